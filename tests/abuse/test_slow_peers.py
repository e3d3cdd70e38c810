"""Peers that are slow on purpose, lie about lengths, or go away in the middle: each costs one connection for a limited time, and others nothing."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from blocktrain import web
from blocktrain.swarm import server
from blocktrain.swarm.dashboard import stream
from blocktrain.swarm.protocol import Work
from tests.swarm_net import Served, join, make_coordinator, make_layout, make_update, serve, sha256, wait_until


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    monkeypatch.setattr(web, "HEAD_S", 0.5)
    monkeypatch.setattr(web, "REST_S", 0.5)
    monkeypatch.setattr(web, "STALL_S", 0.5)
    layout = make_layout(1, {"w": (2000, 1000)})
    with serve(
        make_coordinator(tmp_path / "swarm", layout=layout, limits={"part_mb": 1.0, "parallel_transfers": 2}, round={"inner_steps": 4})
    ) as found:
        yield found


def connect(served: Served) -> socket.socket:
    peer = socket.create_connection(("127.0.0.1", served.port), timeout=30)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
    return peer


def rest(peer: socket.socket) -> bytes:
    """Everything until the other side ends the connection."""
    data = b""
    with contextlib.suppress(ConnectionError):
        while piece := peer.recv(1 << 16):
            data += piece
    return data


def ended_within(peer: socket.socket, seconds: float) -> bytes:
    began = time.monotonic()
    data = rest(peer)
    assert time.monotonic() - began < seconds
    return data


def session(served: Served, name: str = "w") -> str:
    return join(served.coordinator, name, served.token).session


def head(method: str, path: str, secret: str, *more: str) -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/1.1", "host: x", f"authorization: Bearer {secret}", *more, "", ""]).encode()


def is_well(served: Served, secret: str) -> bool:
    with served.http(secret) as http:
        return http.post("/v1/beat").status_code == 200


@pytest.mark.parametrize("said", [b"", b"GET / HT", b"GET / HTTP/1.1\r\nhost: x\r\nslow: ", b"\r\n", b"GET /health HTTP/1.1\r\nhost: x\r\n\r\nGET"])
def test_a_head_that_never_ends_ends_the_connection(said: bytes, served: Served):
    with connect(served) as peer:
        peer.sendall(said)
        ended_within(peer, 10)
    wait_until(lambda: not served.server.server_state.connections)


def test_a_head_that_comes_byte_by_byte_ends_the_connection(served: Served):
    with connect(served) as peer, contextlib.suppress(ConnectionError):
        began = time.monotonic()
        for byte in b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * 1000:
            peer.sendall(bytes([byte]))
            time.sleep(0.05)
        pytest.fail("it was read to its end")
    assert time.monotonic() - began < 20


@pytest.mark.parametrize("filler", ["header", "headers", "url", "trailer", "extension"])
def test_what_is_no_body_cannot_be_endless(filler: str, served: Served):
    chunked = head("POST", "/v1/ask", session(served), "transfer-encoding: chunked")
    begin, more = {
        "header": (b"GET / HTTP/1.1\r\nx: ", b"x" * 65536),
        "headers": (b"GET / HTTP/1.1\r\n", b"name: value\r\n" * 5000),
        "url": (b"GET /", b"x" * 65536),
        "trailer": (chunked + b"0\r\nx: ", b"x" * 65536),
        "extension": (chunked + b"1;", b"x" * 65536),
    }[filler]
    sent = 0
    with connect(served) as peer, contextlib.suppress(ConnectionError):
        peer.sendall(begin)
        while sent < 1 << 26:
            peer.sendall(more)
            sent += len(more)
    assert sent < 1 << 25


def test_a_body_that_stalls_is_refused_and_others_are_answered_meanwhile(served: Served):
    secret = session(served)
    with connect(served) as peer:
        peer.sendall(head("POST", "/v1/ask", secret, "content-length: 100") + b'{"ask"')
        assert is_well(served, secret)
        assert b" 408 " in ended_within(peer, 10)[:20]


def test_a_body_that_drips_is_refused(served: Served):
    with connect(served) as peer, contextlib.suppress(ConnectionError):
        peer.sendall(head("POST", "/v1/ask", session(served), "content-length: 10000"))
        began = time.monotonic()
        while time.monotonic() - began < 20:
            peer.sendall(b" ")
            time.sleep(0.1)
        pytest.fail("it was read for twenty seconds")
    wait_until(lambda: not served.server.server_state.connections)


def begun(served: Served, secret: str) -> tuple[str, bytes]:
    """An upload that has begun: its path, and its first part."""
    with served.http(secret) as http:
        work = http.post("/v1/ask", json={"ask": "x"}).json()["work"]
        data = make_update(served.coordinator.layout, Work.model_validate_json(json.dumps(work)))
        assert http.post("/v1/begin", json={"key": work["key"], "size": len(data), "sha256": sha256(data)}).status_code == 200
    part = data[: served.coordinator.part_bytes]
    return f"/v1/updates/{work['key']}/{sha256(data)}/parts/0?part_sha256={sha256(part)}", part


def test_a_part_that_stalls_or_breaks_off_leaves_nothing_and_can_be_sent_again(served: Served):
    secret = session(served)
    path, part = begun(served, secret)
    with connect(served) as peer:
        peer.sendall(head("PUT", path, secret, f"content-length: {len(part)}") + part[:300_000])
        assert b" 408 " in ended_within(peer, 10)[:20]
    with connect(served) as peer:
        peer.sendall(head("PUT", path, secret, f"content-length: {len(part)}") + part[:300_000])
    wait_until(lambda: not served.service.incoming.total())
    wait_until(lambda: not served.coordinator.store.blobs.names("scratch/"))
    assert not served.coordinator.store.blobs.names("updates/")
    with served.http(secret) as http:
        assert http.put(path, content=part).status_code == 200


def test_no_worker_can_have_more_than_two_parts_on_their_way(served: Served, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(web, "STALL_S", 60.0)  # who stands still is to be there until the end
    secret, other = session(served), session(served, "v")
    path, part = begun(served, secret)
    two = [connect(served) for _ in range(2)]
    for peer in two:
        peer.sendall(head("PUT", path, secret, f"content-length: {len(part)}") + part[:1000])
    wait_until(lambda: served.service.incoming.total() == 2)
    with served.http(secret) as http:
        reply = http.put(path, content=part)
        assert reply.status_code == 429 and "parts of one worker" in reply.json()["reason"]
        assert is_well(served, other)
    for peer in two:
        peer.close()
    wait_until(lambda: not served.service.incoming.total())


def test_readers_who_stop_reading_lose_their_place_in_the_line(served: Served):
    blob = served.coordinator.manifest("block-000", 0)["file"]
    secrets = [session(served, f"w{i}") for i in range(3)]
    peers = [connect(served) for _ in range(2)]
    for peer, secret in zip(peers, secrets, strict=False):
        peer.sendall(head("GET", f"/v1/blobs/{blob['name']}", secret))
    wait_until(lambda: served.service.line.inside.total() == 2)
    with served.http(secrets[2]) as http:
        reply = http.get(f"/v1/blobs/{blob['name']}")
        assert reply.status_code == 503 and reply.json()["place"] == 1
        wait_until(lambda: not served.service.line.inside.total())
        reply = http.get(f"/v1/blobs/{blob['name']}")
        assert reply.status_code == 200 and sha256(reply.content) == blob["sha256"]
    for peer in peers:
        peer.close()


def test_readers_who_go_away_before_or_in_an_answer_give_their_place_back(served: Served):
    blob, secret = served.coordinator.manifest("block-000", 0)["file"], session(served)
    for cut in (0, 0, 0, 10, 5000, 100_000):
        with connect(served) as peer:
            peer.sendall(head("GET", f"/v1/blobs/{blob['name']}", secret))
            if cut:
                peer.recv(cut)
    wait_until(lambda: not served.server.server_state.connections and not served.service.line.inside.total())
    with served.http(secret) as http:
        assert sha256(http.get(f"/v1/blobs/{blob['name']}").content) == blob["sha256"]


def test_one_worker_cannot_take_every_place(served: Served, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(server, "EACH", 1)
    blob = served.coordinator.manifest("block-000", 0)["file"]
    greedy, other = session(served, "greedy"), session(served, "other")
    peers = [connect(served) for _ in range(3)]
    for peer in peers:
        peer.sendall(head("GET", f"/v1/blobs/{blob['name']}", greedy))
    wait_until(lambda: served.service.line.inside.total() == 1)
    with served.http(other) as http:
        assert http.get(f"/v1/blobs/{blob['name']}").status_code == 200
    for peer in peers:
        peer.close()


def test_a_blob_that_is_removed_while_somebody_asks_for_it_is_not_found(served: Served, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(type(served.coordinator.store.blobs), "size", lambda *_: 10)
    with served.http(session(served)) as http:
        assert http.get("/v1/blobs/versions/block-000/gone").status_code == 404


# --- Lengths, and what comes after an early answer ---


def test_after_an_early_413_the_connection_ends_or_goes_on_but_is_never_out_of_step(served: Served):
    secret = session(served)
    beat = head("POST", "/v1/beat", secret, "content-length: 0")
    with connect(served) as peer:  # announced as too long: refused before it is read, and the rest is not read
        peer.sendall(head("POST", "/v1/ask", secret, "content-length: 99999999") + b"POST /v1/leave HTTP/1.1\r\n")
        answer = ended_within(peer, 10)
        assert answer.startswith(b"HTTP/1.1 413 ") and answer.count(b"HTTP/1.1") == 1 and b"connection: close" in answer
    with connect(served) as peer:  # too long as it comes
        peer.sendall(head("POST", "/v1/ask", secret, "transfer-encoding: chunked"))
        with contextlib.suppress(ConnectionError):
            for _ in range(5):
                peer.sendall(b"8000\r\n" + bytes(0x8000) + b"\r\n")
        answer = ended_within(peer, 10)
        assert not answer or answer.startswith(b"HTTP/1.1 413 ")
    with connect(served) as peer:  # answered early, short and whole: the next request is understood
        peer.sendall(head("POST", "/v1/beat", "wrong", "content-length: 500") + bytes(500) + beat)
        data = b""
        while data.count(b"HTTP/1.1") < 2:
            data += peer.recv(4096)
        assert data.startswith(b"HTTP/1.1 401 ") and b"HTTP/1.1 200 " in data
    assert is_well(served, secret)


def test_the_rest_of_a_body_that_was_answered_early_is_not_waited_for_for_ever(served: Served):
    with connect(served) as peer:
        peer.sendall(head("POST", "/v1/beat", "wrong", "content-length: 500"))
        assert ended_within(peer, 10).startswith(b"HTTP/1.1 401 ")


def test_a_body_that_expects_to_be_asked_for_is_asked_for_only_where_it_is_wanted(served: Served):
    secret = session(served)
    with connect(served) as peer:
        peer.sendall(head("POST", "/v1/ask", "wrong", "content-length: 12", "expect: 100-continue", "content-type: application/json"))
        answer = ended_within(peer, 10)
        assert b" 401 " in answer or b" 408 " in answer
    path, part = begun(served, secret)
    with connect(served) as peer:
        peer.sendall(head("PUT", path, "wrong", f"content-length: {len(part)}", "expect: 100-continue"))
        answer = ended_within(peer, 10)
        assert answer.startswith(b"HTTP/1.1 401 ") and b"connection: close" in answer


# --- Watchers ---


def test_many_listeners_cost_one_look_a_second_and_those_who_stop_reading_go(served: Served, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(stream, "MAX_LISTENERS", 32)
    looks = [0]
    made = served.service.status

    def status() -> dict[str, object]:
        looks[0] += 1
        return made()

    monkeypatch.setattr(served.service, "status", status)
    secret = session(served)
    peers = [connect(served) for _ in range(40)]
    for peer in peers:
        peer.sendall(b"GET /v1/events HTTP/1.1\r\nhost: x\r\n\r\n")
    answers = [peer.recv(100) for peer in peers]
    assert sum(answer.startswith(b"HTTP/1.1 200") for answer in answers) == 32
    assert sum(answer.startswith(b"HTTP/1.1 503") for answer in answers) == 8
    assert is_well(served, secret)
    for peer in peers:
        peer.close()
    wait_until(lambda: not served.server.server_state.connections)


def test_the_status_is_made_once_a_second_however_often_it_is_asked_for(served: Served, monkeypatch: pytest.MonkeyPatch):
    calls = [0]
    counted = served.coordinator.counted_bytes

    def counting() -> list[object]:
        calls[0] += 1
        return counted()  # type: ignore[return-value]

    monkeypatch.setattr(served.coordinator, "counted_bytes", counting)
    began = time.monotonic()
    with served.http() as http:
        for _ in range(50):
            assert http.get("/v1/status").status_code == 200
    assert calls[0] <= time.monotonic() - began + 2
