"""Two coordinator processes share one run: one journal, one set of files, and each round is closed exactly once."""

from __future__ import annotations

import hashlib
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from blocktrain.codecs import encode_update
from blocktrain.config import RunConfig
from blocktrain.swarm import coordinator as module
from blocktrain.swarm import identity, journal
from blocktrain.swarm.coordinator import Coordinator, Session, Text
from blocktrain.swarm.parts import layout_of
from blocktrain.swarm.protocol import PROTOCOL, BeginRequest, BlobRef, CommitRequest, JoinRequest, Work, join_text
from blocktrain.swarm.store import open_store
from tests.conftest import tiny_config

TEXT = Text(BlobRef(name="text/none.txt", size=1, sha256="0" * 64), "digest", "none")


def config(**rounds: Any) -> RunConfig:
    chosen = {"deadline": "fixed", "deadline_s": 1000.0, "inner_steps": 2, "heartbeat_limit_s": 500.0, **rounds}
    return tiny_config(model={"blocks": 2}, train={"steps": 40}, round=chosen)


class Client:
    """A worker in miniature: any coordinator of the run will do for each of its requests."""

    def __init__(self, name: str, first: Coordinator) -> None:
        self.key = identity.new_worker_key()
        challenge = first.hello("00" * 8).challenge
        text = join_text(first.run_id, challenge, self.key.public, "p")
        token = first.token_named(name)
        assert token
        request = JoinRequest(
            protocol=PROTOCOL,
            run_id=first.run_id,
            config_digest=first.config_digest,
            name=name,
            public_key=self.key.public,
            process="p",
            challenge=challenge,
            signature=self.key.sign(text),
            capacity=1,
        )
        self.secret = first.join(token, request).session

    def session(self, at: Coordinator) -> Session:
        return at.session(self.secret)

    def ask(self, at: Coordinator, ask: str) -> Work | None:
        return at.ask(self.session(at), ask).work

    def push(self, at: Coordinator, work: Work, value: float) -> str:
        tensors = {name: torch.full(shape, value) for name, shape in at.layout.update_shapes(work.first, work.stop).items()}
        data = encode_update(sorted(tensors.items()), "fp32").data
        sha256 = hashlib.sha256(data).hexdigest()
        who = self.session(at)
        at.begin(who, BeginRequest(key=work.key, size=len(data), sha256=sha256))
        writer = at.open_part(work.key, sha256, 0)
        writer.write(data)
        writer.keep()
        samples = sum(stop - first for first, stop in work.steps) * at.config.train.batch_size
        return at.commit(who, CommitRequest(key=work.key, size=len(data), sha256=sha256, num_samples=samples)).kind


def settle(*coordinators: Coordinator) -> int:
    """What their hosts do every second; returns how many versions that made."""
    return sum(c.tick() for _ in range(2) for c in coordinators)


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Coordinator, Coordinator]:
    settings = config()
    layout = layout_of(settings)
    one, two = (Coordinator("run", settings, layout, open_store(tmp_path / "swarm"), TEXT) for _ in range(2))
    return one, two


def test_each_request_may_go_to_another_coordinator(pair: tuple[Coordinator, Coordinator]):
    one, two = pair
    assert one.run_id == two.run_id
    worker = Client("a", one)
    work = worker.ask(two, "ask-1")
    assert work is not None
    assert worker.ask(one, "ask-1") == work  # the same ask, the same work, whoever is asked
    assert worker.push(two, work, 0.5) == "fresh"
    assert settle(one, two) == 1
    assert one.machine.state == two.machine.state
    assert one.machine.state.blocks[work.first].version == 1


def test_two_requests_at_once_of_a_session_not_heard_of_yet_look_it_up_once_each(
    pair: tuple[Coordinator, Coordinator], monkeypatch: pytest.MonkeyPatch
):
    one, two = pair
    worker, together, real = Client("a", one), threading.Barrier(2, timeout=30), two.store.transaction

    def transaction() -> Any:
        together.wait()
        return real()

    monkeypatch.setattr(two.store, "transaction", transaction)
    threads = [threading.Thread(target=worker.session, args=(two,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert two.knows(worker.secret), "or each later request would count as a stranger's"
    assert worker.session(two).worker.startswith("a-")


def test_both_close_the_same_round_at_once_and_one_wins(pair: tuple[Coordinator, Coordinator]):
    one, two = pair
    workers = [Client(name, pair[i % 2]) for i, name in enumerate("abcd")]
    for round_ in range(4):
        for i, worker in enumerate(workers):
            work = worker.ask(pair[i % 2], f"ask-{round_}")
            if work is not None:
                worker.push(pair[(i + 1) % 2], work, 0.1 * i + round_ + 0.01)
        made: list[int] = []
        threads = [threading.Thread(target=lambda c=c, made=made: made.append(c.tick())) for c in pair]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        settle(one, two)
        versions = [block.version for block in one.machine.state.blocks]
        assert one.machine.state == two.machine.state
        assert sum(made) <= sum(versions)
    assert sum(versions) >= 4
    assert one.machine.state.interface == sum(versions)  # every close moved the interface once
    for block, version in enumerate(versions):
        counted = [key for v in range(1, version + 1) for key in one.manifest(f"block-{block:03d}", v)["updates"]]
        assert len(counted) == len(set(counted))


def test_one_that_slept_through_a_snapshot_reads_it(pair: tuple[Coordinator, Coordinator], monkeypatch: pytest.MonkeyPatch):
    one, two = pair
    monkeypatch.setattr(journal, "SNAPSHOT_EVERY", 3)
    worker = Client("a", one)
    for i in range(6):
        work = worker.ask(one, f"ask-{i}")
        assert work is not None
        assert worker.push(one, work, i + 1.0) == "fresh"
        settle(one)
    assert two.seq < one.seq - 3
    settle(two)
    assert one.machine.state == two.machine.state


def test_a_right_withdrawn_at_one_is_withdrawn_at_the_other(pair: tuple[Coordinator, Coordinator]):
    one, two = pair
    worker = Client("a", one)
    assert worker.ask(two, "ask-1")
    assert one.revoke_token("a")
    settle(two)
    with pytest.raises(module.Refused, match="may not take part"):
        worker.session(two)
