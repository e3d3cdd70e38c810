"""What a server of text counts, for Prometheus: a registry of its own, so that two servers in one process do not mix."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST as CONTENT_TYPE

from blocktrain.serving.decoding import Counts

__all__ = ["CONTENT_TYPE", "Figures"]

FIRST_BYTE_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
PER_BYTE_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)


class Figures:
    """Every figure of one server."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._tried, self._agreed = 0, 0  # bytes of drafts
        here = self.registry
        self.requests = Counter("blocktrain_requests", "Requests by what became of them", ["endpoint", "outcome"], registry=here)
        self.bytes = Counter("blocktrain_generated_bytes", "Bytes generated", registry=here)
        self.traversals = Counter("blocktrain_traversals", "Traversals of the whole chain of blocks", registry=here)
        self.drafted = Counter("blocktrain_drafted_bytes", "Bytes that a draft proposed", registry=here)
        self.accepted = Counter("blocktrain_accepted_bytes", "Bytes of a draft that the other blocks agreed to", registry=here)
        self.acceptance = Gauge("blocktrain_acceptance", "Share of a draft's bytes that was accepted, since the start", registry=here)
        self.streams = Gauge("blocktrain_streams", "Texts that are being generated now", registry=here)
        self.max_streams = Gauge("blocktrain_max_streams", "Texts that may be generated at once", registry=here)
        self.healthy = Gauge("blocktrain_healthy", "1 while the blocks can answer", registry=here)
        self.first_byte = Histogram("blocktrain_first_byte_seconds", "From a text's start to its first byte", buckets=FIRST_BYTE_S, registry=here)
        self.per_byte = Histogram(
            "blocktrain_per_byte_seconds", "Mean time for each byte after the first, by text", buckets=PER_BYTE_S, registry=here
        )

    def count(self, counts: Counts) -> None:
        """Book a generation that has ended, however it did."""
        for counter, amount in (
            (self.bytes, counts.bytes),
            (self.traversals, counts.traversals),
            (self.drafted, counts.drafted),
            (self.accepted, counts.accepted),
        ):
            counter.inc(amount)
        self._tried += counts.drafted
        self._agreed += counts.accepted
        self.acceptance.set(self._agreed / self._tried if self._tried else 0.0)
        if counts.bytes:
            self.first_byte.observe(counts.prompt_s)
        if counts.bytes > 1:
            self.per_byte.observe((counts.seconds - counts.prompt_s) / (counts.bytes - 1))

    def text(self) -> bytes:
        """In Prometheus' text format."""
        return generate_latest(self.registry)
