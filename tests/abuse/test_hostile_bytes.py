"""Hostile requests by the ten thousand at a real process: it answers no 5xx but 503 and 507, does not grow, and an honest worker is still served.

BLOCKTRAIN_HOSTILE says how many.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import gzip
import json
import os
import pickle
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest

from tests.abuse.bodies import any_bytes, mutated, truncated

COUNT = int(os.environ.get("BLOCKTRAIN_HOSTILE", "6000"))
ROOT = Path(__file__).parents[2]
DIGEST = "ab" * 32
GROWTH = 30e6


@dataclass
class Target:
    """The process under attack."""

    process: subprocess.Popen[str]
    port: int
    token: str
    hostile: str
    honest: str

    def rss(self) -> int:
        return psutil.Process(self.process.pid).memory_info().rss

    def http(self, secret: str) -> httpx2.Client:
        return httpx2.Client(base_url=f"http://127.0.0.1:{self.port}", headers={"authorization": f"Bearer {secret}"}, timeout=60, trust_env=False)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    command = [sys.executable, "-m", "tests.abuse.target", str(tmp_path_factory.mktemp("target") / "swarm")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")])}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment)
    try:
        assert process.stdout is not None
        port, *secrets = process.stdout.readline().split()
        yield Target(process, int(port), *secrets)
    finally:
        process.kill()
        process.wait()


# --- Bodies ---

MESSAGES = {
    "/v1/join": {
        "protocol": 1,
        "run_id": "a" * 12,
        "config_digest": DIGEST,
        "name": "w",
        "public_key": DIGEST,
        "process": "p",
        "challenge": "ab" * 16,
    }
    | {"signature": DIGEST * 2, "capacity": 1, "takeover": False},
    "/v1/ask": {"ask": "x"},
    "/v1/begin": {"key": "000000000000", "size": 3400, "sha256": DIGEST},
    "/v1/commit": {"key": "000000000000", "size": 3400, "sha256": DIGEST, "num_samples": 16, "metrics": {"ce": 1.0}},
    "/v1/give-back": {"key": "000000000000", "why": "because"},
}
JUNK = [None, True, -1, 0, 1.5, 1e308, 10**400, "", "x" * 3000, "\x00", "\ud800", [], {}, [[[]]], {"a": {"b": []}}, "../../etc", "NaN", 1 << 63]


def wrong_types(dice: random.Random, message: dict[str, Any]) -> bytes:
    message = dict(message)
    for name in dice.sample(list(message), dice.randint(1, len(message))):
        message[name] = dice.choice(JUNK)
    if dice.random() < 0.2:
        message[dice.choice(["__proto__", "x", "key"])] = dice.choice(JUNK)
    return json.dumps(message).encode()


def deep(dice: random.Random, _: dict[str, Any]) -> bytes:
    depth = dice.randrange(10, 30_000)
    return dice.choice([b"[" * depth, b'{"a":' * (depth // 5), b"[" * (depth // 2) + b"]" * (depth // 2)])


def numbers(dice: random.Random, message: dict[str, Any]) -> bytes:
    name = dice.choice(list(message))
    number = dice.choice(["NaN", "Infinity", "-Infinity", "1e999", "-1e999", "9" * dice.randrange(1, 6000), "0x10", "1_0", "-0", "1e-999", "00"])
    return json.dumps({k: v for k, v in message.items() if k != name})[:-1].encode() + f', "{name}": {number}}}'.encode()


def doubled(dice: random.Random, message: dict[str, Any]) -> bytes:
    name = dice.choice(list(message))
    return json.dumps(message)[:-1].encode() + f', "{name}": {json.dumps(dice.choice(JUNK))}}}'.encode()


def not_utf8(dice: random.Random, message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode().replace(b'"', dice.choice([b"\xff", b"\xc0\x80", b'"\xed\xa0\x80', b"\xef\xbb\xbf"]), dice.randint(1, 5))


def pickled(_: random.Random, message: dict[str, Any]) -> bytes:
    return pickle.dumps(message)


Maker = Callable[[random.Random, dict[str, Any]], bytes]
BODIES: list[Maker] = [
    any_bytes,
    truncated,
    mutated,
    wrong_types,
    deep,
    numbers,
    doubled,
    not_utf8,
    pickled,
]
BOMB = gzip.compress(bytes(10_000_000))


# --- Requests ---


def request(method: str, path: str, body: bytes, secret: str, *more: str) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "host: x", f"content-length: {len(body)}", "content-type: application/json", *more]
    if secret:
        lines.append(f"authorization: Bearer {secret}")
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


def make_request(dice: random.Random, target: Target) -> bytes:
    """A whole request that keeps its connection."""
    kind = dice.random()
    secret = dice.choice([target.hostile, target.hostile, target.hostile, target.token, "", "f" * 32])
    if kind < 0.75:
        path = dice.choice(list(MESSAGES))
        secret = target.token if path == "/v1/join" else secret
        return request("POST", path, dice.choice(BODIES)(dice, MESSAGES[path]), secret)
    if kind < 0.85:
        method = dice.choice(["GET", "PUT", "DELETE", "PATCH", "POST", "OPTIONS"])
        path = dice.choice(
            ["/", "/v1/ask", "/v1/hello", "/v1/hello?nonce=zz", "/v1/nothing", "/v1/status?x=1", "/health", "/v1/updates/1/2/parts/3", "//"]
        )
        return request(method, path, dice.randbytes(dice.randrange(20)), secret)
    if kind < 0.92:
        name = dice.choice(["versions//x", "versions/./x", "..%2f..%2fetc%2fpasswd", "versions/%2e%2e/%2e%2e/state.db", "%00", "versions/block-000"])
        name = dice.choice(
            [name, "text/" + "a/" * dice.randrange(90), "updates/000000000000/x", "scratch/x", "text/train.txt%00", "versions/" + "x" * 300]
        )
        return request("GET", f"/v1/blobs/{name}", b"", target.hostile, f"range: bytes={dice.choice(['-1', '5-1', '0-0,1-1', '9' * 400, 'x', '0-'])}")
    key, index = dice.choice(["000000000000", "9" * 20, "1", "x", "0" * 21]), dice.choice(["0", "-1", "9" * 30, "1", "x", str(1 << 31)])
    data = dice.randbytes(dice.randrange(3500))
    return request("PUT", f"/v1/updates/{key}/{DIGEST}/parts/{index}?part_sha256={dice.choice([DIGEST, 'x', ''])}", data, target.hostile)


def make_ending(dice: random.Random, target: Target) -> bytes:
    """Bytes after which the connection is of no more use."""
    head = f"POST /v1/ask HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {target.hostile}\r\n".encode()
    return dice.choice(
        [
            dice.randbytes(dice.randrange(1, 500)),
            head + b"content-length: 999999999999\r\n\r\n" + bytes(1000),
            head + b"content-length: -5\r\n\r\n{}",
            head + b"content-length: 5\r\ncontent-length: 6\r\n\r\n{}",
            head + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n{}",
            head + b"transfer-encoding: chunked\r\n\r\n" + b"5\r\n12345\r\n" * dice.randrange(100),
            head + b"transfer-encoding: chunked\r\n\r\nffffffffffff\r\n" + bytes(500),
            head + b"transfer-encoding: chunked\r\n\r\n" + b"4000\r\n" + bytes(0x4000) + b"\r\n" * 5,
            head + b"transfer-encoding: chunked\r\n\r\n" + (b"4000\r\n" + bytes(0x4000) + b"\r\n") * 6,
            head + b"transfer-encoding: chunked\r\n\r\n1;" + b"x" * 200_000,
            head + b"transfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
            request("POST", "/v1/ask", BOMB[:8000], target.hostile, "content-encoding: gzip"),
            head + b"".join(b"h%d: %s\r\n" % (i, b"x" * 50) for i in range(dice.choice([500, 3000]))) + b"\r\n",
            head + b"long: " + b"x" * 200_000,
            b"GET /" + b"a" * 100_000,
            b"GET /v1/blobs/" + b"%41" * 5000 + b" HTTP/1.1\r\nhost: x\r\n\r\n",
            b"CONNECT x:1 HTTP/1.1\r\n\r\n",
            b"GET / HTTP/9.9\r\n\r\n",
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            head + b"upgrade: websocket\r\nconnection: upgrade\r\n\r\n",
            b"\x16\x03\x01\x02\x00\x01\x00" + dice.randbytes(300),
            b"\r\n\r\n\r\n",
        ]
    )


async def attack(target: Target, count: int, seed: int, codes: collections.Counter[int]) -> None:
    """Connections one after another, each with a batch of requests at once and an ending; the answers are counted."""
    dice, left = random.Random(seed), count
    while left > 0:
        batch = [make_request(dice, target) for _ in range(min(left - 1, dice.randint(20, 60)))]
        left -= len(batch) + 1
        with contextlib.suppress(ConnectionError):
            reader, writer = await asyncio.open_connection("127.0.0.1", target.port, limit=1 << 22)
            try:
                await asyncio.gather(send(writer, batch), read(reader, len(batch), codes))
                writer.write(make_ending(dice, target))
                await writer.drain()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(0.02):
                        await read(reader, 1, codes)
            finally:
                writer.transport.abort()


async def send(writer: asyncio.StreamWriter, batch: list[bytes]) -> None:
    with contextlib.suppress(ConnectionError):
        for data in batch:
            writer.write(data)
            await writer.drain()


async def read(reader: asyncio.StreamReader, expected: int, codes: collections.Counter[int]) -> None:
    """Until every whole request has its answer, or the connection ends."""
    text, found = b"", 0
    with contextlib.suppress(ConnectionError):
        while found < expected and (data := await asyncio.wait_for(reader.read(1 << 16), 60)):
            text += data
            starts = list(re.finditer(rb"HTTP/1\.1 (\d{3}) ", text[:-20] if len(text) > 20 else b""))
            for start in starts:
                codes[int(start[1])] += 1
            found += len(starts)
            text = text[-20:] if not starts or len(text) - starts[-1].end() > 20 else text[starts[-1].end() :]


def test_tens_of_thousands_of_hostile_requests(target: Target):
    codes: collections.Counter[int] = collections.Counter()

    async def all_of(count: int, seed: int) -> None:
        async with asyncio.timeout(900):
            await asyncio.gather(*(attack(target, count // 8, seed + i, codes) for i in range(8)))

    asyncio.run(all_of(COUNT // 20, 100))
    before, began = target.rss(), time.monotonic()
    asyncio.run(all_of(COUNT - COUNT // 20, 200))
    grown = target.rss() - before
    print(f"CPU s: {psutil.Process(target.process.pid).cpu_times().user:.0f} there, {time.process_time():.0f} here")
    print(f"{time.monotonic() - began:.0f} s, {dict(codes)}, grown by {grown / 1e6:.1f} MB")
    assert target.process.poll() is None
    assert not {code for code in codes if code >= 500} - {503, 507}, codes
    assert sum(codes.values()) > COUNT / 2
    assert grown < GROWTH
    with target.http(target.honest) as http:
        began = time.monotonic()
        assert http.post("/v1/beat").status_code == 200
        assert http.post("/v1/ask", json={"ask": "honest"}).json()["kind"] in ("assigned", "wait")
        assert http.get("/v1/status").json()["run"] == "run"
        assert time.monotonic() - began < 10
