"""Stages that die, hang, come back or cannot be reached, under clients that are generating: real processes, and texts compared to the byte."""

from __future__ import annotations

import asyncio
import os
import random
import re
import shutil
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from blocktrain.errors import ServingError
from blocktrain.serving.decoding import Plan, generate
from blocktrain.serving.host import expected_of
from blocktrain.serving.pipeline import RemoteChain
from tests.faults.stages import (
    LIMIT_S,
    PROMPT,
    StageProcess,
    Stages,
    Told,
    Way,
    cpu_of,
    files_of,
    golden,
    make_run,
    memory_of,
    own_draft,
    plan_of,
    tell,
    until,
    until_free,
)
from tests.faults.swarm import Process, forge, free_port

# A stall is at most 2 s on a machine that is not busy, which is printed; here it is only made sure that nobody waits for a timeout of TCP.
BUSY_S = 10.0
CHURN = int(os.environ.get("BLOCKTRAIN_CHURN", "5"))  # kills of a stage under one client


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("stages") / "run")


@pytest.fixture(scope="module")
def doubled(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stages]:
    """Two of each block."""
    with Stages(tmp_path_factory.mktemp("doubled"), run, *"012012") as stages:
        yield stages


@pytest.fixture
def stages(doubled: Stages) -> Stages:
    doubled.revive()
    return doubled


def on_route(chain: Any, stages: Stages, hop: int) -> StageProcess:
    """The stage that the open text goes through."""
    (text,) = chain.texts.values()
    address = text.route[hop].link.address
    return next(stage for stage in stages.all if stage.address == address)


def command(folder: Path, name: str, *arguments: str) -> Process:
    log = folder / f"{name}.log"
    return Process(forge().start(list(arguments), str(log), {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}, ""), log)


# --- With a replica ---


@pytest.mark.parametrize("wire", ["bfloat16", "int8"])
@pytest.mark.parametrize(("mode", "hop"), [("exact", 0), ("exact", 1), ("exact", 2), ("speculative", 0), ("speculative", 1), ("sweep", 2)])
def test_a_killed_stage_does_not_show_in_the_text(mode: str, hop: int, wire: str, run: Path, stages: Stages):
    plan, draft = plan_of(mode, wire), own_draft(run) if mode == "speculative" else None
    at = random.Random(f"{mode} {hop} {wire}").randrange(1, plan.max_bytes - 8)

    async def go() -> Told:
        async with stages.client() as chain:
            told = await tell(chain, plan, draft=draft, at=at, do=lambda: on_route(chain, stages, hop).kill())
            assert not chain.texts
            return told

    told = asyncio.run(go())
    print(f"{mode}, {wire}: stage {hop} killed after byte {at}, stall {told.stall_s:.3f} s")
    assert told.data == golden(run, plan)
    assert told.stall_s < BUSY_S


def test_several_texts_survive_a_kill_in_the_middle_of_a_step(run: Path, stages: Stages):
    plans = [plan_of(seed=seed, max_bytes=40) for seed in range(6)]

    async def go() -> list[Told]:
        async with stages.client() as chain:
            asyncio.get_running_loop().call_later(0.3, stages[1].kill)
            asyncio.get_running_loop().call_later(0.7, stages[3].kill)
            return await asyncio.gather(*(tell(chain, plan) for plan in plans))

    told = asyncio.run(go())
    assert [each.data for each in told] == [golden(run, plan) for plan in plans]
    print(f"6 texts, 2 kills: longest stall {max(each.stall_s for each in told):.3f} s")


@pytest.mark.parametrize("hop", [0, 1, 2])
def test_a_stage_that_hangs_is_given_up(hop: int, run: Path, stages: Stages):
    async def go() -> Told:
        async with stages.client() as chain:
            return await tell(chain, plan_of(), at=11, do=lambda: on_route(chain, stages, hop).kill(signal.SIGSTOP))

    told = asyncio.run(go())
    print(f"stage {hop} stopped: stall {told.stall_s:.3f} s")
    assert told.data == golden(run, plan_of())
    assert told.stall_s < BUSY_S


@pytest.mark.parametrize(("block", "hole", "spared"), [(0, {"there", "back"}, 0), (1, {"there"}, 1), (2, {"back"}, 0)])
def test_a_way_that_swallows_everything_is_given_up(block: int, hole: set[str], spared: int, run: Path, stages: Stages):
    """Client to first stage; stage to stage alone (the client's own connection, the first one, is spared); last stage to client."""

    async def go() -> Told:
        async with AsyncExitStack() as stack:
            way = await stack.enter_async_context(Way(stages[block].address))
            addresses = [way.address if n == block else stage.address for n, stage in enumerate(stages.all[:3])]
            chain = await stack.enter_async_context(stages.client(*addresses, stages[block + 3].address))
            chain.broke("*", stages[block + 3].address)  # the other one is taken first
            way.spared = spared

            def swallow() -> None:
                (text,) = chain.texts.values()
                assert text.route[block].link.address == way.address
                way.hole = hole

            return await tell(chain, plan_of(), at=11, do=swallow)

    told = asyncio.run(go())
    print(f"way to stage {block} black-holed ({', '.join(sorted(hole))}): stall {told.stall_s:.3f} s")
    assert told.data == golden(run, plan_of())
    assert told.stall_s < BUSY_S


# --- Without one ---


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_without_a_replica_there_is_an_error_soon_that_names_the_stage(number: int, stages: Stages):
    took: list[float] = []

    async def go() -> None:
        async with stages.client(*stages.addresses[:3]) as chain:

            def kill() -> None:
                stages[1].kill(number)
                took.append(time.monotonic())

            with pytest.raises(ServingError, match=f"no stage holds block 1 now.*client -> {stages[1].address}: ") as caught:
                await tell(chain, plan_of(), at=5, do=kill)
            print(f"{signal.Signals(number).name}: {time.monotonic() - took[0]:.2f} s until {caught.value}")
            assert "\n" not in str(caught.value)
            assert time.monotonic() - took[0] < BUSY_S
            status = chain.status()
            assert status.missing == [1]
            assert [stage.state for stage in status.stages] == ["up", "down", "up"]

    asyncio.run(go())


@pytest.mark.parametrize("hop", [0, 1, 2])
def test_without_a_replica_a_text_may_go_on_without_the_block(hop: int, stages: Stages):
    async def go() -> None:
        async with stages.client(*stages.addresses[:3], allow_missing_blocks=True) as chain:
            told = await tell(chain, plan_of(), at=5, do=stages[hop].kill)
            assert told.counts.missing == (hop,)
            assert len(told.data) == 48
            again = await tell(chain, plan_of())
            assert again.counts.missing == (hop,)
        async with stages.client(*stages.addresses[:3], allow_missing_blocks=True) as chain:
            assert (await tell(chain, plan_of())).data == again.data

    asyncio.run(go())


def test_with_a_draft_and_no_other_block_left_there_is_an_error(run: Path, stages: Stages):
    async def go() -> None:
        async with stages.client(*stages.addresses[:3], allow_missing_blocks=True) as chain:

            def kill() -> None:
                stages[1].kill()
                stages[2].kill()

            with pytest.raises(ServingError, match=r"no stage holds blocks? [12, ]+ now"):
                await tell(chain, plan_of("speculative"), draft=own_draft(run), at=5, do=kill)

    asyncio.run(go())


def test_a_stage_started_again_is_used_again_by_the_same_client(run: Path, stages: Stages):
    async def go() -> None:
        async with stages.client(*stages.addresses[:3]) as chain:
            for number in range(2):
                stages[number].end()
                await until(lambda number=number: not chain.links[number].up, "the client sees it")
                stages[number].start()
                await until(lambda number=number: chain.links[number].up, "the client sees it again", LIMIT_S)
                assert (await tell(chain, plan_of())).data == golden(run, plan_of())

            def restart() -> None:
                stages[1].end()
                stages[1].start()

            told = await tell(chain, plan_of(), at=20, do=restart)
            assert told.data == golden(run, plan_of())

    asyncio.run(go())


def test_a_chain_that_was_idle_still_answers_where_idle_connections_are_forgotten(run: Path, stages: Stages):
    async def go() -> None:
        async with AsyncExitStack() as stack:
            ways = [await stack.enter_async_context(Way(stage.address, idle_s=2.0)) for stage in stages.all[:3]]
            chain = await stack.enter_async_context(stages.client(*(way.address for way in ways)))
            assert (await tell(chain, plan_of())).data == golden(run, plan_of())
            await asyncio.sleep(5.0)
            began = time.monotonic()
            assert (await tell(chain, plan_of())).data == golden(run, plan_of())
            print(f"after idling: {time.monotonic() - began:.2f} s")
            for way in ways:
                way.hole = {"there", "back"}  # and one in which everything is lost for a time
            await until(lambda: not chain.live(), "the client sees it")
            for way in ways:
                way.hole = set()
            await chain.ready(LIMIT_S)
            assert (await tell(chain, plan_of())).data == golden(run, plan_of())

    asyncio.run(go())


# --- Clients that go ---


def test_a_killed_client_frees_its_texts_everywhere(tmp_path: Path, run: Path, stages: Stages):
    addresses = stages.addresses[:3]
    arguments = ("generate", str(run), "--stages", ",".join(addresses), "--prompt", "x", "--max-bytes", "100000")
    client = command(tmp_path, "client", *arguments)
    end = time.monotonic() + LIMIT_S
    while len(client.output) < 20:
        assert client.poll() is None and time.monotonic() < end, client.output
        time.sleep(0.02)
    client.kill()
    took = asyncio.run(until_free(addresses))
    print(f"texts of a killed client were gone after {took:.2f} s")
    client.end()


def test_texts_that_are_closed_at_any_step_leave_the_others_alone(run: Path, stages: Stages):
    plans = [plan_of(seed=seed) for seed in range(8)]
    draw = random.Random(5)

    async def left(chain: Any, plan: Plan, at: int) -> None:
        pieces, count = generate(chain, plan, PROMPT), 0
        async for _ in pieces:
            count += 1
            if count == at:
                break
        await pieces.aclose()  # type: ignore[attr-defined]

    async def go() -> tuple[list[Told], float]:
        async with stages.client(*stages.addresses[:3]) as chain:
            leaving = [asyncio.create_task(left(chain, plan, draw.randrange(1, 30))) for plan in plans[4:6]]
            cancelled = [asyncio.create_task(tell(chain, plan)) for plan in plans[6:]]
            for task in cancelled:
                asyncio.get_running_loop().call_later(draw.uniform(0.05, 0.6), task.cancel)
            told = await asyncio.gather(*(tell(chain, plan) for plan in plans[:4]))
            await asyncio.gather(*leaving, *cancelled, return_exceptions=True)
            return told, await until_free(stages.addresses[:3])

    told, took = asyncio.run(go())
    assert [each.data for each in told] == [golden(run, plan) for plan in plans[:4]]
    print(f"4 of 8 texts were closed; all were gone after {took:.2f} s")


# --- Over time ---


def tasks_of(loop: asyncio.AbstractEventLoop) -> int:
    return len([task for task in asyncio.all_tasks(loop) if not task.done()])


def churn(stages: Stages, run: Path, times: int) -> dict[str, Any]:
    """Kill and start the middle stage under a client that is generating, again and again; what that leaves behind."""
    found: dict[str, Any] = {}

    async def go() -> None:
        loop = asyncio.get_running_loop()
        async with stages.client(*stages.addresses[:3], stages.addresses[4]) as chain:
            for number in range(times + 3):
                if number == 3:  # what is made once has been made
                    found.update(files=files_of(os.getpid()), memory=memory_of(os.getpid()), tasks=tasks_of(loop))
                    found.update(stage_files=files_of(stages[0].pid), stage_memory=memory_of(stages[0].pid))
                told = await tell(chain, plan_of(max_bytes=6), at=2, do=stages[1].kill)
                assert told.data == golden_short
                stages[1].end()
                stages[1].start()
                await until(lambda: chain.links[1].up, "it is back", LIMIT_S)
            await until(lambda: tasks_of(loop) <= found["tasks"], f"tasks: {tasks_of(loop)} after {found['tasks']}")
            found.update(files_after=files_of(os.getpid()), memory_after=memory_of(os.getpid()), tasks_after=tasks_of(loop))
            found.update(stage_files_after=files_of(stages[0].pid), stage_memory_after=memory_of(stages[0].pid))
            found["cpu"], found["stage_cpu"] = await idle_cpu(os.getpid()), await idle_cpu(stages[0].pid)

    golden_short = golden(run, plan_of(max_bytes=6))
    asyncio.run(go())
    return found


async def idle_cpu(pid: int, seconds: float = 2.0) -> float:
    """Share of a core that a process takes."""
    began, used = time.monotonic(), cpu_of(pid)
    await asyncio.sleep(seconds)
    return (cpu_of(pid) - used) / (time.monotonic() - began)


def test_kills_and_restarts_leave_nothing_behind(run: Path, stages: Stages):
    found = churn(stages, run, CHURN)
    print(found)
    assert found["files_after"] <= found["files"] + 4
    assert found["stage_files_after"] <= found["stage_files"] + 4
    assert found["tasks_after"] <= found["tasks"]
    assert found["memory_after"] < found["memory"] + (30 << 20)
    assert found["stage_memory_after"] < found["stage_memory"] + (30 << 20)
    assert max(found["cpu"], found["stage_cpu"]) < 0.2  # idle takes less than 5 % where the machine is not busy
    for stage in stages.all:
        assert len(stage.output) < 20_000
        assert "Traceback" not in stage.output and "never retrieved" not in stage.output, stage.output


# --- What cannot be reached, and what cannot be loaded ---


def test_where_no_stage_is_reached_the_command_says_so_in_time(tmp_path: Path, run: Path):
    addresses = [f"127.0.0.1:{free_port()}", f"localhost:{free_port()}"]
    began = time.monotonic()
    client = command(tmp_path, "client", "generate", str(run), "--prompt", "x", "--stages", ",".join(addresses))
    assert client.end() == 1
    print(f"{time.monotonic() - began:.1f} s: {client.output}")
    assert "Traceback" not in client.output
    said = " ".join(client.output.split())
    assert all(f"client -> {address}: connection refused" in said for address in addresses)


def test_where_one_stage_does_not_reach_the_next_the_error_says_which_way(tmp_path: Path, run: Path, stages: Stages):
    async def go() -> None:
        async with Way(stages[1].address) as way:
            way.spared, way.hole = 1, {"there", "back"}  # only the client's connection, the first one, works
            async with stages.client(stages[0].address, way.address, stages[2].address) as chain:
                began = time.monotonic()
                with pytest.raises(ServingError, match=f"{stages[0].address} -> {way.address}: ") as caught:
                    await tell(chain, plan_of())
                print(f"{time.monotonic() - began:.1f} s: {caught.value}")
                assert time.monotonic() - began < 2 * BUSY_S

    asyncio.run(go())


def part(run: Path, folder: Path, *blocks: int) -> Path:
    """A copy of a run folder that has only what a stage of these blocks needs."""
    shutil.copytree(run, folder)
    for file in folder.glob("checkpoints/*/block-*.safetensors"):
        if int(file.stem[-3:]) not in blocks:
            file.unlink()
    return folder


def test_a_stage_needs_only_its_own_blocks(tmp_path: Path, run: Path):
    with Stages(tmp_path, run) as stages:
        for block in range(3):
            stages.add(str(block), part(run, tmp_path / f"part-{block}", block)).wait_up()

        async def go() -> Told:
            async with stages.client() as chain:
                return await tell(chain, plan_of())

        assert asyncio.run(go()).data == golden(run, plan_of())


def damage(run: Path) -> None:
    file = next(run.glob("checkpoints/*/block-001.safetensors"))
    file.write_bytes(file.read_bytes()[:-1] + b"\x99")


def remove(run: Path) -> None:
    next(run.glob("checkpoints/*/block-001.safetensors")).unlink()


SMALL = "import blocktrain.report.measure as m; m.available_memory = lambda device: 10_000"


@pytest.mark.parametrize(
    ("spoil", "patch", "why"),
    [
        (damage, "", r"FAILED: .*block-001.safetensors: damaged"),
        (remove, "", r"FAILED: .*block-001.safetensors: missing"),
        (lambda run: None, SMALL, r"1 block\(s\) need [\d,]+ bytes of memory, [\d,]+ are free here"),
    ],
)
def test_a_stage_that_cannot_load_says_why_and_ends(spoil: Callable[[Path], None], patch: str, why: str, tmp_path: Path, run: Path):
    spoil(copy := part(run, tmp_path / "copy", 0, 1, 2))
    stage = StageProcess(copy, "1", tmp_path / "stage.log", patch=patch).start()
    assert stage.process is not None
    assert stage.process.end(LIMIT_S) == 2
    said = " ".join(stage.output.split())
    assert re.search(why, said), said
    assert "Traceback" not in said
    with socket.create_server(("127.0.0.1", stage.port)):
        pass


def test_while_a_stage_that_failed_lingers_whoever_asks_is_told_why(tmp_path: Path, run: Path):
    damage(copy := part(run, tmp_path / "copy", 0, 1, 2))
    with Stages(tmp_path, run) as stages:
        stage = StageProcess(copy, "1", tmp_path / "stage.log").start()
        stages.all.append(stage)

        async def go() -> str:
            chain = RemoteChain(expected_of(run, str), [stage.address])
            try:
                await until(lambda: chain.links[0].state == "failed", "it failed", LIMIT_S)
                return chain.links[0].reason
            finally:
                await chain.close()

        assert "damaged" in asyncio.run(go())
