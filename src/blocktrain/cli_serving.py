"""The commands that give text: from a run on this machine, or from stages that hold its blocks."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import shlex
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from blocktrain.cli_common import Json, Run, existing_run, out, say
from blocktrain.config import RunConfig, load_config
from blocktrain.errors import ConfigError

READY_S = 8.0
Wires = Literal["float32", "bfloat16", "int8"]
WireOption = Annotated[Wires, Parameter(help="How states are rounded between blocks, whether or not a wire is there.")]
Stages = Annotated[str | None, Parameter(help="Hosts of the blocks, HOST:PORT with commas; each says which blocks it has. Default: this machine.")]
AllowMissing = Annotated[bool, Parameter(negative=(), help="Go on without a block that no stage has; it is said, and costs quality.")]
KeyFile = Annotated[Path | None, Parameter(help="File with the key that stages and their clients share.")]
Wait = Annotated[float, Parameter(help="Seconds to wait at the start for stages to come up and load.")]
Authority = Annotated[Path | None, Parameter(help="PEM certificates that stages' certificates must be signed by; without it, no TLS.")]


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
    wire: WireOption = "bfloat16",
    stages: Stages = None,
    allow_missing_blocks: AllowMissing = False,
    wait: Wait = READY_S,
    key_file: KeyFile = None,
    tls_ca: Authority = None,
    json_: Json = False,
) -> int:
    """Text from a trained run; always valid UTF-8. The prompt is not repeated.

    With --stages the blocks are on other hosts, and the text is the same to the byte.
    """
    from blocktrain.serving.decoding import Plan

    for flag, value, its in (("--window", window, "sweep"), ("--draft-bytes", draft_bytes, "speculative"), ("--draft", draft, "speculative")):
        if value is not None and mode != its:
            raise ConfigError(f"{flag}: only with --mode {its}")
    plan = Plan(mode, *_plan_parts(temperature, top_p, seed, max_bytes, wire, draft_bytes), window=window)
    positions = load_config(existing_run(run)).model.positions
    if (length := len(os.fsencode(prompt))) > positions:
        say(f"note: the prompt has {length} bytes and this run {positions} positions; it goes on from the last {positions * 3 // 4} of them")
    drafts = mode == "speculative"
    source = Source(run, stages, draft if drafts else None, drafts, Reach(allow_missing_blocks, key_file, tls_ca, wait))
    data, counts = asyncio.run(_generate(source, plan, os.fsencode(prompt), None if json_ else _show))
    if counts.missing:
        say(f"note: without block {', '.join(map(str, counts.missing))}, which no stage has")
    if json_:
        said: dict[str, Any] = {"mode": mode, "seed": seed, "temperature": temperature, "top_p": top_p, "traversals": counts.traversals}
        said["missing_blocks"] = list(counts.missing)
        print(json.dumps({"text": data.decode("utf-8", "replace"), "bytes": len(data), **said, "acceptance": counts.acceptance}))
    else:
        print()
    return 0


def serve(
    run: Run,
    /,
    *,
    listen: Annotated[
        str, Parameter(help="HOST:PORT to serve at; port 0 takes a free one. Any address but loopback needs --key-file.")
    ] = "127.0.0.1:8000",
    mode: Annotated[
        Literal["exact", "speculative"],
        Parameter(help="What a request gets that names no mode. speculative gives the same bytes, more of them a traversal."),
    ] = "exact",
    max_streams: Annotated[int, Parameter(help="Texts generated at once; who finds no place is told to ask again.")] = 8,
    wire: WireOption = "bfloat16",
    stages: Stages = None,
    allow_missing_blocks: AllowMissing = False,
    wait: Wait = READY_S,
    stages_key_file: KeyFile = None,
    stages_tls_ca: Authority = None,
    key_file: Annotated[Path | None, Parameter(help="Keys of which whoever asks here shows one, a line each; made if it is not there.")] = None,
    tls_cert: Annotated[Path | None, Parameter(help="PEM file with the certificate.")] = None,
    tls_key: Annotated[Path | None, Parameter(help="PEM file with the certificate's key, where --tls-cert does not hold it too.")] = None,
    plaintext: Annotated[bool, Parameter(negative=(), help="Plain HTTP off loopback: keys and texts can then be read on the way.")] = False,
) -> int:
    """Serve a trained run to any client of OpenAI's API, and on a page to chat on. Ctrl-C ends it.

    With --stages the blocks are on other hosts; they are never replaced by blocks in this process.
    """
    from blocktrain.serving.gateway import Door

    existing_run(run)
    if max_streams < 1:
        raise ConfigError(f"--max-streams: must be at least 1, got {max_streams}")
    opened = Door(listen, key_file, tls_cert, tls_key, plaintext).open(say)
    source = Source(run, stages, None, True, Reach(allow_missing_blocks, stages_key_file, stages_tls_ca, wait))

    async def until_stopped() -> None:
        from blocktrain.serving.engine import Engine

        chain, draft = await _chain_and_draft(source, mode)
        name = run.resolve().name
        engine = Engine(chain, name, draft, mode=mode, wire=wire, max_streams=max_streams, allow_missing=allow_missing_blocks)
        print(f"serving {name} at {opened.url}", flush=True)
        for line in _first_lines(opened.url, name, key_file if opened.keys else None, tls_cert):
            print(line, flush=True)
        await opened.serve(engine)

    asyncio.run(until_stopped())
    say("stopped")
    return 0


async def _chain_and_draft(source: Source, mode: str) -> tuple[Any, Any]:
    """The blocks and what drafts for them; None where the run gives no draft and none is asked for."""
    from blocktrain.errors import CheckpointError
    from blocktrain.serving.decoding import OwnDraft
    from blocktrain.training.checkpoint import load_run

    loaded = load_run(source.run, say) if source.stages is None else None
    try:
        draft = source.drafter() if loaded is None else OwnDraft(loaded)
    except (ConfigError, CheckpointError) as error:
        if mode == "speculative":
            raise
        say(f"note: no speculative mode here: {error}")
        draft = None
    return await source.chain(loaded), draft


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

    return asyncio.run(_generate(Source(run.folder, None), Plan(max_bytes=max_bytes), prompt, None, run))[0].decode("utf-8", "replace")


def stage(
    run: Run,
    /,
    *,
    listen: Annotated[str, Parameter(help="HOST:PORT; port 0 takes a free one.")] = "127.0.0.1:0",
    block: Annotated[
        str | None, Parameter(help="Blocks to serve: 2, 0-1 or 0,1. Default: as many as free memory holds, those that --peers lack.")
    ] = None,
    peers: Annotated[
        str | None, Parameter(help="Other stages of the run, HOST:PORT with commas: this one takes the blocks with fewest copies.")
    ] = None,
    max_texts: Annotated[int, Parameter(help="Texts remembered at once; more are refused.")] = 64,
    key_file: KeyFile = None,
    tls_cert: Annotated[Path | None, Parameter(help="PEM certificate (chain) of this stage.")] = None,
    tls_key: Annotated[Path | None, Parameter(help="PEM private key of that certificate.")] = None,
    tls_ca: Authority = None,
    plaintext: Annotated[bool, Parameter(negative=(), help="Listen off loopback without TLS: for networks that are trusted.")] = False,
) -> int:
    """Serve blocks of a run to `generate`, `evaluate` and `serve` on other hosts.

    RUN needs only run.toml and of its newest checkpoint progress.json, the interface and the blocks served here. Weights are checked by digest.
    """
    from blocktrain.serving import host

    target = host.parse_target(listen, "--listen")
    if not 1 <= max_texts <= 1 << 16:
        raise ConfigError(f"--max-texts: must be between 1 and {1 << 16}, got {max_texts}")
    secrets = host.read_secrets(key_file, tls_cert, tls_key, tls_ca, make_key=True)
    host.check_listen(target, secrets, plaintext)
    settings = load_config(existing_run(run))
    return asyncio.run(_stage(run, settings, target, block, peers, max_texts, secrets))


async def _stage(run: Path, settings: RunConfig, target: str, block: str | None, peers: str | None, max_texts: int, secrets: Any) -> int:
    from blocktrain.serving import host

    addresses = host.parse_targets(peers or "", "--peers")
    free, each = await asyncio.to_thread(_memory, settings)
    if block is not None:
        blocks = host.parse_blocks(block, settings.model.blocks)
        _require_room(len(blocks), free, each)
    else:
        held = await host.ask_peers(addresses, secrets, say)
        blocks = host.place(settings.model.blocks, _require_room(1, free, each), held)
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        with contextlib.suppress(NotImplementedError):  # Windows: Ctrl-C ends it
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return await host.serve_stage(host.StageOptions(run, blocks, target, max_texts, free), secrets, say, stop)


def _memory(settings: RunConfig) -> tuple[int, list[int]]:
    """(bytes free on the device, bytes of the interface and of one block's weights)."""
    from blocktrain.report.accounting import count_blocks, count_interface
    from blocktrain.report.measure import available_memory
    from blocktrain.training.hardware import choose_hardware

    each = [4 * count_interface(settings).all, 4 * count_blocks(settings, range(1)).all]
    return available_memory(choose_hardware(settings).device), each


def _require_room(blocks: int, free: int, each: list[int]) -> int:
    """How many blocks fit; raises MemoryLimitError where fewer than `blocks` do."""
    from blocktrain.errors import MemoryLimitError

    room = int((free * 0.9 - each[0]) // each[1])
    if room < blocks:
        raise MemoryLimitError(f"--block: {blocks} block(s) need {each[0] + blocks * each[1]:,} bytes of memory, {int(free * 0.9):,} are free here")
    return room


@dataclass(frozen=True)
class Reach:
    """How stages are reached."""

    allow_missing_blocks: bool = False
    key_file: Path | None = None
    authority: Path | None = None
    wait_s: float = READY_S

    def __post_init__(self) -> None:
        if not 0 <= self.wait_s < math.inf:
            raise ConfigError(f"--wait: must be a number of seconds from 0, got {self.wait_s}")


class Source:
    """Where text comes from: a run on this machine, or stages."""

    def __init__(self, run: Path, stages: str | None, draft: Path | None = None, drafts: bool = False, reach: Reach | None = None) -> None:
        self.run, self.draft, self.drafts = run, draft, drafts
        self.stages, self.reach = stages, reach or Reach()

    async def chain(self, loaded: Any = None) -> Any:
        """Raises ServingError where the stages do not hold every block."""
        if self.stages is None:
            from blocktrain.serving.chain import LocalChain
            from blocktrain.training.checkpoint import load_run

            return LocalChain(loaded or load_run(self.run, say))
        from blocktrain.serving import host
        from blocktrain.serving.pipeline import RemoteChain

        addresses = host.parse_targets(self.stages, "--stages")
        if not addresses:
            raise ConfigError("--stages: names no stage")
        secrets = host.read_secrets(self.reach.key_file, None, None, self.reach.authority)
        chain = RemoteChain(host.expected_of(self.run, say), addresses, secrets, self.reach.allow_missing_blocks)
        try:
            await chain.ready(self.reach.wait_s, say)
        except BaseException:
            await chain.close()
            raise
        return chain

    def drafter(self) -> Any:
        """The draft model, on this machine; None where none is wanted."""
        from blocktrain.serving.decoding import OtherDraft, OwnDraft, check_own_draft
        from blocktrain.training.checkpoint import load_run

        if not self.drafts:
            return None
        if self.draft is not None:
            return OtherDraft(load_run(self.draft, say))
        depth = load_config(self.run / "run.toml").objective.span
        check_own_draft(load_config(self.run / "run.toml"), depth)
        return OwnDraft(load_run(self.run, say, range(depth)))


def evaluate_stages(run: Path, settings: RunConfig, source: Source, wire: Wires, as_json: bool) -> int:
    """The headline figure through stages."""
    import time

    from blocktrain.serving.compute import Settings
    from blocktrain.serving.scoring import score
    from blocktrain.training.data import heldout_windows, load_corpus

    corpus = load_corpus(settings.data.corpus, heldout=settings.data.heldout, heldout_fraction=settings.data.heldout_fraction)
    windows = heldout_windows(corpus.heldout, settings.model.positions, settings.evaluate.windows)

    async def served() -> tuple[Any, tuple[int, ...]]:
        chain = await source.chain()
        try:
            return await score(chain, windows, Settings(wire))
        finally:
            await chain.close()

    began = time.perf_counter()
    ce, missing = asyncio.run(served())
    headline, seconds = float(ce.mean()), time.perf_counter() - began
    figures = {"headline_ce": headline, "windows": len(windows), "wire": wire, "missing_blocks": list(missing), "seconds": seconds}
    if as_json:
        print(json.dumps(figures))
        return 0
    lacking = f", without block {', '.join(map(str, missing))}" if missing else ""
    out.print(f"headline CE {headline:.4f} nats per byte as served: {len(windows)} windows, one traversal each, states as {wire}{lacking}")
    return 0


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


async def _generate(source: Source, plan: Any, prompt: bytes, show: Callable[[str], None] | None, loaded: Any = None) -> tuple[bytes, Any]:
    from blocktrain.serving.decoding import Counts, generate
    from blocktrain.serving.text import TextStream

    drafter = source.drafter()
    chain, stream, counts, data = await source.chain(loaded), TextStream(), Counts(), b""
    try:
        async for piece in generate(chain, plan, prompt, drafter, counts):
            data += bytes(piece.ids)
            if show:
                show(stream.feed(bytes(piece.ids)))
        if show:
            show(stream.end())
    finally:
        await chain.close()
    return data, counts
