"""From pieces of a generation to what OpenAI's API says: deltas, logprobs, chunks, whole answers, usage. V vocabulary.

A `Choice` turns the bytes of one text into `Delta`s whose texts, joined, are the answer: of whole characters, without a stop string. Bytes are taken
one by one, so a choice ends at the same byte however many came in a traversal. Logprobs are those of what is sampled from, over all V bytes:
after temperature and top_p, before noise; a byte that top_p left out is not among the alternatives.
"""

from __future__ import annotations

import secrets
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from blocktrain.serving.decoding import Counts, Piece, Plan
from blocktrain.serving.sampling import log_probabilities
from blocktrain.serving.text import TextStream

Finish = Literal["stop", "length"]


@dataclass(frozen=True)
class Scored:
    """A byte and how likely it was."""

    byte: int
    logprob: float
    top: list[tuple[int, float]]  # the likeliest bytes, best first
    place: int  # the character of the text that it belongs to


@dataclass
class Delta:
    """What a piece added."""

    text: str = ""
    scored: list[Scored] = field(default_factory=list)
    finish: Finish | None = None


class Choice:
    """One text of a request while it is generated."""

    def __init__(self, index: int, plan: Plan, stops: list[str], top: int | None) -> None:
        """`top`: how many alternatives are kept of each byte; None keeps no logprobs."""
        self.index, self.plan, self.top = index, plan, top
        self.counts = Counts()
        self.bytes = 0  # up to the stop string's last
        self._stream = TextStream(stops)
        self._pending: deque[Scored] = deque()

    @property
    def stopped(self) -> bool:
        return self._stream.stopped

    def take(self, piece: Piece) -> Delta:
        """The next bytes; those after a stop string are left out."""
        text = ""
        for i, byte in enumerate(piece.ids):
            text += self._stream.feed(bytes([byte]))
            self.bytes += 1
            if self.top is not None:
                self._pending.append(score(byte, log_probabilities(piece.logits[i], self.plan.sampling), self.top, self._stream.place))
            if self.stopped:
                break
        return Delta(text, self._certain())

    def end(self) -> Delta:
        """What was held back, and why it ends."""
        text = self._stream.end()
        return Delta(text, self._certain(), "stop" if self.stopped else "length")

    def _certain(self) -> list[Scored]:
        """Of the bytes whose characters were given out."""
        certain = []
        while self._pending and self._pending[0].place < self._stream.given:
            certain.append(self._pending.popleft())
        return certain


def score(byte: int, log_p: Tensor, top: int, place: int) -> Scored:
    """log_p (V,), up to a constant."""
    log_p = torch.log_softmax(log_p, 0)
    values, bytes_ = log_p.sort(descending=True, stable=True)
    best = [(int(b), float(v)) for b, v in zip(bytes_[:top], values[:top], strict=True) if v.isfinite()]
    return Scored(byte, float(log_p[byte]), best, place)


def token_text(byte: int) -> str:
    """A byte as text, or as OpenAI writes tokens that are not text."""
    return chr(byte) if byte < 0x80 else f"bytes:\\x{byte:02x}"


def usage(prompt: bytes, choices: list[Choice]) -> dict[str, Any]:
    """Bytes; `traversals` and `missing_blocks` are ours, drafts go under OpenAI's names for predicted output."""
    missing = sorted({block for choice in choices for block in choice.counts.missing})
    made = sum(choice.bytes for choice in choices)
    drafted, accepted = (sum(getattr(choice.counts, name) for choice in choices) for name in ("drafted", "accepted"))
    return {
        "prompt_tokens": len(prompt),
        "completion_tokens": made,
        "total_tokens": len(prompt) + made,
        "completion_tokens_details": {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": drafted - accepted},
        "traversals": sum(choice.counts.traversals for choice in choices),
    } | ({"missing_blocks": missing} if missing else {})


class CompletionShape:
    """Objects of /v1/completions."""

    kind = chunk_kind = "text_completion"
    mark = "cmpl"

    def __init__(self, model: str, echo: str = "") -> None:
        self.echo = echo
        self.head = {"id": f"{self.mark}-{secrets.token_hex(12)}", "created": int(time.time()), "model": model}

    def opening(self, choice: Choice) -> dict[str, Any] | None:
        return self.chunk(choice, Delta(self.echo)) if self.echo else None

    def chunk(self, choice: Choice, delta: Delta) -> dict[str, Any]:
        """One choice's part of an event."""
        return {"index": choice.index, "text": delta.text, "logprobs": self.logprobs(choice, delta.scored), "finish_reason": delta.finish}

    def whole(self, choice: Choice, delta: Delta) -> dict[str, Any]:
        """One choice, from all its deltas joined."""
        return self.chunk(choice, Delta(self.echo + delta.text, delta.scored, delta.finish))

    def logprobs(self, choice: Choice, scored: list[Scored]) -> dict[str, Any] | None:
        if choice.top is None:
            return None
        return {
            "tokens": [token_text(one.byte) for one in scored],
            "token_logprobs": [one.logprob for one in scored],
            "top_logprobs": [{token_text(b): v for b, v in [*one.top, (one.byte, one.logprob)]} for one in scored],
            "text_offset": [one.place for one in scored],
        }


class ChatShape(CompletionShape):
    """Objects of /v1/chat/completions."""

    kind, chunk_kind, mark = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def opening(self, choice: Choice) -> dict[str, Any] | None:
        return {"index": choice.index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}

    def chunk(self, choice: Choice, delta: Delta) -> dict[str, Any]:
        said = {"content": delta.text} if delta.text else {}
        return {"index": choice.index, "delta": said, "logprobs": self.logprobs(choice, delta.scored), "finish_reason": delta.finish}

    def whole(self, choice: Choice, delta: Delta) -> dict[str, Any]:
        message = {"role": "assistant", "content": delta.text, "refusal": None}
        return {"index": choice.index, "message": message, "logprobs": self.logprobs(choice, delta.scored), "finish_reason": delta.finish}

    def logprobs(self, choice: Choice, scored: list[Scored]) -> dict[str, Any] | None:
        if choice.top is None:
            return None
        return {"content": [_said(one.byte, one.logprob) | {"top_logprobs": [_said(*b) for b in one.top]} for one in scored], "refusal": None}


def _said(byte: int, logprob: float) -> dict[str, Any]:
    return {"token": token_text(byte), "logprob": logprob, "bytes": [byte]}
