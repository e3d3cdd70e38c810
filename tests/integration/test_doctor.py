"""The doctor on a machine and a way that are well, and on every illness that it knows, over real sockets."""

from __future__ import annotations

import contextlib
import dataclasses
import http.server
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import filelock
import pytest
import torch

from blocktrain import cli, cli_swarm
from blocktrain.swarm import doctor, protocol
from blocktrain.swarm.coordinator import Coordinator
from blocktrain.swarm.doctor import Finding, examine
from blocktrain.training import hardware
from tests.swarm_net import Served, make_coordinator, serve

ROOM = (1 << 20, 1 << 34)


def by_check(findings: list[Finding]) -> dict[str, Finding]:
    assert len({finding.check for finding in findings}) == len(findings) or "memory" in [f.check for f in findings]
    return {finding.check: finding for finding in findings}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serve(make_coordinator()) as one:
        yield one


@pytest.fixture(autouse=True)
def _no_proxies(monkeypatch: pytest.MonkeyPatch):
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setattr(doctor, "TIMEOUT_S", 1.0)


def ask(line: object, tmp_path: Path, memory: tuple[int, int] = ROOM) -> dict[str, Finding]:
    return by_check(examine(str(line), lambda _: memory, tmp_path))


def assert_only(found: dict[str, Finding], check: str, *words: str) -> Finding:
    """That check is the only one that is wrong, it has a cure, and what needs it was not tried."""
    wrong = [finding for finding in found.values() if finding.verdict == "wrong"]
    assert [finding.check for finding in wrong] == [check]
    assert wrong[0].cure
    for word in words:
        assert word in f"{wrong[0].found} {wrong[0].cure}", wrong[0]
    return wrong[0]


def assert_rest_not_tried(found: dict[str, Finding], check: str) -> None:
    after = list(found)[list(found).index(check) + 1 :]
    assert after
    assert all(found[name].verdict == "note" and found[name].found == f"not tried: {check} comes first" for name in after)


# --- All is well ---


def test_a_machine_that_is_well(tmp_path: Path):
    found = by_check(examine(None, lambda _: (0, 1 << 34), tmp_path))
    assert [finding for finding in found.values() if finding.verdict == "wrong"] == []
    assert list(found) == ["python", "packages", "torch", "device", "memory", "folder", "locks", "disk", "threads", "clock", "texts"]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("units", "said"),
    [(True, "cpu, bfloat16 for layers at least 192 wide, float32 for others"), (False, "cpu, float32 (bfloat16 is not fast here)")],
)
def test_which_arithmetic_a_worker_takes_is_said_of_the_processor(units: bool, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    monkeypatch.setattr(hardware, "has_bfloat16_units", lambda device: units)
    assert by_check(examine(None, lambda _: (0, 1 << 34), tmp_path))["device"].found == f"a worker would take {said}"


def test_a_way_that_is_well_and_nothing_moves(served: Served, tmp_path: Path):
    found = ask(served.line(), tmp_path)
    assert {finding.verdict for finding in found.values()} <= {"ok", "note"}
    assert {name: found[name].verdict for name in list(found)[11:]} == dict.fromkeys(list(found)[11:], "ok")
    assert len(found) == 25
    assert not [row for row in served.coordinator.counted_bytes() if row["kind"] != "control"]
    assert not served.coordinator.machine.state.workers


def test_a_line_with_its_command_before_it(served: Served, tmp_path: Path):
    assert ask(f"blocktrain worker '{served.line()}'", tmp_path)["token"].verdict == "ok"


def test_a_coordinator_with_a_certificate(tmp_path: Path):
    coordinator = make_coordinator()
    pem = tmp_path / "own.pem"
    pem.write_text(coordinator.pem)
    with serve(coordinator, files={"ssl_certfile": str(pem), "ssl_keyfile": str(pem)}) as one:
        assert [name for name, finding in ask(one.line(), tmp_path).items() if finding.verdict == "wrong"] == []
        other = dataclasses.replace(one.line(), fingerprint="ab" * 16)
        assert_only(ask(other, tmp_path), "fingerprint", "somebody stands between")


# --- The machine's illnesses ---


def test_packages_that_are_missing_or_old(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(doctor, "requirements", lambda: [("torch", (2, 9)), ("no-such-package", (1,)), ("numpy", (999, 1))])
    found = by_check(examine(None, None, tmp_path))
    wrong = assert_only(found, "packages", "no-such-package is missing, 1", "numpy is", "999.1 or later", "pip install")
    assert "torch" not in wrong.found


def test_versions_are_compared_as_numbers():
    assert doctor._version("2.13.0+cpu") == (2, 13, 0) > (2, 9)
    assert doctor._lacking("numpy", (1, 0)) == ""
    assert {name for name, _ in doctor.requirements()} >= {"torch", "numpy"}


def test_an_old_python(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(doctor.sys, "version_info", (3, 10, 4))
    assert_only(by_check(examine(None, None, tmp_path)), "python", "3.11")


def test_a_torch_that_miscalculates(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    import torch

    monkeypatch.setattr(torch, "ones", torch.zeros)
    assert_only(by_check(examine(None, None, tmp_path)), "torch", "cpu", "another build")


def test_a_folder_that_cannot_be_written(tmp_path: Path):
    (tmp_path / "file").write_text("in the way")
    found = by_check(examine(None, None, tmp_path / "file" / "workers"))
    assert found["folder"].verdict == "wrong" and "--folder" in found["folder"].cure
    assert found["locks"].verdict == "wrong"


def test_a_file_system_without_locks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(filelock, "FileLock", lambda *_, **__: contextlib.nullcontext())
    assert_only(by_check(examine(None, None, tmp_path)), "locks", "twice", "local disk")

    def refuse(*_: object, **__: object):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(filelock, "FileLock", refuse)
    assert_only(by_check(examine(None, None, tmp_path)), "locks", "not supported")


def test_a_clock_that_stands(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(doctor.time, "monotonic", lambda: 5.0)
    machine = doctor._Machine(tmp_path, None)
    assert doctor._made("clock", machine.clock).verdict == "wrong"


def test_little_room_is_noted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(doctor._Machine, "free_disk", lambda _: 1 << 20)
    found = by_check(examine(None, lambda _: (0, 1 << 20), tmp_path))
    assert {found[name].verdict for name in ("memory", "disk")} == {"note"}
    assert "1.0 MiB free" in found["disk"].found


def test_more_threads_than_cores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    import torch

    monkeypatch.setattr(torch, "get_num_threads", lambda: 4096)
    found = by_check(examine(None, None, tmp_path))["threads"]
    assert found.verdict == "note" and "--threads" in found.cure


def test_the_doctor_does_not_fall_ill(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    def fail(_: object) -> str:
        raise KeyError("surprise")

    monkeypatch.setattr(doctor._Machine, "texts", fail)
    assert_only(by_check(examine(None, None, tmp_path)), "texts", "KeyError")


# --- The way's illnesses ---


@pytest.mark.parametrize(
    "line", ["", "hello", "http://127.0.0.1:7700", "ftp://t@127.0.0.1:1/aaaaaaaa/bbbbbbbb", "http://t@h:99999/aaaaaaaa/bbbbbbbb"]
)
def test_a_line_that_is_none(line: str, tmp_path: Path):
    found = ask(line, tmp_path)
    assert_only(found, "join line", "join line:", "copy the whole line")
    assert_rest_not_tried(found, "join line")


def test_a_name_that_nobody_knows(served: Served, tmp_path: Path):
    found = ask(dataclasses.replace(served.line(), host="no-such-machine.invalid"), tmp_path)
    assert_only(found, "name", "no-such-machine.invalid", "--public")
    assert_rest_not_tried(found, "name")


def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as bound:
        return bound.getsockname()[1]


def test_a_closed_port_on_loopback(served: Served, tmp_path: Path):
    found = ask(served.line(port=closed_port()), tmp_path)
    assert_only(found, "connection", "refused", "this very machine", "--listen 0.0.0.0")
    assert_rest_not_tried(found, "connection")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ConnectionRefusedError(111, "Connection refused"), ("coordinator is down",)),
        (TimeoutError("timed out"), ("firewall",)),
        (OSError(113, "No route to host"), ("no route", "VPN")),
        (OSError(5, "Input/output error"), ("Input/output error", "network")),
    ],
)
def test_connections_that_fail(error: OSError, words: tuple[str, ...], served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(doctor.socket, "create_connection", fail)
    monkeypatch.setattr(doctor.socket, "getaddrinfo", lambda *_, **__: [(2, 1, 6, "", ("192.0.2.7", 1))])
    found = ask(served.line(), tmp_path)
    assert_only(found, "connection", *words)
    assert_rest_not_tried(found, "connection")


def test_a_port_whose_queue_is_full_times_out(served: Served, tmp_path: Path):
    """A listening socket that nobody accepts from, full to the brim, drops what comes, as a firewall does."""
    with socket.socket() as bound, contextlib.ExitStack() as stack:
        bound.bind(("127.0.0.1", 0))
        bound.listen(0)
        for _ in range(4):
            one = stack.enter_context(socket.socket())
            one.setblocking(False)
            one.connect_ex(bound.getsockname())
        time.sleep(0.1)
        assert_only(ask(served.line(port=bound.getsockname()[1]), tmp_path), "connection", "no answer in 1 s", "firewall")


def test_a_server_that_never_answers(served: Served, tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as bound:
        found = ask(served.line(port=bound.getsockname()[1]), tmp_path)
    assert_only(found, "coordinator", "says nothing for 1 s")
    assert_rest_not_tried(found, "coordinator")


class Other(http.server.BaseHTTPRequestHandler):
    """An HTTP server of another kind."""

    body: bytes = b"<html>It works!</html>"

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.body)

    def log_message(self, *_: object) -> None:
        return


@contextlib.contextmanager
def other_server(answer: bytes = Other.body) -> Iterator[int]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), type("Its", (Other,), {"body": answer}))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_address[1]
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("answer", [Other.body, b"[1]", b'{"some": "json"}', b""])
def test_another_server(answer: bytes, served: Served, tmp_path: Path):
    with other_server(answer) as port:
        found = ask(served.line(port=port), tmp_path)
    assert_only(found, "coordinator", "another server than a coordinator", "BaseHTTP")
    assert_rest_not_tried(found, "coordinator")


def test_a_server_that_speaks_something_else(served: Served, tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as bound:

        def answer() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = bound.accept()
                    connection.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")
                    connection.close()

        threading.Thread(target=answer, daemon=True).start()
        for scheme in ("http", "https"):
            line = dataclasses.replace(served.line(port=bound.getsockname()[1]), scheme=scheme)
            assert_only(ask(line, tmp_path), "coordinator", f"does not speak {scheme.upper()}", "scheme")


def test_https_where_http_is_spoken(served: Served, tmp_path: Path):
    assert_only(ask(dataclasses.replace(served.line(), scheme="https"), tmp_path), "coordinator", "does not speak HTTPS", "scheme")


def test_a_proxy_in_between_is_named(served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with other_server() as port:
        monkeypatch.setenv("http_proxy", f"http://user:secret@127.0.0.1:{port}")
        found = ask(dataclasses.replace(served.line(), host="coordinator.invalid"), tmp_path)
        wrong = assert_only(found, "coordinator", "HTTP_PROXY", "NO_PROXY", f"127.0.0.1:{port}")
        assert "secret" not in wrong.found
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        assert ask(served.line(), tmp_path)["token"].verdict == "ok"


def change_hello(monkeypatch: pytest.MonkeyPatch, **changes: object) -> None:
    right = Coordinator.hello
    monkeypatch.setattr(Coordinator, "hello", lambda self, nonce: right(self, nonce).model_copy(update=changes))


def test_another_protocol(served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    change_hello(monkeypatch, protocol=protocol.PROTOCOL + 1)
    found = ask(served.line(), tmp_path)
    assert_only(found, "protocol", f"protocol {protocol.PROTOCOL + 1}, this machine {protocol.PROTOCOL}", "same version")
    assert_rest_not_tried(found, "protocol")


def test_another_run(served: Served, tmp_path: Path):
    found = ask(dataclasses.replace(served.line(), run_id="abcdef012345"), tmp_path)
    assert_only(found, "run", served.coordinator.run_id, "abcdef012345")
    assert_rest_not_tried(found, "run")


def test_another_fingerprint(served: Served, tmp_path: Path):
    found = ask(dataclasses.replace(served.line(), fingerprint="0" * 32), tmp_path)
    assert_only(found, "fingerprint", "0" * 32, "do not join")
    assert_rest_not_tried(found, "fingerprint")


def test_a_coordinator_that_cannot_prove_itself(served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    change_hello(monkeypatch, signature="00" * 70)
    assert_only(ask(served.line(), tmp_path), "fingerprint", "signature", "do not join")


def test_another_token(served: Served, tmp_path: Path):
    found = ask(served.line(token="f" * 32), tmp_path)
    assert_only(found, "token", "unknown or revoked", "blocktrain token add")
    assert_rest_not_tried(found, "token")


def test_settings_from_the_future(served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    right = Coordinator.info
    monkeypatch.setattr(Coordinator, "info", lambda self: right(self).model_copy(update={"config": {"telepathy": {"strength": 3}}}))
    assert_only(ask(served.line(), tmp_path), "token", "telepathy", "same version")


def test_too_little_memory(served: Served, tmp_path: Path):
    found = ask(served.line(), tmp_path, (3 << 30, 2 << 30))
    assert_only(found, "memory for a block", "needs 3.00 GiB, 2.00 GiB are free")
    assert found["disk for its files"].verdict == found["text"].verdict == "ok"


def test_too_little_disk(served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    need = doctor.files_size(served.coordinator.config)
    assert need > 10_000
    monkeypatch.setattr(doctor._Machine, "free_disk", lambda _: need // 2)
    assert_only(ask(served.line(), tmp_path), "disk for its files", "--folder")


def test_a_paused_run_is_noted(served: Served, tmp_path: Path):
    served.coordinator.pause("disk", "the coordinator's disk is full")
    try:
        found = ask(served.line(), tmp_path)
    finally:
        served.coordinator.resume("disk")
    assert found["health"].verdict == "note" and "disk is full" in found["health"].found
    assert found["latency"].verdict == "ok"


@pytest.mark.parametrize(
    ("date", "words"), [("Mon, 01 Jan 2001 00:00:00 GMT", "behind"), ("Tue, 01 Jan 2069 00:00:00 GMT", "ahead of"), ("soon", "not tell")]
)
def test_a_clock_that_is_off_is_only_noted(date: str, words: str, served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("blocktrain.swarm.server.formatdate", lambda **_: date)
    found = ask(served.line(), tmp_path)
    assert found["coordinator's clock"].verdict == "note" and words in found["coordinator's clock"].found
    assert [finding for finding in found.values() if finding.verdict == "wrong"] == []


def test_the_text_is_here_or_will_be_fetched(served: Served, tmp_path: Path):
    assert "will be fetched" in ask(served.line(), tmp_path)["text"].found
    info = served.coordinator.info()
    path = tmp_path / info.run_id / "texts" / f"{info.text_digest[:32]}.txt"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"x")
    assert "fetched before" in ask(served.line(), tmp_path)["text"].found


# --- The command ---


def test_the_command_prints_and_ends_with_1_if_something_is_wrong(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cli.run(["doctor", f"http://aaaaaaaa@127.0.0.1:{closed_port()}/aaaaaaaa/bbbbbbbb"]) == 1
    printed = capsys.readouterr().out
    assert "WRONG connection" in printed and "--listen 0.0.0.0" in printed
    assert cli.run(["doctor", "--json"]) == 0
    assert {"check", "verdict", "found", "cure"} == set(json.loads(capsys.readouterr().out)[0])
    assert cli_swarm.doctor.__doc__
