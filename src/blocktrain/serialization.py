"""Tensors to and from bytes, their digest, and files that are written whole or not at all.

safetensors is the only format: no pickle, so nothing read here can run code. A digest covers names, dtypes, shapes and
values in sorted order, so it depends on neither the file's layout nor the machine that wrote it.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from blocktrain.errors import CheckpointError


def tensor_digest(tensors: dict[str, Tensor]) -> str:
    """sha256 over every tensor's name, dtype, shape and little-endian bytes, in the order of their names."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        digest.update(memoryview(tensor.reshape(-1).view(torch.uint8).numpy()))  # type: ignore[arg-type]
    return digest.hexdigest()


def file_sha256(path: Path) -> str:
    """Of a file, read in pieces."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_bytes(path: Path, data: bytes) -> None:
    """Write and flush to the disk; after a crash the file is either whole or not under this name."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with open(scratch, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(scratch, path)


def sync_folder(path: Path) -> None:
    """Make the names inside a folder durable, on systems where a folder can be flushed."""
    if os.name == "nt":
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def save_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write a safetensors file atomically."""
    write_bytes(path, save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}))


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Read a safetensors file; raises CheckpointError naming it."""
    try:
        return load_file(path)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: missing") from None
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{path}: damaged ({error})") from None
