"""The one configuration of a run: every setting with its type, default, unit, meaning and check.

A run is a folder with `run.toml`. The file holds the sections below and nothing else decides how the run behaves; commands may
change a setting only through `--set section.field=value`, which goes through the same checks. Each section is handed on
whole to the code that uses it (`config.noise` to the partition, `config.model` to the stack, ...), so a setting is two hops from its
line of use.

Left out on purpose: block ranges of sigma, FLOPs, parameter counts. They are derived where they are needed and never stored.
"""

from __future__ import annotations

import hashlib
import json
import math
import tomllib
from pathlib import Path
from statistics import NormalDist
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from blocktrain.errors import ConfigError


class Section(BaseModel):
    """A frozen table of run.toml: unknown names, wrong types and non-finite numbers are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class ModelConfig(Section):
    """Shape of the stack: `blocks` x `layers_per_block` transformer layers."""

    blocks: int = Field(default=3, ge=1, le=4096, description="number of blocks B the stack is cut into")
    layers_per_block: int = Field(default=4, ge=1, le=4096, description="transformer layers in one block (L = B x this)")
    width: int = Field(default=128, ge=8, le=65536, description="model width D")
    heads: int = Field(default=2, ge=1, le=1024, description="attention heads")
    positions: int = Field(default=256, ge=2, le=1 << 20, description="sequence length T in bytes")
    embed_dim: int = Field(default=128, ge=2, le=65536, description="width E of the target embedding")
    mlp: Literal["relu2", "swiglu"] = Field(default="relu2", description="feed-forward kind")
    attention_ratio: float = Field(
        default=0.5, gt=0, le=64, description="channels of all heads together / model width; this x width / heads must be even (rotary)"
    )
    mlp_ratio: float = Field(default=2.0, gt=0, le=64, description="feed-forward width / model width (swiglu takes 2/3 of it)")
    short_conv: int = Field(
        default=3, ge=0, le=64, description="earlier positions that what each sub-layer reads is mixed with, channel by channel; 0 is none"
    )
    noise_dim: int = Field(default=64, ge=2, le=4096, description="width of the noise-level embedding; even")
    block_heads: bool = Field(default=False, description="each block has a head of its own; false: all share one, as the reference does in any case")

    @model_validator(mode="after")
    def check(self) -> ModelConfig:
        head = self.attention_ratio * self.width / self.heads
        if abs(head - round(head)) > 1e-6 or round(head) % 2 or not round(head):
            inner = f"width {self.width}" + (f" x attention_ratio {self.attention_ratio:g}" if self.attention_ratio != 1 else "")
            raise ValueError(f"model.heads: {inner} / heads {self.heads} must be a whole, even number, it is {head:g}")
        if self.noise_dim % 2:
            raise ValueError(f"model.noise_dim: must be even, got {self.noise_dim}")
        return self

    @property
    def layers(self) -> int:
        return self.blocks * self.layers_per_block

    @property
    def head_width(self) -> int:
        """Channels K of a head."""
        return round(self.attention_ratio * self.width / self.heads)

    @property
    def attention_width(self) -> int:
        """Channels of all heads, H K: the inner width of attention."""
        return self.heads * self.head_width

    @property
    def layer_matrices(self) -> int:
        """Weights in the matrices of one layer."""
        return 4 * self.width * self.attention_width + (3 if self.mlp == "swiglu" else 2) * self.width * self.mlp_hidden

    @property
    def mlp_hidden(self) -> int:
        """Feed-forward width; swiglu has three matrices instead of two, so it gets 2/3 of the width for equal parameters."""
        hidden = self.width * self.mlp_ratio * (2 / 3 if self.mlp == "swiglu" else 1)
        return max(8, round(hidden / 8) * 8)


class NoiseConfig(Section):
    """The sigma density (log-normal, truncated to [sigma_min, sigma_max]) and its cut into one range per block."""

    sigma_min: float = Field(default=1.0, ge=0, description="lowest noise level (0 allowed: shows target leakage)")
    sigma_max: float = Field(default=10.0, gt=0, description="highest noise level, where a sweep starts")
    P_mean: float = Field(default=-1.2, description="mean of ln(sigma)")
    P_std: float = Field(default=1.2, gt=0, description="standard deviation of ln(sigma)")
    sigma_data: float = Field(default=0.5, gt=0, description="EDM's data scale")
    overlap: float = Field(default=0.05, ge=0, le=1, description="each block's range is widened on both sides by this share of its own log-width")
    partition: Literal["lognormal", "information"] | list[float] = Field(
        default="lognormal",
        description="lognormal: equal probability; information: equal fall of cross entropy, fitted while training; "
        "or a list of the B+1 falling boundaries from sigma_max to sigma_min",
    )
    information_fit_at: float = Field(default=0.1, gt=0, lt=1, description="share of the steps after which `information` is fitted")

    @model_validator(mode="after")
    def check(self) -> NoiseConfig:
        if self.sigma_min >= self.sigma_max:
            raise ValueError(f"noise.sigma_min: {self.sigma_min} must be below noise.sigma_max {self.sigma_max}")
        if self.sigma_max < 1e-3:
            raise ValueError(f"noise.sigma_max: must be at least 0.001, got {self.sigma_max}")
        density = NormalDist(self.P_mean, self.P_std)
        inside = density.cdf(math.log(self.sigma_max)) - (density.cdf(math.log(self.sigma_min)) if self.sigma_min else 0.0)
        if inside < 1e-6:
            raise ValueError(
                f"noise.P_mean, noise.P_std: the density has a share of {inside:.1e} between sigma_min and sigma_max, too little to draw from"
            )
        if isinstance(self.partition, list):
            cuts = self.partition
            if any(a <= b for a, b in zip(cuts, cuts[1:], strict=False)):
                raise ValueError(f"noise.partition: boundaries must fall, got {cuts}")
            if len(cuts) < 2 or cuts[0] != self.sigma_max or cuts[-1] != self.sigma_min:
                raise ValueError(f"noise.partition: must run from sigma_max {self.sigma_max} to sigma_min {self.sigma_min}, got {cuts}")
        return self


MAX_VOTERS = 255  # blocks whose votes can be summed in 32 bits


class ObjectiveConfig(Section):
    """What a block learns from, and how the blocks are composed. The default measures best with one block a worker: each reads alone, all vote."""

    input: Literal["independent", "upstream"] = Field(
        default="independent", description="a block sees (x, z, sigma) alone, or also the detached state of the block before it"
    )
    loss: Literal["cross_entropy", "embedding_mse"] = Field(
        default="cross_entropy", description="of the denoising term: over the vocabulary, or on the target embedding"
    )
    span: int = Field(default=1, ge=1, description="consecutive blocks w that are trained together; 1 is the paper, B is end-to-end")
    private_layers: int = Field(
        default=0, ge=0, le=64, description="decoder layers of a block's own, not handed on (upstream only, not in the last block)"
    )
    weighting: Literal["edm", "none"] = Field(default="edm", description="weight of a sample's denoising loss as a function of its sigma")
    denoise_weight: float = Field(
        default=0.0, ge=0, description="weight of the denoising term; 0 leaves the noisy target out everywhere, the paper's recipe has 1"
    )
    anchor_weight: float = Field(
        default=1.0, ge=0, description="weight of plain cross entropy with the target information absent; the paper's recipe has 0"
    )
    readout: Literal["posterior", "evidence_free"] = Field(
        default="posterior", description="keep the evidence <z,e>/sigma^2 in the logits or take it out"
    )
    combine: Literal["auto", "last", "mean"] = Field(
        default="auto",
        description="whose prediction is scored and served: the last block's, or the mean of all blocks' log-probabilities; "
        "auto: mean where blocks are independent and without noise, last elsewhere",
    )
    vote_weight: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="share, 0 to 1, of a block's loss that is the cross entropy of all blocks' mean, the others taken as they are, with many workers "
        "as they were when the work was given; 0: each learns alone. Needs independent blocks without noise, and train.order = 'interleaved'",
    )
    vote_from: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="share of train.steps after which vote_weight takes effect; before, each block learns alone. Raising train.steps moves it on; "
        "a worker's assignment is wholly before or after it",
    )
    start: Literal["noise", "zero"] = Field(default="zero", description="state z a sweep starts from; the paper's recipe has noise")
    window: int = Field(
        default=0,
        ge=0,
        description="W: in some sequences 1 to W of every 2 W positions see a mask id for their context, for sweeps of W + 1 bytes; 0 is off",
    )
    window_share: float = Field(default=0.5, gt=0, le=1, description="share of the training sequences in which positions are masked")

    @model_validator(mode="after")
    def check(self) -> ObjectiveConfig:
        if self.denoise_weight == 0 and self.anchor_weight == 0:
            raise ValueError("objective.denoise_weight: 0 needs objective.anchor_weight > 0, or nothing is learnt")
        if self.denoise_weight == 0 and self.start == "noise":
            raise ValueError("objective.start: must be 'zero' when objective.denoise_weight = 0, the blocks never see noise")
        if self.denoise_weight == 0 and self.loss == "embedding_mse":
            raise ValueError("objective.loss: embedding_mse needs objective.denoise_weight > 0")
        if self.loss == "embedding_mse" and (self.anchor_weight or self.readout == "evidence_free"):
            name = "anchor_weight" if self.anchor_weight else "readout"
            raise ValueError(f"objective.{name}: needs objective.loss = 'cross_entropy', an embedding has no logits to anchor or to free of evidence")
        if self.vote_weight and not self.alone:
            raise ValueError(f"objective.vote_weight: {self.vote_weight:g} needs objective.input = 'independent' and objective.denoise_weight = 0")
        if self.input == "independent" and self.span > 1:
            raise ValueError(f"objective.span: {self.span} needs objective.input = 'upstream', independent blocks share no gradient")
        if self.input == "independent" and self.private_layers:
            raise ValueError("objective.private_layers: needs objective.input = 'upstream', an independent block hands nothing on")
        return self

    @property
    def noisy(self) -> bool:
        """Whether the noisy target z takes part at all."""
        return self.denoise_weight > 0

    @property
    def alone(self) -> bool:
        """Whether each block is a language model of its own: it reads the context and nothing else."""
        return self.input == "independent" and not self.noisy

    @property
    def votes(self) -> bool:
        """Whether the prediction is the mean of all blocks' log-probabilities."""
        return self.combine == "mean" or (self.combine == "auto" and self.alone)

    @property
    def parallel(self) -> bool:
        """Whether no block waits for another: each reads the context alone, and all vote."""
        return self.alone and self.votes

    @property
    def reading(self) -> dict[str, str]:
        """The settings that only say how a trained run is read."""
        return {"start": self.start, "readout": self.readout, "combine": self.combine}


class DataConfig(Section):
    """Which text; bytes are the tokens."""

    corpus: str = Field(default="wiki", min_length=1, description="wiki, python, wikitext-2, wikitext-103, or a path")
    heldout: str = Field(default="", description="path of the held-out text; empty takes the tail of the corpus")
    heldout_fraction: float = Field(default=0.05, gt=0, lt=1, description="share of the corpus that is held out when `heldout` is empty")


class TrainConfig(Section):
    """The inner loop."""

    steps: int = Field(default=1200, ge=1, le=1 << 40, description="optimizer steps per block")
    batch_size: int = Field(default=16, ge=1, le=1 << 20, description="sequences per step")
    optimizer: Literal["muon", "adamw"] = Field(default="muon", description="muon: matrices by Muon, the rest by AdamW")
    lr: float = Field(default=0.01, gt=0, description="AdamW learning rate (all weights; with muon only what is not a hidden matrix)")
    muon_lr: float = Field(default=0.02, gt=0, description="Muon learning rate")
    weight_decay: float = Field(default=0.0, ge=0, description="decoupled weight decay of the matrices")
    warmup_steps: int = Field(default=50, ge=0, description="linear rise of the learning rate")
    cooldown: float = Field(default=0.5, ge=0, le=1, description="last share of the steps over which the learning rate falls linearly to 0")
    clip_norm: float = Field(default=1.0, ge=0, description="gradient norm limit of each block and of the interface; 0 is off")
    ema: float = Field(default=0.0, ge=0, lt=1, description="decay of the exponential moving average that is evaluated and served; 0 is off")
    samples: Literal["auto", "shared", "own"] = Field(
        default="auto",
        description="all blocks learn from the same batches, or each block reads the text in an order of its own; "
        "auto: own where blocks are independent and without noise, as long as they do not learn from their common vote; shared elsewhere",
    )
    order: Literal["interleaved", "sequential"] = Field(
        default="interleaved",
        description="every block at each step, or one block after another with only that block's weights, gradients and moments in memory",
    )
    precision: Literal["auto", "float32", "bfloat16"] = Field(
        default="auto",
        description="autocast; auto takes bfloat16 where the hardware is fast at it: GPUs and, from width 192 on, CPUs that have units for it",
    )
    device: Literal["auto", "cpu", "cuda", "mps"] = Field(default="auto", description="auto takes CUDA, then MPS, then the CPU")
    checkpoint_every: int = Field(default=200, ge=1, description="steps between checkpoints")
    log_every: int = Field(default=10, ge=1, description="steps between lines of metrics.jsonl")


class EvaluateConfig(Section):
    """How much held-out text, and how many draws."""

    windows: int = Field(default=64, ge=1, le=1 << 24, description="held-out sequences of T bytes that are scored")
    noise_draws: int = Field(default=8, ge=1, le=1 << 16, description="sweeps averaged where a sweep starts from noise")
    sigma_bins: int = Field(default=8, ge=1, le=256, description="bins of the table of cross entropy per sigma")


class RoundConfig(Section):
    """Rounds of many workers (docs/rounds.md); no effect on one machine. A live run takes changes up, each block with its next round."""

    deadline: Literal["fixed", "recent"] = Field(default="recent", description="deadline_s always, or from a block's recent arrivals: median + k MAD")
    deadline_s: float = Field(
        default=120.0, gt=0, le=1e7, description="seconds a round lasts from its first assignment; until three arrivals if recent"
    )
    deadline_min_s: float = Field(default=5.0, gt=0, le=1e7, description="lower bound in seconds of a deadline that follows arrivals")
    deadline_max_s: float = Field(default=1800.0, gt=0, le=1e7, description="upper bound in seconds of a deadline that follows arrivals")
    deadline_mads: float = Field(default=4.0, ge=1e-6, le=1e3, description="k in median + k MAD")
    quorum: int = Field(default=2, ge=1, le=1 << 20, description="updates that close a round at its deadline; at twice the deadline one is enough")
    replicas: int = Field(default=0, ge=0, le=1 << 20, description="most workers that one round of a block takes, the others wait; 0 is no limit")
    inner_steps: int = Field(default=50, ge=1, le=1 << 30, description="optimizer steps of one assignment")
    min_span: int = Field(default=1, ge=1, le=4096, description="fewest consecutive blocks that one worker trains together")
    max_span: int = Field(default=1, ge=1, le=4096, description="most consecutive blocks that one worker trains together, if its memory holds them")
    max_age: int = Field(default=3, ge=0, le=1 << 20, description="versions that an update may be behind and still count; 0 drops late work")
    min_work_s: float = Field(default=2.0, gt=0, le=1e7, description="a round with fewer seconds left takes no further worker")
    heartbeat_limit_s: float = Field(default=30.0, ge=0.1, le=1e6, description="seconds of silence after which a worker is not waited for")
    upload_limit_s: float = Field(default=3600.0, gt=0, le=1e7, description="seconds for which an upload that has begun stays admitted")
    strikes: int = Field(default=3, ge=1, le=1 << 20, description="refusals by the gate that suspend a worker")
    suspension_s: float = Field(default=600.0, gt=0, le=1e7, description="seconds of a suspension")
    forget_s: float = Field(default=86400.0, gt=0, le=1e9, description="seconds of silence after which a worker's record is dropped")

    @model_validator(mode="after")
    def check(self) -> RoundConfig:
        if self.min_span > self.max_span:
            raise ValueError(f"round.min_span: {self.min_span} is more than round.max_span {self.max_span}")
        if self.deadline_min_s > self.deadline_max_s:
            raise ValueError(f"round.deadline_min_s: {self.deadline_min_s} is more than round.deadline_max_s {self.deadline_max_s}")
        least = min(self.deadline_s, self.deadline_min_s if self.deadline == "recent" else self.deadline_s)
        if self.min_work_s > least:
            raise ValueError(f"round.min_work_s: {self.min_work_s} does not fit into a deadline of {least} s")
        return self


CodecName = Literal["fp32", "bf16", "int8"]


class OuterConfig(Section):
    """How the updates of a round become a block's next version, and how both travel."""

    optimizer: Literal["sgd", "nesterov"] = Field(default="sgd", description="sgd with lr 1 is the mean of the replicas; nesterov is DiLoCo's")
    lr: float = Field(default=1.0, gt=0, le=100, description="outer learning rate; 0.7 is usual with nesterov")
    momentum: float = Field(default=0.9, ge=0, lt=1, description="of nesterov")
    interface: Literal["averaged", "frozen"] = Field(
        default="averaged", description="the shared interface moves by the mean of all accepted updates, or stays as it was drawn"
    )
    norm_limit: float = Field(default=3.0, ge=0, description="an update's norm may be this many times the median of its round; 0 is off")
    norm_beyond: Literal["clip", "refuse"] = Field(default="clip", description="what happens to an update beyond norm_limit")
    up_codec: CodecName = Field(default="fp32", description="of updates: fp32, bf16, or int8 in groups of 256 with error feedback")
    down_codec: CodecName = Field(default="fp32", description="of the step from a version to the next; a lossy one is what defines the next version")
    upstream_codec: CodecName = Field(default="fp32", description="of the frozen blocks that a worker needs beside its own")


class LimitsConfig(Section):
    """What a coordinator lets the outside do."""

    json_kb: int = Field(default=64, ge=1, le=1 << 20, description="longest JSON body in KiB")
    part_mb: float = Field(default=16.0, gt=0.001, le=1024, description="size in MiB of the parts an update is sent in")
    parallel_transfers: int = Field(default=8, ge=1, le=4096, description="downloads served at once; who comes later waits in line")
    requests_per_s: int = Field(default=50, ge=1, le=1 << 20, description="requests of one worker, on average over ten seconds")
    joins_per_minute: int = Field(default=600, ge=1, le=1 << 20, description="attempts to join from one address, right or wrong")
    max_workers: int = Field(default=10000, ge=1, le=1 << 24, description="members at one time")
    keep_versions: int = Field(default=3, ge=1, le=1 << 20, description="versions of each block that stay in the store")
    keep_updates: bool = Field(default=False, description="keep every accepted update, so that a run can be replayed from its first version")
    free_disk_mb: float = Field(default=64.0, ge=0, description="MiB that must stay free in a local store; uploads wait below it")


class RunConfig(Section):
    """A whole run. `seed` is folded with (block, step, purpose) into every random draw."""

    seed: int = Field(default=0, ge=0, lt=1 << 62, description="the run's seed")
    model: ModelConfig = ModelConfig()
    noise: NoiseConfig = NoiseConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    round: RoundConfig = RoundConfig()
    outer: OuterConfig = OuterConfig()
    limits: LimitsConfig = LimitsConfig()

    @model_validator(mode="after")
    def check(self) -> RunConfig:
        blocks = self.model.blocks
        if self.objective.span > blocks:
            raise ValueError(f"objective.span: {self.objective.span} is more than model.blocks {blocks}")
        if self.objective.votes and blocks > MAX_VOTERS:
            raise ValueError(f"objective.combine: mean is for at most {MAX_VOTERS} blocks, model.blocks is {blocks}; last is for any number")
        if isinstance(self.noise.partition, list) and len(self.noise.partition) != blocks + 1:
            raise ValueError(f"noise.partition: needs model.blocks + 1 = {blocks + 1} boundaries, got {len(self.noise.partition)}")
        if self.objective.window >= self.model.positions:
            raise ValueError(f"objective.window: {self.objective.window} must be below model.positions {self.model.positions}")
        if self.model.block_heads and self.objective.loss == "embedding_mse":
            raise ValueError("model.block_heads: needs objective.loss = 'cross_entropy', an embedding is read without a head")
        if self.noise.partition == "information" and not (self.objective.noisy and self.objective.span == 1 and blocks > 1):
            raise ValueError("noise.partition: 'information' needs objective.denoise_weight > 0, objective.span = 1 and model.blocks > 1")
        if self.round.min_span > blocks:
            raise ValueError(f"round.min_span: {self.round.min_span} is more than model.blocks {blocks}")
        if self.round.max_span > 1 and self.objective.input == "independent":
            raise ValueError(f"round.max_span: {self.round.max_span} needs objective.input = 'upstream', independent blocks share no gradient")
        if self.train.samples == "own" and self.objective.input == "upstream":
            raise ValueError("train.samples: own needs objective.input = 'independent', a state is handed on for the samples it was made from")
        if self.train.order == "sequential":
            if self.objective.vote_weight:
                raise ValueError("train.order: sequential trains a block before the next one is there, objective.vote_weight must be 0")
            if self.objective.span > 1:
                raise ValueError("train.order: sequential trains one block at a time, objective.span must be 1")
            if self.noise.partition == "information":
                raise ValueError("train.order: sequential cannot fit noise.partition = 'information', which needs every block's loss at once")
        return self

    @property
    def digest(self) -> str:
        """sha256 of the canonical JSON of what decides how the run trains on one machine.

        Left out: where the text lies, what is logged, how much is evaluated, and how many workers share the work.
        """
        several = {"round": True, "outer": True, "limits": True}
        read = {"objective": {"combine"}, "train": {"checkpoint_every", "log_every"}}
        fields = self.model_dump(mode="json", exclude={"data": True, "evaluate": True, **read, **several})
        for section in ("model", "objective"):
            for name, then in ADDED[section].items():  # runs from before these were there are the same runs
                if fields[section][name] == then:
                    del fields[section][name]
        if not self.objective.vote_weight:
            fields["objective"].pop("vote_from", None)  # of a vote that there is not
        if self.objective.window:
            fields["objective"]["window"] = f"1 to {self.objective.window}"  # once all of one width, at the end and in the noisy view alone
        fields["train"]["samples"] = "own"
        if not self.own_samples:
            del fields["train"]["samples"]
        return hashlib.sha256(json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()).hexdigest()

    @property
    def own_samples(self) -> bool:
        """Whether each block begins with an order of the text of its own."""
        return self.own_samples_at(0)

    def own_samples_at(self, step: int) -> bool:
        """Whether each block reads step `step` (from 0) in an order of its own."""
        return self.train.samples == "own" or (self.train.samples == "auto" and self.objective.alone and not self.votes_at(step))

    def votes_at(self, step: int) -> bool:
        """Whether blocks learn from their common vote at step `step` (from 0)."""
        return self.objective.vote_weight > 0 and step >= self.objective.vote_from * self.train.steps

    @property
    def tokens_per_step(self) -> int:
        return self.train.batch_size * self.model.positions


# The layer of most Transformers, and of the paper. Ours has half the inner width, so that the same weights make twice as many layers, and taps.
ORDINARY: dict[str, Any] = {"attention_ratio": 1.0, "mlp_ratio": 4.0, "short_conv": 0}

# Presets: the one main dial. Each is only what differs from the defaults above.
PRESETS: dict[str, dict[str, dict[str, Any]]] = {
    "default": {},
    "smoke": {
        "model": {"blocks": 2, "layers_per_block": 2, "width": 64, "heads": 2, "positions": 128, "embed_dim": 64},
        "train": {"steps": 120, "batch_size": 8, "warmup_steps": 10, "checkpoint_every": 60},
        "evaluate": {"windows": 16, "noise_draws": 8},
    },
    "laptop": {
        "model": {"blocks": 3, "layers_per_block": 4, "width": 128, "heads": 2, "positions": 256},
        "train": {"steps": 400, "batch_size": 8, "warmup_steps": 20, "checkpoint_every": 100},
    },
    "bench": {
        "model": {"blocks": 3, "layers_per_block": 4, "width": 128, "heads": 2, "positions": 256, "embed_dim": 128},
        "train": {"steps": 1200, "batch_size": 16},
    },
    "paper": {
        "model": {"blocks": 3, "layers_per_block": 4, "width": 256, "heads": 8, "positions": 256, "embed_dim": 256} | ORDINARY,
        "noise": {"sigma_min": 1.0, "sigma_max": 10.0, "partition": "lognormal", "overlap": 0.05},
        "objective": {
            "input": "independent",
            "span": 1,
            "denoise_weight": 1.0,
            "anchor_weight": 0.0,
            "weighting": "edm",
            "readout": "posterior",
            "start": "noise",
        },
        "train": {"steps": 12000, "batch_size": 32, "optimizer": "adamw", "lr": 2e-3, "warmup_steps": 200, "weight_decay": 0.01},
    },
}


def reference_config(config: RunConfig) -> RunConfig:
    """The end-to-end Transformer of the same layers, tables, optimizer, schedule and data: one span over the whole stack, no noise."""
    objective = ObjectiveConfig(input="upstream", span=config.model.blocks, denoise_weight=0.0, anchor_weight=1.0, start="zero")
    train = config.train.model_copy(update={"order": "interleaved", "samples": "auto"})
    noise = config.noise if config.noise.partition != "information" else config.noise.model_copy(update={"partition": "lognormal"})
    model = config.model.model_copy(update={"block_heads": False})  # one read-out needs one head
    return config.model_copy(update={"model": model, "objective": objective, "train": train, "noise": noise})


def make_config(fields: dict[str, Any], source: str = "run.toml") -> RunConfig:
    """Check nested `fields`; raises ConfigError with one line that names the setting, where it stands, and what it may be."""
    try:
        return RunConfig.model_validate(fields)
    except ValidationError as error:
        raise ConfigError(f"{source}: {_first_problem(error)}") from None


def _first_problem(error: ValidationError) -> str:
    # Of a setting that may be this or that, the complaint that got furthest into the value is the useful one.
    first = max(error.errors(), key=lambda problem: len(problem["loc"]) if problem["loc"][:1] == error.errors()[0]["loc"][:1] else 0)
    place = ".".join(str(part) for part in first["loc"] if not str(part).startswith(("list[", "literal[")))
    if first["type"] == "value_error":
        return str(first.get("ctx", {}).get("error", first["msg"]))
    if first["type"] == "extra_forbidden":
        return f"{place}: no such setting{_suggest(first['loc'])}"
    given = first.get("input")
    return f"{place}: {first['msg'][0].lower()}{first['msg'][1:]}, got {_shorten(given)}"


def _shorten(value: object) -> str:
    """A value as it can stand in one line."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _suggest(loc: tuple[int | str, ...]) -> str:
    import difflib

    table: Any = RunConfig
    for part in loc[:-1]:
        field = table.model_fields.get(str(part))
        if field is None:
            return ""
        table = field.annotation
    names = list(table.model_fields)
    close = difflib.get_close_matches(str(loc[-1]), names, n=1)
    return f" (did you mean {close[0]}?)" if close else f"; known: {', '.join(names)}"


def preset_fields(name: str) -> dict[str, Any]:
    """The nested settings of a preset, as a fresh copy."""
    if name not in PRESETS:
        raise ConfigError(f"--preset: no preset {name!r}; known: {', '.join(PRESETS)}")
    return {section: dict(values) for section, values in PRESETS[name].items()}


def merge_fields(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """`over` wins, table by table."""
    merged = dict(base)
    for key, value in over.items():
        merged[key] = merge_fields(merged[key], value) if isinstance(value, dict) and isinstance(merged.get(key), dict) else value
    return merged


def parse_assignment(text: str) -> dict[str, Any]:
    """`section.field=value` to nested fields. The value is read as TOML; what is not TOML is a string."""
    name, equals, value = text.partition("=")
    path = name.strip().split(".")
    if not equals or not all(path) or len(path) > 2:
        raise ConfigError(f"--set {text}: expected section.field=value, for example --set train.steps=500")
    try:
        table = tomllib.loads(f"value = {value.strip()}")
        parsed = table["value"] if len(table) == 1 else value.strip()
    except (ValueError, RecursionError):  # not TOML, or TOML beyond reason
        parsed = value.strip()
    return {path[0]: parsed} if len(path) == 1 else {path[0]: {path[1]: parsed}}


# What runs did before these could be set. Files that runs write hold every setting, so one in which only these are missing is older than they are.
ADDED: dict[str, dict[str, Any]] = {
    "model": {"short_conv": 0, "attention_ratio": 1.0, "block_heads": False},
    "objective": {"vote_weight": 0.0, "vote_from": 0.0},
    "train": {"samples": "shared"},
}


def with_added_settings(fields: dict[str, Any]) -> dict[str, Any]:
    """The settings of a run from before some of them were there, said in full; those that a person wrote (fewer) are left as they are."""
    for section, added in ADDED.items():
        table = fields.get(section)
        if isinstance(table, dict) and table.keys() >= getattr(RunConfig(), section).model_dump().keys() - added.keys():
            fields = {**fields, section: {**added, **table}}
    return fields


def read_toml(path: Path) -> dict[str, Any]:
    """The nested settings of a run file."""
    try:
        return with_added_settings(tomllib.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read ({error})") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None


def load_config(path: Path) -> RunConfig:
    """Read and check a run file."""
    return make_config(read_toml(path), str(path))


def to_toml(config: RunConfig) -> str:
    """Every setting of the run, in the order of this file, each with its meaning as a comment."""
    lines = ["# BlockTrain run. Change a setting here, then run the same command again (docs/settings.md explains them)."]
    lines += [f"seed = {config.seed}"]
    for name, section in config:
        if isinstance(section, Section):
            lines += ["", f"[{name}]"]
            lines += [f"{key} = {_toml_value(value)}  # {_description(type(section), key)}" for key, value in section]
    return "\n".join(lines) + "\n"


def _toml_value(value: Any) -> str:
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # the one character that JSON leaves and TOML forbids
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return "[" + ", ".join(_toml_value(item) for item in value) + "]"
    if isinstance(value, float):
        assert math.isfinite(value)
        return repr(value)
    return str(value)


def settings_markdown() -> str:
    """docs/settings.md: every setting with its default and meaning, from the fields above."""
    lines = ["# Settings", "", "Every setting of `run.toml`. `--set section.field=value` goes through the same checks.", ""]
    lines += [
        "This page is made from `src/blocktrain/config.py`; a test holds them together.",
        "",
        f"`seed` (default 0): {_description(RunConfig, 'seed')}.",
    ]
    for name, section in RunConfig():
        if isinstance(section, Section):
            lines += ["", f"## [{name}]", "", "| setting | default | meaning |", "| --- | --- | --- |"]
            rows = [(key, _toml_value(value), _description(type(section), key).replace("|", "\\|")) for key, value in section]
            lines += [f"| `{key}` | `{value}` | {meaning} |" for key, value, meaning in rows]
    lines += ["", "## Presets", "", "`--preset NAME` starts a new run from these differences to the defaults.", ""]
    for name, tables in PRESETS.items():
        changes = [f"`{section}.{key} = {_toml_value(value)}`" for section, fields in tables.items() for key, value in fields.items()]
        lines.append(f"* **{name}**: {', '.join(changes) or 'the defaults'}")
    return "\n".join(lines) + "\n"


def _description(section: type[BaseModel], key: str) -> str:
    """What a setting means, and where it is one of a few words, which."""
    field = section.model_fields[key]
    choices = get_args(field.annotation) if get_origin(field.annotation) is Literal else ()
    return (field.description or "") + (f" ({', '.join(choices)})" if choices else "")


def without_effect(config: RunConfig) -> list[str]:
    """Settings that differ from their default and change nothing in this run, each with the reason."""
    idle = ["objective.vote_weight has no effect with one block"] if config.objective.vote_weight and config.model.blocks == 1 else []
    if config.objective.vote_weight and not config.votes_at(config.train.steps - 1):
        idle.append(
            f"objective.vote_weight has no effect: objective.vote_from = {config.objective.vote_from:g} leaves none of {config.train.steps} steps"
        )
    if config.objective.vote_from and not config.objective.vote_weight:
        idle.append("objective.vote_from has no effect while objective.vote_weight = 0")
    if config.objective.noisy:
        return idle
    changed = [f"noise.{key}" for key, value in config.noise if value != getattr(NoiseConfig(), key)]
    changed += [f"objective.{key}" for key in ("weighting", "readout", "loss") if getattr(config.objective, key) != getattr(ObjectiveConfig(), key)]
    return [*idle, *(f"{name} has no effect while objective.denoise_weight = 0" for name in changed)]
