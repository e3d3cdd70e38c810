"""`blocktrain serve` as a user meets it: addresses, keys, certificates, the lines it prints, one-line mistakes, and its end."""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from blocktrain import cli, cli_serving
from blocktrain.errors import ConfigError
from blocktrain.serving.chain import LocalChain
from blocktrain.serving.decoding import Plan
from blocktrain.serving.gateway import Door, is_loopback, read_keys
from blocktrain.serving.sampling import Sampling
from blocktrain.training.checkpoint import load_run
from blocktrain.web import bind, parse_address, url_host
from tests.conftest import write_text
from tests.integration.test_cli import QUICK
from tests.integration.test_decoding import texts
from tests.serving_net import local_engine, serve

QUIET: Any = lambda _: None  # noqa: E731


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("serve")
    text = write_text(folder / "text.txt")
    assert cli.run(["train", str(folder / "my run"), "--data", str(text), "--json", *QUICK]) == 0
    return folder / "my run"


def certificate(folder: Path) -> tuple[Path, Path]:
    """A key and a certificate for 127.0.0.1."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    (folder / "key.pem").write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()))
    (folder / "cert.pem").write_bytes(made.public_bytes(pem))
    return folder / "cert.pem", folder / "key.pem"


# --- Addresses ---


@pytest.mark.parametrize(("text", "host"), [("127.0.0.1:0", "127.0.0.1"), ("[::1]:0", "::1"), ("localhost:0", "localhost")])
def test_addresses_that_work(text: str, host: str):
    assert parse_address(text) == (host, 0)
    with contextlib.closing(bind(host, 0)) as bound:
        port = bound.getsockname()[1]
        socket.create_connection((host, port), timeout=5).close()
        with pytest.raises(ConfigError, match=rf"--listen .*:{port}: .*in use"):
            bind(bound.getsockname()[0], port)


def link_local() -> str | None:
    """An address with a zone of this machine, if it has one."""
    table = Path("/proc/net/if_inet6")
    for line in table.read_text().splitlines() if table.exists() else ():
        digits, *_, interface = line.split()
        if digits.startswith("fe80"):
            return f"{ipaddress.IPv6Address(bytes.fromhex(digits))}%{interface}"
    return None


def test_a_link_local_address_with_its_zone_works():
    host = link_local()
    if host is None:
        pytest.skip("no interface here has a link-local address")
    assert parse_address(f"[{host}]:7800") == (host, 7800)
    with contextlib.closing(bind(host, 0)) as bound:
        assert bound.getsockname()[3] != 0, "the zone is part of the address"
        socket.create_connection(bound.getsockname()[:2] if "%" in bound.getsockname()[0] else (host, bound.getsockname()[1]), timeout=5).close()
    assert url_host(host) == f"[{host.replace('%', '%25')}]"


def test_a_name_with_only_an_ipv6_address_works(monkeypatch: pytest.MonkeyPatch):
    real = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *a, **k: real("::1" if host == "six.test" else host, *a, **k))
    with contextlib.closing(bind("six.test", 0)) as bound:
        assert bound.family == socket.AF_INET6


@pytest.mark.parametrize(
    "text",
    ["", ":", "8000", "127.0.0.1", "127.0.0.1:", ":8000", "127.0.0.1:http", "127.0.0.1:70000", "::1:8000", "[127.0.0.1]:80", "a b:80", "x:-1", "x:٣"],
)
def test_garbage_is_one_clear_line(text: str, tmp_path: Path):
    with pytest.raises(ConfigError, match=r"--listen .*expected HOST:PORT"):
        Door(text).open(QUIET)


def test_a_host_that_is_not_there_is_one_clear_line():
    with pytest.raises(ConfigError, match=r"--listen no-such-host\.invalid:80"):
        bind("no-such-host.invalid", 80)
    with pytest.raises(ConfigError, match=r"--listen 192\.0\.2\.1:0"):
        bind("192.0.2.1", 0)


# --- Who may come in ---


def test_off_loopback_a_key_and_tls_are_needed(tmp_path: Path):
    assert [is_loopback(host) for host in ("127.0.0.1", "127.8.8.8", "::1", "localhost", "0.0.0.0", "::", "a.test")] == [True] * 4 + [False] * 3
    with pytest.raises(ConfigError, match="--key-file"):
        Door("0.0.0.0:0").open(QUIET)
    with pytest.raises(ConfigError, match="--plaintext"):
        Door("0.0.0.0:0", tmp_path / "keys").open(QUIET)
    assert not (tmp_path / "keys").exists(), "a refused start leaves nothing behind"
    opened = Door("0.0.0.0:0", tmp_path / "keys", plaintext=True).open(QUIET)
    assert len(opened.keys) == 1 and opened.url.startswith("http://127.0.0.1:")
    opened.bound.close()


def test_a_key_file_is_made_once_and_only_for_its_owner(tmp_path: Path):
    said: list[str] = []
    path = tmp_path / "made" / "keys"
    (key,) = read_keys(path, said.append)
    assert len(key) > 30 and stat.S_IMODE(path.stat().st_mode) == 0o600 and "new key" in said[0]
    assert read_keys(path, said.append) == [key] and len(said) == 1
    path.write_text(f"{key}\n\nanother-key-of-a-friend\n")
    path.chmod(0o644)
    assert read_keys(path, said.append) == [key, "another-key-of-a-friend"] and "chmod 600" in said[1]


@pytest.mark.parametrize("content", [b"", b"\n\n", b"short", b"with a space in its middle", "schlüssel-schlüssel".encode(), b"\xff" * 40])
def test_a_key_file_that_will_not_do_is_named(tmp_path: Path, content: bytes):
    (tmp_path / "keys").write_bytes(content)
    with pytest.raises(ConfigError, match="--key-file"):
        read_keys(tmp_path / "keys", QUIET)
    with pytest.raises(ConfigError, match="--key-file"):
        read_keys(tmp_path, QUIET)


def test_a_certificate_that_will_not_do_is_named(tmp_path: Path):
    cert, key = certificate(tmp_path)
    for files in ((tmp_path / "none", key), (key, cert), (cert, None), (cert, tmp_path / "none")):
        with pytest.raises(ConfigError, match="--tls-cert"):
            Door("127.0.0.1:0", tls_cert=files[0], tls_key=files[1]).open(QUIET)
    with pytest.raises(ConfigError, match="--tls-key"):
        Door("127.0.0.1:0", tls_key=key).open(QUIET)


# --- The command ---


def test_mistakes_are_one_line_and_stages_are_never_a_silent_local_mode(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for arguments, word in (
        ([str(run), "--listen", "127.0.0.1:0", "--stages", "nowhere"], "--stages"),
        ([str(tmp_path / "none")], "not a run folder"),
        ([str(run), "--listen", "nowhere"], "--listen"),
        ([str(run), "--listen", "127.0.0.1:0", "--stages", ""], "--stages"),
        ([str(run), "--listen", "127.0.0.1:0", "--max-streams", "0"], "--max-streams"),
        ([str(run), "--mode", "sweep"], "--mode"),
    ):
        assert cli.run(["serve", *arguments]) == 2
        said = capsys.readouterr()
        assert said.out == "" and len(said.err.strip().splitlines()) == 1 and word in said.err, said.err


def test_stages_that_cannot_be_reached_are_an_error_and_never_a_local_mode(run: Path, capsys: pytest.CaptureFixture[str]):
    assert cli.run(["serve", str(run), "--listen", "127.0.0.1:0", "--stages", "127.0.0.1:1", "--wait", "1"]) == 1
    said = capsys.readouterr()
    assert said.out == "" and "127.0.0.1:1" in said.err.strip().splitlines()[-1]


def shell(line: str) -> str:
    """What a printed line gives in a shell."""
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", "NO_PROXY": "*"}
    done = subprocess.run(line, shell=True, capture_output=True, text=True, timeout=60, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_printed_lines_work_as_they_are():
    with serve(local_engine()) as served:
        _, curl, python = cli_serving._first_lines(served.url, "tiny", None, None)
        assert '"finish_reason":"length"' in shell(curl)
        assert len(shell(python)) > 10


@contextlib.contextmanager
def process(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    """The command in a process of its own, and the lines that it prints."""
    command = [sys.executable, "-m", "blocktrain", "serve", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        try:
            assert running.stdout is not None
            yield running, [running.stdout.readline().rstrip("\n") for _ in range(4)]
        finally:
            running.kill()


@contextlib.contextmanager
def stage_of(run: Path, block: int) -> Iterator[subprocess.Popen[str]]:
    """A process that serves a block."""
    command = [sys.executable, "-m", "blocktrain", "stage", str(run), "--block", str(block)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as running:
        try:
            yield running
        finally:
            running.kill()


def address_of(stage: subprocess.Popen[str]) -> str:
    assert stage.stderr is not None
    return next(line for line in stage.stderr if line.startswith("address: ")).split()[1]


def test_blocks_behind_stages_give_the_same_bytes_and_a_503_when_one_is_killed(run: Path):
    body = {"model": "my run", "prompt": "one and", "max_tokens": 30, "seed": 3}
    with contextlib.ExitStack() as stack:
        stages = [stack.enter_context(stage_of(run, block)) for block in (0, 1)]
        (wanted,) = texts(LocalChain(load_run(run, QUIET)), (Plan("exact", Sampling(1.0, seed=3), 30), b"one and"))
        first, second = map(address_of, stages)
        running, (address, *_) = stack.enter_context(process(str(run), "--listen", "[::1]:0", "--stages", f"{first},{second}"))
        http = stack.enter_context(httpx2.Client(base_url=address.split()[-1], timeout=30, trust_env=False))
        for mode in ("exact", "speculative"):
            assert http.post("/v1/completions", json=body | {"mode": mode}).json()["choices"][0]["text"] == wanted.decode("utf-8", "replace")
        cluster = http.get("/v1/cluster").json()
        assert cluster["healthy"]
        assert [(s["address"], s["blocks"], s["up"]) for s in cluster["stages"]] == [(first, [0], True), (second, [1], True)]
        stages[1].kill()
        began = time.monotonic()
        answer = http.post("/v1/completions", json=body)
        assert answer.status_code == 503 and second in answer.json()["error"]["message"], answer.text
        assert time.monotonic() - began < 8  # 5 s on a machine that has nothing else to do
        cluster = http.get("/v1/cluster").json()
        assert cluster["missing"] == [1] and [s["up"] for s in cluster["stages"]] == [True, False]
        assert http.get("/health").status_code == 503
        running.send_signal(signal.SIGINT)
        said = running.communicate(timeout=20)[1]
        assert running.returncode == 0 and "Traceback" not in said, said


def test_a_server_with_key_and_tls_serves_and_ends_well(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    cert, key = certificate(tmp_path)
    secret = tmp_path / "my keys"
    tls = ["--tls-cert", str(cert), "--tls-key", str(key), "--key-file", str(secret)]
    with process(str(run), "--listen", "127.0.0.1:0", "--mode", "speculative", *tls) as (running, (address, page, curl, python)):
        url = address.split()[-1]
        assert address == f"serving my run at {url}" and page == f"page: {url}/" and url.startswith("https://127.0.0.1:")
        assert '"completion_tokens":40' in shell(curl)
        assert shell(python)
        monkeypatch.setenv("SSL_CERT_FILE", str(cert))
        client = openai.OpenAI(base_url=f"{url}/v1", api_key=secret.read_text().strip(), max_retries=0, timeout=30)
        stream = client.completions.create(model="my run", prompt="one", max_tokens=30_000, stream=True)
        next(iter(stream))
        running.send_signal(signal.SIGTERM)
        began = time.monotonic()
        with pytest.raises(openai.APIError, match="the server is stopping"):
            list(stream)
        said = running.communicate(timeout=20)[1]
        assert time.monotonic() - began < 12  # 5 s on a machine that has nothing else to do
        assert running.returncode == 0, said
        assert "Traceback" not in said and f"{secret}: made" in said and secret.read_text().strip() not in said
