"""Workers and a coordinator over networks that are late, cut, silent or wrong: in every case the update arrives, or one line says why not."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest

from blocktrain.errors import ConfigError, ProtocolError
from blocktrain.swarm import host, identity, link, server
from blocktrain.swarm.host import Host
from blocktrain.swarm.protocol import BlobRef
from blocktrain.swarm.worker import Told, Worker, WorkerStopped
from tests.conftest import tiny_config
from tests.swarm_net import (
    Fault,
    MadeUpEngine,
    Proxy,
    Served,
    in_time,
    made_up_worker,
    make_coordinator,
    make_layout,
    make_update,
    member,
    serve,
    sha256,
    until_updates,
    wait_until,
)

ROUND = {"inner_steps": 4, "quorum": 1}
BIG = {"w": (300, 1000)}  # 1.2 MB


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(link, "PAUSES_S", (0.02, 0.05))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def blob_of(served: Served, part: str = "block-000") -> BlobRef:
    file = served.coordinator.manifest(part, 0)["file"]
    return BlobRef(name=file["name"], size=file["size"], sha256=file["sha256"])


async def joined(way: link.HttpLink) -> link.HttpLink:
    await way.info()
    await way.join(1, False)
    return way


async def fetched(way: link.HttpLink, blob: BlobRef, target: Path) -> bytes:
    try:
        await (await joined(way)).fetch(blob, target)
        return target.read_bytes()
    finally:
        await way.close()


# --- Coming and going ---


def test_a_worker_waits_for_a_coordinator_that_starts_late_and_says_how_long_it_would(tmp_path: Path):
    coordinator, port, said = make_coordinator(round=ROUND), free_port(), []
    served = Served(coordinator, None, None, port, coordinator.token_named("t") or "")  # type: ignore[arg-type]
    worker = made_up_worker(served, tmp_path / "w", said=said)

    def later() -> None:
        time.sleep(1.0)
        with serve(coordinator, port=port):
            wait_until(lambda: worker.updates)
            time.sleep(0.3)

    thread = threading.Thread(target=later)
    thread.start()
    assert in_time(until_updates(worker, 1)) == "stopped"
    thread.join()
    assert "ConnectError" in said[0] and "trying for up to 60 s more" in said[0]
    assert len([line for line in said if "ConnectError" in line]) == 1, "one line, not one for every attempt"


def test_a_worker_gives_up_on_a_coordinator_after_the_time_it_was_told_to_wait(tmp_path: Path):
    coordinator = make_coordinator()
    served = Served(coordinator, None, None, free_port(), "0" * 32)  # type: ignore[arg-type]
    began = time.monotonic()
    with pytest.raises(WorkerStopped, match="gave up after 1 s"):
        in_time(made_up_worker(served, tmp_path / "w", patience_s=0.7).run())
    assert 0.6 < time.monotonic() - began < 3


def test_four_workers_started_at_once_are_four_members_of_one_run_every_time():
    with serve(make_coordinator(limits={"joins_per_minute": 100_000}), ticking=False) as served:

        async def arrive(repeat: int) -> None:
            ways = [served.link(f"r{repeat}-{i}", transport=httpx2.ASGITransport(served.service.app)) for i in range(4)]
            infos = await asyncio.gather(*(way.info() for way in ways))
            replies = await asyncio.gather(*(way.join(1, False) for way in ways))
            members = [name for name in served.coordinator.machine.state.workers if name.startswith(f"r{repeat}-")]
            assert {info.run_id for info in infos} == {served.coordinator.run_id}
            assert len(members) == 4 and sorted(members) == sorted(reply.worker for reply in replies)

        async def fifty_times() -> None:
            for repeat in range(50):
                await arrive(repeat)

        in_time(fifty_times())


def test_fifty_workers_download_at_once_in_bounded_numbers_and_are_told_their_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(server, "LINE_S", 60.0)
    coordinator = make_coordinator(tmp_path / "swarm", layout=make_layout(1, BIG), limits={"parallel_transfers": 4})
    most, told = [0], []
    entered = server.Line.enter

    def watched(self: server.Line, who: str, now: float) -> int:
        place = entered(self, who, now)
        most[0] = max(most[0], self.inside.total())
        return place

    monkeypatch.setattr(server.Line, "enter", watched)
    with serve(coordinator) as served:
        blob = blob_of(served)

        async def everyone() -> None:
            ways = [served.link(f"w{i}", say=told.append, patience_s=60) for i in range(50)]
            await asyncio.gather(*(fetched(way, blob, tmp_path / f"w{i}") for i, way in enumerate(ways)))

        in_time(everyone())
        assert served.service.line.inside.total() == 0 and not served.service.line.waiting
    assert 1 < most[0] <= 4
    assert all((tmp_path / f"w{i}").stat().st_size == blob.size for i in range(50))
    assert any("in line" in line and "place" in line for line in told)
    assert len(coordinator.machine.state.workers) == 50


# --- The printed address ---


def opened(tmp_path: Path, text: Path, **more: Any) -> Host:
    from tests.conftest import tiny_config

    made = Host(tmp_path / "run", tiny_config(data={"corpus": str(text)}), evaluate=False, **more)
    made.open()
    made.socket.close()
    return made


def test_listening_everywhere_prints_an_address_that_others_can_reach(tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(host, "outward_address", lambda _: "192.0.2.7")
    made = opened(tmp_path, text, listen="0.0.0.0:0")
    assert made.line.host == "192.0.2.7" and made.line.scheme == "https"
    assert str(made.line) == (tmp_path / "run/swarm/join-line").read_text()


@pytest.mark.parametrize("found", ["", "127.0.1.1", "::1", "0.0.0.0", "::"])
def test_without_an_address_that_others_can_reach_it_says_what_to_do(found: str, tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(host, "outward_address", lambda _: found)
    with pytest.raises(ConfigError, match="--public HOST"):
        opened(tmp_path, text, listen="0.0.0.0:0")
    line = opened(tmp_path, text, listen="0.0.0.0:0", public="train.example.org").line
    assert line.host == "train.example.org"


@pytest.mark.parametrize(
    ("public", "expected"),
    [
        ("a.example:81", ("a.example", 81)),
        ("a.example", ("a.example", None)),
        ("[2001:db8::2]:81", ("2001:db8::2", 81)),
        ("2001:db8::2", ("2001:db8::2", None)),
    ],
)
def test_a_public_address_may_have_a_port_and_be_of_either_family(public: str, expected: tuple[str, int | None], tmp_path: Path, text: Path):
    made = opened(tmp_path, text, listen="127.0.0.1:0", public=public)
    assert (made.line.host, made.line.port) == (expected[0], expected[1] or made.port)


# --- Transfers ---


def test_a_download_cut_in_the_middle_goes_on_from_there(tmp_path: Path):
    with serve(make_coordinator(tmp_path / "swarm", layout=make_layout(1, BIG))) as served:
        blob = blob_of(served)
        cut = 5_000 + blob.size // 2
        with Proxy(served.port, [Fault(cut_down=cut)]) as proxy:
            data = in_time(fetched(served.link(port=proxy.port), blob, tmp_path / "b"))
            asked = [head for head in proxy.heads() if "/v1/blobs/" in head]
    assert len(data) == blob.size and proxy.cuts == 1
    assert len(asked) == 2 and "range:" not in asked[0]
    start = int(asked[1].split("range: bytes=")[1].split("-")[0])
    assert blob.size // 2 - 5_000 < start <= cut
    assert proxy.down < blob.size + 10_000, "only the rest was sent"


def test_a_transfer_that_stalls_is_broken_off_and_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(link, "FILE_TIMEOUT", httpx2.Timeout(connect=5, read=0.3, write=0.3, pool=None))
    with serve(make_coordinator(tmp_path / "swarm", layout=make_layout(1, BIG))) as served:
        blob = blob_of(served)
        with Proxy(served.port, [Fault(stall_down=blob.size // 3)]) as proxy:
            data = in_time(fetched(served.link(port=proxy.port), blob, tmp_path / "b"))
        assert len(data) == blob.size and proxy.down < blob.size + 20_000
        wait_until(lambda: served.service.line.inside.total() == 0)


def test_a_byte_flipped_in_a_download_is_noticed_and_nothing_of_it_is_used(tmp_path: Path):
    with serve(make_coordinator(tmp_path / "swarm", layout=make_layout(1, BIG))) as served:
        blob, said = blob_of(served), []
        with Proxy(served.port, [Fault(flip_down=blob.size // 2)]) as proxy:
            data = in_time(fetched(served.link(port=proxy.port, say=said.append), blob, tmp_path / "b"))
        assert data == served.coordinator.store.blobs.read(blob.name, 0, blob.size)
        assert any("damaged" in line for line in said)
        with Proxy(served.port, rest=Fault(flip_down=blob.size // 2)) as proxy, pytest.raises(ProtocolError, match="wrong sha256 5 times"):
            in_time(fetched(served.link("x", port=proxy.port, transport=OneConnectionEach()), blob, tmp_path / "c"))
        assert not (tmp_path / "c").exists()


class OneConnectionEach(httpx2.AsyncHTTPTransport):
    """A connection of its own for every request."""

    def __init__(self) -> None:
        super().__init__(limits=httpx2.Limits(max_keepalive_connections=0))


class AwayFor(httpx2.AsyncHTTPTransport):
    """Nobody can be reached for so many seconds after the first part of an update was to be sent."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds, self.until = seconds, 0.0

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        if request.method == "PUT" and not self.until:
            self.until = time.monotonic() + self.seconds
        if time.monotonic() < self.until:
            raise httpx2.ConnectError("no route")
        return await super().handle_async_request(request)


def test_an_outage_is_no_part_of_how_long_an_upload_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Otherwise the worker would hold so much time back that no step fits into the rounds after it."""
    monkeypatch.setattr(link, "OUTAGE_S", 0.5)
    layout = make_layout(1, BIG)
    with serve(make_coordinator(tmp_path / "swarm", layout=layout, round=ROUND, limits={"part_mb": 0.25})) as served:
        away = AwayFor(2.0)
        way = served.link(transport=away)
        worker = Worker(way, MadeUpEngine(layout, tmp_path))
        began = time.monotonic()
        in_time(until_updates(worker, 1))
        took = time.monotonic() - began
    assert took > way.away_s > away.seconds, "two lanes met it, and it was one outage"
    assert worker._upload_s is not None and worker._upload_s <= took - way.away_s


@pytest.mark.parametrize("at", [0.2, 0.5, 0.9])
def test_a_byte_flipped_in_an_upload_is_noticed_and_sent_again(at: float, tmp_path: Path):
    layout = make_layout(1, BIG)
    size = 2 * 300 * 1000 * 4
    with serve(make_coordinator(tmp_path / "swarm", layout=layout, round=ROUND)) as served:
        with Proxy(served.port, [Fault(flip_up=int(5_000 + at * (size - 10_000)))]) as proxy:
            said: list[str] = []
            worker = Worker(served.link(port=proxy.port, say=said.append), MadeUpEngine(layout, tmp_path), say=said.append)
            assert in_time(until_updates(worker, 1)) == "stopped"
            assert proxy.up > 1.9 * size, "it went over the wire twice"
        wait_until(lambda: served.coordinator.machine.state.blocks[0].version)
        work = worker.engine.seen[0]  # type: ignore[attr-defined]
        with served.coordinator.store.transaction() as tx:
            rows = tx.rows(host.sa.select(host.store.updates).where(host.store.updates.c.key == work.key))
        assert [(row["sha256"], row["kind"]) for row in rows] == [(sha256(make_update(layout, work)), "fresh")]


def test_an_upload_is_cut_again_and_again_and_arrives_once(tmp_path: Path):
    layout = make_layout(1, BIG)
    with serve(make_coordinator(tmp_path / "swarm", layout=layout, round=ROUND, limits={"part_mb": 0.25})) as served:
        with Proxy(served.port, rest=Fault(cut_up=900_000)) as proxy:
            worker = Worker(served.link(port=proxy.port), MadeUpEngine(layout, tmp_path))
            in_time(until_updates(worker, 2))
            assert proxy.cuts >= 3
        with served.coordinator.store.transaction() as tx:
            rows = tx.rows(host.sa.select(host.store.updates))
    assert len(rows) == worker.updates and {row["kind"] for row in rows} == {"fresh"}


def test_a_proxy_that_cuts_idle_connections_does_not_keep_an_update_from_arriving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(server, "ASK_WAIT_S", 0.1)
    with serve(make_coordinator(tmp_path / "swarm", round=ROUND)) as served:
        with Proxy(served.port, rest=Fault(idle_s=0.4)) as proxy:
            worker = made_up_worker(served, tmp_path / "w", port=proxy.port, train_s=1.0)
            in_time(until_updates(worker, 3))
            assert proxy.cuts >= 2
        assert worker.updates >= 3


def test_an_asker_behind_a_proxy_that_cuts_what_waits_still_gets_its_work(tmp_path: Path):
    """The coordinator holds an ask for seconds; the same ask, asked again, is answered."""
    coordinator = make_coordinator(tmp_path / "swarm", round={"inner_steps": 4, "quorum": 2})
    with serve(coordinator) as served, Proxy(served.port, rest=Fault(idle_s=0.5)) as proxy:
        crew = [made_up_worker(served, tmp_path / f"w{i}", f"w{i}", port=proxy.port, train_s=0.3 * (i + 1)) for i in range(3)]

        async def all_of_them() -> None:
            await asyncio.gather(*(until_updates(worker, 2) for worker in crew))

        in_time(all_of_them())


def test_every_connection_is_slow_and_dies_after_a_few_kilobytes_and_the_run_goes_on(tmp_path: Path):
    faults = [Fault(delay_s=0.02, cut_down=600 + 977 * i % 5000) for i in range(40)]
    with serve(make_coordinator(tmp_path / "swarm", round=ROUND)) as served, Proxy(served.port, faults) as proxy:
        worker = made_up_worker(served, tmp_path / "w", port=proxy.port)
        in_time(until_updates(worker, 5))
        assert worker.updates >= 5 and proxy.cuts > 5
        rows = served.coordinator.counted_bytes()
        assert rows


# --- The ledger ---


def test_the_ledger_is_what_really_moved(tmp_path: Path):
    with serve(make_coordinator(tmp_path / "swarm", layout=make_layout(2, BIG), round=ROUND)) as served:
        with Proxy(served.port) as proxy:
            worker = made_up_worker(served, tmp_path / "w", port=proxy.port)
            in_time(until_updates(worker, 3))
        wait_until(lambda: not served.server.server_state.connections)
        rows = served.coordinator.counted_bytes()
    counted: collections.Counter[str] = collections.Counter()
    for row in rows:
        counted[row["direction"]] += row["bytes"]
    assert counted["up"] == pytest.approx(proxy.up, rel=0.02) and counted["down"] == pytest.approx(proxy.down, rel=0.02)
    by = {(row["kind"], row["part"], row["direction"]) for row in rows}
    assert {("weights", "block-000", "down"), ("weights", "block-001", "down"), ("text", "text", "down")} <= by


def test_what_was_never_received_is_not_counted_as_sent(tmp_path: Path):
    with serve(make_coordinator(tmp_path / "swarm", layout=make_layout(1, {"w": (5000, 1000)}))) as served:
        blob, who = blob_of(served), member(served.coordinator, "w")
        token = served.coordinator.token_named("another") or ""
        del who
        from tests.swarm_net import join

        session = join(served.coordinator, "v", token).session
        for _ in range(3):
            with served.http(session) as http, contextlib.suppress(httpx2.HTTPError), http.stream("GET", f"/v1/blobs/{blob.name}") as response:
                next(response.iter_raw(1000))
        wait_until(lambda: served.service.line.inside.total() == 0)
        counted = sum(row["bytes"] for row in served.coordinator.counted_bytes() if row["kind"] == "weights" and row["direction"] == "down")
    assert counted < 0.6 * 3 * blob.size


# --- Who is who ---


class Impostor:
    """Answers hello as it likes and keeps everything that it is sent."""

    def __init__(self, answer: Callable[[str], bytes]) -> None:
        self.answer, self.heard = answer, b""

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            head = await reader.readuntil(b"\r\n\r\n")
            self.heard += head
            body = self.answer(head.split(b"nonce=")[1].split(b" ")[0].decode() if b"nonce=" in head else "")
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body) + body)
            await writer.drain()
            writer.close()


def forged(pem: str, **changes: Any) -> Callable[[str], bytes]:
    """Hello with another key, or with the right certificate and somebody else's signature."""
    from blocktrain.swarm.protocol import Hello, hello_text

    def answer(nonce: str) -> bytes:
        fields = {"protocol": 1, "run_id": "aabbccdd", "challenge": "00" * 16, "certificate": identity.certificate_of(pem), **changes}
        text = hello_text(nonce, str(fields["run_id"]), str(fields["challenge"]))
        fields.setdefault("signature", identity.sign_as_coordinator(pem, text))
        return Hello(**fields).model_dump_json().encode()

    return answer


REAL, OTHER = identity.new_certificate("real"), identity.new_certificate("other")


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (forged(OTHER), "another coordinator"),
        (forged(OTHER, certificate=identity.certificate_of(REAL)), "signature is not"),
        (forged(REAL, signature=""), "signature is not"),
        (forged(REAL, signature="zz"), "signature is not"),
        (forged(REAL, run_id="ffffffff"), "has the run ffffffff, the line says aabbccdd"),
        (forged(REAL, protocol=2), "protocol 2, this worker 1"),
        (lambda _: b'{"protocol": 7, "a_field_of_tomorrow": []}', "protocol 7, this worker 1"),
        (lambda _: b"<html>", "reply of /v1/hello"),
        (forged(REAL, certificate="x"), "certificate"),
    ],
)
def test_before_a_coordinator_has_proved_who_it_is_no_token_is_sent(answer: Callable[[str], bytes], said: str):
    from blocktrain.swarm.protocol import JoinLine

    async def meet() -> bytes:
        impostor = Impostor(answer)
        async with await asyncio.start_server(impostor, "127.0.0.1", 0) as listening:
            port = listening.sockets[0].getsockname()[1]
            line = JoinLine("http", "127.0.0.1", port, "5ecre7" * 5, "aabbccdd", identity.fingerprint(identity.certificate_of(REAL)))
            way = link.HttpLink(line, "w", identity.new_worker_key(), process="p", patience_s=5)
            try:
                with pytest.raises((ConfigError, ProtocolError), match=said):
                    await way.info()
            finally:
                await way.close()
        return impostor.heard

    heard = in_time(meet())
    assert b"GET /v1/hello" in heard and b"5ecre7" not in heard and b"authorization" not in heard.lower()


def tls_files(tmp_path: Path, pem: str) -> dict[str, str]:
    path = tmp_path / "both.pem"
    host.write_private(path, pem)
    return {"ssl_certfile": str(path), "ssl_keyfile": str(path)}


@pytest.mark.parametrize("kind", ["made here", "of one's own, P-256", "of one's own, RSA"])
def test_over_tls_with_a_pinned_certificate_a_worker_trains(kind: str, tmp_path: Path):
    coordinator = make_coordinator(tmp_path / "swarm", round=ROUND)
    if kind == "of one's own, P-256":
        coordinator.pem = OTHER
    elif kind == "of one's own, RSA":
        coordinator.pem = rsa_pem()
    with serve(coordinator, files=tls_files(tmp_path, coordinator.pem)) as served:
        worker = made_up_worker(served, tmp_path / "w")
        assert in_time(until_updates(worker, 2)) == "stopped" and worker.updates >= 2


def test_over_tls_another_certificate_is_refused_before_anything_is_sent(tmp_path: Path):
    coordinator = make_coordinator(tmp_path / "swarm")
    real = coordinator.pem
    with serve(coordinator, files=tls_files(tmp_path, OTHER)) as served:
        coordinator.pem = real
        with pytest.raises(ConfigError, match="another coordinator"):
            in_time(served.link(patience_s=5).info())
        assert sum(row["bytes"] for row in coordinator.counted_bytes()) == 0


def rsa_pem() -> str:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import rsa
    from cryptography.x509.oid import NameOID

    key = rsa.generate_private_key(65537, 2048)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "own")])
    base = x509.load_pem_x509_certificate(identity.certificate_of(OTHER).encode())
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key()).serial_number(7)
    certificate = builder.not_valid_before(base.not_valid_before_utc).not_valid_after(base.not_valid_after_utc).sign(key, hashes.SHA256())
    pem = serialization.Encoding.PEM
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return private.decode() + certificate.public_bytes(pem).decode()


def test_a_second_process_of_a_worker_is_refused_over_http_with_the_holders_name_and_the_first_goes_on():
    with serve(make_coordinator()) as served:
        key = identity.new_worker_key()

        async def both() -> None:
            first, second = served.link("w", key=key, process="host-1"), served.link("w", key=key, process="host-2")
            await joined(first)
            await second.info()
            with pytest.raises(Told, match="host-1") as told:
                await second.join(1, False)
            assert told.value.kind == "conflict"
            await first.beat()
            await second.join(1, True)
            with pytest.raises(Told) as ended:
                await first.beat()
            assert ended.value.kind == "revoked"
            await first.close()
            await second.close()

        in_time(both())


def test_a_second_coordinator_of_a_folder_is_refused(tmp_path: Path):
    (tmp_path / "run" / "swarm").mkdir(parents=True)
    first, second = Host(tmp_path / "run", tiny_config()), Host(tmp_path / "run", tiny_config())
    first.claim()
    with pytest.raises(ConfigError, match="another coordinator is serving this run"):
        second.claim()
