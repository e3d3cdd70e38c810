"""Exact generation: one byte after another, each drawn from the last block's distribution.

p(x_i | x_<i) is what `evaluate` scores: the same sweep, the same start state, with the past kept in each block's key-value cache. A stream
that reaches T positions goes on from its last 3T/4 bytes. Sampling adds Gumbel noise g(seed, position, id) to the logits and takes the largest,
so a seed fixes the text whatever is batched or cached around it.
"""

from __future__ import annotations

import codecs
import math
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from blocktrain.config import RunConfig
from blocktrain.errors import ConfigError
from blocktrain.model.transformer import VOCABULARY
from blocktrain.seeding import generator
from blocktrain.training.checkpoint import LoadedRun
from blocktrain.training.composition import Composer
from blocktrain.training.hardware import choose_hardware

EMPTY_PROMPT = b"\n"  # a model of p(next | past) needs one byte of past


def check_sampling(temperature: float, top_p: float, max_bytes: int) -> None:
    """Raises ConfigError naming the first setting that is out of range."""
    if not (math.isfinite(temperature) and 0 <= temperature <= 100):
        raise ConfigError(f"--temperature: must be between 0 and 100, got {temperature}")
    if not 0 < top_p <= 1:
        raise ConfigError(f"--top-p: must be above 0 and at most 1, got {top_p}")
    if not 1 <= max_bytes <= 1 << 24:
        raise ConfigError(f"--max-bytes: must be between 1 and {1 << 24}, got {max_bytes}")


def pick(logits: Tensor, temperature: float, top_p: float, seed: int, position: int) -> int:
    """One id from logits (V,): argmax at temperature 0, else Gumbel-max over the smallest set of ids that holds `top_p` of the probability."""
    logits = logits.cpu().double()
    if temperature == 0:
        return int(logits.argmax())
    scaled = (logits - logits.max()) / temperature
    if top_p < 1:
        probability, order = torch.softmax(scaled, 0).sort(descending=True, stable=True)
        outside = order[probability.cumsum(0) - probability >= top_p]
        scaled[outside] = -torch.inf
    uniform = torch.rand(VOCABULARY, generator=generator(seed, "sample", position), dtype=torch.float64)
    return int((scaled - torch.log(-torch.log(uniform.clamp(min=1e-300)))).argmax())


class Stream:
    """One text being extended: ids known so far, and the caches behind them."""

    def __init__(self, run: LoadedRun) -> None:
        self.config: RunConfig = run.config
        self.hardware = choose_hardware(run.config.train)
        self.stack = run.stack.to(self.hardware.device)
        self.composer = Composer(self.stack, run.config, run.partition)
        self.caches = self.stack.caches()
        self.context: list[int] = []
        self.position = 0  # of the next byte in the whole text

    def feed(self, ids: Iterable[int]) -> Tensor:
        """Take in bytes; returns the logits (V,) of the one after them."""
        new, capacity = list(ids), self.config.model.positions
        if len(self.context) + len(new) > capacity:
            kept = (self.context + new)[-max(1, capacity * 3 // 4) :]
            self.caches, self.context = self.stack.caches(), []
            self.position += len(new) - len(kept)
            new = kept
        x = torch.tensor([new], device=self.hardware.device)
        z = self.composer.start((1, len(new)), self.config.seed, position=self.position)
        with torch.no_grad(), self.hardware.autocast():
            *_, logits = self.composer.sweep(x, z, self.caches)
        self.context += new
        self.position += len(new)
        return logits[0, -1].float()


def generate_ids(run: LoadedRun, prompt: bytes, max_bytes: int, temperature: float, top_p: float, seed: int) -> Iterator[int]:
    """Yield up to `max_bytes` byte ids after the prompt."""
    check_sampling(temperature, top_p, max_bytes)
    stream = Stream(run)
    logits = stream.feed(prompt or EMPTY_PROMPT)
    for i in range(max_bytes):
        chosen = pick(logits, temperature, top_p, seed, stream.position)
        yield chosen
        if i + 1 < max_bytes:
            logits = stream.feed([chosen])


def to_text(ids: Iterable[int]) -> Iterator[str]:
    """Valid UTF-8 pieces, whatever the bytes: a character is held back until it is whole, what is not UTF-8 becomes U+FFFD."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    for one in ids:
        if piece := decoder.decode(bytes([one])):
            yield piece
    if tail := decoder.decode(b"", final=True):
        yield tail
