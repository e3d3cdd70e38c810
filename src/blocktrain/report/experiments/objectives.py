"""Two changes to the paper's recipe that the paper argues about: noise down to zero (target leakage), and embedding MSE instead of cross entropy."""

from __future__ import annotations

from blocktrain.config import RunConfig
from blocktrain.report.experiments.lab import Lab, ce_list, plain
from blocktrain.report.experiments.result import Experiment, Result, Row
from blocktrain.report.experiments.scale import PAPER
from blocktrain.training.evaluate import Evaluation

LEAKING, MSE = "sigma-range/sigma-0-2", "mse/embedding-mse"


def leaking_config(lab: Lab) -> RunConfig:
    return lab.config(PAPER, {"noise": {"sigma_min": 0.0, "sigma_max": 2.0}})


def mse_config(lab: Lab) -> RunConfig:
    return lab.config({**PAPER, "loss": "embedding_mse"})


def sigma_range(lab: Lab) -> Result:
    """Oracle CE (the answer is shown, with noise) against rollout CE (it is not)."""
    cured, leaking = lab.evaluate(lab.paper_run()), lab.evaluate(lab.train(LEAKING, leaking_config(lab)))
    rows = [
        Row("sigma-range, sigma in [1, 10]", "the paper's cure of target leakage", _line(cured), lab.differs(cured)),
        Row("sigma-range, sigma in [0, 2]", "leaks the target (figure not stated)", _line(leaking), lab.differs(leaking)),
    ]
    figures = {"sigma 1 to 10": plain(cured), "sigma 0 to 2": plain(leaking)}
    return Result(rows, figures, ("long-run/paper", LEAKING), evaluations={"long-run/paper": plain(cured), LEAKING: plain(leaking)})


def mse(lab: Lab) -> Result:
    """The same recipe with either loss, at equal bytes."""
    entropy, squared = lab.evaluate(lab.paper_run()), lab.evaluate(lab.train(MSE, mse_config(lab)))
    ours = f"CE {squared.headline_ce:.3f} with MSE, {entropy.headline_ce:.3f} with cross entropy; after each block {ce_list(squared.rollout_ce)}"
    row = Row("mse, embedding MSE against cross entropy", "cross entropy far better (figure not stated)", ours, lab.differs(squared))
    return Result([row], {"embedding_mse": plain(squared), "cross_entropy": plain(entropy)}, (MSE,), evaluations={MSE: plain(squared)})


def _line(evaluation: Evaluation) -> str:
    return f"oracle CE {ce_list(evaluation.oracle_ce)}; rollout CE {ce_list(evaluation.rollout_ce)}"


SIGMA_RANGE = Experiment("sigma-range", lambda lab: lab.key(lab.paper_config(), leaking_config(lab)), sigma_range)
MSE_LOSS = Experiment("mse", lambda lab: lab.key(lab.paper_config(), mse_config(lab)), mse)
