"""Whole runs in virtual time: the same again for the same seed, participation that follows, and the rules of the real service."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import json
import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from blocktrain.cli import run as blocktrain
from blocktrain.config import RunConfig, merge_fields, parse_assignment
from blocktrain.errors import ProtocolError
from blocktrain.streams import BytesSource
from blocktrain.swarm import replies, server, simlink, simulator, store, virtual
from blocktrain.swarm.coordinator import Coordinator
from blocktrain.swarm.protocol import BeginRequest, BlobRef, CommitRequest, Work
from blocktrain.swarm.regimes import DROP_LATE, LOCKSTEP, REGIMES, SOFT, Regime
from blocktrain.swarm.simlink import Bell, SimLink, Wire
from blocktrain.swarm.simulator import Outcome, Plan, Simulation, simulate, worker_key
from blocktrain.swarm.worker import Link, Told
from blocktrain.training.data import load_corpus
from tests.conftest import tiny_config, write_text
from tests.swarm_net import Clock, make_coordinator, make_layout, make_update, serve


def config_for(regime: Regime, *more: str, **sections: Any) -> RunConfig:
    fields: dict[str, Any] = merge_fields({"round": {"inner_steps": 12}}, sections)
    for text in (*regime.settings(), *more):
        fields = merge_fields(fields, parse_assignment(text))
    return tiny_config(**fields)


def stand_ins(regime: Regime, workers: int, rounds: int, seed: int = 0, *more: str) -> Outcome:
    return simulate(Plan(config_for(regime, *more), regime, workers, seed, rounds, stand_in=True), None)


# --- What follows from a seed ---


def test_the_same_seed_gives_the_same_run_again():
    first, again, other = (stand_ins(REGIMES["wan"], 8, 4, seed) for seed in (3, 3, 4))
    assert first.decisions
    assert first.decisions == again.decisions
    assert first.digests == again.digests
    assert first.bytes == again.bytes
    assert {**first.to_json(), "wall_s": 0} == {**again.to_json(), "wall_s": 0}
    assert other.digests != first.digests


@pytest.mark.parametrize(("name", "workers", "rounds", "low", "high"), [
    ("lockstep", 12, 5, 1.0, 1.0),
    ("soft", 12, 12, 0.86, 0.94),
    ("wan", 8, 48, 0.38, 0.46),
    ("wan", 60, 20, 0.38, 0.46),
])  # fmt: skip
def test_participation_follows_from_machines_lines_and_deadline(name: str, workers: int, rounds: int, low: float, high: float):
    outcome = stand_ins(REGIMES[name], workers, rounds)
    assert outcome.participation is not None
    assert low <= outcome.participation <= high
    assert [block.version for block in outcome.blocks] == [rounds] * 3
    assert (outcome.late + outcome.dropped == 0) == (name == "lockstep")


def test_late_work_is_banked_or_dropped():
    banked, dropped = stand_ins(REGIMES["wan"], 8, 4), stand_ins(REGIMES["wan"], 8, 4, 0, *DROP_LATE)
    assert banked.late > 0
    assert (dropped.late, dropped.dropped > 0) == (0, True)


class Cutting(Simulation):
    """Cuts the line of the first worker at a given time."""

    at_s: float = 0.0

    async def _live(self, *args: Any) -> Outcome:
        asyncio.get_running_loop().call_at(self.at_s, lambda: self.links[0].cut())
        return await super()._live(*args)


def test_a_worker_that_vanishes_is_not_waited_for_beyond_the_heartbeat_limit(monkeypatch: pytest.MonkeyPatch):
    """Its work is about to end when its line is cut; the deadline is an hour, the limit 30 s."""
    monkeypatch.setattr(simulator, "REST_S", 1e6)  # it stays away
    cutting = Cutting(Plan(config_for(LOCKSTEP, model={"blocks": 1}), LOCKSTEP, 3, 0, 1, stand_in=True), None)
    cutting.at_s = 55.0
    outcome = cutting.run()
    when, action, _, reason = outcome.decisions[0]
    assert (action, reason) == ("close", "every live assignee has reported: 2 of 3 assigned")
    assert 55 < when < 55 + 30 + 1


# --- Real training ---


def test_a_real_training_ends_finished_and_evaluates(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    text = write_text(tmp_path / "text.txt")
    config = config_for(SOFT, train={"steps": 12, "batch_size": 4}, round={"inner_steps": 3}, data={"corpus": str(text)})
    outcome = simulate(Plan(config, SOFT, 4, seed=1), load_corpus(str(text)), tmp_path / "run")
    assert outcome.finished
    assert [block.tokens for block in outcome.blocks] == [12 * config.tokens_per_step] * 3
    assert outcome.steps == 12
    assert all(block.ce is not None for block in outcome.blocks)
    assert blocktrain(["evaluate", str(tmp_path / "run"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["bytes_seen"] == 12 * config.tokens_per_step
    again = simulate(Plan(config, SOFT, 4, seed=1), load_corpus(str(text)), tmp_path / "again")
    assert again.digests == outcome.digests
    assert again.decisions == outcome.decisions


def test_the_command_makes_a_run_folder_and_starts_only_anew(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    text = write_text(tmp_path / "text.txt")
    fields = "blocks=2 layers_per_block=1 width=16 heads=2 positions=32 embed_dim=16".split()
    sets = [*(f"model.{field}" for field in fields), "train.batch_size=2", "round.inner_steps=2", "evaluate.windows=4", "train.device=cpu"]
    words = ["simulate", str(tmp_path / "run"), "--regime", "soft", "--workers", "3", "--rounds", "2", "--data", str(text)]
    words += [word for text in sets for word in ("--set", text)]
    assert blocktrain([*words, "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert [block["version"] for block in figures["blocks"]] == [2, 2]
    assert figures["evaluation"]["headline_ce"] > 0
    assert blocktrain(words) == 2
    assert "name a new run folder" in capsys.readouterr().err
    settings = (tmp_path / "run" / "run.toml").read_bytes()
    assert blocktrain(["train", str(tmp_path / "run")]) == 2
    assert "was trained by many workers, or simulated" in capsys.readouterr().err
    assert (tmp_path / "run" / "run.toml").read_bytes() == settings


def test_the_command_with_stand_ins(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    words = ["simulate", str(tmp_path / "run"), "--regime", "lockstep", "--stand-in"]
    assert blocktrain(words) == 2
    assert "--rounds" in capsys.readouterr().err
    assert blocktrain([*words, "--rounds", "2"]) == 0
    assert "participation 100.0%" in capsys.readouterr().out


# --- The same rules as over HTTP ---


@dataclasses.dataclass
class Stage:
    """A coordinator, and how a process of a worker gets to it."""

    coordinator: Coordinator
    clock: Clock
    link: Callable[[str, int, str], Link]  # (name, number of its key, process)
    folder: Path
    log: list[tuple[str, Any]] = dataclasses.field(default_factory=list)

    async def say(self, what: str, doing: Awaitable[Any]) -> Any:
        """Note what came of it: kind and reason."""
        try:
            reply = await doing
        except Told as error:
            reply = None
            self.log.append((what, (error.kind, error.reason, error.retry_after_s)))
        except ProtocolError as error:
            raise AssertionError(what) from error
        else:
            self.log.append((what, (getattr(reply, "kind", "ok"), getattr(reply, "reason", ""))))
        return reply

    def pass_s(self, seconds: float) -> None:
        self.clock.pass_s(seconds)
        self.coordinator.tick()


def update_for(stage: Stage, work: Work) -> bytes:
    return make_update(stage.coordinator.layout, work)


async def upload(stage: Stage, link: Link, work: Work, name: str, num_samples: float | None = None, data: bytes | None = None) -> None:
    data = update_for(stage, work) if data is None else data
    digest = hashlib.sha256(data).hexdigest()
    samples = sum(stop - first for first, stop in work.steps) * stage.coordinator.config.train.batch_size if num_samples is None else num_samples
    if await stage.say(f"{name} begins", link.begin(BeginRequest(key=work.key, size=len(data), sha256=digest))):
        await stage.say(f"{name} sends", link.put_part(work.key, digest, 0, BytesSource(data), 0, len(data)))
    await stage.say(f"{name} commits", link.commit(CommitRequest(key=work.key, size=len(data), sha256=digest, num_samples=samples)))


async def play(stage: Stage) -> None:
    """A story with every kind of answer in it."""
    workers = {name: stage.link(name, number, "p1") for number, name in enumerate("abcd")}
    a, b, c, _ = workers.values()
    for name, link in workers.items():
        info = await link.info()
        await stage.say(f"{name} joins", link.join(0 if name == "d" else 1, False))
    works: dict[str, Work] = {}
    for name, link in list(workers.items())[:3]:
        await stage.say(f"{name} beats", link.beat())
        reply = await stage.say(f"{name} asks", link.ask(f"{name}-1"))
        if reply and reply.work:
            works[name] = reply.work
    again = await stage.say("a asks again", a.ask("a-1"))
    assert again.work == works["a"]
    await files(stage, a, info.text, works["a"].parts[-1].full)
    data = update_for(stage, works["a"])
    digest = hashlib.sha256(data).hexdigest()
    await stage.say("a begins too long", a.begin(BeginRequest(key=works["a"].key, size=len(data) + 1, sha256=digest)))
    await stage.say("a sends too early", a.put_part(works["a"].key, digest, 0, BytesSource(data), 0, len(data)))
    await stage.say("a commits too early", a.commit(CommitRequest(key=works["a"].key, size=len(data), sha256=digest, num_samples=4)))
    await upload(stage, a, works["a"], "a")
    await upload(stage, a, works["a"], "a once more")
    await stage.say("b takes a's", b.begin(BeginRequest(key=works["a"].key, size=len(data), sha256=digest)))
    await stage.say("b takes nobody's", b.begin(BeginRequest(key="99", size=len(data), sha256=digest)))
    await upload(stage, b, works["b"], "b", num_samples=10**9)
    for _ in range(3):
        stage.pass_s(22)
        await stage.say("c beats", c.beat())
    await upload(stage, c, works["c"], "c")
    stage.pass_s(100)
    reply = await stage.say("a asks for more", a.ask("a-2"))
    await stage.say("a gives back", a.give_back(reply.work.key, "no time"))
    await stage.say("a gives back what it has not", a.give_back("77", "no time"))
    other = stage.link("a", 0, "p2")
    await other.info()
    await stage.say("a's other process joins", other.join(1, False))
    await stage.say("a's other process takes over", other.join(1, True))
    await stage.say("a's first process asks", a.ask("a-3"))
    reply = await stage.say("a's other process asks", other.ask("a-4"))
    stage.pass_s(200)
    await upload(stage, other, reply.work, "a late")
    for ask in range(3):
        reply = await stage.say("b asks", b.ask(f"b-{ask}"))
        if reply and reply.work:
            await upload(stage, b, reply.work, "b wrong", num_samples=0, data=b"\0" * len(update_for(stage, reply.work)))
    await stage.say("b asks, suspended", b.ask("b-9"))
    await stage.say("c leaves", c.leave())
    await stage.say("c asks, away", c.ask("c-9"))
    stage.coordinator.revoke(stage.coordinator.session(stage_secret(other)).worker)
    await stage.say("a is revoked", other.beat())
    stage.pass_s(1000)
    for link in (*workers.values(), other):
        await link.close()


def stage_secret(link: Any) -> str:
    return link._session if isinstance(getattr(link, "_session", None), str) else link._secret


async def files(stage: Stage, link: Link, *blobs: BlobRef) -> None:
    for number, blob in enumerate(blobs):
        target = stage.folder / f"file-{number}"
        await stage.say(f"fetches {number}", link.fetch(blob, target))
        assert hashlib.sha256(target.read_bytes()).hexdigest() == blob.sha256
    missing = BlobRef(name="versions/block-000/none", size=1, sha256="0" * 64)
    await stage.say("fetches nothing", link.fetch(missing, stage.folder / "nothing"))


def new_stage(folder: Path) -> tuple[Coordinator, Clock]:
    folder.mkdir()
    opened_at = Clock()
    rules = {"deadline": "fixed", "deadline_s": 60, "quorum": 1, "inner_steps": 4, "heartbeat_limit_s": 30, "strikes": 2}
    coordinator = make_coordinator(layout=make_layout(2), clock=opened_at, round=rules)
    with coordinator.store.transaction() as tx:
        tx.put(store.facts, name="run_id", value="0123456789ab")
    coordinator.run_id = "0123456789ab"
    return coordinator, opened_at


def told(stage: Stage) -> dict[str, Any]:
    """What stays of a story: answers, journal, manifests, blobs."""
    coordinator = stage.coordinator
    with coordinator.store.transaction() as tx:
        journal = [row["event"] for row in tx.rows(sa.select(store.events).order_by(store.events.c.seq))]
        versions = tx.rows(sa.select(store.versions).order_by(store.versions.c.part, store.versions.c.version))
        updates = [{**row, "at": 0} for row in tx.rows(sa.select(store.updates).order_by(store.updates.c.key))]
    blobs = coordinator.store.blobs
    digests = {name: hashlib.sha256(blobs.read(name, 0, blobs.size(name) or 0)).hexdigest() for name in sorted(blobs.names("versions/"))}
    log = [text for _, text in coordinator.logged()]
    return {"answers": stage.log, "journal": journal, "versions": versions, "updates": updates, "blobs": digests, "log": log}


def over_http(folder: Path) -> dict[str, Any]:
    coordinator, clock = new_stage(folder)
    with serve(coordinator, ticking=False) as served:
        stage = Stage(coordinator, clock, lambda name, key, process: served.link(name, process=process, key=worker_key(0, key)), folder)
        asyncio.run(play(stage))
    return told(stage)


def simulated(folder: Path) -> dict[str, Any]:
    coordinator, clock = new_stage(folder)
    token, bell = coordinator.token_named("first") or "", Bell()

    def link(name: str, key: int, process: str) -> Link:
        wire = Wire(latency_s=0.01, up_bytes_s=1e6, down_bytes_s=1e6)
        return SimLink(coordinator, token, name, worker_key(0, key), process=process, wire=wire, dice=random.Random(0), closed=bell)

    stage = Stage(coordinator, clock, link, folder)
    virtual.run(play(stage))
    return told(stage)


def test_a_story_over_http_and_over_the_simulated_wire_ends_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for module in (server, simlink):
        monkeypatch.setattr(module, "ASK_WAIT_S", 0.01)
    http, made_up = over_http(tmp_path / "http"), simulated(tmp_path / "simulated")
    for name in http:
        assert http[name] == made_up[name], name
    kinds = {answer[0] for _, answer in http["answers"]}
    wanted = {"ok", "assigned", "fresh", "late", "invalid", "forbidden", "unknown", "conflict", "suspended", "revoked", "unfit"}
    assert wanted <= kinds
    assert kinds <= replies.STATUS.keys()
    assert len(http["versions"]) > 3
