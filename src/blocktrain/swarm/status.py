"""What `GET /v1/status`, the page and `blocktrain coordinator --status` say of a run: one dictionary with fixed keys."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa

from blocktrain.swarm import store
from blocktrain.swarm.coordinator import Coordinator
from blocktrain.swarm.protocol import part_of
from blocktrain.swarm.state import State, Worker

CURVE_POINTS = 400  # of a block's loss


def status(coordinator: Coordinator) -> dict[str, Any]:
    """A run as its page shows it. Costs a few queries; call it from a thread."""
    with coordinator.reading() as state:
        now = coordinator.now()
        shown = coordinator.machine.figures(now)
        state = _copy(state)
    counted = coordinator.counted_bytes()
    bytes_by = _Moved(counted)
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
        "bytes": _bytes(counted),
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


class _Moved:
    """The ledger summed once, by part and by worker."""

    def __init__(self, rows: list[Mapping[str, Any]]) -> None:
        self._sums: dict[tuple[str, str, str], int] = defaultdict(int)
        for row in rows:
            for kind in ("part", "worker"):
                self._sums[kind, row[kind], row["direction"]] += row["bytes"]

    def of(self, kind: str, name: str, direction: str) -> int:
        return self._sums.get((kind, name, direction), 0)


def _rows(coordinator: Coordinator) -> dict[str, Any]:
    """What the database adds: curves, results and last words of workers, refusals, headlines."""
    updates, notes = store.updates.c, store.notes.c
    newest = sa.select(updates.worker, sa.func.max(updates.at).label("at")).group_by(updates.worker).subquery()
    last = sa.select(updates.worker, updates.metrics, updates.reason)
    last = last.join(newest, sa.and_(updates.worker == newest.c.worker, updates.at == newest.c.at))
    curves = coordinator.curves()
    with coordinator.store.transaction() as tx:
        results = tx.rows(sa.select(updates.worker, updates.kind, sa.func.count().label("count")).group_by(updates.worker, updates.kind))
        words = tx.rows(last)
        refusals = tx.rows(sa.select(store.notes).where(notes.kind == "refusal").order_by(notes.id.desc()).limit(50))
        headlines = tx.rows(sa.select(store.headlines).order_by(store.headlines.c.tokens))
    counts: dict[str, dict[str, int]] = defaultdict(lambda: {"updates": 0, "refusals": 0})
    for row in results:
        counts[row["worker"]]["updates" if row["kind"] in ("fresh", "late") else "refusals"] += row["count"]
    return {
        "curves": curves,
        "results": results,
        "counts": counts,
        "words": {row["worker"]: row for row in words},
        "refusals": refusals,
        "headlines": [{"tokens": row["tokens"], **json.loads(row["figures"])} for row in headlines],
    }


def _block(coordinator: Coordinator, state: State, figure: Any, rows: Mapping[str, Any], bytes_by: _Moved) -> dict[str, Any]:
    part = part_of(figure.block)
    points = rows["curves"].get(part, [])
    told = points[-1 :: -max(1, len(points) // CURVE_POINTS)][::-1]  # the newest is always there
    losses = [[version, tokens, ce] for version, tokens, ce, _ in told if ce is not None]
    return {
        "block": figure.block,
        "version": figure.version,
        "state": figure.state,
        "participation": figure.participation,
        "loss": losses[-1][2] if losses else None,
        "losses": losses,
        "participations": [[version, share] for version, _, _, share in told],
        "assigned": figure.assigned,
        "reported": figure.reported,
        "pending": figure.pending,
        "deadline_in_s": figure.deadline_in_s,
        "tokens": figure.tokens,
        "target_tokens": state.rules.target_steps * coordinator.config.tokens_per_step or None,
        "reason": figure.reason,
        "bytes_down": bytes_by.of("part", part, "down"),
        "bytes_up": bytes_by.of("part", part, "up"),
    }


def _worker(state: State, worker: Worker, shown: Any, now: float, rows: Mapping[str, Any], bytes_by: _Moved) -> dict[str, Any]:
    counts, last = rows["counts"][worker.name], rows["words"].get(worker.name)
    work = state.assignments.get(worker.last_key)
    return {
        "worker": worker.name,
        "state": _worker_state(worker, shown, now),
        "blocks": list(worker.last_blocks),
        "version": work.bases[0].version if work else None,
        "tokens_per_s": json.loads(last["metrics"]).get("tokens_per_s") if last else None,
        "bytes_down": bytes_by.of("worker", worker.name, "down"),
        "bytes_up": bytes_by.of("worker", worker.name, "up"),
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
