"""Memory: what a worker of one block holds against the end-to-end stack; counted, and at scales that mean something measured by real steps."""

from __future__ import annotations

from typing import Any

from blocktrain.config import RunConfig
from blocktrain.report.experiments.lab import Lab
from blocktrain.report.experiments.result import Experiment, Result, Row
from blocktrain.report.memory import MemoryReport, memory_report, paper_figures

MIB = 2**20


def key(lab: Lab) -> str:
    return lab.key(lab.paper_config(), lab.default_config(), lab.common_config(), more=lab.scale.measured)


def run(lab: Lab) -> Result:
    """Counts; takes two real steps of each kind in fresh processes where the scale says so."""
    arms = {"the paper's recipe": lab.paper_config(), "our default": lab.default_config(), "our blocks with a common vote": lab.common_config()}
    rows, figures = _paper_rows(), dict[str, Any]()
    for name, config in arms.items():
        lab.say(f"memory: {name}")
        report = memory_report(config, measure=lab.scale.measured)
        rows.append(Row(f"memory, {name}", "not stated for this shape", _line(report), _differs(lab, config, report)))
        figures[name] = report.to_json()
    return Result(rows, figures | {"paper": [figure.to_json() for figure in paper_figures()]})


def _paper_rows() -> list[Row]:
    """The paper's two figures, and shapes of ours that give them: arithmetic alone."""
    return [
        Row(
            f"memory, {figure.name}",
            f"{figure.paper_gib} GiB",
            f"{figure.gib:.3f} GiB, counted: {figure.model.blocks} x {figure.model.layers_per_block} layers, width {figure.model.width}",
            f"{figure.note}; a shape of ours that gives the figure, the paper's own is not known to us",
        )
        for figure in paper_figures()
    ]


def _line(report: MemoryReport) -> str:
    worker, full = report.worker.total, report.full.total
    text = (
        f"optimizer state {worker.moments / MIB:.2f} of {full.moments / MIB:.2f} MiB, activations {(worker.activations or 0) / MIB:.2f} of "
        f"{(full.activations or 0) / MIB:.2f} MiB, all {worker.total / MIB:.2f} of {full.total / MIB:.2f} MiB ({report.worker_over_full:.3f})"
    )
    if report.measured:
        m = report.measured
        text += f"; measured {m.worker / MIB:.1f} of {m.full / MIB:.1f} MiB ({m.worker_over_full:.3f})"
    return text


def _differs(lab: Lab, config: RunConfig, report: MemoryReport) -> str:
    return f"{lab.differs(config=config)}; {report.optimizer}; {'measured too' if report.measured else 'counted, not measured'}"


EXPERIMENT = Experiment("memory", key, run)
