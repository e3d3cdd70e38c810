"""Which device and which arithmetic: chosen once, from what the machine is fast at."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import torch

from blocktrain.config import RunConfig
from blocktrain.errors import ConfigError


@dataclass(frozen=True)
class Hardware:
    """The device a run uses and the dtype of its autocast regions (float32: none)."""

    device: torch.device
    dtype: torch.dtype

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        if self.dtype == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self.dtype)

    def __str__(self) -> str:
        return f"{self.device.type}, {str(self.dtype).removeprefix('torch.')}"


BFLOAT16_WIDTH = 192  # on CPUs: narrower layers spend more on conversions than their products save (docs/experiments.md)


def choose_hardware(config: RunConfig) -> Hardware:
    """Resolve `train.device` and `train.precision`; raises ConfigError where the named device is not there."""
    name = config.train.device
    there = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if name == "auto":
        name = next(kind for kind in ("cuda", "mps", "cpu") if there[kind])
    if not there[name]:
        raise ConfigError(f"train.device: {name} is not available on this machine")
    device = torch.device(name)
    if config.train.precision == "auto":
        wide = device.type != "cpu" or config.model.width >= BFLOAT16_WIDTH
        return Hardware(device, torch.bfloat16 if wide and has_bfloat16_units(device) else torch.float32)
    return Hardware(device, getattr(torch, config.train.precision))


def has_bfloat16_units(device: torch.device) -> bool:
    """Ampere and later GPUs; CPUs with AVX512-BF16 or AMX. Elsewhere a CPU emulates it, 10 times slower than float32."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    if device.type == "cpu":
        return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
    return False
