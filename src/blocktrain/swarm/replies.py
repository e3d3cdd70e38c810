"""What is said to a request that is not granted: one table for the service (server.py) and for both links (link.py, simlink.py).

Exceptions of the coordinator become a status and an Answer; a status and an Answer become what the worker's link raises: Again where the request
may be repeated as it is, Told where the coordinator says no.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, TypeVar

from blocktrain.errors import BlockTrainError
from blocktrain.swarm.coordinator import Coordinator, Refused
from blocktrain.swarm.protocol import Answer
from blocktrain.swarm.worker import Told

A = TypeVar("A", bound=Answer)
STATUS: Mapping[str, int] = MappingProxyType(
    {
        **dict.fromkeys(("ok", "assigned", "wait", "finished", "fresh", "late"), 200),
        **{"revoked": 401, "forbidden": 403, "unknown": 404, "conflict": 409, "resend": 409, "too_old": 410, "returned": 410},
        **{"unfit": 422, "invalid": 422, "suspended": 429},
    }
)
ASK_WAIT_S = 5.0  # an ask that finds nothing waits so long for a round to end
BLOB = re.compile(r"(versions|text)/[A-Za-z0-9._/-]{1,200}")


class Again(Exception):
    """A request to repeat, after so many seconds if that is known."""

    def __init__(self, reason: str, after_s: float | None = None) -> None:
        super().__init__(reason)
        self.after_s = after_s


# --- At the coordinator ---


def granted(reply: A) -> A:
    """The reply, if its kind is one of success. Raises Refused."""
    if STATUS[reply.kind] != 200:
        raise Refused(reply)
    return reply


def answered(answer: Any) -> Answer:
    """An answer of the rules as a message, if it is one of success. Raises Refused."""
    if STATUS[answer.kind] != 200:
        raise Refused(answer)
    return Answer(kind=answer.kind, reason=answer.reason, key=answer.key)


def given_back(answer: Any, key: str) -> Answer:
    """What a worker hears that gave work back: done, also where the work was too old by then. Raises Refused."""
    if answer.kind not in ("returned", "too_old"):
        raise Refused(answer)
    return Answer(kind="ok", reason=answer.reason, key=key)


def refusal(error: BlockTrainError | OSError | Refused) -> tuple[int, Answer]:
    """Status and answer of a request that raised this."""
    if isinstance(error, Refused):
        answer = error.answer
        left = getattr(answer, "retry_after_s", 0.0) or getattr(answer, "time_left_s", 0.0)
        code = 503 if answer.kind == "wait" else STATUS[answer.kind]
        return code, Answer(kind=answer.kind, reason=answer.reason, key=answer.key, retry_after_s=left)
    if isinstance(error, BlockTrainError):
        return 422, Answer(kind="invalid", reason=str(error))
    return 507, Answer(kind="wait", reason=f"the coordinator cannot write: {error}"[:300], retry_after_s=5.0)


def find_blob(coordinator: Coordinator, name: str) -> tuple[int, str, str]:
    """(size, kind of bytes, part they are booked on) of a blob that workers may fetch. Raises Refused."""
    size = coordinator.store.blobs.size(name) if BLOB.fullmatch(name) and ".." not in name else None
    if size is None:
        raise Refused(Answer(kind="unknown", reason=f"blob {name[:100]}: there is none of that name, or not any more"))
    return (size, "text", "text") if name.startswith("text/") else (size, "weights", name.split("/")[1])


# --- At the worker ---


def heard(code: int, answer: Answer, *, damaged_is_again: bool = False) -> Again | Told:
    """What a link raises for a reply that is not 200."""
    busy = code >= 500 or code in (400, 408)
    too_many = code == 429 and answer.reason.startswith("more than")
    if busy or too_many or (damaged_is_again and answer.kind == "resend"):
        return Again(answer.reason, answer.retry_after_s or None)
    return Told(answer.kind, answer.reason, answer.retry_after_s)
