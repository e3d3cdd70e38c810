"""Everything that a run has become, worked out once more: its versions from version 0 and the accepted updates, and its books from both.

`replay` makes every version of every part anew, in the order in which rounds were closed, and compares each file with the manifest's digest. `audit`
asks whether each accepted update is counted exactly once in each block that took it (or still waits), whether no step of a block was counted twice,
and whether the tokens are the sum of what was counted. Needs limits.keep_updates = true from the start of the run.

    python -m blocktrain.swarm.replay RUN      one line per part; exit code 1 where something differs
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from obstore.store import LocalStore

from blocktrain.config import RunConfig, load_config
from blocktrain.errors import BlockTrainError, CheckpointError
from blocktrain.swarm import aggregate, store
from blocktrain.swarm.aggregate import Arrived, Manifest
from blocktrain.swarm.leases import Ranges
from blocktrain.swarm.parts import INTERFACE, Layout, layout_of
from blocktrain.swarm.plain import from_json, from_tagged_json
from blocktrain.swarm.protocol import part_of
from blocktrain.swarm.rounds import Machine
from blocktrain.swarm.rules import staleness_factor
from blocktrain.swarm.state import EVENTS, Share, State
from blocktrain.swarm.store import Blobs, BlobSource, Row, Store, open_store
from blocktrain.training.outer import NormRule, OuterRule

ACCEPTED = ("fresh", "late")


@dataclass
class Books:
    """What the database says of one moment."""

    state: State
    manifests: list[Manifest]  # in the order in which they were made
    updates: dict[str, Row]  # accepted ones, by key

    def of(self, part: str) -> list[Manifest]:
        """A part's manifests, version 0 first."""
        return sorted((m for m in self.manifests if m["part"] == part), key=lambda m: m["version"])


@dataclass
class Report:
    """What came out: the newest digest of each part, how many versions were made anew, and what is wrong, a sentence each."""

    digests: dict[str, str] = field(default_factory=dict)
    versions: Counter[str] = field(default_factory=Counter)
    faults: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))  # by part


def replay(opened: Store, layout: Layout, config: RunConfig) -> dict[str, str]:
    """part -> sha256 of its newest version, made anew. Raises CheckpointError naming the first thing that differs, or that is wrong in the books."""
    report = examine(opened, layout, config)
    faults = [f"{part}: {fault}" for part, found in sorted(report.faults.items()) for fault in found]
    if faults:
        raise CheckpointError(faults[0] + (f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""))
    return report.digests


def examine(opened: Store, layout: Layout, config: RunConfig) -> Report:
    """Replay and audit, with everything that is wrong."""
    books, report = read_books(opened), Report()
    for part, fault in audit(books, layout, config):
        report.faults[part].append(fault)
    with tempfile.TemporaryDirectory(prefix="blocktrain-replay-") as folder:
        _make_anew(opened.blobs, Blobs(LocalStore(folder)), books, layout, config, report)
    return report


def read_books(opened: Store) -> Books:
    """In one transaction, so that a coordinator may go on meanwhile."""
    with opened.transaction() as tx:
        newest = tx.rows(sa.select(store.snapshots).order_by(store.snapshots.c.seq.desc()).limit(1))
        events = tx.events_after(newest[0]["seq"]) if newest else []
        versions = tx.rows(sa.select(store.versions).order_by(store.versions.c.seq, store.versions.c.part, store.versions.c.version))
        updates = tx.rows(sa.select(store.updates).where(store.updates.c.kind.in_(ACCEPTED)))
    if not newest:
        raise CheckpointError("the run has not started yet: there is nothing to replay")
    machine = Machine(from_json(State, newest[0]["state"]))
    for _, event in events:
        machine.apply(from_tagged_json(EVENTS, event))
    manifests = [json.loads(row["manifest"]) | {"seq": row["seq"]} for row in versions]
    return Books(machine.state, manifests, {row["key"]: row for row in updates})


# --- The books ---


def audit(books: Books, layout: Layout, config: RunConfig) -> Iterator[tuple[str, str]]:
    """(part, what is wrong with its books)."""
    for block in range(layout.blocks):
        part = part_of(block)
        counted = [share for manifest in books.of(part)[1:] for share in manifest["shares"]]
        faults = [*_counted_once(books, block, [share["key"] for share in counted]), *_steps_once(books, block)]
        faults += [*_tokens(books, block, config), *_weights(books, counted, config), *_numbers(books, part, books.state.blocks[block].version)]
        yield from ((part, fault) for fault in faults)
    yield from ((INTERFACE, fault) for fault in _numbers(books, INTERFACE, books.state.interface))


def _numbers(books: Books, part: str, newest: int) -> Iterator[str]:
    versions = [manifest["version"] for manifest in books.of(part)]
    if versions != list(range(newest + 1)):
        yield f"manifests are of versions {versions}, the journal says 0 to {newest}"


def _counted_once(books: Books, block: int, counted: list[str]) -> Iterator[str]:
    pending = [update.key for update in books.state.blocks[block].pending]
    times = Counter([*counted, *pending])
    for key, row in sorted(books.updates.items()):
        worker = books.state.workers.get(row["worker"])
        dropped = worker is not None and worker.revoked  # only what was not counted yet
        if block in json.loads(row["taken_by"]) and times[key] != 1 and not (dropped and times[key] == 0):
            yield f"update {key} of worker {row['worker']} was accepted and is counted {times[key]} times"
    yield from (f"update {key} is counted and was never accepted" for key in sorted(times.keys() - books.updates.keys()))


def _steps_once(books: Books, block: int) -> Iterator[str]:
    """No step of a block belongs to two accepted updates."""
    ranges = sorted((first, stop, key) for key, steps in steps_of(books, block).items() for first, stop in steps)
    for (_, stop, key), (first, _, other) in zip(ranges, ranges[1:], strict=False):
        if first < stop:
            yield f"step {first} is in update {key} and in update {other}"


def steps_of(books: Books, block: int) -> dict[str, Ranges]:
    """The steps of a block's data that each accepted update was trained on."""
    rows = {key: row for key, row in books.updates.items() if block in json.loads(row["taken_by"])}
    return {key: tuple((first, stop) for first, stop in json.loads(row["steps"])) for key, row in rows.items()}


def _tokens(books: Books, block: int, config: RunConfig) -> Iterator[str]:
    total = 0
    for manifest in books.of(part_of(block))[1:]:
        total += sum(_tokens_of(books, share["key"], config) for share in manifest["shares"])
        if manifest["tokens"] != total:
            yield f"version {manifest['version']} says {manifest['tokens']} tokens, its updates have {total}"
            return
    if books.state.blocks[block].tokens != total:
        yield f"the journal says {books.state.blocks[block].tokens} tokens, the counted updates have {total}"


def _tokens_of(books: Books, key: str, config: RunConfig) -> int:
    return books.updates[key]["num_samples"] * config.model.positions if key in books.updates else 0


def _weights(books: Books, counted: list[Mapping[str, Any]], config: RunConfig) -> Iterator[str]:
    for share in counted:
        if share["weight"] != (due := _tokens_of(books, share["key"], config) * staleness_factor(share["age"])):
            yield f"update {share['key']} was weighted {share['weight']}, its tokens and age make {due}"


# --- The versions ---


def _make_anew(kept: Blobs, made: Blobs, books: Books, layout: Layout, config: RunConfig, report: Report) -> None:
    """Every version in the order in which it was closed; a part ends where it cannot be gone on with."""
    newest = {part: aggregate.first_version(made, layout, part) for part in layout.entries}
    for part, manifest in newest.items():
        _compare(books.of(part)[0] if books.of(part) else None, manifest, report)
    stories = {manifest["seq"]: manifest for manifest in books.manifests if "shares" in manifest}
    for manifest in books.manifests:
        part, before = manifest["part"], newest.get(manifest["part"])
        if manifest["version"] == 0 or before is None:
            continue
        try:
            after = _next(kept, made, manifest, stories.get(manifest["seq"]), before, books, layout, config)
        except (BlockTrainError, OSError) as error:
            report.faults[part].append(f"version {manifest['version']} cannot be made anew: {error}")
            del newest[part]
            continue
        _compare(manifest, after, report)
        made.delete({*_names(before)} - {*_names(after)})
        newest[part] = after


def _next(
    kept: Blobs, made: Blobs, manifest: Manifest, story: Manifest | None, before: Manifest, books: Books, layout: Layout, config: RunConfig
) -> Manifest:
    """One version from the one before. `story` is the manifest of the block whose close made it: it tells who counted what."""
    if story is None:
        raise CheckpointError("no manifest tells of which updates it was made")
    part, outer = manifest["part"], config.outer
    heard = [share for share in story["shares"] if share["key"] not in story["damaged"]]
    ages = {share["key"]: share["age"] for share in story["shares"]}
    shares = [Share(share["key"], share["worker"], share["age"], share["weight"]) for share in heard]
    arrived = {share["key"]: _arrived(kept, books, share, config) for share in heard}
    rule = OuterRule() if part == INTERFACE else OuterRule(outer.optimizer, outer.lr, outer.momentum)
    found = aggregate.contributions(part, story["block"], layout, shares, arrived, NormRule(outer.norm_limit, outer.norm_beyond))
    return aggregate.next_version(aggregate.Step(made, layout, part, story["block"], before, found, rule, ages, outer.down_codec))


def _arrived(kept: Blobs, books: Books, share: Mapping[str, Any], config: RunConfig) -> Arrived:
    """A counted update, its bytes held to the digest under which it was accepted."""
    row = books.updates.get(share["key"])
    if row is None:
        raise CheckpointError(f"update {share['key']} was never accepted")
    parts, blocks, digest = json.loads(row["parts"]), json.loads(row["blocks"]), hashlib.sha256()
    for name, size in parts:
        if kept.size(name) != size:
            cure = "" if config.limits.keep_updates else "; limits.keep_updates must be true from the start of a run that is to be replayed"
            raise CheckpointError(f"update {share['key']}: {name} is not there whole{cure}")
        for chunk in kept.chunks(name, 0, size):
            digest.update(chunk)
    if not digest.hexdigest() == row["sha256"] == share["sha256"]:
        raise CheckpointError(f"update {share['key']}: its bytes are not those that were accepted, their sha256 is another")
    return Arrived(row["key"], blocks[0], blocks[-1] + 1, BlobSource(kept, parts), row["sha256"], json.loads(row["metrics"])["norms"])


def _compare(said: Manifest | None, made: Manifest, report: Report) -> None:
    part, version = made["part"], made["version"]
    report.digests[part] = made["file"]["sha256"]
    report.versions[part] += 1
    if said is None:
        report.faults[part].append(f"version {version} has no manifest")
        return
    for kind in ("file", "delta", "residual", "momentum"):
        recorded, found = (m[kind]["sha256"] if m[kind] else None for m in (said, made))
        if recorded != found:
            report.faults[part].append(f"version {version}: {kind} is {str(recorded)[:16]} by its manifest and {str(found)[:16]} made anew")


def _names(manifest: Manifest) -> Iterator[str]:
    return (manifest[kind]["name"] for kind in ("file", "delta", "residual", "momentum") if manifest[kind])


# --- For operators ---


def main(run: Path) -> int:
    """One line per part, then what is wrong; 1 where something is."""
    if not (run / "swarm" / "state.db").is_file():
        raise CheckpointError(f"{run}: has no coordinator's state; start one with `blocktrain coordinator {run}`")
    config = load_config(run / "run.toml")
    opened = open_store(run / "swarm")
    try:
        report = examine(opened, layout_of(config), config)
    finally:
        opened.close()
    for part in sorted({*report.digests, *report.faults}):
        found = report.faults.get(part, [])
        print(f"{part}: {report.versions[part]} versions, {report.digests.get(part, '-')[:16]}: {f'{len(found)} faults' if found else 'as recorded'}")
        for fault in found:
            print(f"  {fault}")
    return 1 if any(report.faults.values()) else 0


if __name__ == "__main__":
    try:
        sys.exit(main(Path(sys.argv[1])))
    except IndexError:
        sys.exit("usage: python -m blocktrain.swarm.replay RUN")
    except BlockTrainError as error:
        sys.exit(str(error))
