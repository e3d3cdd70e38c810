"""Keys and values of past positions for many texts at once, read and written in tiles of one fixed shape.

H heads, K channels of a head, R = TILE rows.

A matrix product of another shape may add its terms in another order, so a byte that is computed alone, beside other texts, as a draft or while a lost
cache is rebuilt could come out differently in its last bits, and with it the text. Here every product has one shape: rows go through the layers in
tiles of R (empty rows are zeros), and a query at position p is one of the R queries of positions R·⌊p/R⌋ … and sees R·(⌊p/R⌋ + 1) keys, those after
itself masked. What comes out for a position then depends on the text before it and on nothing else.

A text is its `BlockMemory` of each block. Nothing is ever forgotten on purpose: whoever keeps n positions writes the next ones over the old.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from blocktrain.config import ModelConfig

TILE = 16
GROW = 64  # positions by which a memory grows; a multiple of TILE


class LayerMemory:
    """Keys and values of one layer for one text: (H, room, K) each, zeros where nothing was written."""

    def __init__(self) -> None:
        self._kept: Tensor | None = None  # (2, H, room, K)
        self._rows: dict[int, Tensor] = {}  # what each short convolution read: (room, D)

    def put_rows(self, site: int, position: int, rows: Tensor) -> None:
        """Write (n, D) rows from `position` on."""
        stop, kept = position + rows.size(0), self._rows.get(site)
        if kept is None or kept.size(0) < stop:
            grown = rows.new_zeros(-(-stop // GROW) * GROW, rows.size(1))
            if kept is not None:
                grown[: kept.size(0)] = kept
            kept = self._rows[site] = grown
        kept[position:stop] = rows

    def read_rows(self, site: int, start: int, count: int) -> Tensor:
        """Rows start ... start + count, zeros before the first position: (count, D)."""
        rows = self._rows[site][max(0, start) : max(0, start + count)]
        return torch.cat((rows.new_zeros(count - rows.size(0), rows.size(1)), rows))

    def put(self, position: int, k: Tensor, v: Tensor) -> None:
        """Write (H, n, K) keys and values from `position` on."""
        stop = position + k.size(1)
        if self._kept is None or self._kept.size(2) < stop:
            grown = k.new_zeros(2, k.size(0), -(-stop // GROW) * GROW, k.size(2))
            if self._kept is not None:
                grown[:, :, : self._kept.size(2)] = self._kept
            self._kept = grown
        self._kept[0, :, position:stop] = k
        self._kept[1, :, position:stop] = v

    def read(self, stop: int) -> Tensor:
        """Keys and values before `stop`, which lies in what was written or in its last tile: (2, H, stop, K)."""
        assert self._kept is not None
        return self._kept[:, :, :stop]


class BlockMemory:
    """What one block remembers of one text; `length` positions of it are valid."""

    def __init__(self, config: ModelConfig, private_layers: int = 0) -> None:
        self.layers = [LayerMemory() for _ in range(config.layers_per_block)]
        self.private = [LayerMemory() for _ in range(private_layers)]
        self.length = 0


@dataclass(frozen=True)
class Segment:
    """Consecutive positions of one text, all in one aligned chunk of R, and the rows of the tile that hold them."""

    memory: BlockMemory
    position: int
    row: int
    count: int

    @property
    def rows(self) -> slice:
        return slice(self.row, self.row + self.count)


class LayerTile:
    """One layer's attention and short convolutions for the rows of a tile."""

    def __init__(self, segments: Sequence[Segment], memories: Sequence[LayerMemory]) -> None:
        self.segments, self.memories = segments, memories

    def past(self, site: int, h: Tensor, lags: int) -> list[Tensor]:
        """h (1, R, D): remember what a convolution reads -> what it read 1 ... `lags` positions before each row, (1, R, D) each."""
        found = [torch.zeros_like(h) for _ in range(lags)]
        for segment, memory in zip(self.segments, self.memories, strict=True):
            memory.put_rows(site, segment.position, h[0, segment.rows])
            for lag, rows in enumerate(found, 1):
                rows[0, segment.rows] = memory.read_rows(site, segment.position - lag, segment.count)
        return found

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q, k, v (1, H, R, K): remember keys and values, and answer the queries -> (1, H, R, K)."""
        y = torch.zeros_like(q)
        by_stop: dict[int, list[int]] = {}
        for i, (segment, memory) in enumerate(zip(self.segments, self.memories, strict=True)):
            memory.put(segment.position, k[0, :, segment.rows], v[0, :, segment.rows])
            by_stop.setdefault((segment.position // TILE + 1) * TILE, []).append(i)
        for stop, members in by_stop.items():
            self._attend(q, y, stop, members)
        return y

    def _attend(self, q: Tensor, y: Tensor, stop: int, members: list[int]) -> None:
        """The queries of all texts that see `stop` keys: a batch of products of one shape."""
        heads, width = q.size(1), q.size(3)
        queries = q.new_zeros(len(members), heads, TILE, width)
        for n, i in enumerate(members):
            segment = self.segments[i]
            lane = segment.position % TILE
            queries[n, :, lane : lane + segment.count] = q[0, :, segment.rows]
        past = torch.stack([self.memories[i].read(stop) for i in members], dim=1)  # (2, n, H, stop, K)
        keys, values = past[0].flatten(0, 1), past[1].flatten(0, 1)
        scores = torch.bmm(queries.flatten(0, 1), keys.transpose(1, 2)).float() * width**-0.5  # (n H, R, stop)
        scores[:, :, stop - TILE :].masked_fill_(torch.ones(TILE, TILE, dtype=torch.bool, device=q.device).triu_(1), -torch.inf)
        answers = torch.bmm(torch.softmax(scores, dim=-1).to(values.dtype), values).view_as(queries)
        for n, i in enumerate(members):
            segment = self.segments[i]
            lane = segment.position % TILE
            y[0, :, segment.rows] = answers[n, :, lane : lane + segment.count].to(y.dtype)


class BlockTile:
    """A tile's way through one block: the position of each row, and the attention of each layer."""

    def __init__(self, segments: Sequence[Segment], device: torch.device) -> None:
        positions = torch.zeros(TILE, dtype=torch.long)
        for segment in segments:
            positions[segment.rows] = torch.arange(segment.position, segment.position + segment.count)
        self.positions = positions.to(device)
        self.layers = [LayerTile(segments, memories) for memories in zip(*(s.memory.layers for s in segments), strict=True)]
        self.private = [LayerTile(segments, memories) for memories in zip(*(s.memory.private for s in segments), strict=True)]
