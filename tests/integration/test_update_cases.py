"""What a coordinator does with updates that are late, wrong, hostile or alone. No network: the coordinator itself, on a clock that the test turns."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
import torch
from torch import Tensor

from blocktrain.codecs import encode_update, read_update
from blocktrain.errors import ProtocolError
from blocktrain.serialization import tensor_digest
from blocktrain.streams import BytesSource, TensorFile, tensor_stream
from blocktrain.swarm import store
from blocktrain.swarm.aggregate import moved
from blocktrain.swarm.coordinator import Refused, Session
from blocktrain.swarm.parts import Layout
from blocktrain.swarm.protocol import AskReply, Work
from blocktrain.swarm.status import status
from blocktrain.swarm.store import BlobSource
from tests import swarm_net
from tests.swarm_net import Clock, Shapes, begin, commit, hand_in, join, make_coordinator, make_layout, make_update, member, put_parts

ROUND = {"inner_steps": 4, "deadline": "fixed", "deadline_s": 60.0, "quorum": 2}


class Scene:
    """A coordinator of one block unless told otherwise, and a clock."""

    def __init__(self, folder: Path | None = None, *, blocks: int = 1, layout: Layout | None = None, **sections: Any) -> None:
        self.clock, self.asks = Clock(), 0
        self.layout = layout or make_layout(blocks)
        sections = {**sections, "round": {**ROUND, **sections.get("round", {})}, "train": {"steps": 100_000, **sections.get("train", {})}}
        self.coordinator = make_coordinator(folder, layout=self.layout, clock=self.clock, **sections)

    def member(self, name: str) -> Session:
        return member(self.coordinator, name)

    def asked(self, who: Session) -> AskReply:
        self.asks += 1
        return self.coordinator.ask(who, f"ask-{self.asks}")

    def work(self, who: Session) -> Work:
        reply = self.asked(who)
        assert reply.work is not None, reply.reason
        return reply.work

    def update(self, work: Work, **more: Any) -> bytes:
        return make_update(self.layout, work, **more)

    def tensors(self, part: str = "block-000", version: int | None = None) -> dict[str, Tensor]:
        version = self.version(part) if version is None else version
        file = self.coordinator.manifest(part, version)["file"]
        return dict(TensorFile(BlobSource(self.coordinator.store.blobs, [(file["name"], file["size"])]), part).tensors())

    def version(self, part: str = "block-000") -> int:
        return self.coordinator.machine.state.blocks[int(part[-3:])].version

    def log(self) -> str:
        return "\n".join(text for _, text in self.coordinator.logged())


def moved_by(before: dict[str, Tensor], after: dict[str, Tensor]) -> float:
    return math.sqrt(sum(float((after[name] - before[name]).square().sum()) for name in before))


# --- How many, and when ---


def test_one_worker_on_a_block_its_update_is_the_next_version():
    scene = Scene()
    who = scene.member("a")
    work = scene.work(who)
    data = scene.update(work)
    before = scene.tensors()
    assert hand_in(scene.coordinator, who, work, data).kind == "fresh"
    scene.coordinator.tick()
    assert scene.version() == 1
    after = scene.tensors()
    assert torch.equal(after["frozen"], before["frozen"])
    assert torch.allclose(after["w"] - before["w"], dict(read(scene, data))["block-000/w"], atol=1e-6)


def read(scene: Scene, data: bytes) -> Iterator[tuple[str, Tensor]]:
    return read_update(data, scene.layout.update_shapes(0, 1)).tensors()


def test_no_update_leaves_the_block_as_it_was():
    scene = Scene(round={"heartbeat_limit_s": 30.0})
    scene.work(scene.member("a"))
    before = tensor_digest(scene.tensors())
    for _ in range(40):
        scene.clock.pass_s(10)
        scene.coordinator.tick()
    assert scene.version() == 0 and tensor_digest(scene.tensors()) == before


def test_eight_workers_that_take_ten_seconds_close_rounds_early_and_the_slow_ninth_still_counts():
    scene = Scene(round={"deadline": "recent", "deadline_s": 60.0})
    crew = [scene.member(f"fast-{i}") for i in range(8)]
    slow = scene.member("slow")
    slow_work, slow_since, slow_answers = None, 0.0, []
    lengths: list[float] = []
    opened, held = scene.clock.at, {}
    for _ in range(2000):
        for i, who in enumerate(crew):
            if who not in held:
                reply = scene.asked(who)
                if reply.work:
                    held[who] = (reply.work, scene.clock.at + 10 + (i % 3 - 1))
            elif scene.clock.at >= held[who][1]:
                work, _ = held.pop(who)
                assert hand_in(scene.coordinator, who, work, scene.update(work)).kind in ("fresh", "late")
            else:
                scene.coordinator.beat(who)
        if slow_work is None:
            slow_work, slow_since = scene.asked(slow).work, scene.clock.at
        elif scene.clock.at >= slow_since + 40:
            slow_answers.append(hand_in(scene.coordinator, slow, slow_work, scene.update(slow_work)))
            slow_work = None
        else:
            scene.coordinator.beat(slow)
        made = scene.coordinator.tick()
        if made:
            lengths.append(scene.clock.at - opened)
            opened = scene.clock.at
        if len(lengths) >= 9:
            break
        scene.clock.pass_s(0.5)
    assert max(lengths[4:]) < 20
    assert slow_answers and {answer.kind for answer in slow_answers} <= {"fresh", "late"}
    assert any(age for answer in slow_answers for _, age in answer.ages)


def test_a_deadline_changed_in_a_live_run_holds_for_the_next_round_and_stands_in_the_log():
    scene = Scene(round={"quorum": 1, "deadline_s": 60.0, "heartbeat_limit_s": 1000.0})
    a, b = scene.member("a"), scene.member("b")
    work, _ = scene.work(a), scene.work(b)
    config = scene.coordinator.config
    scene.coordinator.take_up(config.model_copy(update={"round": config.round.model_copy(update={"deadline_s": 20.0})}))
    assert "rules changed" in scene.log() and "deadline_s" in scene.log()
    hand_in(scene.coordinator, a, work, scene.update(work))
    scene.clock.pass_s(30)
    assert scene.coordinator.tick() == 0, "the open round keeps the deadline it began with"
    scene.clock.pass_s(91)
    assert scene.coordinator.tick() == 1
    work = scene.work(a)
    scene.asked(b)
    hand_in(scene.coordinator, a, work, scene.update(work))
    scene.clock.pass_s(41)
    assert scene.coordinator.tick() == 1


def test_an_upload_that_began_before_the_deadline_and_ends_after_it_counts_next_round_with_staleness_one():
    scene = Scene(round={"quorum": 1})
    a, b = scene.member("a"), scene.member("b")
    work, other = scene.work(a), scene.work(b)
    data = scene.update(work)
    scene.clock.pass_s(58)
    hand_in(scene.coordinator, b, other, scene.update(other))
    begin(scene.coordinator, a, work, data)
    for _ in range(13):
        scene.clock.pass_s(5)
        scene.coordinator.beat(a)
        scene.coordinator.beat(b)
        scene.coordinator.tick()
    assert scene.version() == 1
    put_parts(scene.coordinator, work, data)
    answer = commit(scene.coordinator, a, work, data)
    assert answer.kind == "late" and answer.ages == [(0, 1)]
    assert not scene.coordinator.machine.state.workers[a.worker].revoked
    fresh = scene.work(b)
    hand_in(scene.coordinator, b, fresh, scene.update(fresh))
    scene.coordinator.tick()
    shares = scene.coordinator.manifest("block-000", scene.version())["shares"]
    ages = {share["worker"]: share["age"] for share in shares}
    assert ages[a.worker] == 1


def test_an_update_from_three_versions_ago_weighs_half_and_one_from_four_is_refused():
    scene = Scene(round={"max_age": 3, "quorum": 1, "heartbeat_limit_s": 5.0})
    old, older, quick = scene.member("old"), scene.member("older"), scene.member("quick")
    works = {}
    works[older] = scene.work(older)

    def advance() -> None:
        work = scene.work(quick)
        scene.clock.pass_s(6)
        hand_in(scene.coordinator, quick, work, scene.update(work))
        assert scene.coordinator.tick() == 1

    advance()
    works[old] = scene.work(old)
    for _ in range(3):
        advance()
    assert scene.version() == 4
    answer = hand_in(scene.coordinator, old, works[old], scene.update(works[old]))
    assert answer.kind == "late" and answer.ages == [(0, 3)]
    assert kind_of_hand_in(scene, older, works[older]) == "too_old"
    work = scene.work(quick)
    hand_in(scene.coordinator, quick, work, scene.update(work))
    scene.coordinator.tick()
    weights = {share["worker"]: share["weight"] for share in scene.coordinator.manifest("block-000", 5)["shares"]}
    assert weights[old.worker] == pytest.approx(weights[quick.worker] / 2)


def kind_of_hand_in(scene: Scene, who: Session, work: Work) -> str:
    try:
        return hand_in(scene.coordinator, who, work, scene.update(work)).kind
    except Refused as refused:
        return refused.answer.kind


def test_a_block_without_worker_is_shown_starved_and_the_others_go_on():
    scene = Scene(blocks=2, round={"heartbeat_limit_s": 30.0})
    busy, gone = scene.member("busy"), scene.member("gone")
    works = {who.worker: scene.work(who) for who in (busy, gone)}
    mine, theirs = (works[who.worker].first for who in (busy, gone))
    assert mine != theirs
    hand_in(scene.coordinator, busy, works[busy.worker], scene.update(works[busy.worker]))
    scene.coordinator.tick()
    for _ in range(8):  # while the one that is gone is still waited for
        scene.clock.pass_s(10)
        scene.coordinator.beat(busy)
        scene.coordinator.tick()
    shown = status(scene.coordinator)
    assert shown["blocks"][theirs]["state"] == "starved" and "has no worker" in shown["reason"]
    assert scene.version(f"block-{mine:03d}") == 1
    assert scene.work(busy).first == theirs, "whoever asks next is sent there"


# --- Wrong updates ---


@pytest.mark.parametrize("num_samples", [0, -1, -16.0, 0.5, math.nan, math.inf, 1e30, 17, 10**40])
def test_a_number_of_samples_that_cannot_be_is_refused_with_its_reason(num_samples: float):
    scene = Scene()
    who = scene.member("a")
    work = scene.work(who)
    answer = hand_in(scene.coordinator, who, work, scene.update(work), num_samples=num_samples)
    assert answer.kind == "invalid" and "num_samples" in answer.reason
    scene.coordinator.tick()
    assert scene.version() == 0
    scene.coordinator._reload()  # the journal replays
    assert scene.work(who).key != work.key


def test_an_update_of_zeros_leaves_the_block_unchanged():
    scene = Scene()
    who = scene.member("a")
    work = scene.work(who)
    before = tensor_digest(scene.tensors())
    assert hand_in(scene.coordinator, who, work, scene.update(work, scale=0.0)).kind == "fresh"
    scene.coordinator.tick()
    assert scene.version() == 1 and tensor_digest(scene.tensors()) == before


def test_one_nan_among_five_updates_four_are_averaged_and_one_is_logged():
    scene = Scene()
    crew = [scene.member(f"w{i}") for i in range(5)]
    works = [scene.work(who) for who in crew]
    bad = with_a_nan(scene.update(works[2]))
    for who, work in zip(crew, works, strict=True):
        answer = hand_in(scene.coordinator, who, work, bad if who is crew[2] else scene.update(work))
        assert answer.kind == ("invalid" if who is crew[2] else "fresh")
    scene.coordinator.tick()
    manifest = scene.coordinator.manifest("block-000", 1)
    assert len(manifest["updates"]) == 4 and works[2].key not in manifest["updates"]
    assert all(torch.isfinite(tensor).all() for tensor in scene.tensors().values())
    assert "tensor" in scene.log() and "finite" in scene.log() and crew[2].worker in scene.log()
    with scene.coordinator.store.transaction() as tx:
        notes = tx.rows(sa.select(store.notes))
    assert [note["worker"] for note in notes] == [crew[2].worker]


def with_a_nan(data: bytes) -> bytes:
    return data[:-4] + struct.pack("<f", math.nan)


def renamed(shapes: Shapes) -> Shapes:
    return {name.replace("/w", "/v"): shape for name, shape in shapes.items()}


def refused_update(scene: Scene, work: Work, kind: str) -> bytes:
    """A well-formed file of the right length that is not the update that was asked for."""
    right = scene.update(work)
    if kind == "dtype":
        data = encode_update([(n, torch.zeros(s)) for n, s in sorted(scene.layout.update_shapes(work.first, work.stop).items())], "bf16").data
    else:
        data = scene.update(work, change=renamed if kind == "name" else lambda shapes: {name: shape[::-1] for name, shape in shapes.items()})
    return data + bytes(max(0, len(right) - len(data))) if len(data) != len(right) else data


@pytest.mark.parametrize(("kind", "said"), [("name", "/v"), ("shape", "tensor block-000/w"), ("dtype", "update")])
def test_a_wrong_name_shape_or_dtype_is_refused_by_the_tensors_name_and_the_others_are_averaged(kind: str, said: str):
    scene = Scene()
    a, b = scene.member("a"), scene.member("b")
    work, other = scene.work(a), scene.work(b)
    answer = hand_in(scene.coordinator, a, work, refused_update(scene, work, kind))
    assert answer.kind == "invalid" and said in answer.reason
    assert hand_in(scene.coordinator, b, other, scene.update(other)).kind == "fresh"
    scene.coordinator.tick()
    assert scene.coordinator.manifest("block-000", 1)["updates"] == [other.key]


@pytest.mark.parametrize("change", [lambda s: dict(list(s.items())[:-1]), lambda s: {**s, "block-000/x": (4,)}])
def test_a_missing_or_extra_tensor_is_refused_before_it_is_sent(change: Any):
    scene = Scene()
    who = scene.member("a")
    work = scene.work(who)
    with pytest.raises(ProtocolError, match=r"size: .* bytes, this update has"):
        begin(scene.coordinator, who, work, scene.update(work, change=change))
    assert hand_in(scene.coordinator, who, work, scene.update(work)).kind == "fresh"


def test_worker_a_cannot_write_into_the_place_of_b():
    scene = Scene()
    a, b = scene.member("a"), scene.member("b")
    scene.work(a)
    work = scene.work(b)
    data = scene.update(work)
    for attempt in (
        lambda: begin(scene.coordinator, a, work, data),
        lambda: scene.coordinator.part_length(a, work.key, 0),
        lambda: commit(scene.coordinator, a, work, data),
    ):
        with pytest.raises(Refused) as refused:
            attempt()
        assert refused.value.answer.kind == "forbidden"
    assert scene.coordinator.give_back(a, work.key, "mischief").kind == "forbidden"
    assert hand_in(scene.coordinator, b, work, data).kind == "fresh"


def test_bytes_of_an_update_that_was_accepted_are_not_taken_again_from_anyone():
    scene = Scene()
    a, b = scene.member("a"), scene.member("b")
    work, other = scene.work(a), scene.work(b)
    data = scene.update(work)
    assert hand_in(scene.coordinator, a, work, data).kind == "fresh"
    answer = hand_in(scene.coordinator, b, other, data)
    assert answer.kind == "invalid" and "copied" in answer.reason and work.key in answer.reason


def test_three_strikes_suspend_a_worker_and_afterwards_it_goes_on():
    scene = Scene(round={"strikes": 3, "suspension_s": 100.0})
    who = scene.member("a")
    for _ in range(3):
        work = scene.work(who)
        assert hand_in(scene.coordinator, who, work, scene.update(work), num_samples=-1).kind == "invalid"
        scene.coordinator.tick()
    assert scene.asked(who).kind == "suspended"
    scene.clock.pass_s(101)
    work = scene.work(who)
    assert hand_in(scene.coordinator, who, work, scene.update(work)).kind == "fresh"


@pytest.mark.parametrize("beyond", ["clip", "refuse"])
def test_a_norm_far_beyond_the_median_is_clipped_or_refused(beyond: str):
    scene = Scene(outer={"norm_beyond": beyond, "norm_limit": 3.0})
    crew = [scene.member(f"w{i}") for i in range(5)]
    works = [scene.work(who) for who in crew]
    before = scene.tensors()
    for who, work in zip(crew[:4], works[:4], strict=True):
        hand_in(scene.coordinator, who, work, scene.update(work, scale=0.01))
    answer = hand_in(scene.coordinator, crew[4], works[4], scene.update(works[4], scale=1000.0))
    assert answer.kind == ("fresh" if beyond == "clip" else "invalid"), answer.reason
    if beyond == "refuse":
        assert "norm" in answer.reason
    scene.coordinator.tick()
    assert moved_by(before, scene.tensors()) < 0.01 * math.sqrt(400) * 3


def test_a_full_disk_refuses_an_upload_before_it_begins_and_takes_it_afterwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    scene = Scene(tmp_path / "swarm")
    who = scene.member("a")
    work = scene.work(who)
    data = scene.update(work)
    with monkeypatch.context() as full:
        full.setattr(type(scene.coordinator.store.blobs), "free_bytes", lambda _: 1000)
        with pytest.raises(OSError, match="disk has 0 MiB left"):
            begin(scene.coordinator, who, work, data)
        assert "disk" in scene.coordinator.problem
        assert not scene.coordinator.store.blobs.names("updates/")
    assert hand_in(scene.coordinator, who, work, data).kind == "fresh"
    assert not scene.coordinator.problem


# --- What was accepted stays what it was ---


def test_after_the_gate_no_part_of_an_update_can_be_replaced_or_removed():
    scene = Scene()
    a, b = scene.member("a"), scene.member("b")
    work, _ = scene.work(a), scene.work(b)
    data, poison = scene.update(work), with_a_nan(scene.update(work))
    begin(scene.coordinator, a, work, data)
    slow = scene.coordinator.open_part(work.key, swarm_net.sha256(data), 0)
    slow.write(poison)  # begun before the commit, whole only after it
    put_parts(scene.coordinator, work, data)
    assert commit(scene.coordinator, a, work, data).kind == "fresh"
    with pytest.raises(Refused):
        scene.coordinator.keep_part(work.key, slow)
    begin(scene.coordinator, a, work, poison)  # another update under the same key
    with pytest.raises(Refused):
        scene.coordinator.open_part(work.key, swarm_net.sha256(poison), 0)
    scene.coordinator.revoke(b.worker)
    assert scene.coordinator.tick() == 1
    assert scene.coordinator.manifest("block-000", 1)["updates"] == [work.key]
    assert torch.isfinite(scene.tensors()["w"]).all()


def test_an_accepted_update_whose_file_is_damaged_on_the_disk_is_left_out_and_the_round_closes(tmp_path: Path):
    scene = Scene(tmp_path / "swarm")
    crew = [scene.member(f"w{i}") for i in range(3)]
    works = [scene.work(who) for who in crew]
    for who, work in zip(crew, works, strict=True):
        if who is crew[2]:
            first, second = (next((tmp_path / "swarm/blobs/updates" / w.key).rglob("000000")) for w in works[:2])
            first.write_bytes(first.read_bytes()[:-1] + b"\x7f")
            second.unlink()
        hand_in(scene.coordinator, who, work, scene.update(work))
    assert scene.coordinator.tick() == 1
    assert scene.coordinator.manifest("block-000", 1)["updates"] == [works[2].key]
    assert scene.log().count("out of the mean") == 2


def test_only_one_update_under_a_key_takes_room_and_what_nobody_finishes_is_swept(tmp_path: Path):
    scene = Scene(tmp_path / "swarm")
    who, stays = scene.member("a"), scene.member("b")
    work, _ = scene.work(who), scene.work(stays)
    data = scene.update(work)
    begin(scene.coordinator, who, work, data)
    for number in range(20):
        writer = scene.coordinator.open_part(work.key, f"{number:064x}", 0)
        writer.write(bytes(100))
        scene.coordinator.keep_part(work.key, writer)
    assert len(scene.coordinator.store.blobs.names("updates/")) == 1
    scene.coordinator.revoke(who.worker)
    scene.clock.pass_s(120)
    scene.coordinator.tick()
    assert not scene.coordinator.store.blobs.names("updates/") and not scene.coordinator.store.blobs.names("scratch/")


def test_revoking_a_token_ends_its_workers_at_the_next_call_and_drops_what_they_had_open():
    scene = Scene()
    coordinator = scene.coordinator
    token, key = coordinator.token_named("lent") or "", swarm_net.identity.new_worker_key()
    secret = join(coordinator, "guest", token, key=key).session
    guest, host = coordinator.session(secret), scene.member("host")
    mine, theirs = scene.work(host), scene.work(guest)
    hand_in(coordinator, guest, theirs, scene.update(theirs))
    assert coordinator.revoke_token("lent") == [guest.worker]
    with pytest.raises(Refused) as refused:
        coordinator.session(secret)
    assert refused.value.answer.kind == "revoked"
    with pytest.raises(Refused, match="revoked"):
        join(coordinator, "guest", token, key=key)
    assert hand_in(coordinator, host, mine, scene.update(mine)).kind == "fresh"
    coordinator.tick()
    assert coordinator.manifest("block-000", 1)["updates"] == [mine.key]


def test_a_token_revoked_while_somebody_joins_by_it_lets_nobody_in(monkeypatch: pytest.MonkeyPatch):
    scene = Scene()
    token = scene.coordinator.token_named("lent") or ""
    monkeypatch.setattr("blocktrain.swarm.crash.point", lambda name: scene.coordinator.revoke_token("lent") if name == "join.before_record" else None)
    with pytest.raises(Refused, match="revoked"):
        join(scene.coordinator, "guest", token)
    assert not scene.coordinator.machine.state.workers


def test_a_second_process_with_the_same_key_is_told_the_holder_and_takes_over_only_when_it_says_so():
    scene = Scene()
    coordinator = scene.coordinator
    token, key = coordinator.token_named("t") or "", swarm_net.identity.new_worker_key()
    first = join(coordinator, "w", token, key=key, process="one")
    with pytest.raises(Refused) as refused:
        join(coordinator, "w", token, key=key, process="two")
    assert refused.value.answer.kind == "conflict" and "one" in refused.value.answer.reason
    coordinator.session(first.session)
    second = join(coordinator, "w", token, key=key, process="two", takeover=True)
    assert second.worker == first.worker
    coordinator.session(second.session)
    with pytest.raises(Refused):
        coordinator.session(first.session)


def test_fifty_workers_at_once_are_all_members_once_and_a_full_run_says_so():
    scene = Scene(limits={"max_workers": 50})
    for i in range(50):
        scene.member(f"w{i}")
    assert len(scene.coordinator.machine.state.workers) == 50
    with pytest.raises(Refused, match="max_workers") as refused:
        scene.member("one-more")
    assert refused.value.answer.kind == "wait"


# --- Lossy both ways ---


def test_int8_up_and_down_with_error_feedback_every_replica_has_the_coordinators_bits(tmp_path: Path):
    scene = Scene(tmp_path / "swarm", layout=make_layout(1, {"w": (64, 64)}), outer={"up_codec": "int8", "down_codec": "int8"})
    who = scene.member("a")
    replica = scene.tensors(version=0)
    for version in range(1, 5):
        work = scene.work(who)
        assert work.codec == "int8"
        hand_in(scene.coordinator, who, work, scene.update(work))
        scene.coordinator.tick()
        manifest = scene.coordinator.manifest("block-000", version)
        delta = manifest["delta"]
        assert delta["size"] < manifest["file"]["size"] / 3
        raw = scene.coordinator.store.blobs.read(delta["name"], 0, delta["size"])
        shapes = scene.layout.part_shapes("block-000")
        base = TensorFile(BytesSource(as_file(scene, replica)), "replica")
        replica = dict(moved(base, read_update(raw, shapes), shapes))
        assert swarm_net.sha256(as_file(scene, replica)) == manifest["file"]["sha256"]
        assert manifest["residual"]


def as_file(scene: Scene, tensors: dict[str, Tensor]) -> bytes:
    return b"".join(bytes(chunk) for chunk in tensor_stream(scene.layout.entries["block-000"], sorted(tensors.items())))
