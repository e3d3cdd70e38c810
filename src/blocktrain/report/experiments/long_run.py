"""The long run: the paper's recipe, our default, and our default with a common vote, beside the end-to-end Transformer of their shape."""

from __future__ import annotations

from typing import Any

from blocktrain.report.experiments.lab import Lab, ce_list, gap_text, paired, plain
from blocktrain.report.experiments.result import Experiment, Result, Row
from blocktrain.training.evaluate import Evaluation

PAPER_SAYS = "CE 1.359 (perplexity 3.89), end to end 1.32: gap about 0.04"


def key(lab: Lab) -> str:
    return lab.key(lab.paper_config(), lab.default_config(), lab.common_config())


def run(lab: Lab) -> Result:
    """Trains the recipes and their references."""
    reference, default = lab.evaluate(lab.reference_run()), lab.default_run()
    paper_reference, paper = lab.evaluate(lab.paper_reference_run()), lab.paper_run()
    ours, theirs, common = lab.evaluate(default), lab.evaluate(paper), lab.evaluate(lab.common_run())
    rows = [
        Row("long-run, the paper's recipe", PAPER_SAYS, _line(theirs, paper_reference), lab.differs(theirs, lab.paper_config())),
        Row("long-run, our default", "not stated (another recipe)", _line(ours, reference), lab.differs(ours)),
        Row("long-run, our blocks with a common vote", "not stated (another recipe)", _line(common, reference), lab.differs(common)),
    ]
    figures = {"paper": beside(theirs, paper_reference), "default": beside(ours, reference), "common": beside(common, reference)}
    runs = {f"long-run/{name}": figures[name] for name in ("default", "paper", "common")}
    return Result(rows, figures, tuple(runs), evaluations=runs)


def beside(evaluation: Evaluation, reference: Evaluation) -> dict[str, Any]:
    """The figures with the gap to a reference that does not lie in the run's own folder."""
    gap, error = paired(evaluation.headline_by_window, reference.headline_by_window)
    return plain(evaluation) | {"reference_ce": reference.headline_ce, "gap": gap, "gap_standard_error": error}


def _line(evaluation: Evaluation, reference: Evaluation) -> str:
    told = plain(evaluation)
    gain = "–" if evaluation.composition_gain is None else f"{evaluation.composition_gain:+.3f}"
    gap = gap_text(evaluation.headline_by_window, reference.headline_by_window)
    return (
        f"CE {evaluation.headline_ce:.3f} (perplexity {told['perplexity']:.2f}), end to end {reference.headline_ce:.3f}: gap {gap}; "
        f"after each block {ce_list(evaluation.rollout_ce)}; gain {gain}; n-gram {evaluation.ngram_ce:.3f}"
    )


EXPERIMENT = Experiment("long-run", key, run)
