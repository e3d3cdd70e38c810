"""Bytes to text while they come: whole characters only, and nothing of a stop string.

A character is held back until it is whole; what is not UTF-8 becomes U+FFFD; what is left at the end gives one U+FFFD. Bytes that may be the
beginning of a stop string are held back until they are, or are not. The pieces joined are the text, and do not depend on how the bytes were cut into
pieces: of several stop strings the one that is whole first counts, of those the longest.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence


class TextStream:
    """Feed bytes, get text; `stopped` once a stop string was met, whose text and all after it are left out.

    For those who keep something beside each byte: `place` is the character that the last byte fed belongs to, and `given` how many characters
    were given out.
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        assert all(stops), "an empty stop string would stop at once"
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._stops = tuple(stops)
        self._held = ""
        self._decoded = 0  # characters
        self.given = 0
        self.stopped = False

    @property
    def place(self) -> int:
        """Index in the text of the character that the last byte fed began, went on with, or made whole."""
        unfinished = bool(self._decoder.getstate()[0])
        return self._decoded if unfinished else self._decoded - 1

    def feed(self, data: bytes) -> str:
        """The text that is certain now."""
        return self._take(self._decoder.decode(data))

    def end(self) -> str:
        """What was held back."""
        rest = self._take(self._decoder.decode(b"", final=True))
        held, self._held = self._held, ""
        self.given += len(held)
        return rest + held

    def _take(self, text: str) -> str:
        if self.stopped:
            return ""
        self._held += text
        self._decoded += len(text)
        found = [(place + len(stop), place) for stop in self._stops if (place := self._held.find(stop)) >= 0]
        if found:
            self.stopped = True
            certain, rest = min(found)[1], ""
        else:
            certain = len(self._held) - max((_overlap(self._held, stop) for stop in self._stops), default=0)
            rest = self._held[certain:]
        given, self._held = self._held[:certain], rest
        self.given += certain
        return given


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that a `stop` may begin with."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
