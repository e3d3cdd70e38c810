"""A client and stages in one process: who is accepted, what is mixed, which errors are told, and what each makes of the other's faults."""

from __future__ import annotations

import asyncio
import datetime
import ipaddress
import json
import re
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
import torch
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from blocktrain.cli import run as command
from blocktrain.errors import BusyError, ConfigError, ProtocolError, ServingError
from blocktrain.serving import frames, host, line, link, pipeline, remote_text, server
from blocktrain.serving.compute import BlockRunner, Result, Settings
from blocktrain.serving.frames import Frame, HelloReply, Kind, Name, OpenRequest, ids_tensor, message_frame
from blocktrain.serving.line import SERVICE, Secrets
from blocktrain.serving.pipeline import RemoteChain
from blocktrain.serving.remote_text import CLIENT
from blocktrain.serving.server import StageServer
from blocktrain.serving.stage import Stage
from tests.conftest import CLEAN
from tests.faults.stages import PROMPT, WINDOWED, golden, make_run, own_draft, plan_of, quiet, tell, until
from tests.faults.swarm import free_port
from tests.integration.test_decoding import VOTE, made_run

HOST = "127.0.0.1"
KEY = "k" * 32


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("pipeline") / "run")


@asynccontextmanager
async def stage(
    run: Path, first: int, stop: int, *, secrets: Secrets | None = None, listen: str = HOST, port: int = 0, max_texts: int = 64, **hello: Any
) -> AsyncIterator[tuple[str, StageServer]]:
    """A stage in this process; `hello` overrides what it says of itself."""
    door = StageServer(secrets or Secrets())
    port = await door.start(f"{listen}:{port}", 1 << 22)
    try:
        await host._load(door, host.StageOptions(run, range(first, stop), "", max_texts, 0), quiet)
        real = door.hello
        door.hello = lambda: real().model_copy(update=hello)
        yield f"{listen}:{port}", door
    finally:
        await door.stop(0.0)


@asynccontextmanager
async def chained(run: Path, *addresses: str, ready_s: float = 10.0, expected: Any = None, **fields: Any) -> AsyncIterator[RemoteChain]:
    chain = RemoteChain(expected or host.expected_of(run, quiet), addresses, **fields)
    try:
        await chain.ready(ready_s)
        yield chain
    finally:
        await chain.close()


@asynccontextmanager
async def three(run: Path, **fields: Any) -> AsyncIterator[tuple[list[str], list[StageServer]]]:
    async with AsyncExitStack() as stack:
        made = [await stack.enter_async_context(stage(run, b, b + 1, **fields)) for b in range(3)]
        yield [address for address, _ in made], [door for _, door in made]


async def refusal(run: Path, *addresses: str, **fields: Any) -> str:
    """Why a client cannot use these stages."""
    with pytest.raises(ServingError) as caught:
        async with chained(run, *addresses, **{"ready_s": 2.0, **fields}):
            pass
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- Who is there ---


def test_a_stage_that_is_stopped_in_the_middle_of_texts_is_quiet_about_their_lines(run: Path, caplog: pytest.LogCaptureFixture):
    """Frames come in until the last moment, and whoever reads one after the stop is told that the server is no more."""

    async def go() -> None:
        for _ in range(8):
            async with AsyncExitStack() as clients:
                async with stage(run, 0, 3) as (address, door):
                    chains = [await clients.enter_async_context(chained(run, address)) for _ in range(4)]
                    busy = [asyncio.create_task(tell(chain, plan_of(max_bytes=200))) for chain in chains]
                    await asyncio.sleep(0.1)
                    await door.stop(0.0)
                await asyncio.gather(*busy, return_exceptions=True)

    asyncio.run(go())
    assert not [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]


def test_a_client_that_is_there_first_waits_for_its_stages_and_says_so(run: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pipeline, "TELL_S", 0.05)
    said: list[str] = []

    async def go() -> None:
        port = free_port()
        chain = RemoteChain(host.expected_of(run, quiet), [f"{HOST}:{port}"])
        try:
            waiting = asyncio.create_task(chain.ready(60.0, said.append))
            while not said:
                await asyncio.sleep(0.02)
            async with stage(run, 0, 3, port=port):
                await waiting
                assert (await tell(chain, plan_of())).data == golden(run, plan_of())
        finally:
            await chain.close()

    asyncio.run(go())
    assert len(said) == 1
    assert said[0].startswith("waiting up to 60 s: no stage holds blocks 0, 1, 2 now (client -> ")


def test_a_newer_minor_version_is_accepted_and_its_fields_are_ignored(run: Path, monkeypatch: pytest.MonkeyPatch):
    class Newer(HelloReply):
        colour: str = "green"

    async def go() -> None:
        async with stage(run, 0, 3) as (address, door):
            reply = door.hello()
            newer = Newer(**{**reply.model_dump(), "protocol": [1, 1]})
            door.hello = lambda: newer
            monkeypatch.setattr(link, "PROTOCOL", (1, 7))
            async with chained(run, address) as chain:
                assert (await tell(chain, plan_of())).data == golden(run, plan_of())

    asyncio.run(go())


def test_another_major_version_is_refused_by_both_with_both_values(run: Path, monkeypatch: pytest.MonkeyPatch):
    async def go() -> None:
        async with stage(run, 0, 3, protocol=[2, 0]) as (address, _):
            assert "protocol: it speaks 2.0, this client 1.0" in await refusal(run, address)
            monkeypatch.setattr(link, "PROTOCOL", (3, 4))
            assert "protocol: this stage speaks 1.0, you 3.4" in await refusal(run, address)

    asyncio.run(go())


def test_another_runs_stage_and_other_weights_are_refused_with_both_digests(run: Path, tmp_path: Path):
    other = make_run(tmp_path / "other", train={"lr": 0.5})
    changed = make_run(tmp_path / "changed", shift=0.01)

    async def go() -> None:
        mine = host.expected_of(run, quiet)
        async with stage(other, 0, 3) as (address, door):
            assert f"digest {door.hello().config_digest[:16]}, here {mine.config_digest[:16]}" in await refusal(run, address)
        async with stage(changed, 0, 3) as (address, door):
            theirs = door.hello().digests["interface.safetensors"]
            said = await refusal(run, address)
            assert f"interface.safetensors is {theirs[:16]}, here {mine.digests['interface.safetensors'][:16]}" in said

    asyncio.run(go())


def test_a_run_that_is_read_otherwise_is_another_run(run: Path, tmp_path: Path):
    other = make_run(tmp_path / "other")
    text = (other / "run.toml").read_text()
    (other / "run.toml").write_text(text.replace('start = "noise"', 'start = "zero"'))
    assert (other / "run.toml").read_text() != text

    async def go() -> None:
        async with stage(other, 0, 3) as (address, _):
            assert "serves a run with other settings" in await refusal(run, address)

    asyncio.run(go())


@pytest.mark.parametrize("checkpoint_here", [True, False])
def test_how_blocks_are_combined_is_part_of_what_a_run_is(checkpoint_here: bool, tmp_path: Path):
    """Training does not depend on it, so weights and the digest of training are the same."""
    last, mean = (make_run(tmp_path / name, objective={**VOTE, "combine": name}) for name in ("last", "mean"))

    async def go() -> None:
        async with three(mean) as (addresses, _):
            mine = mean if checkpoint_here else tmp_path / "settings"
            mine.mkdir(exist_ok=True)
            (mine / "run.toml").write_text((mean / "run.toml").read_text())
            async with chained(mine, *addresses) as chain:
                assert (await tell(chain, plan_of())).data == golden(mean, plan_of())
            assert "serves a run with other settings" in await refusal(last, *addresses)

    asyncio.run(go())


def test_stages_of_two_checkpoints_never_share_a_text(run: Path, tmp_path: Path):
    """The client has no weights of its own, so it can only compare stages with each other."""
    later = make_run(tmp_path / "later", updates=2, shift=0.01)
    mine = host.expected_of(run, quiet)
    blind = link.Expected(mine.config, mine.config_digest, {})

    async def go() -> None:
        async with stage(run, 0, 1) as (a, _), stage(later, 1, 3) as (b, _), stage(run, 1, 3) as (c, _), stage(later, 0, 1) as (d, _):
            said = await refusal(run, a, b, expected=blind)
            assert "no stages of one checkpoint hold all blocks" in said
            assert re.search(rf"{a}: checkpoint \w{{16}}, step 1.*{b}: checkpoint \w{{16}}, step 2", said)
            async with chained(run, a, b, c, expected=blind) as chain:
                assert (await tell(chain, plan_of())).data == golden(run, plan_of())
            async with chained(run, a, b, c, d, expected=blind) as chain:
                await until(lambda: len(chain.live()) == 4, "all are up")
                assert (await tell(chain, plan_of())).data == golden(later, plan_of()), "the later one is taken"

    asyncio.run(go())


def test_a_text_does_not_go_on_with_another_checkpoint(run: Path, tmp_path: Path):
    later = make_run(tmp_path / "later", updates=2, shift=0.01)
    mine = host.expected_of(run, quiet)
    blind = link.Expected(mine.config, mine.config_digest, {})

    async def go() -> None:
        async with AsyncExitStack() as stack:
            a, _ = await stack.enter_async_context(stage(run, 0, 1))
            b, _ = await stack.enter_async_context(stage(later, 1, 3))
            c, door = await stack.enter_async_context(stage(run, 1, 3))
            chain, stopping = await stack.enter_async_context(chained(run, a, b, c, expected=blind)), []
            with pytest.raises(ServingError, match="no stages of one checkpoint hold all blocks"):
                await tell(chain, plan_of(), at=5, do=lambda: stopping.append(asyncio.ensure_future(door.stop(0.0))))
            await asyncio.gather(*stopping)

    asyncio.run(go())


def test_one_stage_by_two_addresses_is_one(run: Path):
    async def go() -> None:
        async with stage(run, 0, 3) as (address, _):
            port = address.rpartition(":")[2]
            async with chained(run, address, f"localhost:{port}", address) as chain:
                await until(lambda: all(each.up for each in chain.links), "both addresses answer")
                assert len(chain.links) == 2
                assert len(chain.live()) == len(chain.status().stages) == 1
                assert (await tell(chain, plan_of())).data == golden(run, plan_of())

    asyncio.run(go())


@pytest.mark.parametrize("listen", ["[::1]", "[::1%lo]", "localhost"])
def test_addresses_of_other_forms_work(listen: str, run: Path):
    async def go() -> None:
        async with AsyncExitStack() as stack:
            try:
                address, _ = await stack.enter_async_context(stage(run, 0, 3, listen=listen))
            except RuntimeError:
                pytest.skip("this machine has no IPv6")
            chain = await stack.enter_async_context(chained(run, host.parse_target(address, "--stages")))
            assert (await tell(chain, plan_of())).data == golden(run, plan_of())

    asyncio.run(go())


# --- Room ---


def test_where_all_are_full_it_is_said_at_once_and_a_replica_with_room_is_taken(run: Path):
    async def go() -> None:
        async with stage(run, 0, 3, max_texts=1) as (a, _), stage(run, 0, 3, max_texts=1) as (b, _), chained(run, a, b) as chain:
            await until(lambda: len(chain.live()) == 2, "both are up")
            texts = [await chain.open(Settings()) for _ in range(2)]
            began = asyncio.get_running_loop().time()
            with pytest.raises(BusyError, match="1 texts are open here, which is the most"):
                await chain.open(Settings())
            assert asyncio.get_running_loop().time() - began < 2.0
            await texts[0].close()
            assert (await tell(chain, plan_of())).data == golden(run, plan_of())

    asyncio.run(go())


def test_a_stage_takes_so_many_clients_and_no_more(run: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(server, "MAX_PEERS", 2)

    async def go() -> None:
        async with stage(run, 0, 3) as (address, door), chained(run, address), chained(run, address):
            assert "2 are connected, which is the most" in await refusal(run, address)
            assert len(door.clients) == 2

    asyncio.run(go())


# --- Keys and certificates ---


def authority(folder: Path, name: str) -> tuple[Path, Path]:
    """A self-signed certificate for 127.0.0.1 and localhost, and its key, as files."""
    key = ec.generate_private_key(ec.SECP256R1())
    who, now = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]), datetime.datetime.now(datetime.UTC)
    names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(HOST)), x509.DNSName("localhost")])
    made = x509.CertificateBuilder().subject_name(who).issuer_name(who).public_key(key.public_key()).serial_number(7)
    made = made.not_valid_before(now - datetime.timedelta(days=1)).not_valid_after(now + datetime.timedelta(days=9))
    certificate = made.add_extension(names, False).add_extension(x509.BasicConstraints(True, None), True).sign(key, hashes.SHA256())
    paths = folder / f"{name}.pem", folder / f"{name}.key"
    paths[0].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    form = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    paths[1].write_bytes(key.private_bytes(serialization.Encoding.PEM, *form))
    return paths


def test_a_key_that_is_missing_or_wrong_is_refused_at_once(run: Path):
    async def go() -> None:
        async with three(run, secrets=Secrets(KEY)) as (addresses, _):
            for secrets in (Secrets(), Secrets("x" * 32)):
                began = asyncio.get_running_loop().time()
                said = await refusal(run, *addresses, secrets=secrets, ready_s=30.0)
                assert f"client -> {addresses[0]}: the key is missing or wrong (--key-file)" in said
                assert asyncio.get_running_loop().time() - began < 15
            async with chained(run, *addresses, secrets=Secrets(KEY)) as chain:
                assert (await tell(chain, plan_of())).data == golden(run, plan_of())

    asyncio.run(go())


def test_tls_between_all_of_them_and_nobody_else(run: Path, tmp_path: Path):
    certificate, key = authority(tmp_path, "stage")
    wrong, _ = authority(tmp_path, "wrong")
    secrets = host.read_secrets(None, certificate, key, certificate)

    async def go() -> None:
        async with three(run, secrets=secrets) as (addresses, _):
            async with chained(run, *addresses, secrets=host.read_secrets(None, None, None, certificate)) as chain:
                assert (await tell(chain, plan_of())).data == golden(run, plan_of())
            said = await refusal(run, *addresses, secrets=host.read_secrets(None, None, None, wrong))
            assert f"client -> {addresses[0]}: its certificate is not signed by --tls-ca" in said
            said = await refusal(run, *addresses)
            assert f"client -> {addresses[0]}: it closed the connection (where it has --tls-cert, --tls-ca is needed here)" in said
        async with stage(run, 0, 3) as (address, _):
            said = await refusal(run, address, secrets=host.read_secrets(None, None, None, wrong))
            assert f"client -> {address}: it speaks no TLS, and --tls-ca was given" in said

    asyncio.run(go())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--listen", "0.0.0.0:0"], "--listen 0.0.0.0:0: is not loopback, so --key-file is needed"),
        (["--listen", "127.evil.example:0"], "is not loopback, so --key-file is needed"),
        (["--listen", "[::]:0", "--key-file", "KEY"], "is not loopback, so --tls-cert and --tls-key are needed, or --plaintext"),
        (["--listen", "[::1%lo]:70000"], "--listen [::1%lo]:70000: expected HOST:PORT with a port up to 65535"),
        (["--tls-cert", "KEY"], "--tls-key: --tls-cert and --tls-key go together"),
        (["--key-file", "SHORT"], "must hold one key of 16 to 200 printable characters without spaces"),
        (["--tls-cert", "KEY", "--tls-key", "KEY"], "KEY: holds no certificate in PEM"),
        (["--block", "3"], "--block 3: expected consecutive blocks of 0 to 2"),
        (["--peers", "x"], "--peers x: expected HOST:PORT"),
        (["--max-texts", "0"], "--max-texts: must be between 1 and 65536, got 0"),
    ],
)
def test_mistakes_of_a_stage_are_one_line(arguments: list[str], said: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "KEY").write_text(KEY)
    (tmp_path / "SHORT").write_text("abc")
    named = [str(tmp_path / part) if part in ("KEY", "SHORT") else part for part in arguments]
    assert command(["stage", str(run), *named]) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert said in told and "Traceback" not in told


@pytest.mark.parametrize(
    "address", ["garbage", ":9000", "127.0.0.1", "127.0.0.1:0", "127.0.0.1:70000", "fe80::1%lo:9", "http://x:1", "unix:/x", "a b:1"]
)
def test_addresses_that_are_none_are_one_line(address: str, run: Path, capsys: pytest.CaptureFixture[str]):
    assert command(["generate", str(run), "--prompt", "x", "--stages", f"127.0.0.1:9000,{address}"]) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert f"--stages {address}: expected HOST:PORT with a port up to 65535, for example " in told
    assert address != "fe80::1%lo:9" or "[fe80::1%lo]:9" in told


# --- Stages that answer wrongly, and clients that do ---


def answering(change: Callable[[Frame], None]) -> Callable[[pytest.MonkeyPatch], None]:
    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        real = Stage._outgoing

        def outgoing(self: Stage, frame: Frame, *rest: Any) -> Frame:
            out = real(self, frame, *rest)
            if out.kind == Kind.ANSWER:
                change(out)
            return out

        monkeypatch.setattr(Stage, "_outgoing", outgoing)

    return patch


def shorter(frame: Frame) -> None:
    frame.count, frame.want, frame.tensors[Name.LOGITS] = 1, 0, frame.tensors[Name.LOGITS][:1]
    frame.keep = 3


def nan(frame: Frame) -> None:
    frame.tensors[Name.LOGITS] = torch.full_like(frame.tensors[Name.LOGITS], torch.nan)


@pytest.mark.parametrize(("change", "said"), [(shorter, "its answer is not for the step that was asked"), (nan, "numbers that are not finite")])
def test_an_answer_that_is_none_is_an_error(change: Callable[[Frame], None], said: str, run: Path, monkeypatch: pytest.MonkeyPatch):
    answering(change)(monkeypatch)

    async def go() -> None:
        async with stage(run, 0, 3) as (address, _), chained(run, address) as chain:
            with pytest.raises(ServingError, match=f"{address}: .*{said}"):
                await tell(chain, plan_of())

    asyncio.run(go())


def test_blocks_that_hang_are_given_up_though_the_stage_answers_pings(run: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pipeline, "STEP_LIMIT_S", 1.0)

    async def go() -> None:
        async with stage(run, 0, 3) as (a, door), stage(run, 0, 3) as (b, _):
            release = threading.Event()
            async with chained(run, a, b) as chain:
                await until(lambda: len(chain.live()) == 2, "both are up")
                chain.broke("*", b)

                def hang() -> None:
                    assert door.stage is not None
                    door.stage.runner.run = lambda jobs: release.wait(60) and [Result()] * len(jobs)  # type: ignore[method-assign, assignment]

                try:
                    told = await tell(chain, plan_of(), at=9, do=hang)
                finally:
                    release.set()
                assert told.data == golden(run, plan_of())

    asyncio.run(go())


def test_a_step_that_fails_is_the_loss_of_nobody_else(run: Path):
    """Two texts in one batch, of which one cannot be computed on this stage; there is another stage."""

    async def go() -> None:
        async with stage(run, 0, 3) as (a, door), stage(run, 0, 3) as (b, _), chained(run, a, b) as chain:
            await until(lambda: len(chain.live()) == 2, "both are up")
            assert door.stage is not None
            real = door.stage.runner.run

            def fails(jobs: Any) -> Any:
                if any(job.offset + job.keep == 20 for job in jobs):
                    raise MemoryError("not enough")
                return real(jobs)

            door.stage.runner.run = fails  # type: ignore[method-assign]
            chain.broke("*", b)
            told = await asyncio.gather(*(tell(chain, plan_of(seed=seed, max_bytes=40)) for seed in range(3)), tell(chain, plan_of(max_bytes=4)))
            assert [each.data for each in told[:3]] == [golden(run, plan_of(seed=seed, max_bytes=40)) for seed in range(3)]

    asyncio.run(go())


def test_a_step_that_meets_a_stage_which_is_stopping_goes_another_way_and_is_no_fault(run: Path, caplog: pytest.LogCaptureFixture):
    """Its blocks are at rest already while its line is still open."""

    async def go() -> None:
        async with stage(run, 0, 3) as (a, door), stage(run, 0, 3) as (b, _), chained(run, a, b) as chain:
            await until(lambda: len(chain.live()) == 2, "both are up")
            assert door.stage is not None
            chain.broke("*", b)
            told = await tell(chain, plan_of(), at=9, do=door.stage.batcher.close)
            assert told.data == golden(run, plan_of())

    asyncio.run(go())
    assert not [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]


def test_a_stage_that_has_forgotten_the_text_is_told_it_again(run: Path):
    async def go() -> None:
        async with three(run) as (addresses, doors), chained(run, *addresses) as chain:

            def forget() -> None:
                assert doors[1].stage is not None
                doors[1].stage.texts.clear()

            assert (await tell(chain, plan_of(), at=9, do=forget)).data == golden(run, plan_of())

    asyncio.run(go())


@pytest.mark.parametrize("objective", [{**VOTE, "window": 4}, {**WINDOWED, "combine": "mean"}], ids=["independent", "chained"])
def test_blocks_that_vote_are_served_like_any_other(objective: dict[str, Any], tmp_path: Path):
    voting = make_run(tmp_path / "run", objective=objective)

    async def go() -> None:
        async with three(voting) as (addresses, doors), chained(voting, *addresses) as chain:

            def forget() -> None:
                assert doors[2].stage is not None
                doors[2].stage.texts.clear()

            wanted = golden(voting, plan_of())
            assert (await tell(chain, plan_of(), at=9, do=forget)).data == wanted
            drafted = await tell(chain, plan_of("speculative"), draft=own_draft(voting), at=3, do=forget)
            assert drafted.data == wanted and drafted.counts.drafted > drafted.counts.accepted > 0
            swept = await tell(chain, plan_of("sweep"))
            assert swept.data == golden(voting, plan_of("sweep")) and swept.counts.bytes_per_traversal > 3

    asyncio.run(go())


@pytest.mark.parametrize("lost", ["client -> {1}", "{2} -> client"])
def test_where_all_stages_are_asked_at_once_a_lost_frame_is_sent_again(lost: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(remote_text, "STUCK_S", 1.0)
    voting = make_run(tmp_path / "run", objective=VOTE)
    dropped: list[str] = []

    async def go() -> None:
        async with three(voting) as (addresses, doors), chained(voting, *addresses) as chain:
            asked, answer = chain.links[1].send, server.Peer.send

            def ask(frame: Frame) -> None:
                asked(frame) if dropped or frame.kind != Kind.STEP or frame.step != 9 else dropped.append(lost)

            def reply(peer: Any, frame: Frame) -> None:
                mine = doors[2].stage is not None and any(text.owner is peer for text in doors[2].stage.texts.values())
                answer(peer, frame) if dropped or not mine or frame.kind != Kind.ANSWER or frame.step != 9 else dropped.append(lost)

            if lost.startswith(CLIENT):
                monkeypatch.setattr(chain.links[1], "send", ask)
            else:
                monkeypatch.setattr(server.Peer, "send", reply)
            problems: list[str] = []
            ended = remote_text.RemoteText._end
            monkeypatch.setattr(remote_text.RemoteText, "_end", lambda self, error: (problems.append(str(error)), ended(self, error))[1])
            assert (await tell(chain, plan_of())).data == golden(voting, plan_of())
            assert dropped and problems[0] == lost.format(*addresses) + ": nothing arrives"

    asyncio.run(go())


def test_stages_that_vote_compute_at_once(tmp_path: Path):
    voting = make_run(tmp_path / "run", objective=VOTE)
    at_work, most = set[int](), 0

    async def go() -> None:
        nonlocal most
        async with three(voting) as (addresses, doors), chained(voting, *addresses) as chain:
            for number, door in enumerate(doors):
                assert door.stage is not None
                real = door.stage.batcher.run

                async def slow(job: Any, number: int = number, real: Any = real) -> Result:
                    nonlocal most
                    at_work.add(number)
                    most = max(most, len(at_work))
                    await asyncio.sleep(0.02)
                    at_work.discard(number)
                    return await real(job)

                door.stage.batcher.run = slow  # type: ignore[method-assign]
            told = await tell(chain, plan_of(max_bytes=4))
            assert told.data == golden(voting, plan_of(max_bytes=4))

    asyncio.run(go())
    assert most == 3


def test_votes_that_are_missing_or_no_numbers_are_refused(tmp_path: Path):
    run = made_run({**CLEAN, "combine": "mean"})
    at_work = Stage(BlockRunner(run, 1, 3))
    owner = object()
    at_work.open(message_frame(Kind.OPEN, bytes(16), OpenRequest(wire="float32", first=1, stop=3), 1), owner)

    def step(votes: Any) -> str:
        frame = Frame(Kind.STEP, bytes(16), 1, 1, 0, 0, 2, 1, enter=1)
        frame.tensors |= {Name.IDS: ids_tensor([1, 2]), Name.STATE: torch.zeros(2, run.config.model.width)}
        if votes is not None:
            frame.tensors[Name.VOTES] = votes
        with pytest.raises(ProtocolError) as caught:
            at_work._job(frame, at_work.texts[bytes(16)])
        return str(caught.value)

    assert step(None) == "VOTES: needed at block 1"
    assert step(torch.full((1, 256), 1, dtype=torch.int32)) == "VOTES: holds a number that is no sum of log-probabilities"


@pytest.mark.parametrize("lost", ["client -> {0}", "{0} -> {1}", "{2} -> client"])
def test_a_frame_that_is_lost_though_all_lines_are_well_is_sent_again(lost: str, run: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(remote_text, "STUCK_S", 1.0)
    dropped: list[str] = []

    async def go() -> None:
        async with three(run) as (addresses, doors), chained(run, *addresses) as chain:
            at = ["client -> {0}", "{0} -> {1}", "{2} -> client"].index(lost)
            real = [chain.links[0].send, doors[0]._send_on, server.Peer.send]

            def drop(*given: Any) -> None:
                frame = given[-1]
                wanted = Kind.ANSWER if at == 2 else Kind.STEP
                if frame.kind == wanted and frame.step == 9 and not dropped:
                    dropped.append(lost)
                else:
                    real[at](*given)

            places = [(chain.links[0], "send"), (doors[0], "_send_on"), (server.Peer, "send")]
            monkeypatch.setattr(*places[at], drop)
            problems: list[str] = []
            ended = remote_text.RemoteText._end
            monkeypatch.setattr(remote_text.RemoteText, "_end", lambda self, error: (problems.append(str(error)), ended(self, error))[1])
            assert (await tell(chain, plan_of())).data == golden(run, plan_of())
            assert dropped and problems[0] == lost.format(*addresses) + ": nothing arrives"

    asyncio.run(go())


def test_steps_of_closed_texts_are_not_computed(run: Path):
    async def go() -> None:
        async with stage(run, 0, 3) as (address, door), chained(run, address) as chain:
            assert door.stage is not None
            gate, ran = threading.Event(), list[int]()
            real = door.stage.runner.run

            def slow(jobs: Any) -> Any:
                ran.append(len(jobs))
                gate.wait(30)
                return real(jobs)

            door.stage.runner.run = slow  # type: ignore[method-assign]
            texts = [asyncio.create_task(tell(chain, plan_of(seed=seed))) for seed in range(5)]
            await until(lambda: len(ran) == 1 and len(door.stage.batcher._waiting) >= 4 - ran[0] + 1, "the others wait")  # type: ignore[union-attr]
            for text in texts:
                text.cancel()
            await asyncio.gather(*texts, return_exceptions=True)
            await until(lambda: not door.stage.texts, "they are closed")  # type: ignore[union-attr]
            await asyncio.sleep(0)
            gate.set()
            await until(lambda: not door.stage.batcher._waiting and door.stage.batcher.busy_since is None, "all done")  # type: ignore[union-attr]
            assert sum(ran) == ran[0]

    asyncio.run(go())


def test_a_line_that_takes_nothing_ends_before_it_takes_the_memory(run: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(line, "MAX_UNSENT", 1 << 18)
    monkeypatch.setattr(line, "SILENCE_S", 60.0)

    async def go() -> None:
        door = grpc.aio.server()
        never = asyncio.Event()

        async def deaf(frames_in: Any, context: Any) -> None:
            await never.wait()

        handlers = {"Session": grpc.stream_stream_rpc_method_handler(deaf)}
        door.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        port = door.add_insecure_port(f"{HOST}:0")
        await door.start()
        async with grpc.aio.insecure_channel(f"{HOST}:{port}") as channel:
            held = line.Line(line.Patience(), lambda data: None)
            running = asyncio.create_task(held.run(channel, "Session", Secrets()))
            for _ in range(200):
                held.send(bytes(10_000))
                await asyncio.sleep(0)
            with pytest.raises(line.Broken, match="bytes wait, and it takes none"):
                await asyncio.wait_for(running, 20)
        never.set()
        await door.stop(0)

    asyncio.run(go())


def test_next_addresses_are_only_ever_hosts_and_ports(run: Path):
    runner_run = run

    async def go() -> None:
        async with stage(runner_run, 0, 1) as (_, door):
            assert door.stage is not None
            for n, bad in enumerate(["unix:/tmp/x", "dns:///a:1", "a", "http://a:1", "a:1\n", "[::1]"]):
                text = bytes([n]) * 16
                asked = json.dumps({"wire": "int8", "first": 0, "stop": 1, "next": bad}).encode()
                with pytest.raises(frames.ProtocolError, match="next: "):
                    door.stage.open(Frame(Kind.OPEN, text, 1, json=asked), object())

    asyncio.run(go())


def test_lines_onward_are_closed_when_no_text_needs_them(run: Path, monkeypatch: pytest.MonkeyPatch):
    from blocktrain.serving import onward

    monkeypatch.setattr(onward, "UNUSED_S", 0.2)

    async def go() -> None:
        async with three(run) as (addresses, doors), chained(run, *addresses) as chain:
            assert (await tell(chain, plan_of())).data == golden(run, plan_of())
            await until(lambda: not doors[0]._onward and not doors[1]._onward, "the lines are closed")
            await until(lambda: not doors[1].stages and not doors[2].stages, "and seen to be")
            assert (await tell(chain, plan_of())).data == golden(run, plan_of())

    asyncio.run(go())


def test_the_line_to_the_next_stage_survives_a_frame_that_cannot_be_read(run: Path):
    """One text's bad frame is told to its client; texts that come the same way go on."""

    async def go() -> None:
        async with three(run) as (addresses, doors), chained(run, *addresses) as chain:
            good = asyncio.create_task(tell(chain, plan_of()))
            bad = await chain.open(Settings())
            await until(lambda: bool(doors[0]._onward), "the line is there")
            (way,) = doors[0]._onward.values()
            broken = Frame(Kind.STEP, bad.name, bad.epoch, 1, count=1).encode()[:-1]
            turn = asyncio.create_task(bad._wait())
            await asyncio.sleep(0)
            way.line.send(broken)
            with pytest.raises(ServingError, match="from the stage before: "):
                await asyncio.wait_for(turn, 20)
            assert (await good).data == golden(run, plan_of())
            assert doors[0]._onward[way.address] is way

    asyncio.run(go())


def test_a_closed_chain_leaves_no_task(run: Path):
    async def go() -> None:
        async with three(run) as (addresses, _):
            left: list[int] = []
            for _ in range(4):
                async with chained(run, *addresses, f"{HOST}:{free_port()}") as chain:
                    assert len((await tell(chain, plan_of(max_bytes=3))).data) == 3
                await until(lambda: not left or len(asyncio.all_tasks()) <= left[0], f"more tasks than {left}")
                left.append(len(asyncio.all_tasks()))  # the stages keep their lines to each other for a while

    asyncio.run(go())


def test_a_stage_that_sends_nonsense_is_down_and_another_is_taken(run: Path):
    async def nonsense(asked: Any, context: Any) -> AsyncIterator[bytes]:
        async for _ in asked:
            yield b"BTS1" + bytes(range(60))

    async def go() -> None:
        async with stage(run, 0, 3) as (address, door):
            fake = grpc.aio.server()
            handlers: dict[str, Any] = {"Session": grpc.stream_stream_rpc_method_handler(nonsense)}
            handlers["Hello"] = grpc.unary_unary_rpc_method_handler(door._hello)
            fake.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
            port = fake.add_insecure_port(f"{HOST}:0")
            await fake.start()
            async with chained(run, f"{HOST}:{port}", address) as chain:
                assert (await tell(chain, plan_of())).data == golden(run, plan_of())
                assert not chain.links[0].up and "frame: " in chain.links[0].reason
            await fake.stop(0)

    asyncio.run(go())


def test_a_text_is_closed_for_whoever_still_waits_for_it(run: Path):
    async def go() -> None:
        async with stage(run, 0, 3) as (address, door), chained(run, address) as chain:
            text = await chain.open(Settings())
            await text.close()
            await text.close()
            from blocktrain.serving.chain import Step

            with pytest.raises(ServingError, match="closed"):
                await text.step(Step(0, 0, list(PROMPT)))
            await until(lambda: not door.stage.texts, "closed")  # type: ignore[union-attr]

    asyncio.run(go())


def test_with_missing_blocks_allowed_a_client_starts_without_them(run: Path):
    async def go() -> None:
        async with stage(run, 0, 1) as (a, _), stage(run, 2, 3) as (c, _):
            nobody = f"{HOST}:{free_port()}"
            assert f"no stage holds block 1 now (client -> {nobody}: connection refused" in await refusal(run, a, nobody, c)
            async with chained(run, a, nobody, c, allow_missing_blocks=True) as chain:
                told = await tell(chain, plan_of())
                assert told.counts.missing == (1,) and len(told.data) == 48

    asyncio.run(go())


def test_a_replica_whose_way_broke_is_tried_again_when_nothing_else_is_left(run: Path, monkeypatch: pytest.MonkeyPatch):
    async def go() -> None:
        async with three(run) as (addresses, _), chained(run, *addresses) as chain:
            chain.broke(addresses[0], addresses[1])
            chain.broke("*", addresses[2])
            assert (await tell(chain, plan_of())).data == golden(run, plan_of())
            with pytest.raises(ConfigError):
                host.parse_target("x:0", "--stages")

    asyncio.run(go())
