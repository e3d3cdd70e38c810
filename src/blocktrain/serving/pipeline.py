"""The client's side of a chain of stages: a link to each address, and routes of live stages through all blocks.

A way that broke (between two stages that do not reach each other, or to a stage that fails at its work) is avoided while there is another, and tried
again at once when one of its ends comes back, or after a second where nothing else is left. Stages of different checkpoints never share a text.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from blocktrain.errors import ProtocolError, ServingError
from blocktrain.serving.chain import ChainStatus, StageStatus
from blocktrain.serving.compute import Settings
from blocktrain.serving.frames import Frame, Kind, Refusal
from blocktrain.serving.line import Secrets
from blocktrain.serving.link import Expected, StageLink
from blocktrain.serving.remote_text import Hop, RemoteText

__all__ = ["Expected", "Hop", "RemoteChain", "RemoteText", "Secrets"]

AVOID_S = 20.0  # for which a way that broke is not taken where there is another
RETRY_S = 1.0  # and where there is none
TELL_S = 3.0  # after which whoever waits for stages is told so
STEP_LIMIT_S = 60.0  # for which a stage's blocks may be at one batch of steps


class RemoteChain:
    """The blocks of a run behind stages. Made inside a running event loop."""

    def __init__(self, expected: Expected, addresses: Sequence[str], secrets: Secrets | None = None, allow_missing_blocks: bool = False) -> None:
        self.expected, self.config, self.shape = expected, expected.config, expected.shape
        self.allow_missing_blocks = allow_missing_blocks
        self.step_limit_s = STEP_LIMIT_S
        self.texts: dict[bytes, RemoteText] = {}
        self._broken: dict[tuple[str, str], float] = {}  # way from address ("*": any) to address -> when it broke
        self._changed = asyncio.Event()
        self.links = [StageLink(address, expected, secrets or Secrets(), self._take, self._change) for address in dict.fromkeys(addresses)]

    # --- Stages ---

    async def ready(self, limit_s: float = 8.0, say: Callable[[str], None] | None = None) -> None:
        """Wait until stages that are up hold every block, or with `allow_missing_blocks` some; whoever waits long is told for what.

        Raises ServingError saying what each address lacks.
        """
        began = time.monotonic()
        end = began + limit_s
        while self.missing():
            if say is not None and time.monotonic() > began + TELL_S:
                say(f"waiting up to {limit_s:g} s: {self.why_not()}")
                say = None
            over = time.monotonic() > end or all(link.state == "failed" for link in self.links)
            if self.allow_missing_blocks and self.live() and (over or all(link.tried and link.state != "loading" for link in self.links)):
                return
            if over:
                raise ServingError(self.why_not())
            await self.change(end - time.monotonic())

    async def change(self, limit_s: float) -> None:
        """Until some stage comes or goes, at most `limit_s`."""
        await asyncio.wait({waiter := asyncio.ensure_future(self._changed.wait())}, timeout=max(0.01, min(limit_s, 1.0)))
        waiter.cancel()

    def _change(self, link: StageLink) -> None:
        """A stage came or went."""
        if link.up:
            self._broken = {way: since for way, since in self._broken.items() if link.address not in way}
        else:
            for text in list(self.texts.values()):
                text.lost(link)
        self._changed.set()
        self._changed = asyncio.Event()

    def live(self) -> list[StageLink]:
        """Stages that are up, each once however many addresses it has."""
        found: dict[str, StageLink] = {}
        for link in self.links:
            if link.up and link.hello:
                found.setdefault(link.hello.node, link)
        return list(found.values())

    def _checkpoints(self) -> list[str]:
        """Of the stages that are up, the latest first."""
        steps = {link.checkpoint: link.hello.step for link in self.links if link.up and link.hello}
        return sorted(steps, key=lambda checkpoint: -steps[checkpoint])

    def missing(self, skip: Sequence[int] = (), checkpoint: str | None = None) -> list[int]:
        """Blocks that no stage holds; where stages serve several checkpoints, of the one that lacks least."""
        found: list[list[int]] = []
        for each in self._checkpoints() if checkpoint is None else [checkpoint]:
            held = {b for link in self.links if link.up and link.checkpoint == each for b in range(*link.span)}
            found.append([b for b in range(self.config.model.blocks) if b not in held and b not in skip])
        return min(found, key=len, default=[b for b in range(self.config.model.blocks) if b not in skip])

    def why_not(self, skip: Sequence[int] = (), checkpoint: str | None = None) -> str:
        """Which blocks are missing, and what is wrong with each address."""
        missing = self.missing(skip, checkpoint)
        numbers = f"block{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
        problems, up = [link.problem for link in self.links if not link.up], [link for link in self.links if link.up]
        which = f"no stage holds {numbers} now"
        if len({link.checkpoint for link in up} | ({checkpoint} if checkpoint is not None else set())) > 1:
            which = f"no stages of one checkpoint hold all blocks ({numbers} missing)"
            problems += [f"{link.address}: checkpoint {link.checkpoint[:16]}, step {link.hello.step}" for link in up if link.hello]
        return f"{which} ({'; '.join(problems)})" if problems else f"{which} ({len(self.links)} stages are up and hold the others)"

    def status(self) -> ChainStatus:
        shown: dict[str, StageStatus] = {}
        for link in self.links:
            status = link.status()
            if status.node not in shown or not status.node or status.state == "up":
                shown[status.node or link.address] = status
        return ChainStatus(list(shown.values()), self.missing(), max((link.stalled_s for link in self.links if link.up), default=0.0))

    # --- Texts ---

    async def open(self, settings: Settings, enter: int = 0) -> RemoteText:
        """Raises BusyError where stages are full, ServingError where there is no way through the blocks."""
        text = RemoteText(self, settings, enter)
        self.texts[text.name] = text
        try:
            await text.begin()
        except BaseException:
            await text.close()
            raise
        return text

    async def close(self) -> None:
        for text in list(self.texts.values()):
            await text.close()
        for link in self.links:
            link.task.cancel()
        await asyncio.gather(*(link.task for link in self.links), return_exceptions=True)

    def route(self, enter: int, skip: Sequence[int], avoid: set[str], checkpoint: str | None) -> list[Hop] | None:
        """Stages of one checkpoint through all blocks from `enter` on that are not skipped, the idlest first; None where there is no way."""
        now = time.monotonic()
        self._broken = {way: since for way, since in self._broken.items() if now - since < AVOID_S}
        for limit_s in (AVOID_S, RETRY_S):
            barred = {way for way, since in self._broken.items() if now - since < limit_s}
            for each in self._checkpoints() if checkpoint is None else [checkpoint]:
                links = [link for link in self.links if link.up and link.checkpoint == each and link.address not in avoid]
                found = self._way(enter, skip, sorted(links, key=lambda link: (link.texts, -link.span[1])), barred)
                if found:
                    return found
        return None

    def _way(self, enter: int, skip: Sequence[int], links: list[StageLink], barred: set[tuple[str, str]]) -> list[Hop] | None:
        dead: set[tuple[int, str]] = set()

        def onward(block: int, before: str) -> list[Hop] | None:
            while block in skip:
                block += 1
            if block >= self.config.model.blocks:
                return []
            if (block, before) in dead:
                return None
            for link in links:
                first, stop = link.span
                if first <= block < stop and not {(before, link.address), ("*", link.address)} & barred:
                    rest = onward(stop, link.address)
                    if rest is not None:
                        return [Hop(link, block, stop), *rest]
            dead.add((block, before))
            return None

        return onward(enter, "")

    def broke(self, source: str, target: str) -> None:
        """A way between two addresses, or from anywhere ("*")."""
        self._broken[source, target] = time.monotonic()

    def _take(self, link: StageLink, frame: Frame) -> None:
        """A frame from a stage, for the text it belongs to."""
        if frame.text in self.texts:
            self.texts[frame.text].take(link, frame)
        elif frame.kind == Kind.ERROR and frame.text == bytes(16):
            raise ProtocolError(f"it refused a frame: {frame.message(Refusal).reason}")
