"""A coordinator's versions as a checkpoint of the run folder, so that `evaluate`, `generate` and `serve` read it like any other.

The versions are those of one moment. Files are copied from the store in pieces and written whole or not at all, like every checkpoint.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import sqlalchemy as sa

from blocktrain.errors import CheckpointError
from blocktrain.swarm import crash, store
from blocktrain.swarm.coordinator import Coordinator
from blocktrain.swarm.parts import INTERFACE
from blocktrain.swarm.protocol import part_of
from blocktrain.training.checkpoint import Progress, block_file, write_checkpoint
from blocktrain.training.trainer import training_flops


def export(coordinator: Coordinator, run: Path, heldout_digest: str) -> int:
    """Write the newest versions as a checkpoint; returns the steps that every block has taken. Raises CheckpointError where the disk refuses."""
    with coordinator.reading() as state:
        interface, blocks = state.interface, [(block.version, block.tokens) for block in state.blocks]
        finished = coordinator.finished
    manifests = {"interface.safetensors": coordinator.manifest(INTERFACE, interface)}
    manifests |= {block_file(b): coordinator.manifest(part_of(b), version) for b, (version, _) in enumerate(blocks)}
    config, seconds = coordinator.config, coordinator.now()
    steps = min(tokens for _, tokens in blocks) // config.tokens_per_step
    progress = Progress(
        updates=steps,
        phase=0,
        step=steps,
        finished=finished,
        bytes_seen=max(tokens for _, tokens in blocks),
        training_flops=_flops(coordinator, [tokens // config.tokens_per_step for _, tokens in blocks]),
        seconds=seconds,
        fitted=None,
        config=config.model_dump_json(),
        config_digest=config.digest,
        train_digest=coordinator.text.digest,
        heldout_digest=heldout_digest,
        files={},
    )

    def fill(folder: Path) -> None:
        for name, manifest in manifests.items():
            blob = manifest["file"]
            digest = hashlib.sha256()
            with open(folder / name, "wb") as file:
                for chunk in coordinator.store.blobs.chunks(blob["name"], 0, blob["size"]):
                    digest.update(chunk)
                    file.write(chunk)
            if digest.hexdigest() != blob["sha256"]:
                raise CheckpointError(coordinator.damage_of(blob["name"]) or f"{blob['name']}: could not be read whole")
        crash.point("export.before_rename")

    write_checkpoint(run, progress, fill)
    return steps


def _flops(coordinator: Coordinator, steps: list[int]) -> float:
    """Of every accepted update, frozen blocks that it needed included; `steps` of each block, over which its updates are spread evenly."""
    config, total = coordinator.config, 0.0
    accepted = sa.select(store.updates.c.blocks, sa.func.sum(store.updates.c.num_samples).label("samples")).where(
        store.updates.c.kind.in_(["fresh", "late"])
    )
    with coordinator.store.transaction() as tx:
        for row in tx.rows(accepted.group_by(store.updates.c.blocks)):
            blocks = json.loads(row["blocks"])
            taken = max(1, min(steps[b] for b in blocks))
            each = training_flops(config, [(blocks[0], blocks[-1] + 1)], taken) / (taken * config.train.batch_size)
            total += row["samples"] * each
    return total
