"""Bodies that are nearly right, from a right message and dice."""

from __future__ import annotations

import json
import random
from typing import Any


def any_bytes(dice: random.Random, _: dict[str, Any]) -> bytes:
    return dice.randbytes(dice.randrange(400))


def truncated(dice: random.Random, message: dict[str, Any]) -> bytes:
    data = json.dumps(message).encode()
    return data[: dice.randrange(len(data))]


def mutated(dice: random.Random, message: dict[str, Any]) -> bytes:
    data = bytearray(json.dumps(message).encode())
    for _ in range(dice.randint(1, 4)):
        data[dice.randrange(len(data))] = dice.randrange(256)
    return bytes(data)
