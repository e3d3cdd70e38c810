"""The status as Prometheus text. Whatever is null or not finite is left out, and no worker's name becomes a label: there may be thousands of them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST as CONTENT_TYPE
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

__all__ = ["CONTENT_TYPE", "prometheus_text"]

Rows = Iterable[tuple[tuple[str, ...], Any]]  # label values, value
RUN_STATES = ("training", "waiting", "paused", "finished")
WORKER_STATES = ("live", "gone", "suspended", "revoked", "left")
BYTES_HELP = "Bytes moved, once by direction (kind is 'all') and once by kind (direction is 'all')"
BLOCK_GAUGES = {
    "version": "Version of the block",
    "participation": "Share of the last round's assigned work that was reported in time",
    "loss": "Training loss of the last round in nats per byte",
    "tokens": "Tokens the block was trained on",
    "assigned": "Workers assigned to the open round",
    "reported": "Workers that reported in the open round",
}


def prometheus_text(status: dict[str, Any]) -> bytes:
    """Every figure of one status, from a registry that holds nothing else."""
    registry = CollectorRegistry()
    registry.register(_Figures(status))
    return generate_latest(registry)


class _Figures(Collector):
    def __init__(self, status: dict[str, Any]) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        return _families(self._status)


def _families(status: dict[str, Any]) -> Iterator[Metric]:
    blocks, workers = status.get("blocks") or [], status.get("workers") or []
    for key, text in BLOCK_GAUGES.items():
        yield from _gauge(f"blocktrain_block_{key}", text, ("block",), (((str(block["block"]),), block.get(key)) for block in blocks))
    states = Counter(worker.get("state") for worker in workers)
    yield from _gauge("blocktrain_workers", "Workers by state", ("state",), (((state,), states[state]) for state in WORKER_STATES))
    run = status.get("state")
    yield from _gauge("blocktrain_run_state", "1 for the state the run is in", ("state",), (((one,), one == run) for one in RUN_STATES))
    yield from _gauge(
        "blocktrain_headline_ce", "Cross entropy of the composed model on held-out text, nats per byte", (), [((), status.get("headline_ce"))]
    )
    yield from _gauge("blocktrain_interface_version", "Version of the interface", (), [((), (status.get("interface") or {}).get("version"))])
    yield from _gauge("blocktrain_uptime_seconds", "Of the run's own clock, over all starts", (), [((), status.get("uptime_s"))])
    yield from _counter("blocktrain_tokens", "Tokens the run was trained on", (), [((), status.get("tokens"))])
    yield from _counter("blocktrain_bytes", BYTES_HELP, ("direction", "kind"), _bytes(status.get("bytes") or {}))
    updates = status.get("updates") or {}
    yield from _counter("blocktrain_updates", "Updates by what became of them", ("result",), (((str(key),), one) for key, one in updates.items()))
    refusals = sum(worker.get("refusals") or 0 for worker in workers)
    yield from _counter("blocktrain_refusals", "Refusals to the workers that are known now", (), [((), refusals)])


def _single_gauges(status: dict[str, Any]) -> dict[str, tuple[str, Any]]:
    return {
        "headline_ce": ("Cross entropy of the composed model on held-out text, nats per byte", status.get("headline_ce")),
        "interface_version": ("Version of the interface", (status.get("interface") or {}).get("version")),
        "uptime_seconds": ("Of the run's own clock, over all starts", status.get("uptime_s")),
    }


def _bytes(moved: dict[str, Any]) -> Rows:
    for direction in ("down", "up"):
        yield (direction, "all"), moved.get(direction)
    for kind, count in (moved.get("by_kind") or {}).items():
        yield ("all", str(kind)), count


def _gauge(name: str, text: str, labels: tuple[str, ...], rows: Rows) -> Iterator[Metric]:
    yield from _filled(GaugeMetricFamily(name, text, labels=labels), rows)


def _counter(name: str, text: str, labels: tuple[str, ...], rows: Rows) -> Iterator[Metric]:
    """`_total` is added to the name."""
    yield from _filled(CounterMetricFamily(name, text, labels=labels), rows)


def _filled(family: GaugeMetricFamily | CounterMetricFamily, rows: Rows) -> Iterator[Metric]:
    for labels, value in rows:
        if isinstance(value, int | float) and math.isfinite(value):
            family.add_metric(labels, value)
    if family.samples:
        yield family
