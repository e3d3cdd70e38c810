"""Where experiments are done: one folder, one text, one scale, one seed; trainings one after another, each an ordinary run folder.

Arms have a fixed home, whichever experiment asks for them first (`long-run/paper` is also an arm of `sigma-range`), so nothing is trained twice.
`TrainingRun` resumes by itself: a killed training goes on, a finished one is left as it is. What was evaluated is kept in memory, since several
experiments look at one run.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from blocktrain.config import DataConfig, RunConfig, make_config, merge_fields, reference_config
from blocktrain.report.experiments.scale import COMMON, DEFAULT, PAPER, Fields, Scale
from blocktrain.report.memory import require_memory
from blocktrain.training.checkpoint import LoadedRun, load_run
from blocktrain.training.data import Corpus, heldout_windows
from blocktrain.training.evaluate import Evaluation, Evaluator, evaluate
from blocktrain.training.hardware import choose_hardware
from blocktrain.training.run import StepReport, TrainingRun

TELL_EVERY_S = 30.0
Say = Callable[[str], None]


@contextlib.contextmanager
def _never() -> Iterator[list[int]]:
    yield []


@dataclass
class Lab:
    """`stopping` gives, while something trains, a list that fills when it is to stop."""

    out: Path
    scale: Scale
    corpus: Corpus
    data: DataConfig
    seed: int = 0
    say: Say = lambda _: None
    stopping: Callable[[], AbstractContextManager[list[int]]] = _never
    evaluations: dict[Path, Evaluation] = field(default_factory=dict)

    # --- Runs ---

    def config(self, objective: Fields, over: Fields | None = None) -> RunConfig:
        """Settings of a run of this scale; `over` wins."""
        fields = merge_fields(self.scale.run_fields(objective, self.seed), over or {})
        return self.checked(fields)

    def checked(self, fields: Fields) -> RunConfig:
        """With this lab's text; raises ConfigError."""
        return make_config(merge_fields(fields, {"data": self.data.model_dump()}), f"scale {self.scale.name}")

    def train(self, home: str, config: RunConfig) -> Path:
        """Train OUT/home to its end, from wherever it stands; raises KeyboardInterrupt when stopped, and whatever TrainingRun raises."""
        folder = self.out / home
        require_memory(config)
        with self.stopping() as stopped:
            training = TrainingRun(folder, config, self.corpus, report=self._teller(home), say=self.say, stopped=lambda: bool(stopped))
            if not training.train() or stopped:
                self.say(f"stopped; a checkpoint is in {folder}. The same command goes on from it.")
                raise KeyboardInterrupt
        return folder

    def _teller(self, home: str) -> Callable[[StepReport], None]:
        began = [time.monotonic()]

        def tell(step: StepReport) -> None:
            if time.monotonic() - began[0] >= TELL_EVERY_S or step.updates == step.total_updates:
                began[0] = time.monotonic()
                ce = " ".join(f"{value:.3f}" for value in step.figures.ce)
                self.say(f"{home}: step {step.updates}/{step.total_updates}, CE {ce} nats/byte, {step.tokens_per_s:,.0f} bytes/s")

        return tell

    def evaluate(self, folder: Path) -> Evaluation:
        """All figures of a run; once."""
        if folder not in self.evaluations:
            self.say(f"{folder.relative_to(self.out)}: evaluating")
            self.evaluations[folder] = evaluate(load_run(folder, self.say), self.corpus, self.say)
        return self.evaluations[folder]

    def headline_windows(self, run: LoadedRun, count: int) -> list[float]:
        """Headline CE of each of `count` held-out windows, for paired comparisons, where nothing else is asked of a run."""
        windows = heldout_windows(self.corpus.heldout, run.config.model.positions, count)
        return Evaluator(run, windows).rollout().mean(0)[-1].tolist()

    # --- Arms that several experiments look at ---

    def default_config(self) -> RunConfig:
        return self.config(DEFAULT)

    def paper_config(self) -> RunConfig:
        return self.config(PAPER)

    def common_config(self) -> RunConfig:
        return self.config(DEFAULT, COMMON)

    def default_run(self) -> Path:
        return self.train("long-run/default", self.default_config())

    def paper_run(self) -> Path:
        return self.train("long-run/paper", self.paper_config())

    def common_run(self) -> Path:
        return self.train("long-run/common", self.common_config())

    def reference_run(self) -> Path:
        """The end-to-end Transformer beside our default."""
        return self.train("long-run/default/reference", reference_config(self.default_config()))

    def paper_reference_run(self) -> Path:
        """The one beside the paper's recipe: the same, unless the optimizer differs."""
        mine, its = reference_config(self.default_config()), reference_config(self.paper_config())
        return self.reference_run() if mine.digest == its.digest else self.train("long-run/paper/reference", its)

    # --- What is said of them ---

    def key(self, *configs: RunConfig, more: object = None) -> str:
        """Digest of everything that a saved result depends on: settings, text, scale."""
        settings = [config.model_dump(mode="json", exclude={"data": True, "train": {"checkpoint_every", "log_every"}}) for config in configs]
        made_from = [self.scale.name, settings, self.corpus.train_digest, self.corpus.heldout_digest, more]
        return hashlib.sha256(json.dumps(made_from, sort_keys=True, default=str).encode()).hexdigest()

    def differs(self, evaluation: Evaluation | None = None, config: RunConfig | None = None) -> str:
        """Data, size and hardware of ours, since all three are others than the paper's."""
        config = config or self.default_config()
        size = f"{config.model.blocks} x {config.model.layers_per_block} layers, width {config.model.width}"
        if evaluation is not None:
            size += f", {evaluation.parameters:,} parameters, {evaluation.bytes_seen:,} bytes a block"
        return f"{self.text}; {size}; {choose_hardware(config)}, {os.cpu_count()} cores"

    @property
    def text(self) -> str:
        """Name of the corpus; of a file, its own."""
        return Path(self.data.corpus).name


def paired(ours: Sequence[float], others: Sequence[float]) -> tuple[float, float]:
    """Mean difference of two runs over the same windows, and its standard error (nan for a single window)."""
    differences = [a - b for a, b in zip(ours, others, strict=True)]
    error = statistics.stdev(differences) / len(differences) ** 0.5 if len(differences) > 1 else float("nan")
    return statistics.fmean(differences), error


def gap_text(ours: Sequence[float], others: Sequence[float]) -> str:
    """`+0.0493 ± 0.0051`."""
    mean, error = paired(ours, others)
    return f"{mean:+.4f} ± {error:.4f}"


def ce_list(values: Sequence[float | None] | None) -> str:
    """`1.312, 1.298, –`."""
    return "–" if values is None else ", ".join("–" if v is None else f"{v:.3f}" for v in values)


def plain(evaluation: Evaluation) -> dict[str, Any]:
    """What is kept of an evaluation."""
    return evaluation.to_json()
