"""`blocktrain bench serving`: text from a run over stages in processes of their own, on links with delay and bandwidth.

Rows, all on the same prompts, seeds and link, prompt by prompt by turns, over connections that are warm:

  baseline     `exact` on RUN/reference: the plain autoregressive pipeline of the end-to-end Transformer, one byte a traversal
  exact        the same on the run
  speculative  the same bytes; the run's first blocks draft on the client
  sweep        a window a traversal, lossy; only where a run has objective.window (this one, or --window-run)

Bytes per traversal count what a round trip through all blocks yields; the ratio is of bytes per second to the baseline, by prompt, median. Network
time is what a traversal takes beyond what the stages say they waited and computed, per way of the ring. Quality stands beside speed: output that is
not that of `exact` has its variety and its held-out cross entropy.

Every figure that has a goal stands beside it. Left out: links that lose packets, and clients on machines of their own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from blocktrain.errors import CheckpointError, ConfigError
from blocktrain.report.bench_training import Goal
from blocktrain.report.netlink import Links
from blocktrain.report.serving_failover import bench_failovers
from blocktrain.report.serving_fleet import Fleet, split, stage_command
from blocktrain.report.serving_rows import MS, Sample, System, Watched, figures, run_once, streams_ratio
from blocktrain.report.texts import heldout_of, prompts_of, variety
from blocktrain.report.windows import window_figures
from blocktrain.serving.chain import Chain, Step
from blocktrain.serving.decoding import OwnDraft, Plan, check_own_draft
from blocktrain.serving.host import expected_of
from blocktrain.serving.sampling import Sampling
from blocktrain.training.checkpoint import LoadedRun, load_run
from blocktrain.training.data import heldout_windows

KB = 1024
STATE_KB = 64
GOAL_RTT_MS = 100.0
Say = Callable[[str], None]


@dataclass(frozen=True)
class Options:
    """What is measured; raises ConfigError naming the flag that is out of range."""

    quick: bool = False
    hosts: int = 3
    rtts_ms: tuple[float, ...] = (0.0, 20.0, 50.0, 100.0)
    mbits_s: tuple[float, ...] = (20.0, 0.0)
    prompts: int = 4
    prompt_bytes: int = 64
    max_bytes: int = 64
    temperature: float = 0.8
    draft_blocks: int | None = None
    window_run: Path | None = None
    failovers: int = 0
    streams: int = 8  # texts at once
    repeats: int = 60  # traversals that overhead is a median of

    def __post_init__(self) -> None:
        for flag, values in (("--rtt", self.rtts_ms), ("--mbit", self.mbits_s)):
            if not values or not all(0 <= value <= 1e5 for value in values):
                raise ConfigError(f"{flag}: must be numbers from 0 to 100000, got {', '.join(f'{value:g}' for value in values) or 'none'}")
        for flag, value, most in (("--prompts", self.prompts, 10_000), ("--bytes", self.max_bytes, 1 << 20), ("--hosts", self.hosts, 4096)):
            if not 1 <= value <= most:
                raise ConfigError(f"{flag}: must be between 1 and {most}, got {value}")
        if not 0 <= self.failovers <= 10_000:
            raise ConfigError(f"--failovers: must be between 0 and 10000, got {self.failovers}")

    @property
    def small(self) -> Options:
        """The same with everything that takes long made short."""
        return replace(self, rtts_ms=(0.0, 20.0), mbits_s=(0.0,), prompts=2, prompt_bytes=16, max_bytes=16, streams=2, repeats=6)


def bench_serving(run: Path, options: Options, say: Say = lambda _: None) -> dict[str, Any]:
    """All figures and their goals, as one JSON line's worth. Raises ConfigError, CheckpointError and ServingError."""
    chosen = options.small if options.quick else options
    loaded, windowed = load_run(run, say), _window_run(run, options, say)
    split(loaded.config.model.blocks, chosen.hosts)
    if chosen.draft_blocks is not None:
        check_own_draft(loaded.config, chosen.draft_blocks)
    folders = {"baseline": _baseline(run, say), "run": run} | ({"window": windowed} if windowed and windowed != run else {})
    heldout = heldout_of(loaded)
    prompts = prompts_of(heldout, chosen.prompts, chosen.prompt_bytes, chosen.max_bytes)
    with Links() as links:
        bench = Bench(folders, loaded, windowed, chosen, links, say)
        measured = asyncio.run(bench.run([prompt for prompt, _ in prompts]))
        failover = asyncio.run(bench_failovers(run, chosen.hosts, links, chosen.failovers, prompts[0][0], say)) if chosen.failovers else None
    quality = bench.quality(heldout, [after for _, after in prompts])
    settings = {key: getattr(chosen, key) for key in ("hosts", "prompts", "prompt_bytes", "max_bytes", "temperature")}
    result = {"bench": "serving", "quick": options.quick, "run": run.name, "baseline": folders["baseline"].name, **settings}
    result |= {**measured, "quality": quality, "failover": failover}
    return {**result, "goals": [goal.to_json() for goal in goals_of(result)]}


def _baseline(run: Path, say: Say) -> Path:
    """The reference where it is trained; else the run's own `exact`, and said so."""
    try:
        return load_run(run / "reference", lambda _: None).folder
    except CheckpointError:
        say(f"note: {run}/reference is not trained (`blocktrain train {run} --reference`), so the baseline is `exact` on the run itself")
        return run


def _window_run(run: Path, options: Options, say: Say) -> Path | None:
    """The run that sweeps; raises ConfigError where one was named that cannot."""
    folder = options.window_run or run
    window = load_run(folder, say).config.objective.window
    if options.window_run is not None and not window:
        raise ConfigError(f"--window-run {folder}: was trained without objective.window")
    return folder if window else None


class Bench:
    """Fleets of all rows at once, so that they can be measured by turns."""

    def __init__(self, folders: dict[str, Path], loaded: LoadedRun, windowed: Path | None, options: Options, links: Links, say: Say) -> None:
        self.loaded, self.options, self.links, self.say = loaded, options, links, say
        self.window = load_run(windowed, say) if windowed else None
        self.fleets: dict[Path, Fleet] = {}
        for folder in dict.fromkeys(folders.values()):
            expected = expected_of(folder, say)
            self.fleets[folder] = Fleet(expected, stage_command(folder), split(expected.config.model.blocks, options.hosts), links)
        self.folders, self.texts = folders, dict[str, list[bytes]]()

    async def run(self, prompts: Sequence[bytes]) -> dict[str, Any]:
        for fleet in self.fleets.values():
            fleet.start()
        try:
            systems = await self._systems()
            tables = [await self._table(systems, prompts, rtt, mbit) for mbit in self.options.mbits_s for rtt in self.options.rtts_ms]
            self._change(0.0, 0.0)
            self.say(f"{self.options.streams} texts at once")
            streams = [{"name": system.name, **await streams_ratio(system, prompts, self.options.streams)} for system in systems[1:3]]
        finally:
            for fleet in self.fleets.values():
                await fleet.close()
        return {"tables": tables, "overhead": await self._overhead(), "streams": streams}

    async def _systems(self) -> list[System]:
        chains: dict[Path, Chain] = {folder: await fleet.connect() for folder, fleet in self.fleets.items()}
        plan = Plan("exact", Sampling(self.options.temperature), self.options.max_bytes)
        base, run = self.folders["baseline"], self.folders["run"]
        systems = [
            System("baseline", chains[base], plan, links=self.fleets[base].links),
            System("exact", chains[run], plan, links=self.fleets[run].links),
        ]
        if self.loaded.config.objective.span < self.loaded.config.model.blocks:
            draft = OwnDraft(self.loaded, self.options.draft_blocks)
            systems.append(System("speculative", chains[run], replace(plan, mode="speculative"), draft, self.fleets[run].links))
        if self.window:
            folder = self.folders.get("window", run)
            systems.append(System("sweep", chains[folder], replace(plan, mode="sweep"), links=self.fleets[folder].links))
        return systems

    def _change(self, rtt_ms: float, mbit_s: float) -> None:
        for fleet in self.fleets.values():
            fleet.change(rtt_ms, mbit_s)

    async def _table(self, systems: Sequence[System], prompts: Sequence[bytes], rtt_ms: float, mbit_s: float) -> dict[str, Any]:
        """All rows on one link."""
        self.say(f"RTT {rtt_ms:g} ms, " + (f"{mbit_s:g} Mbit/s" if mbit_s else "no limit"))
        self._change(rtt_ms, mbit_s)
        samples: dict[str, list[Sample]] = {system.name: [] for system in systems}
        for system in systems:
            await run_once(replace(system, plan=replace(system.plan, max_bytes=min(4, system.plan.max_bytes))), prompts[0], 0)  # warms up
        for seed, prompt in enumerate(prompts):
            for system in systems:
                samples[system.name].append(await run_once(system, prompt, seed))
        self.texts = {name: [sample.text for sample in found] for name, found in samples.items()}
        rows = [figures(name, found, samples["baseline"]) for name, found in samples.items()]
        same = self.texts["speculative"] == self.texts["exact"] if "speculative" in self.texts else None
        return {"rtt_ms": rtt_ms, "mbit_s": mbit_s, "rows": rows, "speculative_equals_exact": same}

    async def _overhead(self) -> dict[str, float]:
        """What a hop takes on loopback beyond the stages' own compute: one with a state of 64 KB, and one with next to nothing.

        Nothing else runs meanwhile, not even idle stages. Of the n + 1 hops of a traversal over n stages only the n - 1 between stages carry
        states; what the first and the last take after such a computation is known from one stage that holds all blocks.
        """
        self.say("overhead of a hop")
        blocks, model, hosts = self.loaded.config.model.blocks, self.loaded.config.model, self.options.hosts
        positions = max(1, min(model.positions, STATE_KB * KB // (2 * model.width)))
        ring = hosts > 1 and not self.loaded.config.objective.parallel
        between, small, compute = await self._between(split(blocks, hosts), positions)
        ends, ways = (await self._between(split(blocks, 1), positions))[0] if ring else 0.0, hosts + 1 if ring else 2
        return {
            "state_kb": positions * model.width * 2 / KB,
            "stages": hosts,
            "hop_ms": (between - ends) / (hosts - 1) if ring else between / 2,
            "mean_hop_ms": between / ways,
            "small_hop_ms": small / ways,
            "compute_ms_per_stage": compute / hosts,
        }

    async def _between(self, spans: Sequence[range], positions: int) -> tuple[float, float, float]:
        """Milliseconds of a traversal beyond compute with `positions` positions, and with one; and its compute with `positions`. Medians."""
        fleet = Fleet(self.fleets[self.folders["run"]].expected, stage_command(self.folders["run"]), spans, self.links)
        fleet.start()
        try:
            watched = Watched(await fleet.connect(direct=True))
            text, between = await watched.open(Plan().settings), []
            for size in (positions, 1):
                for _ in range(self.options.repeats + 2):
                    await text.step(Step(0, 0, [0] * size, size - 1))
                seen = watched.seen[-self.options.repeats :]
                between.append((median(t.network_s for t in seen) / MS, median(sum(map(sum, t.hops)) for t in seen) / MS))
            await text.close()
        finally:
            await fleet.close()
        return between[0][0], between[1][0], between[0][1]

    def quality(self, heldout: np.ndarray, following: Sequence[bytes]) -> dict[str, Any]:
        """Of each row's output, and of the text that really follows the prompts; a sweep also has its CE."""
        found: dict[str, Any] = {name: variety(texts) for name, texts in self.texts.items()} | {"held-out": variety(following)}
        if self.window:
            config = self.window.config
            width = config.objective.window + 1
            windows = heldout_windows(heldout, config.model.positions, min(64, config.evaluate.windows))
            found["sweep"] |= window_figures(self.window, windows, width)
        return found


def goals_of(result: dict[str, Any]) -> list[Goal]:
    """Of what was measured."""
    goals = []
    found = {(table["rtt_ms"], table["mbit_s"]): row for table in result["tables"] for row in table["rows"] if row["name"] == "speculative"}
    if found:
        fewest = min(row["bytes_per_traversal"] for (rtt, _), row in found.items() if rtt == max(rtt for rtt, _ in found))
        goals.append(Goal("speculative, bytes per traversal at the longest RTT", fewest, ">=", 4.0))
        same = min(table["speculative_equals_exact"] for table in result["tables"])
        goals.append(Goal("speculative gives the bytes of exact (1: yes)", float(same), ">=", 1.0))
    for (rtt, mbit), row in found.items():
        if rtt == GOAL_RTT_MS:
            where = f"RTT {rtt:g} ms" + (f", {mbit:g} Mbit/s" if mbit else "")
            goals.append(Goal(f"speculative over baseline, bytes/s at {where}", row["ratio"], ">=", 3.0))
    overhead = result["overhead"]
    goals.append(Goal(f"overhead a hop at {overhead['state_kb']:.0f} KB states, ms", overhead["hop_ms"], "<=", 1.0))
    if result["failover"]:
        goals.append(Goal("failovers whose text is that of the undisturbed run, share", result["failover"]["identical_share"], ">=", 1.0))
    return goals
