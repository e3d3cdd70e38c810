"""The versions of a run's parts in the store: their manifests, how a worker gets one, what rots, and what may go.

A manifest never changes. Files have their content's digest in their names, so a damaged one is known; nothing is built upon it or served. Old files
go when nobody needs them any more; what a crash or a lost race left is swept.
"""

from __future__ import annotations

import hashlib
import json
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from blocktrain.config import RunConfig
from blocktrain.swarm import aggregate, store
from blocktrain.swarm.journal import Journal
from blocktrain.swarm.parts import INTERFACE, Layout
from blocktrain.swarm.protocol import BlobRef, Delta, PartFiles
from blocktrain.swarm.store import BlobSource, Store

SWEEP_VERSIONS_S = 3600.0  # between looks for files of versions that nothing names; one that two looks in a row find is deleted
SWEEP_S = 60.0  # between looks for parts of uploads that nobody will finish
Point = tuple[int, int, float | None, float | None]  # version, tokens, CE, participation


class Versions(Journal):
    """What the store holds of a run, beside its journal."""

    def __init__(self, config: RunConfig, layout: Layout, store: Store, clock: Callable[[], float], say: Callable[[str], None]) -> None:
        super().__init__(store, clock, say)
        self.config, self.layout = config, layout
        self._manifests: dict[tuple[str, int], dict[str, Any]] = {}
        self._curves: dict[str, list[Point]] = {}
        self._curves_seq, self._curves_lock = 0, threading.Lock()
        self._sound: dict[str, Any] = {}  # blob -> what its file looked like when its digest was right
        self._orphans: set[str] = set()  # files of versions that nothing named at the last look
        self._swept_at, self._versions_swept_at = clock(), -math.inf

    def _write_first_versions(self, first_state: str) -> None:
        """Version 0 of every part, and the state before the first event, where they are not there yet."""
        with self.store.transaction() as tx:
            have = {row["part"] for row in tx.rows(sa.select(store.versions.c.part).distinct())}
            started = bool(tx.rows(sa.select(store.snapshots.c.seq)))
        missing = [part for part in self.layout.entries if part not in have]
        manifests = [aggregate.first_version(self.store.blobs, self.layout, part) for part in missing]
        with self.store.transaction() as tx:
            for manifest in manifests:
                tx.put(store.versions, part=manifest["part"], version=0, seq=0, manifest=json.dumps(manifest))
            if not started:
                tx.put(store.snapshots, seq=0, state=first_state)

    def manifest(self, part: str, version: int) -> dict[str, Any]:
        """Of a version of a part; manifests never change."""
        found = self._manifests.get((part, version))
        if found is None:
            found = self.store.manifest(part, version)
            assert found is not None, f"{part} version {version} has no manifest"
            if len(self._manifests) > 10_000:
                self._manifests.clear()
            self._manifests[part, version] = found
        return found

    def _part_files(self, part: str, version: int, codec: str = "fp32") -> PartFiles:
        """How to get a version of a part; `codec` only for parts that are read and not trained."""
        manifest = self.manifest(part, version)
        if codec != "fp32":
            return PartFiles(part=part, version=version, full=self._coded(part, manifest, codec), codec=codec)  # type: ignore[arg-type]
        deltas = []
        for older in range(version, max(0, version - self._kept(part)), -1):
            if (delta := self.manifest(part, older)["delta"]) is None:
                break
            deltas.append(Delta(version=older, blob=_ref(delta)))
        return PartFiles(part=part, version=version, full=_ref(manifest["file"]), deltas=deltas[::-1])

    def _coded(self, part: str, manifest: dict[str, Any], codec: str) -> BlobRef:
        """A version encoded for whoever only reads it, made once and found again by a fact."""
        fact = f"coded {part} {manifest['version']} {codec}"
        known = self.store.fact(fact)
        if known is None:
            blob = aggregate.encoded_part(self.store.blobs, self.layout, part, manifest, codec)  # type: ignore[arg-type]
            known = self.store.fact_once(fact, json.dumps(vars(blob)))
        return _ref(json.loads(known))

    def curves(self) -> dict[str, list[Point]]:
        """The points of each block; only what is new since the last look is read."""
        new = sa.select(store.versions.c.seq, store.versions.c.manifest).where(store.versions.c.part != INTERFACE, store.versions.c.version > 0)
        with self._curves_lock:
            with self.store.transaction() as tx:
                rows = tx.rows(new.where(store.versions.c.seq > self._curves_seq).order_by(store.versions.c.seq))
            for row in rows:
                told = json.loads(row["manifest"])
                point = told["version"], told["tokens"], told.get("ce"), told.get("participation")
                self._curves.setdefault(told["part"], []).append(point)
                self._curves_seq = row["seq"]
            return {part: list(points) for part, points in self._curves.items()}

    def _digest(self, source: BlobSource) -> str:
        """sha256 of what can be read of it."""
        digest = hashlib.sha256()
        try:
            for name, size in source.parts:
                for chunk in self.store.blobs.chunks(name, 0, size):
                    digest.update(chunk)
        except FileNotFoundError:
            return ""
        return digest.hexdigest()

    # --- Damage ---

    def _require_sound(self, manifest: Mapping[str, Any]) -> None:
        """Nothing is built upon a damaged version. Raises OSError naming the file."""
        for kind in ("file", "residual", "momentum"):
            blob = manifest[kind]
            if blob and self.store.blobs.digest(blob["name"], blob["size"]) != blob["sha256"]:
                raise OSError(self._damage(blob["name"]))

    def _damage(self, name: str) -> str:
        digest = _digest_in(name)
        where = self.store.blobs.path(name) or name
        return f"{where} is damaged: put back a file whose sha256 begins with {digest} (the run's checkpoints hold the newest versions)"

    def damage_of(self, name: str) -> str:
        """Why a blob cannot be served: its bytes are not those of its name. Looked at again only where its file has changed; empty if all is well.

        Raises FileNotFoundError where it has been dropped meanwhile, which is no damage.
        """
        path = self.store.blobs.path(name)
        seen = (path.stat().st_size, path.stat().st_mtime_ns) if path else self.store.blobs.size(name)
        if self._sound.get(name) == seen:
            return ""
        if not self.store.blobs.digest(name, self.store.blobs.size(name) or 0).startswith(_digest_in(name)):
            if self.store.blobs.size(name) is None:
                raise FileNotFoundError(name)
            self.pause(f"file {name}", problem := self._damage(name))
            return problem
        if len(self._sound) > 10_000:
            self._sound.clear()
        self._sound[name] = seen
        self.resume(f"file {name}")
        return ""

    # --- Old files ---

    def _drop_old(self, manifests: Sequence[Mapping[str, Any]], rows: Mapping[str, Mapping[str, Any]]) -> None:
        """Files of versions that nobody needs any more, and of updates that are counted in all their blocks."""
        gone: list[str] = []
        if not self.config.limits.keep_updates:
            pending = {update.key for block in self.machine.state.blocks for update in block.pending}
            gone += [name for key, row in rows.items() if key not in pending for name, _ in json.loads(row["parts"])]
        for manifest in manifests:
            gone += self._files_before(manifest["part"], manifest["version"] - self._kept(manifest["part"]))
        try:
            self.store.blobs.delete(gone)
        except OSError as error:
            self.log(f"old files could not be removed: {error}")

    def _kept(self, part: str) -> int:
        """Versions of a part that stay in the store: the interface moves with each block's close."""
        return self.config.limits.keep_versions * (self.layout.blocks if part == INTERFACE else 1)

    def _files_before(self, part: str, oldest: int) -> list[str]:
        """Files that only versions at or before `oldest` name (manifests stay)."""
        if oldest < 0:
            return []
        kept = {name for version in range(oldest + 1, oldest + self._kept(part) + 1) for name in _files(self.manifest(part, version))}
        names = set(_files(self.manifest(part, oldest)))
        for codec in ("bf16", "int8"):
            if known := self.store.fact(f"coded {part} {oldest} {codec}"):
                names.add(json.loads(known)["name"])
        return sorted(names - kept)

    def _sweep_files(self) -> None:
        """Files that a crash left: scratch, and parts of uploads that nobody will finish."""
        self.store.blobs.delete(self.store.blobs.names("scratch/"))
        self._sweep_uploads()

    def _sweep_uploads(self) -> None:
        """Parts of uploads that nobody will finish."""
        self._swept_at = self.clock()
        if self.config.limits.keep_updates:
            return
        blobs = self.store.blobs
        there = blobs.names("updates/")
        with self._lock, self.store.transaction() as tx:
            self._catch_up(tx)
            state = self.machine.state
            needed = {update.key for block in state.blocks for update in block.pending}
            needed |= {key for key, assignment in state.assignments.items() if assignment.answer is None}
        blobs.delete(name for name in there if name.split("/")[1] not in needed)

    def _sweep_versions(self) -> None:
        """Files of closes that were lost to another coordinator, or cut short before they looked after their own."""
        self._versions_swept_at = self.clock()
        there = set(self.store.blobs.names("versions/"))
        with self.store.transaction() as tx:
            newest = tx.rows(sa.select(store.versions.c.part, sa.func.max(store.versions.c.version).label("version")).group_by(store.versions.c.part))
        for row in newest:
            part, keep = row["part"], self._kept(row["part"])
            for version in range(max(0, row["version"] - keep), row["version"] + 1):
                there.difference_update(_files(self.manifest(part, version)))
                for codec in ("bf16", "int8"):
                    if known := self.store.fact(f"coded {part} {version} {codec}"):
                        there.discard(json.loads(known)["name"])
        self.store.blobs.delete(there & self._orphans)
        self._orphans = there - self._orphans

    def _sweep_if_due(self) -> None:
        if self.clock() - self._swept_at > SWEEP_S:
            self._sweep_uploads()
        if self.clock() - self._versions_swept_at > SWEEP_VERSIONS_S:
            self._sweep_versions()


def _digest_in(name: str) -> str:
    """The digits of its content's sha256 that a blob's name ends in."""
    return name.rpartition("/")[2].partition(".")[0].rpartition("-")[2]


def _ref(blob: Mapping[str, Any]) -> BlobRef:
    return BlobRef(name=blob["name"], size=blob["size"], sha256=blob["sha256"])


def _files(manifest: Mapping[str, Any]) -> Iterator[str]:
    for kind in ("file", "delta", "residual", "momentum"):
        if manifest[kind]:
            yield manifest[kind]["name"]
