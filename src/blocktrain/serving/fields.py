"""What may be asked for, field by field, as OpenAI's API names it; a token is a byte.

Every field is strict (1.0 is not an integer, "1" is not a number) and an unknown one is refused by name: what would be ignored in silence is a
promise that is not kept. `user`, `metadata` and `store` alone are taken and ignored. The fields after them are our own.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, ValidatorFunctionWrapHandler, WrapValidator, model_validator

from blocktrain.serving.compute import Wire
from blocktrain.serving.decoding import MAX_DRAFT, Mode

MAX_TOKENS = 32_768  # bytes of one text
MAX_SCORED = 8192  # bytes with logprobs in one request: each is an object of its own in the answer
DEFAULT_TOKENS = 200
MAX_CHOICES = 8


def _said(sentence: str) -> WrapValidator:
    """One sentence for a union, in place of one error for each of its types."""

    def check(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        try:
            return handler(value)
        except ValidationError:
            raise ValueError(sentence) from None

    return WrapValidator(check)


def _list(of: Any, least: int, most: int) -> Any:
    return Annotated[list[of], Field(min_length=least, max_length=most, fail_fast=True)]


def _encodable(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("must be text that UTF-8 can say, without half of a surrogate pair") from None
    return text


Text = Annotated[str, AfterValidator(_encodable)]
Byte = Annotated[int, Field(ge=0, le=255)]
Tokens = Annotated[int, Field(ge=1, le=MAX_TOKENS)]
StopText = Annotated[Text, Field(min_length=1, max_length=1024)]
Prompt = Annotated[
    Text | _list(Text, 1, 1) | _list(Byte, 0, 1 << 20),
    _said("must be a string, a list of one string, or a list of byte ids from 0 to 255"),
]
Stop = Annotated[StopText | _list(StopText, 0, 4), _said("must be a string or a list of at most 4, none empty or longer than 1024 characters")]


class Part(BaseModel):
    """A piece of a message."""

    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["text"]
    text: Text


Content = Annotated[Text | _list(Part, 1, 1000), _said('must be a string, or a list of parts {"type": "text", "text": ...}')]


class ChatMessage(BaseModel):
    """One turn."""

    model_config = ConfigDict(extra="forbid", strict=True)

    role: Literal["system", "user", "assistant"]
    content: Content

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class StreamOptions(BaseModel):
    """What a stream says beside the text."""

    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool | None = None  # a last chunk with the usage
    continuous_usage_stats: bool | None = None  # ours: the usage so far in every chunk


class Asking(BaseModel):
    """What completions and chats have in common."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: Text
    max_tokens: Tokens | None = None
    max_completion_tokens: Tokens | None = None
    temperature: Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: Stop | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    user: Text | None = None
    metadata: dict[Text, Text] | None = None
    store: bool | None = None
    mode: Mode | None = None
    window: Annotated[int, Field(ge=1, le=1 << 20)] | None = None
    draft_bytes: Annotated[int, Field(ge=0, le=MAX_DRAFT)] | None = None
    wire: Wire | None = None

    @property
    def max_bytes(self) -> int:
        return self.max_tokens or self.max_completion_tokens or DEFAULT_TOKENS

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or [])

    @property
    @abstractmethod
    def top_logprobs_wanted(self) -> int | None:
        """How many alternatives to each byte are told, None for no logprobs at all."""

    @model_validator(mode="after")
    def _agree(self) -> Asking:
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            raise ValueError("max_completion_tokens: contradicts max_tokens; give one of them")
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: only with stream = true")
        if self.top_logprobs_wanted is not None and self.max_bytes * (self.n or 1) > MAX_SCORED:
            raise ValueError(f"logprobs: at most for {MAX_SCORED} bytes in a request (n times max_tokens)")
        return self


class CompletionAsking(Asking):
    """/v1/completions"""

    prompt: Prompt
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None
    echo: bool | None = None

    @property
    def prompt_bytes(self) -> bytes:
        if isinstance(self.prompt, str):
            return self.prompt.encode()
        return b"".join(one.encode() if isinstance(one, str) else bytes([one]) for one in self.prompt)

    @property
    def top_logprobs_wanted(self) -> int | None:
        return self.logprobs

    @model_validator(mode="after")
    def _echo(self) -> CompletionAsking:
        if self.echo and self.logprobs is not None:
            raise ValueError("echo: not together with logprobs, there are none of the prompt")
        return self


class ChatAsking(Asking):
    """/v1/chat/completions"""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=1000, fail_fast=True)]
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    @property
    def prompt_bytes(self) -> bytes:
        return chat_prompt([(message.role, message.text) for message in self.messages]).encode()

    @property
    def stops(self) -> list[str]:
        return [*super().stops, TURN]

    @property
    def top_logprobs_wanted(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @model_validator(mode="after")
    def _top(self) -> ChatAsking:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs: only with logprobs = true")
        return self


# --- The template ---

TURN = "\nUser:"  # where the model begins to speak for its user, its answer has ended
NAMES = {"user": "User: ", "assistant": "Assistant: ", "system": ""}


def chat_prompt(messages: list[tuple[str, str]]) -> str:
    """(role, text) of each turn -> the text that the model goes on from. A system message stands alone, each turn is a line with a name."""
    return "".join(f"{NAMES[role]}{text}\n" for role, text in messages) + "Assistant:"


def first_error(errors: Callable[[], Any]) -> tuple[str, str]:
    """(field, what is wrong with it) of a refused body."""
    found = errors()
    first = next((one for one in found if one["type"] == "extra_forbidden"), found[0])
    place = [str(part) for part in first["loc"] if part != "body"]
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "json_invalid":
        return "", f"body: not JSON ({first.get('ctx', {}).get('error', message)})"
    if first["type"] == "extra_forbidden":
        return ".".join(place), f"{'.'.join(place)[:100]}: not supported here"
    if not place:  # a check of the whole body names the field itself
        name = message.partition(":")[0]
        return (name, message) if name.isidentifier() else ("", f"body: {message}")
    return ".".join(place), f"{'.'.join(place)[:100]}: {message}"
