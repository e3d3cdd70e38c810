"""Bytes to text while they come: whole characters only, and nothing of a stop string.

A character is held back until it is whole; what is not UTF-8 becomes U+FFFD; what is left at the end gives one U+FFFD. Bytes that may be the
beginning of a stop string are held back until they are, or are not. The pieces joined are the text.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence


class TextStream:
    """Feed bytes, get text; `stopped` once a stop string was met, whose text and all after it are left out."""

    def __init__(self, stops: Sequence[str] = ()) -> None:
        assert all(stops), "an empty stop string would stop at once"
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._stops = tuple(stops)
        self._held = ""
        self.stopped = False

    def feed(self, data: bytes) -> str:
        """The text that is certain now."""
        return self._take(self._decoder.decode(data))

    def end(self) -> str:
        """What was held back."""
        rest = self._take(self._decoder.decode(b"", final=True))
        held, self._held = self._held, ""
        return rest + held

    def _take(self, text: str) -> str:
        if self.stopped:
            return ""
        self._held += text
        found = [place for stop in self._stops if (place := self._held.find(stop)) >= 0]
        if found:
            self.stopped = True
            given, self._held = self._held[: min(found)], ""
            return given
        certain = len(self._held) - max((_overlap(self._held, stop) for stop in self._stops), default=0)
        given, self._held = self._held[:certain], self._held[certain:]
        return given


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that a `stop` may begin with."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
