"""What `GET /v1/status`, the page and `blocktrain coordinator --status` say of a run: one dictionary with fixed keys."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa

from blocktrain.swarm import store
from blocktrain.swarm.coordinator import Coordinator
from blocktrain.swarm.parts import INTERFACE
from blocktrain.swarm.protocol import part_of
from blocktrain.swarm.rounds import figures
from blocktrain.swarm.state import State, Worker

CURVE_POINTS = 400  # of a block's loss


def status(coordinator: Coordinator) -> dict[str, Any]:
    """A run as its page shows it. Costs a few queries; call it from a thread."""
    with coordinator.reading() as state:
        now = coordinator.now()
        shown = coordinator.machine.figures(now) if hasattr(coordinator.machine, "figures") else figures(state, now)
        state = _copy(state)
    bytes_by = coordinator.counted_bytes()
    rows = _rows(coordinator)
    blocks = [_block(coordinator, state, figure, rows, bytes_by) for figure in shown.blocks]
    condition, reason = _condition(coordinator, shown)
    target = state.rules.target_steps * coordinator.config.tokens_per_step
    headline = rows["headlines"][-1] if rows["headlines"] else {}
    return {
        "run": coordinator.run,
        "run_id": coordinator.run_id,
        "config_digest": coordinator.config_digest,
        "state": condition,
        "reason": reason,
        "uptime_s": now,
        "tokens": sum(block.tokens for block in state.blocks),
        "target_tokens": target * len(state.blocks) or None,
        "headline_ce": headline.get("headline_ce"),
        "headline_tokens": headline.get("tokens"),
        "reference_ce": headline.get("reference_ce"),
        "ngram_ce": headline.get("ngram_ce"),
        "headline": [[row["tokens"], row["headline_ce"]] for row in rows["headlines"]],
        "blocks": blocks,
        "interface": {"version": state.interface, "mode": coordinator.config.outer.interface},
        "workers": [_worker(state, worker, shown, now, rows, bytes_by) for worker in sorted(state.workers.values(), key=lambda w: w.name)],
        "refusals": [{"s_ago": now - row["at"], "worker": row["worker"], "block": row["block"], "reason": row["text"]} for row in rows["refusals"]],
        "log": [{"s_ago": now - at, "text": text} for at, text in coordinator.logged()][::-1],
        "updates": _results(rows["results"]),
        "bytes": _bytes(bytes_by),
    }


def _copy(state: State) -> State:
    from dataclasses import replace

    return replace(state, workers=dict(state.workers), assignments=dict(state.assignments))


def _condition(coordinator: Coordinator, shown: Any) -> tuple[str, str]:
    if coordinator.finished:
        return "finished", "every block has taken all its steps"
    if coordinator.problem:
        return "paused", coordinator.problem
    if not shown.live:
        return "waiting", f"no workers for {shown.alone_s / 60:.0f} min" if shown.alone_s >= 60 else "no workers yet"
    starving = [str(block.block) for block in shown.blocks if block.state == "starved"]
    if starving:
        return "training", f"block {', '.join(starving)} has no worker; the others go on"
    return "training", f"{len(shown.live)} worker{'s' * (len(shown.live) != 1)} live"


def _rows(coordinator: Coordinator) -> dict[str, list[dict[str, Any]]]:
    """What the database adds: curves, results, refusals, headlines."""
    updates, notes = store.updates.c, store.notes.c
    with coordinator.store.transaction() as tx:
        manifests = tx.rows(sa.select(store.versions.c.manifest).where(store.versions.c.part != INTERFACE).order_by(store.versions.c.version))
        results = tx.rows(sa.select(updates.worker, updates.kind, sa.func.count().label("count")).group_by(updates.worker, updates.kind))
        speeds = tx.rows(sa.select(updates.worker, updates.metrics, updates.reason, sa.func.max(updates.at)).group_by(updates.worker))
        refusals = tx.rows(sa.select(store.notes).where(notes.kind == "refusal").order_by(notes.id.desc()).limit(50))
        headlines = tx.rows(sa.select(store.headlines).order_by(store.headlines.c.tokens))
    return {
        "manifests": [json.loads(row["manifest"]) for row in manifests],
        "results": [dict(row) for row in results],
        "speeds": [dict(row) for row in speeds],
        "refusals": [dict(row) for row in refusals],
        "headlines": [{"tokens": row["tokens"], **json.loads(row["figures"])} for row in headlines],
    }


def _block(coordinator: Coordinator, state: State, figure: Any, rows: Mapping[str, Any], bytes_by: Any) -> dict[str, Any]:
    part = part_of(figure.block)
    told = [m for m in rows["manifests"] if m["part"] == part and m["version"]]
    told = told[:: max(1, len(told) // CURVE_POINTS)]
    losses = [[m["version"], m["tokens"], m["ce"]] for m in told if m.get("ce") is not None]
    moved = {d: sum(row["bytes"] for row in bytes_by if row["part"] == part and row["direction"] == d) for d in ("down", "up")}
    return {
        "block": figure.block,
        "version": figure.version,
        "state": figure.state,
        "participation": figure.participation,
        "loss": losses[-1][2] if losses else None,
        "losses": losses,
        "participations": [[m["version"], m["participation"]] for m in told],
        "assigned": figure.assigned,
        "reported": figure.reported,
        "pending": figure.pending,
        "deadline_in_s": figure.deadline_in_s,
        "tokens": figure.tokens,
        "target_tokens": state.rules.target_steps * coordinator.config.tokens_per_step or None,
        "reason": figure.reason,
        "bytes_down": moved["down"],
        "bytes_up": moved["up"],
    }


def _worker(state: State, worker: Worker, shown: Any, now: float, rows: Mapping[str, Any], bytes_by: Any) -> dict[str, Any]:
    counts: dict[str, int] = defaultdict(int)
    for row in rows["results"]:
        if row["worker"] == worker.name:
            counts["updates" if row["kind"] in ("fresh", "late") else "refusals"] += row["count"]
    last = next((row for row in rows["speeds"] if row["worker"] == worker.name), None)
    work = state.assignments.get(worker.last_key)
    moved = {d: sum(row["bytes"] for row in bytes_by if row["worker"] == worker.name and row["direction"] == d) for d in ("down", "up")}
    return {
        "worker": worker.name,
        "state": _worker_state(worker, shown, now),
        "blocks": list(worker.last_blocks),
        "version": work.bases[0].version if work else None,
        "tokens_per_s": json.loads(last["metrics"]).get("tokens_per_s") if last else None,
        "bytes_down": moved["down"],
        "bytes_up": moved["up"],
        "updates": counts["updates"],
        "refusals": counts["refusals"],
        "seen_s_ago": max(0.0, now - worker.seen_at),
        "last": last["reason"] if last else "",
    }


def _worker_state(worker: Worker, shown: Any, now: float) -> str:
    if worker.revoked:
        return "revoked"
    if not worker.present:
        return "left"
    if now < worker.suspended_until:
        return "suspended"
    return "live" if worker.name in shown.live else "gone"


def _results(rows: list[dict[str, Any]]) -> dict[str, int]:
    names = {"fresh": "fresh", "late": "late", "too_old": "too_old"}
    counts: dict[str, int] = dict.fromkeys(("fresh", "late", "refused", "too_old"), 0)
    for row in rows:
        counts[names.get(row["kind"], "refused")] += row["count"]
    return counts


def _bytes(rows: Any) -> dict[str, Any]:
    total: dict[str, Any] = {"down": 0, "up": 0, "by_kind": dict.fromkeys(("weights", "updates", "text", "control"), 0)}
    for row in rows:
        total[row["direction"]] += row["bytes"]
        total["by_kind"][row["kind"]] += row["bytes"]
    return total
