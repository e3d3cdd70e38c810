"""The peak memory of real optimizer steps, measured in a fresh process: `python -m blocktrain.report.measure` with a job on stdin.

The process warms the libraries up on a tiny model first (thread pools, workspaces, lazily loaded kernels: one-time costs that a long run does
not notice), notes what it holds, builds the real model, takes the steps, and prints one JSON line. On Linux the peak is VmHWM, reset before the
model is built; elsewhere ru_maxrss, which can only be read as a difference of peaks; on CUDA the allocator's own peak.

glibc keeps freed tensors of up to 32 MiB on its heap, where they lie in pieces that the next step cannot always use: a CPU process then holds up
to 1.6 times what its tensors take. `allocator = "returning"` fixes glibc's mmap threshold, so that freed tensors go back to the system and
the peak is that of the tensors; "default" leaves glibc as it is.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import torch

from blocktrain.config import ModelConfig, RunConfig, make_config
from blocktrain.diffusion.noise import make_partition
from blocktrain.errors import MemoryLimitError
from blocktrain.model.transformer import VOCABULARY, BlockStack
from blocktrain.seeding import generator
from blocktrain.training.hardware import Hardware, choose_hardware
from blocktrain.training.objective import Span
from blocktrain.training.trainer import BlockTrainer

try:
    import resource
except ImportError:  # Windows: the peak of a process is not measured there
    resource = None

Allocator = Literal["returning", "default"]


def peak_memory(job: dict[str, Any], allocator: Allocator = "returning") -> int:
    """Run a job {config, span, held, steps} in a fresh process; returns bytes over the baseline.

    Raises MemoryLimitError if the system killed it.
    """
    fixed = {"MALLOC_MMAP_THRESHOLD_": "262144", "MALLOC_TRIM_THRESHOLD_": "262144"} if allocator == "returning" else {}
    command = [sys.executable, "-m", "blocktrain.report.measure"]
    result = subprocess.run(command, input=json.dumps(job), capture_output=True, text=True, check=False, env={**os.environ, **fixed})
    if result.returncode == -getattr(signal, "SIGKILL", 9):
        raise MemoryLimitError("the system ended the measured step, most likely for want of memory; make the model or the batch smaller")
    if result.returncode:
        raise RuntimeError(f"measured step failed:\n{result.stderr}")
    answer = json.loads(result.stdout.splitlines()[-1])
    return answer["peak"] - answer["baseline"]


def available_memory(device: torch.device) -> int:
    """Bytes that could still be taken on a device without swapping; what a container's limit leaves, where there is one."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = _meminfo("MemAvailable:") or _memory_without_proc()
    with contextlib.suppress(OSError, ValueError):  # "max" is no number: no limit
        group = Path("/sys/fs/cgroup")
        free = min(free, int((group / "memory.max").read_text()) - int((group / "memory.current").read_text()))
    return free


def _memory_without_proc() -> int:
    """All memory where the system does not say what is free of it; what is free on Windows."""
    if hasattr(os, "sysconf"):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    status = (ctypes.c_ulonglong * 8)(ctypes.sizeof(ctypes.c_ulonglong) * 8)  # MEMORYSTATUSEX: length and load, then total and free, ...
    ctypes.WinDLL("kernel32").GlobalMemoryStatusEx(ctypes.byref(status))  # type: ignore[attr-defined]
    return int(status[2])


def _meminfo(key: str, path: str = "/proc/meminfo") -> int:
    """A line of /proc in bytes; 0 where there is no such file or line."""
    with contextlib.suppress(OSError):
        for line in Path(path).read_text().splitlines():
            if line.startswith(key):
                return int(line.split()[1]) * 1024
    return 0


class Meter:
    """Memory of this process from now on."""

    def __init__(self, device: torch.device) -> None:
        gc.collect()
        self.device = device
        self.resettable = False
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self.baseline = torch.cuda.memory_allocated(device)
            return
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from what is resident now
            self.resettable = True
        self.baseline = _meminfo("VmRSS:", "/proc/self/status") if self.resettable else _highest()

    def peak(self) -> int:
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        return _meminfo("VmHWM:", "/proc/self/status") if self.resettable else _highest()


def _highest() -> int:
    """ru_maxrss in bytes: kilobytes on Linux, bytes on macOS."""
    if resource is None:
        raise MemoryLimitError("peak memory cannot be measured on this system; leave --measure out")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def tiny(config: RunConfig) -> RunConfig:
    """The same run with a model that is nothing beside the real one, and no less than every kernel of it."""
    model = ModelConfig(
        blocks=config.model.blocks,
        layers_per_block=1,
        width=32,
        heads=2,
        positions=16,
        embed_dim=16,
        noise_dim=8,
        mlp=config.model.mlp,
        short_conv=config.model.short_conv,
        block_heads=config.model.block_heads,
    )
    objective = config.objective.model_copy(update={"window": min(config.objective.window, 4)})
    return config.model_copy(update={"model": model, "objective": objective, "train": config.train.model_copy(update={"batch_size": 2})})


def take_steps(config: RunConfig, span: Span, held: list[int], steps: int, hardware: Hardware) -> None:
    """Build the model and take optimizer steps of one span on random bytes."""
    stack = BlockStack.of(config, held).to(hardware.device)
    peers = BlockStack.of(config).to(hardware.device).requires_grad_(False) if config.objective.vote_weight else None
    trainer = BlockTrainer(stack, config, make_partition(config.noise, config.model.blocks), [span], hardware, peers=peers)
    for step in range(steps):
        shape = (config.train.batch_size, config.model.positions + 1)
        trainer.step(torch.randint(VOCABULARY, shape, generator=generator(config.seed, "measure", step)), step)


def main() -> None:
    job = json.load(sys.stdin)
    config, span = make_config(job["config"], "stdin"), (job["span"][0], job["span"][1])
    hardware = choose_hardware(config)
    take_steps(tiny(config), span, job["held"], 2, hardware)
    meter = Meter(hardware.device)
    take_steps(config, span, job["held"], job["steps"], hardware)
    print(json.dumps({"baseline": meter.baseline, "peak": meter.peak(), "device": str(hardware)}))


if __name__ == "__main__":
    main()
