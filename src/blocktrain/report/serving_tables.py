"""What `bench serving` measured, as tables: one a link, then quality, the rest, and the goals."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from blocktrain.report.texts import goals_table

VARIETY = ("distinct_1", "distinct_2", "distinct_3", "entropy")


def number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def link_name(table: dict[str, Any]) -> str:
    return f"RTT {table['rtt_ms']:g} ms, " + (f"{table['mbit_s']:g} Mbit/s" if table["mbit_s"] else "no limit")


def render(result: dict[str, Any]) -> list[Table]:
    """All tables of a result."""
    tables = [link_table(table) for table in result["tables"]]
    return [*tables, quality_table(result["quality"]), other_table(result), goals_table(result["goals"])]


def link_table(table: dict[str, Any]) -> Table:
    """Rows on one link."""
    columns = ["bytes/ trav.", "bytes/s", "ratio", "wire B/ trav.", "accepted", "trav. ms", "client ms", "compute ms", "queue ms", "network ms/way"]
    shown = Table("", *columns, title=link_name(table))
    for row in table["rows"]:
        cells = [number(row["bytes_per_traversal"]), number(row["bytes_per_s"], 1), number(row["ratio"]), number(row["wire_bytes_per_traversal"], 0)]
        cells += [number(row["acceptance"], 3)]
        names = ("traversal_ms", "client_ms", "compute_ms_per_stage", "queue_ms_per_stage", "network_ms_per_way")
        shown.add_row(row["name"], *cells, *(number(row[name]) for name in names))
    return shown


def quality_table(quality: dict[str, Any]) -> Table:
    """Variety of each row's output beside held-out text; CE of the bytes of a sweep."""
    shown = Table("output", *(name.replace("_", "-") for name in VARIETY), "held-out CE", "first masked", "masked", title="quality")
    for name, row in quality.items():
        ce = [number(row.get(key), 3) for key in ("ce", "first_masked_ce", "masked_ce")]
        shown.add_row(name, *(number(row[key], 3) for key in VARIETY), *ce)
    return shown


def other_table(result: dict[str, Any]) -> Table:
    """Overhead, many texts at once, failover."""
    shown = Table("figure", "value", title="the rest")
    overhead = result["overhead"]
    shown.add_row(f"compute a stage at {overhead['state_kb']:.0f} KB states, ms", number(overhead["compute_ms_per_stage"]))
    shown.add_row("a hop between stages with such a state beside it, ms", number(overhead["hop_ms"]))
    shown.add_row("all hops of that traversal, first and last too, mean ms", number(overhead["mean_hop_ms"]))
    shown.add_row("a hop with next to nothing, ms", number(overhead["small_hop_ms"]))
    for row in result["streams"]:
        shown.add_row(f"{row['name']}: bytes/s of {row['streams']} texts at once over one at a time", number(row["ratio"]))
    if failover := result["failover"]:
        shown.add_row("stages killed during a text", str(failover["times"]))
        shown.add_row("texts that are those of the undisturbed run", number(100 * failover["identical_share"], 1) + " %")
        shown.add_row("stall, median and longest, s", f"{failover['stall_median_s']:.2f}, {failover['stall_max_s']:.2f}")
    return shown
