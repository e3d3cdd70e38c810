"""Every error as OpenAI's error object: {"error": {"message", "type", "param", "code"}}.

| error            | code | what it means to the caller                                  |
| ---              | ---  | ---                                                          |
| Refused          | its  | the request names something that is not here, or no key      |
| ConfigError      | 400  | a field cannot be had from this run; `param` names it        |
| a body refused   | 400  | a field is unknown, of another type or out of range          |
| BusyError        | 429  | no place is free; Retry-After says when to ask again         |
| ServingError     | 503  | the blocks cannot answer now                                 |
| anything else    | 500  | our own bug: an id here, the traceback with that id in the log |
"""

from __future__ import annotations

import logging
import re
import secrets
from typing import Any

from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from blocktrain.errors import BusyError, ConfigError, ServingError
from blocktrain.serving.fields import first_error

RETRY_S = "1"
INVALID = "invalid_request_error"
CODES = {413: "request_too_large", 415: "unsupported_media_type", 404: "not_found", 405: "method_not_allowed", 408: "timeout"}

log = logging.getLogger(__name__)


class Refused(Exception):
    """An answer of our own choosing."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code


def refusal(error: Exception) -> tuple[int, dict[str, Any]]:
    """(status, body) of an error; what is not deliberate is logged with its traceback, and only its id goes out."""
    if isinstance(error, Refused):
        return error.status, body(error.message, INVALID, error.param, error.code)
    if isinstance(error, ConfigError):
        name, message = _field(str(error))
        return 400, body(message, INVALID, name)
    if isinstance(error, RequestValidationError):
        name, message = first_error(error.errors)
        return 400, body(message, INVALID, name or None)
    if isinstance(error, HTTPException):
        return error.status_code, body(str(error.detail), INVALID, None, CODES.get(error.status_code))
    if isinstance(error, BusyError):
        return 429, body(str(error), "rate_limit_error", None, "rate_limit_exceeded")
    if isinstance(error, ServingError):
        return 503, body(str(error), "server_error", None, "unavailable")
    mark = secrets.token_hex(6)
    log.error("error %s", mark, exc_info=error)
    return 500, body(f"the server made a mistake; its log has the details under the id {mark}", "server_error", None, mark)


def body(message: str, kind: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    return {"error": {"message": _clean(message, 500), "type": kind, "param": _clean(param, 100) if param else None, "code": code}}


def _clean(text: str, length: int) -> str:
    """One line that UTF-8 can say, whatever a caller named a field."""
    return " ".join(text[:length].encode("utf-8", "replace").decode().split())


def response(error: Exception) -> JSONResponse:
    """An error as a whole answer."""
    status, said = refusal(error)
    headers = {"retry-after": RETRY_S} if status == 429 else {"www-authenticate": "Bearer"} if status == 401 else {}
    if isinstance(error, HTTPException):
        headers |= error.headers or {}
    return JSONResponse(said, status, headers)


def _field(message: str) -> tuple[str | None, str]:
    """`--flag-name: ...` or `field: ...` of a ConfigError, as a field of the API."""
    found = re.match(r"(?:--)?([a-z][a-z_-]*):", message)
    if not found:
        return None, message
    name = found[1].replace("-", "_")
    return name, name + message[found.end(1) :]
