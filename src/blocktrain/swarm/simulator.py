"""A whole run in one process and in virtual time: the real coordinator, the real workers, and between them a network that is made up.

The same rules, aggregation, gate and worker code as in a real run decide everything; what is simulated is time, lines, machines and absences
(regimes.py). With real training the run folder that comes out is like any other; stand-ins for models let thousands of workers take part.

One seed decides everything: keys and names of the workers, machines, lines, delays and absences, and with the run's own seed weights and batches.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from blocktrain.config import RunConfig, to_toml
from blocktrain.errors import BlockTrainError, ConfigError
from blocktrain.seeding import fold
from blocktrain.serialization import write_bytes
from blocktrain.swarm import store, virtual
from blocktrain.swarm.coordinator import Coordinator, Text
from blocktrain.swarm.export import export
from blocktrain.swarm.identity import WorkerKey
from blocktrain.swarm.parts import INTERFACE, Layout, layout_of
from blocktrain.swarm.protocol import BlobRef, part_of
from blocktrain.swarm.regimes import WORK_S, Machine, Regime
from blocktrain.swarm.simlink import Bell, SimLink
from blocktrain.swarm.stand_in import Pace, PacedEngine, StandInEngine, stand_in_layout
from blocktrain.swarm.state import Decision
from blocktrain.swarm.store import Store, memory_store
from blocktrain.swarm.worker import Engine, Worker, WorkerStopped
from blocktrain.training.data import Corpus

REST_S = 5.0  # before a worker that was told no joins again
STARTS_S = 10.0  # within which the workers of a run come, one after the other


@dataclass(frozen=True)
class Plan:
    """What is simulated. `rounds` ends it after so many versions of each block; without it, it goes on to train.steps."""

    config: RunConfig
    regime: Regime
    workers: int
    seed: int = 0
    rounds: int | None = None
    stand_in: bool = False

    def __post_init__(self) -> None:
        for name, value in (("--workers", self.workers), ("--rounds", self.rounds)):
            if value is not None and value < 1:
                raise ConfigError(f"{name}: must be at least 1, got {value}")
        if self.stand_in and self.rounds is None:
            raise ConfigError("--stand-in: nothing is trained that could be finished; say with --rounds how many versions of each block to make")


@dataclass
class BlockOutcome:
    """What became of one block."""

    block: int
    version: int
    assigned: int
    fresh: int
    late: int
    tokens: int
    ce: float | None  # of the newest version's updates, nats per byte

    @property
    def participation(self) -> float | None:
        return self.fresh / self.assigned if self.assigned else None


@dataclass
class Outcome:
    """What a simulation gave. `late` are updates that came late and were counted, `dropped` those that came too late to count."""

    regime: str
    workers: int
    seed: int
    finished: bool
    blocks: list[BlockOutcome]
    late: int
    dropped: int
    bytes: dict[str, int]  # "weights down" and so on
    events: int
    virtual_s: float
    wall_s: float
    steps: int = 0  # that every block has taken, in the checkpoint
    decisions: list[tuple[float, str, int, str]] = field(default_factory=list)  # (when, action, block, reason)
    digests: dict[str, str] = field(default_factory=dict)  # part -> sha256 of its newest version

    @property
    def participation(self) -> float | None:
        assigned = sum(block.assigned for block in self.blocks)
        return sum(block.fresh for block in self.blocks) / assigned if assigned else None

    def to_json(self) -> dict[str, Any]:
        blocks = [{**vars(block), "participation": block.participation} for block in self.blocks]
        left_out = ("blocks", "decisions", "digests")
        plain = {name: value for name, value in vars(self).items() if name not in left_out}
        return plain | {"participation": self.participation, "tokens": sum(block.tokens for block in self.blocks), "blocks": blocks}


class BoundedCoordinator(Coordinator):
    """Makes no more than `rounds` versions of a block, so that runs compare at equal rounds: the round after is left open and takes nobody."""

    rounds: int | None = None
    decided: Callable[[Decision], None] = staticmethod(lambda _: None)

    def _due(self) -> list[Decision]:
        due, blocks = super()._due(), self.machine.state.blocks
        kept = [decision for decision in due if self.rounds is None or blocks[decision.block].version < self.rounds]
        for decision in kept:
            self.decided(decision)
        return kept

    @property
    def complete(self) -> bool:
        """Whether there is nothing more to be done."""
        enough = self.rounds is not None and all(block.version >= self.rounds for block in self.machine.state.blocks)
        return enough or self.finished


class VirtualHost:
    """Does what is due, after events and when time alone makes it due. Writing a version takes no virtual time."""

    def __init__(self, coordinator: BoundedCoordinator) -> None:
        self.coordinator, self.closed = coordinator, Bell()
        self._changed = asyncio.Event()
        coordinator.changed = self._changed.set
        coordinator.closed = self.closed.ring

    async def run(self) -> None:
        """Until the run is complete."""
        while True:
            self._changed.clear()
            self.coordinator.tick()
            if self.coordinator.complete:
                return
            if self._changed.is_set():
                continue
            wake = self.coordinator.wake_at()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), None if wake is None else max(0.0, wake - self.coordinator.now()))


class Simulation:
    """One run, from an empty store to its outcome."""

    def __init__(self, plan: Plan, corpus: Corpus | None, opened: Store | None = None, say: Callable[[str], None] = lambda _: None) -> None:
        assert plan.stand_in or corpus is not None, "real training needs a text"
        self.plan, self.corpus, self.say = plan, corpus, say
        self.config = _without_end(plan.config) if plan.stand_in else plan.config
        self.layout: Layout = stand_in_layout(self.config) if plan.stand_in else layout_of(self.config)
        self.store = opened or memory_store()
        self.decisions: list[tuple[float, str, int, str]] = []
        self.links: dict[int, SimLink] = {}
        self.refusals: Counter[str] = Counter()
        self.seconds_per_step = WORK_S / self.config.round.inner_steps

    # --- Running ---

    def run(self, keep: Callable[[Coordinator], int] = lambda _: 0) -> Outcome:
        """Live through it; `keep` gets the coordinator at the end and returns the steps that every block has taken."""
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="blocktrain-simulation-") as folder:
            return virtual.run(self._live(Path(folder), keep, began))

    async def _live(self, folder: Path, keep: Callable[[Coordinator], int], began: float) -> Outcome:
        self.coordinator = self._open()
        host = VirtualHost(self.coordinator)
        token = self.coordinator.token_named("simulation")
        assert token is not None
        lives = [asyncio.ensure_future(self._life(number, token, host.closed, folder)) for number in range(self.plan.workers)]
        try:
            await _first_of(asyncio.ensure_future(host.run()), lives)
        finally:
            for link in self.links.values():
                link.cut()
        return self._outcome(keep(self.coordinator), began)

    def _open(self) -> BoundedCoordinator:
        text = memoryview(self.corpus.train if self.corpus else b"stand-in")  # type: ignore[arg-type]
        digest = self.corpus.train_digest if self.corpus else hashlib.sha256(b"stand-in").hexdigest()
        blob = self.store.blobs.put_stream("text/train", ".txt", [text])
        self.store.fact_once("run_id", f"{fold(self.plan.seed, 'run'):016x}"[:12])
        loop = asyncio.get_running_loop()
        coordinator = BoundedCoordinator(
            "simulation", self.config, self.layout, self.store, Text(BlobRef(**vars(blob)), digest, "simulation"), clock=loop.time, say=self.say
        )
        coordinator.rounds = self.plan.rounds
        coordinator.decided = lambda d: self.decisions.append((round(loop.time(), 6), d.action, d.block, d.reason))
        return coordinator

    # --- A worker's life ---

    async def _life(self, number: int, token: str, closed: Bell, folder: Path) -> None:
        """Present and away by turns, until the run is complete."""
        dice = random.Random(f"{self.plan.seed} worker {number}")
        regime, name = self.plan.regime, f"w{number:05d}"
        machine = regime.machine(dice, self.seconds_per_step, self._block_bytes())
        key, engine = worker_key(self.plan.seed, number), self._engine(machine, dice, folder / name)
        await asyncio.sleep(STARTS_S * dice.random())
        turn = 0
        while not self.coordinator.complete:
            link = SimLink(self.coordinator, token, name, key, process=f"{name}-{turn}", wire=machine.wire, dice=dice, closed=closed)
            link.say, link.told = self.say, self._refused
            self.links[number] = link
            present_s = dice.expovariate(1 / regime.present_s) if regime.present_s < float("inf") else None
            if await self._turn(Worker(link, engine, takeover=True), link, present_s):
                return
            turn += 1
            await asyncio.sleep(dice.expovariate(1 / regime.away_s) if regime.away_s else REST_S)

    async def _turn(self, worker: Worker, link: SimLink, present_s: float | None) -> bool:
        """From joining to the end or to vanishing; True if the run is finished."""
        task = asyncio.ensure_future(worker.run())
        done, _ = await asyncio.wait([task], timeout=present_s)
        if done:
            try:
                task.result()
                return True
            except WorkerStopped as error:
                self.say(str(error))
                return False
        link.cut()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, BlockTrainError):
            await task
        return False

    def _refused(self, kind: str) -> None:
        self.refusals[kind] += 1

    def _engine(self, machine: Machine, dice: random.Random, folder: Path) -> Engine:
        regime = self.plan.regime
        pace = Pace(machine.seconds_per_step, regime.hold_ups, regime.hold_up_s, dice)
        capacity = self.config.round.max_span
        if self.plan.stand_in:
            return StandInEngine(self.layout, pace, self.config.train.batch_size, capacity)
        return PacedEngine(folder / "worker", pace, capacity=capacity)

    def _block_bytes(self) -> int:
        return self.coordinator.manifest(part_of(0), 0)["file"]["size"]

    # --- What came of it ---

    def _outcome(self, steps: int, began: float) -> Outcome:
        coordinator, state = self.coordinator, self.coordinator.machine.state
        late = self._late()
        manifests = {part_of(block.index): coordinator.manifest(part_of(block.index), block.version) for block in state.blocks}
        blocks = [
            BlockOutcome(b.index, b.version, b.assigned_total, b.fresh_total, late[b.index], b.tokens, manifests[part_of(b.index)].get("ce"))
            for b in state.blocks
        ]
        manifests[INTERFACE] = coordinator.manifest(INTERFACE, state.interface)
        moved: dict[str, int] = {}
        for row in coordinator.counted_bytes():
            name = f"{row['kind']} {row['direction']}"
            moved[name] = moved.get(name, 0) + row["bytes"]
        return Outcome(
            regime=self.plan.regime.name,
            workers=self.plan.workers,
            seed=self.plan.seed,
            finished=coordinator.finished,
            blocks=blocks,
            late=sum(late.values()),
            dropped=self.refusals["too_old"],
            bytes=dict(sorted(moved.items())),
            events=coordinator.seq,
            virtual_s=state.now,
            wall_s=time.monotonic() - began,
            steps=steps,
            decisions=self.decisions,
            digests={part: manifest["file"]["sha256"] for part, manifest in sorted(manifests.items())},
        )

    def _late(self) -> Counter[int]:
        """Updates that came late and were counted, by the first block of their span."""
        query = sa.select(store.updates.c.blocks, sa.func.count().label("count")).where(store.updates.c.kind == "late")
        found: Counter[int] = Counter()
        with self.store.transaction() as tx:
            for row in tx.rows(query.group_by(store.updates.c.blocks)):
                found[json.loads(row["blocks"])[0]] += row["count"]
        return found


def simulate(plan: Plan, corpus: Corpus | None, run: Path | None = None, say: Callable[[str], None] = lambda _: None) -> Outcome:
    """Live through a plan. With a run folder, leave it there as a run that can be evaluated (nothing but settings of a stand-in)."""
    if run is None:
        return Simulation(plan, corpus, say=say).run()
    refuse_used(run)
    run.mkdir(parents=True, exist_ok=True)
    write_bytes(run / "run.toml", to_toml(plan.config).encode())
    if corpus is None or plan.stand_in:
        return Simulation(plan, None, say=say).run()
    heldout = corpus.heldout_digest
    return Simulation(plan, corpus, say=say).run(lambda coordinator: export(coordinator, run, heldout))


async def _first_of(main: asyncio.Task[None], others: list[asyncio.Task[None]]) -> None:
    """Until `main` ends. Others may end before; their errors are raised at once."""
    ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def note(task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if not ended.done() and (error or task is main):
            ended.set_exception(error) if error else ended.set_result(None)

    for task in (main, *others):
        task.add_done_callback(note)
    await ended


def refuse_used(run: Path) -> None:
    """A simulation starts anew: it does not go on with what is there."""
    if (run / "checkpoints").is_dir() or (run / "swarm").is_dir():
        raise ConfigError(f"{run}: has been trained already, and a simulation always starts anew; name a new run folder")


def _without_end(config: RunConfig) -> RunConfig:
    """Settings of a run that has as many steps to give as anybody may want."""
    return config.model_copy(update={"train": config.train.model_copy(update={"steps": 1 << 40})})


def worker_key(seed: int, number: int) -> WorkerKey:
    """A worker's key, made from the seed: names follow from keys, and reasons name workers."""
    return WorkerKey(Ed25519PrivateKey.from_private_bytes(hashlib.sha256(f"{seed} key {number}".encode()).digest()))
