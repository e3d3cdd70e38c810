"""The rules of rounds that a run may choose, with their checks, and the two formulas that follow from them.

A rule that is changed in a live run takes effect for a block when its next round opens (see `Round` in state.py for what a round fixes).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal

from blocktrain.errors import ConfigError

MIN_ARRIVALS = 3  # arrivals of a block before its deadline follows them
MIN_SPREAD = 0.05  # of the median: arrivals that are all alike still leave some slack


@dataclass(frozen=True)
class Rules:
    """Durations in seconds of the coordinator's clock; counts of inner steps, blocks, versions or refusals."""

    deadline: Literal["fixed", "recent"] = "recent"  # deadline_s always, or from a block's recent arrivals
    deadline_s: float = 60.0  # of a round, from its first assignment
    deadline_min_s: float = 5.0  # bounds of a deadline that follows arrivals
    deadline_max_s: float = 600.0
    deadline_mads: float = 4.0  # k in median + k MAD
    quorum: int = 2  # updates that close a round at its deadline; at twice the deadline one is enough
    heartbeat_limit_s: float = 30.0  # silence after which a worker is gone
    min_work_s: float = 2.0  # a round with less time left takes no further assignee
    inner_steps: int = 100  # steps leased with an assignment
    target_steps: int = 0  # that each block is to take in all; 0: no end
    min_span: int = 1  # consecutive blocks that one worker trains together
    max_span: int = 1
    replicas: int = 0  # updates that one round of a block expects at most; 0 is no limit
    max_age: int = 3  # versions that an update may be behind
    strikes: int = 3  # refusals by the gate that suspend a worker
    suspension_s: float = 600.0
    upload_limit_s: float = 3600.0  # for this long an upload that was admitted stays so
    forget_s: float = 86400.0  # silence after which a worker's record is dropped

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            least = 0 if field.name in ("max_age", "replicas", "target_steps") else 1e-6
            if isinstance(value, int | float) and not (math.isfinite(value) and value >= least):
                raise ConfigError(f"round.{field.name}: must be a positive, finite number, got {value}")
        if self.min_span > self.max_span:
            raise ConfigError(f"round.min_span: {self.min_span} is more than round.max_span {self.max_span}")
        if self.deadline_min_s > self.deadline_max_s:
            raise ConfigError(f"round.deadline_min_s: {self.deadline_min_s} is more than round.deadline_max_s {self.deadline_max_s}")
        least = min(self.deadline_s, self.deadline_min_s if self.deadline == "recent" else self.deadline_s)
        if self.min_work_s > least:
            raise ConfigError(f"round.min_work_s: {self.min_work_s} does not fit into a deadline of {least} s")


def deadline_of(rules: Rules, arrivals: Sequence[float]) -> float:
    """How long the next round of a block lasts; `arrivals` are its recent durations from assignment to update."""
    if rules.deadline == "fixed" or len(arrivals) < MIN_ARRIVALS:
        return rules.deadline_s
    median = statistics.median(arrivals)
    mad = statistics.median(abs(arrival - median) for arrival in arrivals)
    spread = max(mad, MIN_SPREAD * median)
    return min(max(median + rules.deadline_mads * spread, rules.deadline_min_s), rules.deadline_max_s)


def staleness_factor(age: int) -> float:
    """What an update counts that is `age` versions behind the block: (1 + age)^-1/2."""
    return (1 + age) ** -0.5
