"""What autograd keeps for the backward pass of one span, line by line, in bytes.

N batch, T positions, M = N T rows, D width, E target-embedding width, F feed-forward width, H heads, C noise-level embedding width,
V vocabulary (256 bytes).

A formula and no trace, so that it answers for shapes that no machine here can hold. Each line below is a tensor that one operation of
`model/layers.py`, `training/composition.py` or `training/objective.py` saves; a test compares the sum with `saved_tensors_hooks` on real steps.
Attention is the flash kernel's: it keeps its inputs, its output and one number per row and head, never a T x T matrix.

Left out on purpose: parameters, byte ids, numbers per batch (a few bytes), and what lives for an instant inside an operation (a gradient on its
way, the logits before their log-softmax). The frozen prefix saves nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from blocktrain.config import ModelConfig, RunConfig
from blocktrain.model.transformer import VOCABULARY
from blocktrain.training.objective import Span

FLOAT32 = 4  # bytes; statistics of norms and attention and the log-softmax are float32 under every precision


@dataclass(frozen=True)
class Precision:
    """Bytes per number of everything that is held, and the sentence that says so."""

    weights: int
    gradients: int
    moments: int
    stream: int  # residual stream, and what a norm reads and gives
    compute: int  # what matrix products and attention read and give
    casts: bool  # autocast: plain matrix products (not those of model/fused.py) keep a cast copy of their weights
    meaning: str


PRECISIONS: dict[str, Precision] = {
    "float32": Precision(4, 4, 4, 4, 4, False, "everything float32"),
    "mixed": Precision(4, 4, 4, 4, 2, True, "bfloat16 autocast over float32 weights, gradients and moments, as train.precision = bfloat16 does"),
    "bfloat16": Precision(2, 2, 4, 2, 2, False, "bfloat16 weights, gradients and activations, float32 moments; the trainer does not do this"),
    "float16": Precision(2, 2, 4, 2, 2, False, "float16 weights, gradients and activations, float32 moments; the trainer does not do this"),
}


def layer_activations(model: ModelConfig, batch: int, noisy: bool, p: Precision) -> dict[str, int]:
    """Bytes saved by one layer in one pass."""
    rows = batch * model.positions  # M
    d, f, h = rows * model.width, rows * model.mlp_hidden, rows * model.heads  # M D, M F, M H
    a = rows * model.attention_width
    return {
        # what norm, modulation, short convolution and products are made from again (model/fused.py)
        "attention: stream": d * p.stream,
        "attention: q, k, v; norms of q, k": 3 * a * p.compute + 2 * h * FLOAT32,
        "attention: result by heads, log-sum": a * p.compute + h * FLOAT32,
        "feed-forward: stream": d * p.stream,
        "feed-forward: hidden": (2 if model.mlp == "swiglu" else 1) * f * p.compute,
        # 1 + scale of both sub-layers, and where the noise level sets them, per sample, also what the shifts are a part of
        "modulation": 6 * model.width * batch * p.compute if noisy else 2 * model.width * p.stream,
    }


def layer_copies(model: ModelConfig, noisy: bool, p: Precision) -> int:
    """Bytes of the cast copy of one layer's modulation matrix that is kept: made once per step."""
    return 4 * model.noise_dim * model.width * p.compute if noisy and p.casts else 0


def interface_activations(config: RunConfig, span_blocks: int, noisy: bool, clean: bool, p: Precision) -> dict[str, int]:
    """Bytes saved by the interface in one pass through a span: entry of z and of its level at every block, one head.

    `clean` is the pass in which z is zero: it carries no denoising loss.
    """
    model, batch = config.model, config.train.batch_size
    rows, mse = batch * model.positions, config.objective.loss == "embedding_mse"
    lines = {} if mse else {"head: its gradient": (VOCABULARY + 1) * model.width * p.weights}
    if config.objective.vote_weight:
        lines["loss: the vote without the block (held, not saved)"] = rows * VOCABULARY * FLOAT32
    if noisy:
        lines["entry: c_in z"] = span_blocks * rows * model.embed_dim * p.compute
        lines["entry: noise level before and after SiLU"] = span_blocks * 3 * batch * model.noise_dim * p.compute
    if noisy and not clean:
        lines["entry: norms of the target table"] = span_blocks * 2 * VOCABULARY * FLOAT32
    if mse:
        lines["head: log-softmax"] = rows * VOCABULARY * FLOAT32
        lines["head: logits before sharpness"] = rows * VOCABULARY * p.compute
    if mse and not clean:
        lines["loss: distance to the target"] = rows * model.embed_dim * FLOAT32
    return lines


def interface_copies(config: RunConfig, noisy: bool, p: Precision) -> int:
    """Bytes of the cast copy of the interface's matrix for z, made once per step."""
    return config.model.embed_dim * config.model.width * p.compute if noisy and p.casts else 0


def span_activations(config: RunConfig, span: Span, p: Precision) -> tuple[int, int]:
    """Bytes that one step of a span keeps for its backward pass: (interface, blocks). Every view of the batch is kept until then."""
    model, objective, batch = config.model, config.objective, config.train.batch_size
    noisy, num_blocks = objective.noisy, span[1] - span[0]
    layers = num_blocks * model.layers_per_block + (objective.private_layers if span[1] < model.blocks else 0)
    clean = ([False] if noisy else []) + ([True] if objective.anchor_weight else [])
    layer = sum(layer_activations(model, batch, noisy, p).values())
    read_out = batch * model.positions * model.width * p.stream  # the stream, or its gradient
    blocks = len(clean) * (layers * layer + read_out) + layers * layer_copies(model, noisy, p)
    passes = sum(sum(interface_activations(config, num_blocks, noisy, c, p).values()) for c in clean)
    return passes + interface_copies(config, noisy, p), blocks
