"""A hostile client, of every kind at once, against a real stage that serves an honest text meanwhile.

BLOCKTRAIN_HOSTILE frames (10,000) go over gRPC sessions; other bytes go over plain sockets. Whatever comes ends in an error frame or a closed
session; the honest text keeps its bytes, the process its memory, and its log stays empty.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import random
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from blocktrain.serving.compute import Settings
from blocktrain.serving.frames import Frame, Kind, Name, OpenRequest, ids_tensor, message_frame
from tests.faults.stages import Stages, golden, make_run, memory_of, plan_of, tell, texts_at, until_free

FRAMES = int(os.environ.get("BLOCKTRAIN_HOSTILE", "10000"))
MINE = b"hostile client's"
OPEN = OpenRequest(wire="float32", first=0, stop=3)
HEAD = struct.Struct("<4sBBH16sIII")
STEP = struct.Struct("<IQIIHHI")
TENSOR = struct.Struct("<BBHII")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("hostile") / "run")


@pytest.fixture(scope="module")
def stages(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stages]:
    with Stages(tmp_path_factory.mktemp("stages"), run, "0-2", more=("--max-texts", "12")) as stages:
        yield stages


def step(text: bytes = MINE, epoch: int = 1, number: int = 1, ids: Any = (1, 2, 3), **fields: Any) -> Frame:
    frame = Frame(Kind.STEP, text, epoch, number, count=len(ids), **fields)
    frame.tensors[Name.IDS] = ids_tensor(ids)
    return frame


def with_state(value: float) -> bytes:
    frame = step()
    frame.tensors[Name.STATE] = torch.full((3, 32), value)
    return frame.encode()


def tensor_of(code: int = 1, rows: int = 1, columns: int = 3, name: int = 1, data: bytes = bytes(6), zero: int = 0) -> bytes:
    """A step whose tensor says anything."""
    head = HEAD.pack(b"BTS1", Kind.STEP, 1, 0, MINE, 1, 1, 0) + STEP.pack(0, 0, 3, 0, 0, 0, 0)
    return head + TENSOR.pack(name, code, zero, rows, columns) + data


def refused(draw: random.Random, others: list[bytes]) -> list[bytes]:
    """Frames that can be read and are wrong: each is told so, and the session goes on."""
    asked = OPEN.model_dump()
    wrong = [
        {"first": -1},
        {"stop": 9},
        {"wire": "pickle"},
        {"skip": [0, 1, 2]},
        {"skip": [1, 1]},
        {"next": "x"},
        {"next": "unix:/x"},
        {"skip": "all"},
    ]
    opens = [Frame(Kind.OPEN, draw.randbytes(16), 1, json=str({**asked, **each}).replace("'", '"').encode()) for each in wrong]
    other = draw.choice(others)
    return [
        *(each.encode() for each in opens),
        Frame(Kind.OPEN, draw.randbytes(16), 1, json=b'{"wire": ' * 1000).encode(),
        Frame(Kind.OPEN, draw.randbytes(16), 1, json=pickle.dumps(asked)).encode(),
        message_frame(Kind.OPEN, other, OPEN, 1 << 31).encode(),
        message_frame(Kind.OPEN, MINE, OPEN, 1).encode(),
        step(other, draw.randrange(5), draw.randrange(9)).encode(),
        Frame(Kind.CLOSE, other).encode(),
        Frame(Kind.PING, other).encode(),
        step(draw.randbytes(16)).encode(),
        step(epoch=draw.choice([0, 2, 1 << 31])).encode(),
        step(keep=draw.randrange(1, 29), number=1 << 20).encode(),
        step(ids=[draw.choice([-1, 257, 32767, -32768])] * 3, number=1 << 20).encode(),
        step(enter=draw.randrange(1, 3), number=1 << 20).encode(),
        with_state(draw.choice([float("nan"), float("inf"), 0.0])),
        *(step(number=draw.randrange(1, 4)).encode() for _ in range(3)),
        *[Frame(Kind.PING).encode()] * 5,
    ]


def unreadable(draw: random.Random) -> bytes:
    good = step().encode()
    place = draw.randrange(len(good))
    return draw.choice(
        [
            b"",
            b"BTS2" + good[4:],
            good[:4] + bytes([draw.choice([0, 9, 255])]) + good[5:],
            good[:place],
            good + draw.randbytes(draw.randrange(1, 50)),
            draw.randbytes(draw.randrange(1, 5000)),
            pickle.dumps({"a": 1}),
            Frame(Kind.OPEN, MINE, json=b" " * (1 << 14) + b"{}").encode(),
            Frame(Kind.ANSWER, MINE, 1, 1, count=1).encode(),
            Frame(Kind.OPENED, MINE).encode(),
            Frame(Kind.PONG, MINE).encode(),
            step(keep=1 << 31).encode(),
            step(want=3).encode(),
            step(offset=1 << 60).encode(),
            step(enter=3).encode(),
            step(ids=[1] * 40).encode(),
            *(tensor_of(code=code) for code in (0, 2, 9, 255)),
            *(tensor_of(rows=rows, columns=columns) for rows, columns in ((0, 0), (0, 3), (1 << 31, 1 << 31), (1, (1 << 32) - 1), (3, 1))),
            *(tensor_of(name=name) for name in (0, 6, 8, 255)),
            tensor_of(data=bytes(5)),
            tensor_of(data=bytes(7)),
            tensor_of(zero=1),
            good[:5] + b"\xff" + good[6:],
            good[:5] + b"\x02" + good[6:] + good[-18:],
        ]
    )


async def session(channel: Any, sent: list[bytes], last: list[bytes]) -> tuple[int, list[bytes]]:
    """One session: how much was sent until it ended, and what came back. `last`, which ends it, goes out after a first refusal was read:
    what is on its way to a client when a call ends may be lost to it."""
    import grpc

    call, count, answers, refusal = channel.stream_stream("/blocktrain.Stage/Session")(), 0, list[bytes](), asyncio.Event()

    async def read() -> None:
        while isinstance(data := await call.read(), bytes):
            answers.append(data)
            if data[4] == Kind.ERROR:
                refusal.set()

    reading = asyncio.create_task(read())
    try:
        for data in sent:
            await call.write(data)
            count += 1
        await asyncio.wait_for(refusal.wait(), 60)
        for data in last:
            await call.write(data)
            count += 1
    except (grpc.RpcError, asyncio.InvalidStateError):
        pass  # it was ended before
    await asyncio.wait_for(asyncio.wait({reading}), 60)
    assert reading.done()
    reading.exception()
    return count, answers


async def attack(address: str, others: list[bytes], frames: int, seed: int, warm: Callable[[], None]) -> int:
    """Sessions one after another, each ended by a frame that cannot be read. Returns how many frames went out."""
    import grpc.aio

    draw, count, options = random.Random(seed), 0, (("grpc.use_local_subchannel_pool", 1),)
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        while count < frames:
            opened = message_frame(Kind.OPEN, MINE[:-1] + bytes([seed]), OPEN, 1).encode()
            told = [data.replace(MINE, MINE[:-1] + bytes([seed])) for data in refused(draw, others)]
            draw.shuffle(told)
            last = unreadable(draw)
            sent, answers = await session(channel, [opened, *told], [*([last] if last else []), b"\0"])
            assert any(data[4] == Kind.ERROR for data in answers), ("nothing was said", sent, [bytes(a[4:5]) + a[36:] for a in answers])
            count += sent
            if count > frames // 5:
                warm()
    return count


async def knock(address: str, draw: random.Random) -> None:
    """Plain sockets that say something else."""
    host, _, port = address.rpartition(":")
    tls = bytes.fromhex("16030100c8010000c40303") + draw.randbytes(196)
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    said = [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", tls, draw.randbytes(1 << 20), b"", preface, preface + draw.randbytes(4000), b"BTS1" + bytes(100)]
    said += [preface + bytes(9), preface + b"\xff\xff\xff\x00\x00" + bytes(4), pickle.dumps(["x"] * 100)]
    for data in said:
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            writer.write(data)
            await asyncio.wait_for(asyncio.gather(writer.drain(), reader.read(64)), 0.2)
        except (TimeoutError, OSError):
            pass
        finally:
            writer.transport.abort()


def test_whatever_comes_an_honest_text_keeps_its_bytes_and_the_stage_its_memory(run: Path, stages: Stages):
    (stage,) = stages.all
    figures: dict[str, Any] = {"texts": 0}
    wanted = golden(run, plan_of())

    async def honest(chain: Any, over: asyncio.Event) -> None:
        while not over.is_set():
            assert (await tell(chain, plan_of())).data == wanted
            figures["texts"] += 1

    async def knocking(over: asyncio.Event) -> None:
        draw = random.Random(9)
        while not over.is_set():
            await knock(stage.address, draw)
            await asyncio.sleep(0.5)

    def warm() -> None:
        figures.setdefault("before", memory_of(stage.pid))

    async def go() -> None:
        async with stages.client() as chain:
            held, over, began = await chain.open(Settings()), asyncio.Event(), time.monotonic()
            others = [asyncio.create_task(honest(chain, over)), asyncio.create_task(knocking(over))]
            counts = await asyncio.gather(*(attack(stage.address, [held.name], FRAMES // 2, seed, warm) for seed in (1, 2)))
            over.set()
            await asyncio.gather(*others)
            figures.update(frames=sum(counts), seconds=time.monotonic() - began, after=memory_of(stage.pid))
            assert chain.links[0].up
        await until_free(stages.addresses)

    asyncio.run(go())
    growth = figures["after"] - figures["before"]
    print(f"{figures['frames']} hostile frames in {figures['seconds']:.1f} s, {figures['texts']} honest texts, memory {growth / 2**20:+.1f} MiB")
    assert growth < 40 << 20
    assert len(stage.output.splitlines()) == 2, stage.output


def test_more_texts_and_sessions_than_allowed_are_refused_and_freed(run: Path, stages: Stages):
    (stage,) = stages.all

    async def go() -> None:
        import grpc.aio

        opens = [message_frame(Kind.OPEN, bytes([n]) * 16, OPEN, 1).encode() for n in range(60)]
        async with grpc.aio.insecure_channel(stage.address) as channel:
            call = channel.stream_stream("/blocktrain.Stage/Session")()
            for data in opens:
                await call.write(data)
            kinds = [(await call.read())[4] for _ in opens]
            assert kinds.count(Kind.OPENED) == 12 and kinds.count(Kind.ERROR) == 48
            calls = [channel.stream_stream("/blocktrain.Stage/Session")() for _ in range(600)]
            await asyncio.sleep(0.5)
            for each in (*calls, call):
                each.cancel()
        await until_free(stages.addresses)
        async with stages.client() as chain:
            assert (await tell(chain, plan_of())).data == golden(run, plan_of())

    asyncio.run(go())


def test_a_flood_of_frames_that_nobody_reads_takes_no_memory(run: Path, stages: Stages):
    """A client that asks for the same large answer again and again, and takes none of them."""
    (stage,) = stages.all

    async def go() -> None:
        import grpc.aio

        before = memory_of(stage.pid)
        async with grpc.aio.insecure_channel(stage.address) as channel:
            call = channel.stream_stream("/blocktrain.Stage/Session")()
            await call.write(message_frame(Kind.OPEN, MINE, OPEN, 1).encode())
            assert (await call.read())[4] == Kind.OPENED
            again = step(ids=[1] * 32).encode()  # 32 KiB of logits each
            end = time.monotonic() + 60
            while await texts_at(stage.address):
                assert time.monotonic() < end, "it is still served"
                for _ in range(500):
                    await asyncio.wait_for(call.write(again), 30)

            async def rest() -> None:
                with contextlib.suppress(grpc.RpcError):
                    while isinstance(await call.read(), bytes):
                        pass

            await asyncio.wait_for(rest(), 60)
            assert await call.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        await until_free(stages.addresses)
        print(f"memory {(memory_of(stage.pid) - before) / 2**20:+.1f} MiB")
        assert memory_of(stage.pid) - before < 250 << 20
        async with stages.client() as chain:
            assert (await tell(chain, plan_of())).data == golden(run, plan_of())

    asyncio.run(go())
    assert "Traceback" not in stage.output, stage.output
