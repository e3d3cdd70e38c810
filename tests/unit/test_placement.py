"""Which blocks a new stage takes, how its flags are read, and which addresses are this machine's own."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from blocktrain.errors import ConfigError
from blocktrain.serving import host
from blocktrain.serving.line import Secrets
from tests.faults.swarm import free_port


@pytest.mark.parametrize(
    ("blocks", "room", "held", "taken"),
    [
        (4, 4, [], (0, 4)),
        (4, 9, [], (0, 4)),
        (4, 1, [], (0, 1)),
        (4, 1, [(0, 1)], (1, 2)),
        (4, 2, [(0, 2)], (2, 4)),
        (4, 2, [(2, 4)], (0, 2)),
        (3, 1, [(0, 3), (0, 1)], (1, 2)),
        (3, 1, [(0, 1), (1, 2), (2, 3), (0, 1)], (1, 2)),
        (4, 2, [(0, 1), (1, 2), (3, 4)], (1, 3)),  # block 2 is missing, and a copy of 1 helps as much as one of 3
        (5, 3, [(0, 5), (4, 5)], (0, 3)),
    ],
)
def test_a_stage_takes_the_blocks_with_fewest_copies(blocks: int, room: int, held: list[tuple[int, int]], taken: tuple[int, int]):
    assert host.place(blocks, room, held) == range(*taken)


def test_stages_that_come_one_after_another_hold_every_block():
    held: list[tuple[int, int]] = []
    for _ in range(4):
        span = host.place(8, 2, held)
        held.append((span.start, span.stop))
    assert sorted(held) == [(0, 2), (2, 4), (4, 6), (6, 8)]


@pytest.mark.parametrize(("text", "blocks"), [("2", (2, 3)), ("0-1", (0, 2)), ("0,1,2", (0, 3)), (" 1-1 ", (1, 2))])
def test_blocks_are_read(text: str, blocks: tuple[int, int]):
    assert host.parse_blocks(text, 3) == range(*blocks)


@pytest.mark.parametrize("text", ["", "3", "-1", "2-1", "0,2", "1,0", "a", "0-99999999999", "0-1-2", "1.0", "٣"])
def test_blocks_that_are_none_are_refused(text: str):
    with pytest.raises(ConfigError, match="--block "):
        host.parse_blocks(text, 3)


@pytest.mark.parametrize("target", ["127.0.0.1:1", "127.9.9.9:1", "[::1]:1", "localhost:1", "[::1%lo]:1"])
def test_loopback(target: str):
    host.check_listen(host.parse_target(target, "--listen"), Secrets(), False)


@pytest.mark.parametrize(
    "target", ["0.0.0.0:1", "[::]:1", "127.evil.example:1", "10.0.0.1:1", "[fe80::1%eth0]:1", "host:1", "localhost.evil.example:1"]
)
def test_not_loopback(target: str):
    parsed = host.parse_target(target, "--listen")
    with pytest.raises(ConfigError, match="--key-file is needed"):
        host.check_listen(parsed, Secrets(), True)
    with pytest.raises(ConfigError, match="--plaintext if the network is trusted"):
        host.check_listen(parsed, Secrets("k" * 16), False)
    host.check_listen(parsed, Secrets("k" * 16), True)
    host.check_listen(parsed, Secrets("k" * 16, certificate=b"x"), False)


def test_a_key_file_is_made_once_and_for_its_owner_alone(tmp_path: Path):
    path = tmp_path / "key"
    made = host.read_secrets(path, None, None, None, make_key=True)
    assert path.stat().st_mode & 0o777 == 0o600
    assert host.read_secrets(path, None, None, None) == made and len(made.key) == 32
    assert made.key not in repr(made)


def test_what_cannot_be_read_names_its_flag(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"--key-file .*cannot be read"):
        host.read_secrets(tmp_path / "none", None, None, None)
    with pytest.raises(ConfigError, match=r"--tls-ca .*cannot be read"):
        host.read_secrets(None, None, None, tmp_path)
    with pytest.raises(ConfigError, match="--tls-cert: --tls-cert and --tls-key go together"):
        host.read_secrets(None, None, tmp_path, None)


def test_a_peer_that_does_not_answer_is_named_and_left_out():
    said: list[str] = []
    address = f"127.0.0.1:{free_port()}"
    assert asyncio.run(host.ask_peers([address], Secrets(), said.append)) == []
    assert said == [f"--peers {address}: connection refused: nothing listens there"]
