"""The life of a stage process, and how a client or stage finds others: placement, loading, the key and certificates.

A stage listens before it loads, so that whoever asks is told that it is loading, or why that failed; then it ends, and its port and memory with it.
"""

from __future__ import annotations

import asyncio
import hashlib
import ipaddress
import json
import logging
import os
import re
import secrets as random_secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc.aio
from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from blocktrain.config import RunConfig, load_config
from blocktrain.errors import BlockTrainError, ConfigError, ProtocolError, ServingError
from blocktrain.serving.compute import BlockRunner
from blocktrain.serving.frames import PROTOCOL, TARGET, HelloReply, Shape
from blocktrain.serving.line import Secrets, describe
from blocktrain.serving.link import Expected, greet
from blocktrain.serving.server import StageServer
from blocktrain.serving.stage import Stage
from blocktrain.training.checkpoint import MOMENTS, LoadedRun, block_file, latest_checkpoint, load_run

FAILED_S = 2.0  # for which a stage that could not load still says why
log = logging.getLogger("blocktrain.stage")


@dataclass(frozen=True)
class StageOptions:
    """What a stage process is told."""

    run: Path
    blocks: range
    listen: str
    max_texts: int
    free_memory: int


def expected_of(run: Path, warn: Callable[[str], None]) -> Expected:
    """What stages of a run must be, from its folder here: the settings, and digests where there is a checkpoint."""
    config = load_config(run / "run.toml")
    checkpoint = latest_checkpoint(run, warn, names=())
    if checkpoint is None:
        return Expected(config, _settings_digest(config, config.digest, config), {})
    progress = checkpoint.progress
    return Expected(config, _settings_digest(progress.run_config(), progress.config_digest, config), progress.files)


def _settings_digest(trained: RunConfig, digest: str, config: RunConfig) -> str:
    """Of the settings that decide what blocks compute: `digest`, of those of training, and with it those that may be read otherwise later."""
    read, then = (each.objective.reading | {"combine": "mean" if each.objective.votes else "last"} for each in (config, trained))
    if read == then | {"combine": "last"}:  # of which the digest of training says nothing
        return digest
    return hashlib.sha256(f"{digest} {read}".encode()).hexdigest()


async def serve_stage(options: StageOptions, secrets: Secrets, say: Callable[[str], None], stop: asyncio.Event) -> int:
    """Until `stop`; the exit code. Raises ConfigError where the address cannot be had, and what loading raises."""
    server = StageServer(secrets)
    shape = Shape.of(load_config(options.run / "run.toml"))
    try:
        port = await server.start(options.listen, shape.max_bytes)
    except RuntimeError:
        raise ConfigError(f"--listen {options.listen}: this address cannot be listened on (in use, or not one of this machine's)") from None
    try:
        loaded = await _load(server, options, say)
        host = options.listen.rpartition(":")[0]
        blocks = f"block {options.blocks[0]}" if len(options.blocks) == 1 else f"blocks {options.blocks[0]} to {options.blocks[-1]}"
        say(f"stage {server.node}: {blocks} of {options.run}, {server.stage and server.stage.runner.hardware}, step {loaded.progress.step}")
        everywhere = " (every address of this machine; clients name one that they can reach)" if host in ("0.0.0.0", "[::]") else ""
        say(f"address: {host}:{port}{everywhere}")
        await stop.wait()
        say("stopping")
        return 0
    finally:
        await server.stop()


async def _load(server: StageServer, options: StageOptions, say: Callable[[str], None]) -> LoadedRun:
    """The weights, checked by digest. If that fails, whoever asks is told for a moment, and the error goes on."""

    def load() -> tuple[LoadedRun, Stage]:
        run = load_run(options.run, say, options.blocks)
        return run, Stage(BlockRunner(run, options.blocks.start, options.blocks.stop), options.max_texts)

    try:
        run, stage = await asyncio.to_thread(load)
    except (BlockTrainError, OSError, MemoryError, RuntimeError) as error:
        reason = (str(error) or type(error).__name__).partition("\n")[0]
        server.hello = lambda: HelloReply(protocol=list(PROTOCOL), node=server.node, state="failed", reason=reason[:300])
        say(f"FAILED: {reason}")
        await asyncio.sleep(FAILED_S)
        if isinstance(error, BlockTrainError):
            raise
        raise ServingError(f"the stage could not load blocks {options.blocks.start} to {options.blocks.stop - 1}: {reason}") from None
    names = ["interface.safetensors", *map(block_file, options.blocks)]

    def hello() -> HelloReply:
        return HelloReply(
            protocol=list(PROTOCOL),
            node=server.node,
            state="up",
            config_digest=_settings_digest(run.trained_config, run.progress.config_digest, run.config),
            first=options.blocks.start,
            stop=options.blocks.stop,
            digests={name: run.progress.files[name] for name in names},
            checkpoint=_digest_of(run.progress.files),
            step=run.progress.updates,
            dtype=str(stage.runner.hardware.dtype).removeprefix("torch."),
            max_texts=options.max_texts,
            texts=len(stage.texts),
            free_memory=options.free_memory,
        )

    server.stage, server.hello = stage, hello
    return run


def _digest_of(files: dict[str, str]) -> str:
    """One digest of all weights of a checkpoint; what only training needs is not in it."""
    weights = {name: digest for name, digest in files.items() if name != MOMENTS}
    return hashlib.sha256(json.dumps(weights, sort_keys=True).encode()).hexdigest()


# --- Which blocks ---


def parse_blocks(text: str, blocks: int) -> range:
    """`2`, `0-1` or `0,1`: consecutive blocks. Raises ConfigError."""
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", text.strip())
    numbers = list(range(int(match[1]), int(match[2] or match[1]) + 1)) if match and int(match[2] or match[1]) < 1 << 20 else []
    if not match and re.fullmatch(r"\d+(,\d+)+", text.strip()):
        numbers = [int(n) for n in text.split(",")]
    if not numbers or numbers != list(range(numbers[0], numbers[0] + len(numbers))) or numbers[-1] >= blocks:
        raise ConfigError(f"--block {text}: expected consecutive blocks of 0 to {blocks - 1}, such as 0, or 0-1")
    return range(numbers[0], numbers[-1] + 1)


def place(blocks: int, room: int, held: Sequence[tuple[int, int]]) -> range:
    """The `room` consecutive blocks for a new stage where others hold the spans `held`: those with fewest copies, the first of equals."""
    copies = [sum(first <= b < stop for first, stop in held) for b in range(blocks)]
    room = min(room, blocks)

    def need(start: int) -> tuple[list[int], int]:
        return sorted(copies[start : start + room]), start

    start = min(range(blocks - room + 1), key=need)
    return range(start, start + room)


async def ask_peers(addresses: Sequence[str], secrets: Secrets, say: Callable[[str], None]) -> list[tuple[int, int]]:
    """The spans that stages at these addresses hold; who does not answer is named and left out."""

    async def ask(address: str) -> tuple[int, int] | None:
        channel = secrets.channel(address, 1 << 20)
        try:
            hello = await greet(address, channel, secrets)
            return (hello.first, hello.stop) if hello.stop else None
        except (grpc.aio.AioRpcError, ProtocolError) as error:
            say(f"--peers {address}: {describe(error) if isinstance(error, grpc.aio.AioRpcError) else error}")
            return None
        finally:
            await channel.close()

    return [span for span in await asyncio.gather(*map(ask, addresses)) if span]


# --- Addresses, keys, certificates ---


def parse_target(text: str, flag: str) -> str:
    """HOST:PORT or [IPv6]:PORT as gRPC takes it; port 0 only to listen on. Raises ConfigError naming the flag."""
    target = text.strip()
    host, _, port = target.rpartition(":")
    if not re.fullmatch(TARGET, target) or int(port) > 65535 or (port.strip("0") == "" and flag != "--listen"):
        example = f"[{host}]:{port}" if host.count(":") > 1 and host[0] != "[" else "127.0.0.1:9000 or [::1]:9000"
        raise ConfigError(f"{flag} {text}: expected HOST:PORT with a port up to 65535, for example {example}")
    return target


def parse_targets(text: str, flag: str) -> list[str]:
    """Several, with commas. Raises ConfigError naming the flag."""
    return [parse_target(part, flag) for part in text.split(",") if part.strip()]


def is_loopback(target: str) -> bool:
    host = target.rpartition(":")[0].strip("[]").partition("%")[0]
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def read_secrets(
    key_file: Path | None, certificate: Path | None, private_key: Path | None, authority: Path | None, make_key: bool = False
) -> Secrets:
    """From files. Raises ConfigError naming the flag."""
    if (certificate is None) != (private_key is None):
        raise ConfigError(f"--tls-{'cert' if certificate is None else 'key'}: --tls-cert and --tls-key go together")
    if make_key and key_file is not None and not key_file.exists():
        handle = os.open(key_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(handle, "w") as file:
            file.write(random_secrets.token_hex(16) + "\n")
    key = _read("--key-file", key_file).decode("utf-8", "replace").strip()
    if key_file is not None and not re.fullmatch(r"[\x21-\x7e]{16,200}", key):
        raise ConfigError(f"--key-file {key_file}: must hold one key of 16 to 200 printable characters without spaces")
    secrets = Secrets(key, _read("--tls-cert", certificate), _read("--tls-key", private_key), _read("--tls-ca", authority))
    for flag, path, data in (("--tls-cert", certificate, secrets.certificate), ("--tls-ca", authority, secrets.authority)):
        if path is not None and not _certificates(data):
            raise ConfigError(f"{flag} {path}: holds no certificate in PEM")
    if private_key is not None and not _belongs(secrets.private_key, secrets.certificate):
        raise ConfigError(f"--tls-key {private_key}: is not the private key of --tls-cert, in PEM and without a password")
    return secrets


def _certificates(data: bytes) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(data)
    except ValueError:
        return []


def _belongs(private_key: bytes, certificate: bytes) -> bool:
    try:
        mine = load_pem_private_key(private_key, None).public_key()
    except (ValueError, TypeError, UnsupportedAlgorithm):
        return False
    return mine == _certificates(certificate)[0].public_key()


def _read(flag: str, path: Path | None) -> bytes:
    try:
        return path.read_bytes() if path is not None else b""
    except OSError as error:
        raise ConfigError(f"{flag} {path}: cannot be read ({error.strerror})") from None


def check_listen(target: str, secrets: Secrets, plaintext: bool) -> None:
    """Loopback, or a key and TLS, or a key and the flag that says plaintext. Raises ConfigError."""
    if is_loopback(target):
        return
    if not secrets.key:
        raise ConfigError(f"--listen {target}: is not loopback, so --key-file is needed")
    if not secrets.certificate and not plaintext:
        raise ConfigError(f"--listen {target}: is not loopback, so --tls-cert and --tls-key are needed, or --plaintext if the network is trusted")
