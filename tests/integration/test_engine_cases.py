"""Real engines at a real coordinator: an update is a function of its assignment, whoever trains it and whenever it joined."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path
from typing import Any

import pytest

from blocktrain.codecs import read_update
from blocktrain.errors import CheckpointError
from blocktrain.swarm.engine import TrainingEngine
from blocktrain.swarm.link import HttpLink
from blocktrain.swarm.parts import layout_of
from blocktrain.swarm.protocol import AskReply, BeginRequest, BlobRef, CommitRequest, RunInfo, Work
from blocktrain.swarm.worker import Trained, Worker
from tests.conftest import CLEAN, write_text
from tests.swarm_net import Served, in_time, make_config, make_coordinator, serve, until_updates, wait_until

ROUND = {"inner_steps": 2, "quorum": 1}
MODEL = {"blocks": 2}
TRAIN = {"steps": 4000, "warmup_steps": 10, "batch_size": 2}


def real_coordinator(tmp_path: Path, **sections: Any) -> Any:
    text = write_text(tmp_path / "text.txt", 20_000).read_bytes()
    sections = {"round": ROUND, "train": TRAIN, "model": MODEL, **sections}
    layout = layout_of(make_config(sections["model"]["blocks"], **sections))
    return make_coordinator(tmp_path / "swarm", layout=layout, text=text, **sections)


def engine(folder: Path) -> TrainingEngine:
    return TrainingEngine(folder, lambda _: 4, device="cpu")


async def arrive(served: Served, name: str, folder: Path) -> tuple[HttpLink, TrainingEngine, RunInfo]:
    way, trainer = served.link(name, process=name), engine(folder)
    info = await way.info()
    await way.join(trainer.configure(info), False)
    await trainer.prepare(info, way)
    return way, trainer, info


async def trained(way: HttpLink, trainer: TrainingEngine, work: Work) -> Trained:
    await trainer.fetch(work, way)
    done = await trainer.train(work, 600.0, lambda: False)
    assert done is not None
    return done


async def hand_in(way: HttpLink, trainer: TrainingEngine, work: Work) -> Trained:
    done = await trained(way, trainer, work)
    size = done.source.size
    reply = await way.begin(BeginRequest(key=work.key, size=size, sha256=done.sha256))
    for index, start in enumerate(range(0, size, reply.part_bytes)):
        await way.put_part(work.key, done.sha256, index, done.source, start, min(size, start + reply.part_bytes))
    answer = await way.commit(CommitRequest(key=work.key, size=size, sha256=done.sha256, num_samples=done.num_samples))
    assert answer.kind in ("fresh", "late")
    trainer.settled(work, True)
    return done


async def next_work(way: HttpLink, ask: str) -> Work:
    while True:
        reply: AskReply = await way.ask(ask)
        if reply.work:
            return reply.work
        await asyncio.sleep(0.02)
        ask += "x"


COMMON = {"vote_weight": 0.5}
LATE = {"vote_weight": 0.5, "vote_from": 0.002}  # of 4,000 steps
OWN_HEADS = {**MODEL, "block_heads": True}


@pytest.mark.parametrize("objective", [{}, CLEAN, COMMON, LATE], ids=["alone", "upstream", "common vote", "late vote"])
def test_whoever_joins_after_thirty_rounds_trains_the_same_update_as_who_was_there_from_the_start(objective: dict[str, Any], tmp_path: Path):
    with serve(real_coordinator(tmp_path, objective=objective, round={**ROUND, "inner_steps": 1})) as served:

        async def story() -> None:
            way, veteran, _ = await arrive(served, "veteran", tmp_path / "veteran")
            for number in range(30):
                await hand_in(way, veteran, await next_work(way, f"ask-{number}"))
            work = await next_work(way, "the-one")
            assert min(part.version for part in work.parts if part.part.startswith("block")) >= 10
            assert work.schedule_step >= 10
            late_way, late, _ = await arrive(served, "late", tmp_path / "late")
            mine, theirs = await trained(way, veteran, work), await trained(late_way, late, work)
            assert mine.sha256 == theirs.sha256
            assert mine.source.read(0, mine.source.size) == theirs.source.read(0, theirs.source.size)
            files = [sorted(path.name for path in (tmp_path / who / "parts").iterdir()) for who in ("veteran", "late")]
            assert files[0] == files[1], "names carry digests: the same weights"
            await way.close()
            await late_way.close()

        in_time(story(), 300)


def test_a_worker_is_sent_other_blocks_only_once_the_common_vote_has_begun(tmp_path: Path):
    with serve(real_coordinator(tmp_path, objective=LATE, round=ROUND)) as served:

        async def story() -> list[tuple[int, int, int]]:
            way, trainer, _ = await arrive(served, "w", tmp_path / "w")
            seen = []
            for number in range(12):
                work = await next_work(way, f"ask-{number}")
                batch = trainer.batches.batch([(work.first, work.stop)], 0, work.schedule_step)
                seen.append((work.schedule_step, sum(part.part.startswith("block") for part in work.parts), batch.ndim))
                await hand_in(way, trainer, work)
            await way.close()
            return seen

        seen = in_time(story(), 300)
    assert {step >= 8 for step, _, _ in seen} == {False, True}
    assert all((blocks, dimensions) == ((2, 2) if step >= 8 else (1, 3)) for step, blocks, dimensions in seen)


def test_a_worker_that_was_there_before_takes_up_what_a_restart_changed(tmp_path: Path):
    """Learning rate and length of training are what every worker's steps follow, also those of one that joined long before."""
    said: list[str] = []
    trainer = engine(tmp_path / "w")
    later = {**TRAIN, "lr": 0.001, "steps": 6000}

    async def until(worker: Worker, running: asyncio.Future[str], updates: int) -> None:
        while worker.updates < updates:
            assert not running.done()
            await asyncio.sleep(0.01)

    async def story() -> None:
        first = real_coordinator(tmp_path)
        with serve(first) as served:
            worker, port = Worker(served.link("w", process="w"), trainer, say=said.append), served.port
            running = asyncio.ensure_future(worker.run())
            await until(worker, running, 3)
        first.store.close()
        before = trainer.config.train.lr
        with serve(real_coordinator(tmp_path, train=later), port=port) as served:
            await until(worker, running, worker.updates + 3)
            worker.stop()
            await running
            assert f"train.lr: {before} -> 0.001" in served.log()
        assert (trainer.config.train.lr, trainer.config.train.steps) == (later["lr"], later["steps"])
        assert sum("settings have changed" in line for line in said) == 1

    in_time(story(), 300)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"train": {**TRAIN, "batch_size": 4}}, "train.batch_size: 2 -> 4"),
        ({"train": {**TRAIN, "optimizer": "adamw"}}, "train.optimizer: muon -> adamw"),
        ({"objective": {"vote_weight": 0.2}}, "objective.vote_weight: 0.0 -> 0.2"),
        ({"objective": CLEAN}, "objective.input: independent -> upstream"),
    ],
)
def test_a_restart_may_not_change_what_decides_the_training(changed: dict[str, Any], words: str, tmp_path: Path):
    real_coordinator(tmp_path).store.close()
    for _ in range(2):  # what was refused is not remembered
        with pytest.raises(CheckpointError, match=words):
            real_coordinator(tmp_path, **changed)
    again = real_coordinator(tmp_path, objective={"vote_from": 0.5})  # of no effect without a vote
    assert not [text for _, text in again.logged() if "since step" in text]


def test_a_restart_says_that_a_vote_which_had_begun_rests_and_refuses_fewer_steps_than_were_taken(tmp_path: Path):
    few = {**TRAIN, "steps": 8}
    with serve(real_coordinator(tmp_path, objective={"vote_weight": 0.5, "vote_from": 0.25}, train=few)) as served:

        async def story() -> None:
            way, trainer, _ = await arrive(served, "w", tmp_path / "w")
            for number in range(4):
                await hand_in(way, trainer, await next_work(way, f"ask-{number}"))
            await way.close()

        in_time(story(), 300)
        served.coordinator.store.close()
    voting = {"vote_weight": 0.5, "vote_from": 0.25}
    with pytest.raises(CheckpointError, match=r"steps already, train.steps = 1 is fewer"):
        real_coordinator(tmp_path, objective=voting, train={**few, "steps": 1})
    again = real_coordinator(tmp_path, objective=voting, train={**few, "steps": 400})
    assert any("rests until step 100" in text for _, text in again.logged())


def test_an_update_lists_what_learns_and_nothing_else(tmp_path: Path):
    """The interface is frozen and the run has no noisy target: most tensors never get a gradient, and none of them travels."""
    outer = {"interface": "frozen"}
    with serve(real_coordinator(tmp_path, objective=CLEAN, outer=outer, model={"blocks": 2, "embed_dim": 64})) as served:

        async def story() -> list[str]:
            way, trainer, _ = await arrive(served, "w", tmp_path / "w")
            work = await next_work(way, "a")
            done = await hand_in(way, trainer, work)
            await way.close()
            shapes = served.coordinator.layout.update_shapes(work.first, work.stop)
            update = read_update(done.source.read(0, done.source.size), shapes)
            return [name for name, _ in update.tensors()]

        names = in_time(story(), 300)
        layout = served.coordinator.layout
        everything = sum(len(entries) for entries in layout.entries.values())
        assert names and all(name.startswith("block-") for name in names)
        part = names[0].partition("/")[0]
        assert [name.partition("/")[2] for name in names] == sorted(layout.trainable[part]) and len(names) < everything / 2


def test_int8_both_ways_the_replica_of_a_worker_has_the_coordinators_bits_and_came_by_deltas(tmp_path: Path):
    outer = {"up_codec": "int8", "down_codec": "int8"}
    fetched: list[tuple[str, int]] = []
    with serve(real_coordinator(tmp_path, outer=outer, model={"blocks": 1, "width": 64})) as served:
        way = served.link("w", process="w")
        inner = way.fetch

        async def fetch(blob: BlobRef, target: Path | None) -> None:
            fetched.append((blob.name, blob.size))
            await inner(blob, target)

        way.fetch = fetch  # type: ignore[method-assign]
        worker = Worker(way, engine(tmp_path / "w"))
        in_time(until_updates(worker, 5), 300)
        wait_until(lambda: not served.coordinator.machine.state.blocks[0].pending)
        state = served.coordinator.machine.state
        there = {path.name: path for path in (tmp_path / "w/parts").glob("*.safetensors")}
        assert there
        for name, path in there.items():
            part, version = name.rsplit("-", 2)[0], int(name.rsplit("-", 2)[1])
            file = served.coordinator.manifest(part, version)["file"]
            assert hashlib.sha256(path.read_bytes()).hexdigest() == file["sha256"]
        assert state.blocks[0].version >= 4
    deltas = [(name, size) for name, size in fetched if "-delta" in name]
    whole = [(name, size) for name, size in fetched if name.startswith("versions/") and "-delta" not in name]
    assert len(deltas) >= 2 * 3 and len(whole) == 2, "whole files only at first"
    assert max(size for name, size in deltas if "block" in name) < min(size for name, size in whole if "block" in name) / 2


@pytest.mark.parametrize("codec", ["fp32", "int8"])
def test_a_worker_that_learns_from_the_common_vote_gets_all_blocks_and_sends_its_own(codec: str, tmp_path: Path):
    with serve(real_coordinator(tmp_path, objective=COMMON, outer={"upstream_codec": codec}, model=OWN_HEADS)) as served:

        async def story() -> tuple[Work, list[str], bool]:
            way, trainer, _ = await arrive(served, "w", tmp_path / "w")
            work = await next_work(way, "a")
            done = await hand_in(way, trainer, work)
            stack, peers = trainer._load(work)
            await way.close()
            shapes = served.coordinator.layout.update_shapes(work.first, work.stop)
            update = read_update(done.source.read(0, done.source.size), shapes)
            assert peers is not None
            frozen = not any(p.requires_grad for p in peers.parameters())
            return work, [name for name, _ in update.tensors()], frozen and stack.held == [work.first] and peers.held == [0, 1]

        work, names, right = in_time(story(), 300)
    assert right
    assert sorted(part.part for part in work.parts) == ["block-000", "block-001", "interface"]
    coded = {part.part: part.codec for part in work.parts}
    assert coded[f"block-{work.first:03d}"] == coded["interface"] == "file", "what it changes it has exactly"
    assert {coded[f"block-{b:03d}"] for b in range(2) if b != work.first} == {codec if codec != "fp32" else "file"}
    assert {name.partition("/")[0] for name in names} == {f"block-{work.first:03d}", "interface"}
    assert f"block-{work.first:03d}/head.weight" in names and [name for name in names if name.startswith("interface")] == ["interface/tokens.weight"]
