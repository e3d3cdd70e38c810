"""A generation on its way to its reader: one JSON object, or server-sent events as OpenAI's API sends them.

The reader is watched all the while. When it goes away, or takes nothing for a minute, the generation ends with it. What goes wrong before the first
byte is an answer with its own code; after that it is an event `data: {"error": ...}` and the end, without `[DONE]`. Nothing is held for a slow
reader but what the socket and one chunk hold: its generation waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from fastapi import Response
from starlette.requests import ClientDisconnect

from blocktrain.serving.answers import Choice, CompletionShape, Delta, usage
from blocktrain.serving.engine import Engine
from blocktrain.serving.fields import StreamOptions
from blocktrain.serving.refusals import refusal

T = TypeVar("T")
Send = Callable[[Any], Awaitable[None]]
EVENTS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]


class Reply(Response):
    """Generates when it is sent; takes a place in the engine for each of its choices while it does."""

    def __init__(self, engine: Engine, prompt: bytes, choices: list[Choice], shape: CompletionShape, stream: StreamOptions | None) -> None:
        super().__init__()
        self.engine, self.prompt, self.choices, self.shape, self.stream = engine, prompt, choices, shape, stream

    async def __call__(self, scope: Any, receive: Any, send: Send) -> None:
        """Raises what the engine raises as long as nothing was sent."""
        outcome = scope.setdefault("state", {})

        async def out(message: Any) -> None:
            try:
                await send(message)
            except TimeoutError:
                raise ClientDisconnect from None

        with self.engine.places(len(self.choices)):
            try:
                await while_there(receive, self._whole(out) if self.stream is None else self._events(out, outcome))
            except ClientDisconnect:  # returning with the answer unfinished ends the connection
                outcome["outcome"] = "cancelled"
            except asyncio.CancelledError:
                outcome["outcome"] = "cancelled"
                raise

    async def _deltas(self) -> AsyncGenerator[tuple[Choice, Delta], None]:
        async with contextlib.aclosing(self.engine.together([self._of(choice) for choice in self.choices])) as together:
            async for item in together:
                yield item

    async def _of(self, choice: Choice) -> AsyncGenerator[tuple[Choice, Delta], None]:
        async with contextlib.aclosing(self.engine.pieces(choice.plan, self.prompt, choice.counts)) as pieces:
            async for piece in pieces:
                delta = choice.take(piece)
                if delta.text or delta.scored:
                    yield choice, delta
                if choice.stopped:
                    break
        yield choice, choice.end()

    async def _whole(self, send: Send) -> None:
        joined = {choice.index: Delta() for choice in self.choices}
        texts: dict[int, list[str]] = {choice.index: [] for choice in self.choices}
        async with contextlib.aclosing(self._deltas()) as deltas:
            async for choice, delta in deltas:
                texts[choice.index].append(delta.text)
                joined[choice.index].scored += delta.scored
                joined[choice.index].finish = delta.finish
        for index, parts in texts.items():
            joined[index].text = "".join(parts)
        found = [self.shape.whole(choice, joined[choice.index]) for choice in self.choices]
        data = dumps({**self.shape.head, "object": self.shape.kind, "choices": found, "usage": usage(self.prompt, self.choices)})
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(data)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": data})

    async def _events(self, send: Send, outcome: dict[str, Any]) -> None:
        async with contextlib.aclosing(self._deltas()) as deltas:
            first = await anext(deltas)
            await send({"type": "http.response.start", "status": 200, "headers": EVENTS})
            try:
                for choice in self.choices:
                    if (opening := self.shape.opening(choice)) is not None:
                        await send(_event(self._chunk([opening])))
                await send(_event(self._chunk([self.shape.chunk(*first)])))
                async for item in deltas:
                    await send(_event(self._chunk([self.shape.chunk(*item)])))
                if self.stream and self.stream.include_usage:
                    await send(_event(self._chunk([]) | {"usage": usage(self.prompt, self.choices)}))
                await send(_event("[DONE]"))
            except ClientDisconnect:
                raise
            except Exception as error:  # too late for a code
                status, said = refusal(error)
                outcome["outcome"] = outcome_of(status)
                await send(_event(said))
        await send({"type": "http.response.body", "body": b""})

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = {**self.shape.head, "object": self.shape.chunk_kind, "choices": choices}
        if self.stream and self.stream.continuous_usage_stats:
            return chunk | {"usage": usage(self.prompt, self.choices)}
        return chunk | ({"usage": None} if self.stream and self.stream.include_usage else {})


def outcome_of(status: int) -> str:
    """What became of a request, in the metrics."""
    named = {401: "unauthorized", 404: "unknown", 429: "busy", 500: "error", 503: "unavailable"}
    return named.get(status, "ok" if status < 400 else "invalid")


def dumps(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def _event(value: Any) -> dict[str, Any]:
    data = value.encode() if isinstance(value, str) else dumps(value)
    return {"type": "http.response.body", "body": b"data: " + data + b"\n\n", "more_body": True}


async def while_there(receive: Any, work: Coroutine[Any, Any, T]) -> T:
    """What `work` gives, unless the one who asked goes away first: then it is cancelled and awaited, and ClientDisconnect is raised."""
    task, gone = asyncio.create_task(work), asyncio.create_task(_gone(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        for one in (task, gone):
            one.cancel()
        await asyncio.wait({task, gone})


async def _gone(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
