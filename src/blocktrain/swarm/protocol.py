"""Messages between coordinator and workers: JSON with strict schemas, and the one line by which a worker joins.

docs/protocol.md says the same in prose. Every message refuses fields it does not know; numbers are not made from strings. Names of parts:
`interface`, `block-000`, `block-001`, ...; tensors in an update are named PART/TENSOR.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field

from blocktrain.errors import ConfigError

PROTOCOL = 1
Kind = (
    Literal["ok", "assigned", "wait", "finished", "fresh", "late", "unknown", "conflict", "forbidden", "revoked", "suspended", "unfit", "invalid"]
    | (Literal["too_old", "returned", "resend"])
)
Name = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9._-]+$")]
Hex = Annotated[str, Field(min_length=8, max_length=128, pattern=r"^[0-9a-f]+$")]
Key = Annotated[str, Field(min_length=1, max_length=20, pattern=r"^[0-9]+$")]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Codec = Literal["fp32", "bf16", "int8"]
Count = Annotated[int, Field(ge=0, le=1 << 53)]  # what every JSON reader has exactly
Figure = Annotated[float, Field(ge=-1e15, le=1e15, allow_inf_nan=False)]
Part = Annotated[str, Field(pattern=r"^(interface|block-[0-9]{3,9})$")]
BlobName = Annotated[str, Field(pattern=r"^(versions|text)/[A-Za-z0-9_-][A-Za-z0-9._-]*(/[A-Za-z0-9_-][A-Za-z0-9._-]*)?$", max_length=200)]


class Message(BaseModel):
    """Base of all messages."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Answer(Message):
    """What every request is told: a kind, one sentence, and when to come back."""

    kind: Kind
    reason: str
    key: str = ""
    retry_after_s: float = 0.0
    place: int = 0  # in a queue, from 1


class Hello(Message):
    """Who answers: `signature` is over hello_text(nonce, run_id, challenge) with the certificate's key."""

    protocol: int
    run_id: str
    challenge: str
    certificate: str  # PEM
    signature: str  # hex


class BlobRef(Message):
    """A file to fetch: GET /v1/blobs/NAME."""

    name: BlobName
    size: Count
    sha256: Sha256


class RunInfo(Message):
    """What a worker needs to know before it joins."""

    protocol: int
    run: str
    run_id: str
    config: dict[str, Any]
    config_digest: str
    corpus: str
    text: BlobRef
    text_digest: Hex


class JoinRequest(Message):
    protocol: int
    run_id: Name
    config_digest: Hex
    name: Name
    public_key: Hex
    process: Name
    challenge: Hex
    signature: Hex  # over join_text(...)
    capacity: Annotated[int, Field(ge=0, le=4096)]
    takeover: bool = False


class JoinReply(Message):
    worker: str
    session: str
    reason: str
    heartbeat_s: float


class AskRequest(Message):
    ask: Name
    config_digest: Hex | None = None  # of the settings that the worker has read


class Delta(Message):
    """What turns version - 1 into `version`: an encoded update."""

    version: Count
    blob: BlobRef


class PartFiles(Message):
    """A version of a part and how to get it: whole, or from an older version by deltas (rising, ending in `version`)."""

    part: Part
    version: Count
    full: BlobRef  # of an upstream part it may be coded: codec
    codec: Literal["file", "fp32", "bf16", "int8"] = "file"
    deltas: list[Delta] = []


class Work(Message):
    """An assignment as the worker trains it."""

    key: Key
    first: Count  # block
    stop: Count  # one past the last block
    steps: list[tuple[Count, Count]]
    schedule_step: Count  # where the learning rate of the span stands
    parts: list[PartFiles]  # interface, frozen blocks, own blocks
    codec: Codec  # of the update


class AskReply(Answer):
    time_left_s: float = 0.0
    work: Work | None = None


class BeginRequest(Message):
    key: Key
    size: Count
    sha256: Sha256


class BeginReply(Answer):
    part_bytes: int = 0
    received: list[int] = []  # parts that are here already


class Metrics(Message):
    """What the inner loop measured; shown, never acted on."""

    ce: Figure | None = None  # nats per byte over the assignment
    loss: Figure | None = None
    tokens_per_s: Figure | None = None
    seconds: Figure | None = None


class CommitRequest(Message):
    key: Key
    size: Count
    sha256: Sha256
    num_samples: int | float
    metrics: Metrics = Metrics()


class CommitReply(Answer):
    ages: list[tuple[int, int]] = []


class GiveBackRequest(Message):
    key: Key
    why: Annotated[str, Field(max_length=200)]


def part_of(block: int) -> str:
    return f"block-{block:03d}"


def hello_text(nonce: str, run_id: str, challenge: str) -> bytes:
    return f"blocktrain hello {PROTOCOL}\n{nonce}\n{run_id}\n{challenge}".encode()


def join_text(run_id: str, challenge: str, public_key: str, process: str) -> bytes:
    return f"blocktrain join {PROTOCOL}\n{run_id}\n{challenge}\n{public_key}\n{process}".encode()


@dataclass(frozen=True)
class JoinLine:
    """SCHEME://TOKEN@HOST:PORT/RUN_ID/FINGERPRINT: all that a worker needs."""

    scheme: str
    host: str
    port: int
    token: str
    run_id: str
    fingerprint: str  # of the coordinator's certificate: the first 32 digits of its sha256

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}"

    def __str__(self) -> str:
        return f"{self.scheme}://{self.token}@{self.url.partition('://')[2]}/{self.run_id}/{self.fingerprint}"


def parse_join_line(text: str) -> JoinLine:
    """Read a join line, with or without the words `blocktrain worker` before it; raises ConfigError naming what is wrong."""
    example = "expected http://TOKEN@HOST:PORT/RUN/FINGERPRINT as `blocktrain coordinator` prints it"
    line = text.strip().removeprefix("blocktrain worker").strip().strip("'\"")
    try:
        parts = urlsplit(line)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ConfigError(f"join line: {error}; {example}") from None
    for there, what in ((parts.scheme in ("http", "https"), "http:// before it"), (host, "host"), (port, "port"), (parts.username, "token")):
        if not there:
            raise ConfigError(f"join line: has no {what}; {example}")
    names = parts.path.strip("/").split("/")
    if len(names) != 2 or not all(re.fullmatch(r"[0-9a-f]{8,64}", name) for name in names):
        raise ConfigError(f"join line: has no run and fingerprint at its end; {example}")
    return JoinLine(parts.scheme, str(host), int(port or 0), str(parts.username), names[0], names[1])
