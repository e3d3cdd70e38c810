"""Three kinds of swarm, as distributions of machines, lines and absences, and the deadline that goes with each.

Nothing here says how many updates arrive in time. That follows from the rules, from what the machines and lines do, and from the deadline; the
figures were tuned so that what follows is near 100 %, 90 % and 42 % (docs/experiments.md).

Times are virtual seconds. The median machine takes WORK_S for the steps of a full lease, whatever the run's steps are, so one regime fits every
run. Lines are told in seconds that a block takes on the median one.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from blocktrain.swarm.simlink import Wire

WORK_S = 60.0  # in which the median machine trains a full lease
DROP_LATE = ("round.max_age=0", "round.upload_limit_s=0.001")  # what misses its round counts nothing, even if its upload began in it


@dataclass(frozen=True)
class Regime:
    """A kind of swarm."""

    name: str
    meaning: str
    deadline_s: float
    min_work_s: float = 2.0  # a round with less time left takes nobody
    speed_sigma: float = 0.0  # of the log-normal speed of machines
    latency_s: float = 0.0  # one way, median
    transfer_s: float = 0.1  # of a block, median
    line_sigma: float = 0.0  # of the log-normal rate of lines
    jitter: float = 0.0  # of the same line from one transfer to the next
    hold_ups: float = 0.0  # share of assignments during which the machine is taken by something else
    hold_up_s: float = 0.0  # mean length of that
    present_s: float = float("inf")  # mean time until a worker vanishes without a word
    away_s: float = 0.0  # mean time until it is back

    def settings(self) -> list[str]:
        """The rules that go with it, as --set takes them."""
        return ["round.deadline=fixed", f"round.deadline_s={self.deadline_s:g}", f"round.min_work_s={self.min_work_s:g}", "round.quorum=1"]

    def machine(self, dice: random.Random, seconds_per_step: float, block_bytes: int) -> Machine:
        """Draw a machine with its line; `seconds_per_step` is the median machine's."""
        rate = block_bytes / self.transfer_s
        return Machine(
            seconds_per_step / dice.lognormvariate(0.0, self.speed_sigma),
            Wire(
                latency_s=self.latency_s * dice.lognormvariate(0.0, self.line_sigma),
                up_bytes_s=rate * dice.lognormvariate(0.0, self.line_sigma),
                down_bytes_s=rate * dice.lognormvariate(0.0, self.line_sigma),
                jitter=self.jitter,
            ),
        )


@dataclass(frozen=True)
class Machine:
    """What was drawn for one worker."""

    seconds_per_step: float
    wire: Wire


LOCKSTEP = Regime("lockstep", "equal machines side by side; no deadline ever cuts", deadline_s=3600.0, latency_s=0.001)
SOFT = Regime(
    "soft",
    "machines of one organisation on good lines; the deadline cuts stragglers",
    deadline_s=90.0,
    min_work_s=30.0,
    speed_sigma=0.25,
    latency_s=0.02,
    transfer_s=1.0,
    line_sigma=0.3,
    jitter=0.2,
    hold_ups=0.08,
    hold_up_s=90.0,
    present_s=3600.0,
    away_s=120.0,
)
WAN = Regime(
    "wan",
    "volunteers' machines on home lines, which their owners take away half of the time; the deadline cuts more than half",
    deadline_s=120.0,
    min_work_s=80.0,
    speed_sigma=0.4,
    latency_s=0.08,
    transfer_s=2.0,
    line_sigma=0.4,
    jitter=0.3,
    hold_ups=0.53,
    hold_up_s=400.0,
    present_s=1800.0,
    away_s=300.0,
)
REGIMES = {regime.name: regime for regime in (LOCKSTEP, SOFT, WAN)}
