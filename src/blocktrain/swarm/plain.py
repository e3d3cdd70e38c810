"""Frozen dataclasses to JSON and back, exactly: what is written, read and compared is equal.

Fields may be int, float, str, bool, None, literals, tuples, dicts with text keys, and other dataclasses. Numbers keep their type; those that JSON
does not know are written as "nan", "inf" and "-inf". Whatever else is read raises ProtocolError with the place.
"""

from __future__ import annotations

import json
import math
import types
from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from blocktrain.errors import ProtocolError

T = TypeVar("T")
NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def to_json(value: Any) -> str:
    """One line of JSON."""
    return json.dumps(_written(value), separators=(",", ":"), allow_nan=False)


def from_json(kind: type[T], text: str | bytes) -> T:
    """A `kind` from the JSON that `to_json` wrote."""
    return _read(kind, _parsed(kind.__name__, text), kind.__name__)


def to_tagged_json(value: Any) -> str:
    """One line of JSON that says which dataclass it is: {"Name": {...}}."""
    return json.dumps({type(value).__name__: _written(value)}, separators=(",", ":"), allow_nan=False)


def from_tagged_json(kinds: Iterable[type[T]], text: str | bytes) -> T:
    """One of `kinds` from the JSON that `to_tagged_json` wrote."""
    value = _parsed("record", text)
    for kind in kinds:
        if isinstance(value, dict) and list(value) == [kind.__name__]:
            return _read(kind, value[kind.__name__], kind.__name__)
    raise ProtocolError(f"record: {str(text)[:60]!r} is none of {', '.join(kind.__name__ for kind in kinds)}")


def _parsed(what: str, text: str | bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"{what}: not JSON ({str(error)[:100]})") from None


def _written(value: Any) -> Any:
    if is_dataclass(value):
        return {field.name: _written(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, tuple):
        return [_written(item) for item in value]
    if isinstance(value, dict):
        return {name: _written(item) for name, item in value.items()}
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


_hints = cache(get_type_hints)


def _read(kind: Any, value: Any, place: str) -> Any:
    origin, args = get_origin(kind), get_args(kind)
    if is_dataclass(kind):
        return _read_fields(kind, value, place)
    if origin in (Union, types.UnionType):
        (some,) = [arg for arg in args if arg is not type(None)]
        return None if value is None else _read(some, value, place)
    if origin is tuple and isinstance(value, list):
        if args[1:] == (...,):
            return tuple(_read(args[0], item, f"{place}[{i}]") for i, item in enumerate(value))
        if len(args) == len(value):
            return tuple(_read(arg, item, f"{place}[{i}]") for i, (arg, item) in enumerate(zip(args, value, strict=True)))
    if origin is dict and isinstance(value, dict):
        return {name: _read(args[1], item, f"{place}.{name}") for name, item in value.items()}
    if origin is Literal and value in args:
        return value
    if kind is float and isinstance(value, str) and value in NOT_FINITE:
        return NOT_FINITE[value]
    if type(value) is kind or (kind is float and type(value) is int):
        return value
    raise ProtocolError(f"{place}: is {repr(value)[:60]}, expected {getattr(kind, '__name__', kind)}")


def _read_fields(kind: Any, value: Any, place: str) -> Any:
    hints = _hints(kind)
    if not isinstance(value, dict) or value.keys() != hints.keys():
        wrong = sorted(set(value) ^ set(hints)) if isinstance(value, dict) else "not an object"
        raise ProtocolError(f"{place}: fields differ from those of {kind.__name__} ({str(wrong)[:100]})")
    return kind(**{name: _read(hint, value[name], f"{place}.{name}") for name, hint in hints.items()})
