"""The user-space link: as late and as slow as it says, in order, and what a cut and a hole do to who is talking."""

from __future__ import annotations

import hashlib
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from blocktrain.errors import BlockTrainError
from blocktrain.report.netlink import Echo, Link, Links, accuracy, receive

BUSY_MS = 25.0  # by how much a machine that does other things may be late


@pytest.fixture(scope="module")
def links() -> Iterator[Links]:
    with Links() as started:
        yield started


@pytest.fixture
def echo() -> Iterator[Echo]:
    started = Echo(8)
    yield started
    started.close()


def dial(link: Link) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", link.port), timeout=10)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def said(connection: socket.socket) -> bytes:
    connection.sendall(b"12345678")
    return receive(connection, 1)


@pytest.mark.parametrize("rtt_ms", [0.0, 20.0, 50.0, 100.0])
def test_bytes_are_never_early_and_hardly_late(links: Links, rtt_ms: float):
    figures = accuracy(links, rtt_ms, repeats=5)
    assert -0.2 <= figures["late_ms"] <= BUSY_MS


def test_a_frame_takes_its_size_over_the_bandwidth(links: Links):
    figures = accuracy(links, 20.0, mbit_s=20.0, size=100_000, repeats=3)
    assert figures["promised_ms"] == pytest.approx(60.0, abs=0.1)
    assert -0.5 <= figures["late_ms"] <= BUSY_MS


def test_connections_of_a_link_share_its_bandwidth(links: Links):
    echo, size = Echo(50_000), 50_000
    link = links.open(echo.target, mbit_s=20.0)
    connections = [dial(link) for _ in range(3)]
    began = time.perf_counter()
    for connection in connections:
        connection.sendall(bytes(size))
    for connection in connections:
        receive(connection, 1)
    taken = time.perf_counter() - began
    echo.close()
    assert taken >= 3 * size * 8 / 20e6 - 1e-3


def test_a_large_transfer_arrives_whole_in_order_and_is_counted(links: Links):
    sent, listener = bytes(range(256)) * 16384, socket.create_server(("127.0.0.1", 0))  # 4 MiB
    got: list[bytes] = []

    def take() -> None:
        connection, _ = listener.accept()
        with connection:
            got.append(receive(connection, 1 << 30))  # until it ends
            connection.sendall(b"done")

    reader = threading.Thread(target=take, daemon=True)
    reader.start()
    link = links.open(listener.getsockname(), rtt_ms=10.0)
    with dial(link) as connection:
        half = len(sent) // 2
        connection.sendall(sent[:half])
        link.change(rtt_ms=0.0)  # what is sent later does not overtake
        connection.sendall(sent[half:])
        connection.shutdown(socket.SHUT_WR)
        assert receive(connection, 4) == b"done", "the other direction goes on after an end"
    reader.join(timeout=10)
    listener.close()
    assert hashlib.sha256(got[0]).digest() == hashlib.sha256(sent).digest()
    traffic = link.traffic()
    assert (traffic.there, traffic.back, traffic.accepted) == (len(sent), 4, 1)


def test_a_delay_can_be_changed_while_it_is_used(links: Links, echo: Echo):
    link = links.open(echo.target)
    with dial(link) as connection:
        assert said(connection) == b"k"
        link.change(rtt_ms=120.0)
        began = time.perf_counter()
        assert said(connection) == b"k"
        assert time.perf_counter() - began >= 0.119


def test_connecting_takes_a_round_trip_before_the_first_byte_moves(links: Links, echo: Echo):
    link, began = links.open(echo.target, rtt_ms=60.0), time.perf_counter()
    with dial(link) as connection:
        assert said(connection) == b"k"
    assert time.perf_counter() - began >= 0.119


def test_a_cut_resets_and_refuses_until_it_is_mended(links: Links, echo: Echo):
    link = links.open(echo.target)
    with dial(link) as connection:
        assert said(connection) == b"k"
        link.change(state="cut")
        with pytest.raises(ConnectionResetError):
            connection.recv(1)
    with pytest.raises(OSError, match="reset"), dial(link) as connection:
        said(connection)
    link.change(state="up")
    with dial(link) as connection:
        assert said(connection) == b"k"


def test_a_hole_is_silence_and_what_it_held_goes_on_after(links: Links, echo: Echo):
    link = links.open(echo.target)
    with dial(link) as connection:
        assert said(connection) == b"k"
        link.change(state="hole")
        connection.sendall(b"12345678")
        connection.settimeout(0.2)
        with pytest.raises(TimeoutError):
            connection.recv(1)
        connection.settimeout(10)
        link.change(state="up")
        assert receive(connection, 1) == b"k"


def test_the_end_of_a_process_behind_a_link_is_heard_late(links: Links):
    listener = socket.create_server(("127.0.0.1", 0))
    link = links.open(listener.getsockname(), rtt_ms=100.0)
    with dial(link) as connection:
        far, _ = listener.accept()
        connection.sendall(b"x")
        far.recv(1)
        far.close()
        began = time.perf_counter()
        assert connection.recv(1) == b""
        assert 0.04 <= time.perf_counter() - began <= 1.0
    listener.close()


def test_a_target_that_is_not_there_is_a_reset_and_can_be_replaced(links: Links, echo: Echo):
    nobody = socket.create_server(("127.0.0.1", 0))
    link = links.open(nobody.getsockname())
    nobody.close()
    with pytest.raises(OSError, match="reset"), dial(link) as connection:
        said(connection)
    link.change(target=echo.target)
    with dial(link) as connection:
        assert said(connection) == b"k"


def test_a_port_that_is_taken_is_one_clear_line(links: Links, echo: Echo):
    with pytest.raises(BlockTrainError, match="netlink: OSError"):
        links.open(echo.target, port=echo.target[1])
