"""The commands that give text: from a run on this machine, or from stages that hold its blocks."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from blocktrain.cli_common import Json, Run, existing_run, say
from blocktrain.errors import ConfigError

Wires = Literal["float32", "bfloat16", "int8"]


def generate(
    run: Run,
    /,
    *,
    prompt: Annotated[str, Parameter(help="Text to go on from.")],
    mode: Annotated[
        Literal["exact", "speculative", "sweep"],
        Parameter(
            help="exact: a byte a traversal. speculative: the same bytes, drafted by the first blocks and checked many at a time. "
            "sweep: a window a traversal, lossy, for runs with objective.window."
        ),
    ] = "exact",
    max_bytes: Annotated[int, Parameter(help="Bytes to generate.")] = 200,
    temperature: Annotated[float, Parameter(help="0 takes the most likely byte.")] = 0.8,
    top_p: Annotated[float, Parameter(help="Sample from the smallest set of bytes with this probability.")] = 1.0,
    seed: Annotated[int, Parameter(help="Same seed, same text.")] = 0,
    draft: Annotated[Path | None, Parameter(help="speculative: another run folder that drafts, instead of this run's first blocks.")] = None,
    draft_bytes: Annotated[int | None, Parameter(help="speculative: bytes drafted for each traversal; default: follows what is accepted.")] = None,
    window: Annotated[int | None, Parameter(help="sweep: bytes a traversal; default: the most that the run was trained for.")] = None,
    wire: Annotated[Wires, Parameter(help="How states are rounded between blocks, whether or not a wire is there.")] = "bfloat16",
    json_: Json = False,
) -> int:
    """Text from a trained run; always valid UTF-8. The prompt is not repeated."""
    from blocktrain.serving.decoding import Plan
    from blocktrain.training.checkpoint import load_run

    plan = Plan(mode, *_plan_parts(temperature, top_p, seed, max_bytes, wire, draft_bytes), window=window)
    existing_run(run)
    loaded = load_run(run, say)
    other = None if draft is None else load_run(draft, say)
    data, counts = asyncio.run(_generate(loaded, other, plan, os.fsencode(prompt), None if json_ else _show))
    if json_:
        said = {"mode": mode, "seed": seed, "temperature": temperature, "top_p": top_p, "traversals": counts.traversals}
        print(json.dumps({"text": data.decode("utf-8", "replace"), "bytes": len(data), **said, "acceptance": counts.acceptance}))
    else:
        print()
    return 0


def serve(
    run: Run,
    /,
    *,
    stages: Annotated[
        str | None, Parameter(help="HOST:PORT,HOST:PORT of the stages that hold the blocks; default: all blocks in this process.")
    ] = None,
    listen: Annotated[
        str, Parameter(help="HOST:PORT to serve at; port 0 takes a free one. Any address but loopback needs --key-file.")
    ] = "127.0.0.1:8000",
    mode: Annotated[
        Literal["exact", "speculative"],
        Parameter(help="What a request gets that names no mode. speculative gives the same bytes, more of them a traversal."),
    ] = "exact",
    max_streams: Annotated[int, Parameter(help="Texts generated at once; who finds no place is told to ask again.")] = 8,
    wire: Annotated[Wires, Parameter(help="How states are rounded between blocks, where a request names nothing else.")] = "bfloat16",
    key_file: Annotated[Path | None, Parameter(help="Keys of which a client shows one, a line each; made if it is not there.")] = None,
    tls_cert: Annotated[Path | None, Parameter(help="PEM file with the certificate.")] = None,
    tls_key: Annotated[Path | None, Parameter(help="PEM file with the certificate's key, where --tls-cert does not hold it too.")] = None,
    plaintext: Annotated[bool, Parameter(negative=(), help="Plain HTTP off loopback: keys and texts can then be read on the way.")] = False,
    allow_missing_blocks: Annotated[bool, Parameter(negative=(), help="Answer without the blocks that no stage holds, worse but at all.")] = False,
) -> int:
    """Serve a trained run to any client of OpenAI's API, and on a page to chat on. Ctrl-C ends it."""
    from blocktrain.serving.engine import Engine
    from blocktrain.serving.host import Door

    existing_run(run)
    opened = Door(listen, key_file, tls_cert, tls_key, plaintext).open(say)
    chain, draft = open_chain(run, stages, mode)
    name = run.resolve().name
    engine = Engine(chain, name, draft, mode=mode, wire=wire, max_streams=max_streams, allow_missing=allow_missing_blocks)
    print(f"serving {name} at {opened.url}", flush=True)
    for line in _first_lines(opened.url, name, key_file if opened.keys else None, tls_cert):
        print(line, flush=True)
    opened.serve(engine)
    say("stopped")
    return 0


def open_chain(run: Path, stages: str | None, mode: str) -> tuple[Any, Any]:
    """(chain, what drafts for it or None). Where stages are named, theirs are the blocks: they are never replaced by blocks in this process.

    Raises ConfigError where `mode` needs a draft that the run cannot give.
    """
    from blocktrain.serving.chain import LocalChain
    from blocktrain.serving.decoding import OwnDraft
    from blocktrain.training.checkpoint import load_run

    if stages is not None:
        raise ConfigError(f"--stages {stages}: stages on other hosts are not part of this version")  # a remote chain goes here, and only here
    loaded = load_run(run, say)
    try:
        draft = OwnDraft(loaded)
    except ConfigError:
        if mode == "speculative":
            raise
        draft = None
    return LocalChain(loaded), draft


def _first_lines(url: str, name: str, key_file: Path | None, certificate: Path | None) -> list[str]:
    """A page, and two lines that ask for a text: each can be pasted into a shell."""
    key = f' -H "Authorization: Bearer $(head -n1 {shlex.quote(str(key_file))})"' if key_file else ""
    trust = f" --cacert {shlex.quote(str(certificate))}" if certificate else ""
    body = json.dumps({"model": name, "prompt": "The ", "max_tokens": 40})
    curl = f"curl -sg{trust}{key} -H 'Content-Type: application/json' -d {shlex.quote(body)} {shlex.quote(url + '/v1/completions')}"
    client = f"OpenAI(base_url={url + '/v1'!r}, api_key={f'open({str(key_file)!r}).readline().strip()' if key_file else repr('none')})"
    python = f"from openai import OpenAI; print({client}.completions.create(model={name!r}, prompt='The ', max_tokens=40).choices[0].text)"
    before = f"SSL_CERT_FILE={shlex.quote(str(certificate))} " if certificate else ""
    return [f"page: {url}/", curl, f"{before}python3 -c {shlex.quote(python)}"]


def sample(run: Any, prompt: bytes, max_bytes: int) -> str:
    """A text after a prompt from a loaded run."""
    from blocktrain.serving.decoding import Plan

    return asyncio.run(_generate(run, None, Plan(max_bytes=max_bytes), prompt, None))[0].decode("utf-8", "replace")


def _plan_parts(temperature: float, top_p: float, seed: int, max_bytes: int, wire: Wires, draft_bytes: int | None) -> tuple[Any, ...]:
    """Checked; raises ConfigError naming the flag."""
    from blocktrain.serving.compute import Settings
    from blocktrain.serving.decoding import MAX_DRAFT
    from blocktrain.serving.sampling import Sampling, check_max_bytes

    try:
        sampling = Sampling(temperature, top_p, seed)
        check_max_bytes(max_bytes)
    except ConfigError as error:
        name, _, rest = str(error).partition(":")
        raise ConfigError(f"--{name.replace('_', '-')}:{rest}") from None
    if draft_bytes is not None and not 0 <= draft_bytes <= MAX_DRAFT:
        raise ConfigError(f"--draft-bytes: must be between 0 and {MAX_DRAFT}, got {draft_bytes}")
    return sampling, max_bytes, Settings(wire), draft_bytes


def _show(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


async def _generate(run: Any, other: Any, plan: Any, prompt: bytes, show: Callable[[str], None] | None) -> tuple[bytes, Any]:
    from blocktrain.serving.chain import LocalChain
    from blocktrain.serving.decoding import Counts, OtherDraft, OwnDraft, generate
    from blocktrain.serving.text import TextStream

    drafter = (OwnDraft(run) if other is None else OtherDraft(other)) if plan.mode == "speculative" else None
    chain, stream, counts, data = LocalChain(run), TextStream(), Counts(), b""
    async for piece in generate(chain, plan, prompt, drafter, counts):
        data += bytes(piece.ids)
        if show:
            show(stream.feed(bytes(piece.ids)))
    if show:
        show(stream.end())
    await chain.close()
    return data, counts
