"""What a file with the output of `blocktrain bench serving` holds: its JSON, wherever in the file it is."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from blocktrain.errors import ConfigError

ROW_KEYS = ("bytes_per_s", "bytes_per_traversal")


def read_bench(path: Path) -> dict[str, Any]:
    """The result in a file that is JSON, or whose last line that is a JSON object is the result. Raises ConfigError naming the file."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or 'not UTF-8 text'})") from None
    result = _last_object(text)
    if result is None:
        raise ConfigError(f"{path}: holds no line of JSON; give what `blocktrain bench serving RUN` prints, or its last line")
    if problem := _problem(result):
        raise ConfigError(f"{path}: not a result of `blocktrain bench serving RUN` ({problem})")
    return result


def _last_object(text: str) -> dict[str, Any] | None:
    for piece in (text, *reversed(text.splitlines())):
        try:
            found = json.loads(piece)
        except (ValueError, RecursionError):
            continue
        if isinstance(found, dict):
            return found
    return None


def _problem(result: dict[str, Any]) -> str:
    """What is wrong with it; empty if nothing is."""
    if result.get("bench") != "serving":
        return f"bench is {result.get('bench')!r}"
    tables = result.get("tables")
    if not isinstance(tables, list) or not tables:
        return "tables is missing or empty"
    for i, table in enumerate(tables):
        if not isinstance(table, dict) or not all(_is_number(table.get(key)) for key in ("rtt_ms", "mbit_s")):
            return f"tables[{i}] has no rtt_ms or mbit_s"
        rows = table.get("rows")
        if not isinstance(rows, list) or not rows:
            return f"tables[{i}].rows is missing or empty"
        for row in rows:
            if not isinstance(row, dict) or not isinstance(row.get("name"), str):
                return f"tables[{i}] has a row without a name"
            if missing := [key for key in ROW_KEYS if not _is_number(row.get(key))]:
                return f"tables[{i}], row {row['name']}: no number {missing[0]}"
    return ""


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
