"""Inner optimizers, the learning-rate schedule and gradient clipping.

Matrices of the layers go to Muon (orthogonalised momentum), everything else (embeddings, head, gains, modulation) to AdamW; or all to AdamW.

`Muon` is torch.optim.Muon with another inner step: torch orthogonalises one matrix at a time in bfloat16, which a CPU without bfloat16 units runs
30 times slower than float32 (measured: 1,541 ms against 48 ms for 36 matrices of a 6-layer, width-128 stack on two AVX2 cores). Here matrices of one
shape are stacked into one batched product, in bfloat16 on accelerators and in float32 on CPUs. State, hyper-parameters and result are the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from blocktrain.config import TrainConfig
from blocktrain.model.transformer import BlockStack


def orthogonalize(matrices: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """Quintic Newton-Schulz iteration towards the nearest semi-orthogonal matrix (Jordan et al. 2024), batched: (M, rows, columns) -> same."""
    a, b, c = coefficients
    tall = matrices.size(-2) > matrices.size(-1)
    x = matrices.mT if tall else matrices
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


class Muon(torch.optim.Muon):
    """torch.optim.Muon with its update computed for all matrices of one shape at once."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None, "the trainer computes gradients before it steps"
        for group in self.param_groups:
            shapes: dict[torch.Size, list[nn.Parameter]] = {}
            for p in group["params"]:
                if p.grad is not None:
                    shapes.setdefault(p.shape, []).append(p)
            for shape, parameters in shapes.items():
                self._update(group, shape, parameters)

    def _update(self, group: dict[str, Any], shape: torch.Size, parameters: list[nn.Parameter]) -> None:
        for p in parameters:
            if "momentum_buffer" not in self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        grads: list[Tensor] = [p.grad for p in parameters if p.grad is not None]
        buffers: list[Tensor] = [self.state[p]["momentum_buffer"] for p in parameters]
        torch._foreach_lerp_(buffers, grads, 1 - group["momentum"])
        updates = torch._foreach_lerp(grads, buffers, group["momentum"]) if group["nesterov"] else buffers
        stacked = torch.stack(list(updates))  # (M, rows, columns)
        if stacked.device.type != "cpu":
            stacked = stacked.bfloat16()
        direction = orthogonalize(stacked, group["ns_coefficients"], group["ns_steps"], group["eps"]).to(parameters[0].dtype)
        rate = group["lr"] * max(1.0, shape[0] / shape[1]) ** 0.5
        weights: list[Tensor] = [*parameters]
        torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(weights, list(direction.unbind(0)), alpha=-rate)


def make_optimizers(stack: BlockStack, config: TrainConfig, trained: Iterable[int], interface: bool) -> list[torch.optim.Optimizer]:
    """Optimizers over the trained blocks and, if asked, the interface. Each group remembers its peak rate in `base_lr`."""
    blocks = [stack.block(b) for b in trained]
    matrices = [p for block in blocks for p in block.matrices()]
    ids = {id(p) for p in matrices}
    modules: list[nn.Module] = [*blocks, *([stack.interface] if interface else [])]
    rest = [p for module in modules for p in module.parameters() if id(p) not in ids]
    fused = {"fused": True} if rest and rest[0].device.type in ("cpu", "cuda") else {}
    groups = [{"params": rest, "weight_decay": 0.0, "lr": config.lr, "base_lr": config.lr}]
    if config.optimizer == "adamw":
        groups.append({"params": matrices, "weight_decay": config.weight_decay, "lr": config.lr, "base_lr": config.lr})
        return [torch.optim.AdamW(groups, betas=(0.9, 0.95), **fused)]
    adamw = torch.optim.AdamW(groups, betas=(0.9, 0.95), **fused)
    muon = Muon(matrices, lr=config.muon_lr, weight_decay=config.weight_decay, momentum=0.95)
    muon.param_groups[0]["base_lr"] = config.muon_lr
    return [adamw, muon]


def schedule(step: int, config: TrainConfig) -> float:
    """Trapezoid: share of the peak learning rate for update `step` (from 0): linear rise, flat, linear fall to 0 at `steps`."""
    rise = (step + 1) / config.warmup_steps if config.warmup_steps else 1.0
    fall_steps = config.cooldown * config.steps
    fall = (config.steps - step) / fall_steps if fall_steps else 1.0
    return max(0.0, min(1.0, rise, fall))


def set_rate(optimizers: Iterable[torch.optim.Optimizer], share: float) -> None:
    """Scale every group's learning rate to `share` of its peak."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["base_lr"] * share


def clip(modules: Iterable[nn.Module], limit: float) -> list[float]:
    """Clip each module's gradient norm to `limit` on its own (0: only measure); returns the norms before."""
    norms = []
    for module in modules:
        grads = [p.grad for p in module.parameters() if p.grad is not None]
        if not grads:
            norms.append(0.0)
            continue
        norm = torch.nn.utils.get_total_norm(grads)
        if limit:
            torch.nn.utils.clip_grads_with_norm_(module.parameters(), limit, norm)
        norms.append(float(norm))
    return norms


def optimizer_tensors(stack: BlockStack, optimizers: Iterable[torch.optim.Optimizer]) -> dict[str, Tensor]:
    """Every moment and counter as `parameter.slot`, in the dtype it has."""
    names = {id(p): name for name, p in stack.named_parameters()}
    return {
        f"{names[id(p)]}.{slot}": value if isinstance(value, Tensor) else torch.tensor(value)
        for optimizer in optimizers
        for p, state in optimizer.state.items()
        for slot, value in state.items()
    }


def restore_optimizers(stack: BlockStack, optimizers: Iterable[torch.optim.Optimizer], tensors: dict[str, Tensor]) -> None:
    """Put moments and counters back by parameter name, on the parameter's device."""
    names = {id(p): name for name, p in stack.named_parameters()}
    slots: dict[str, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        name, _, slot = key.rpartition(".")
        slots.setdefault(name, {})[slot] = value
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for p in group["params"]:
                for slot, value in slots.get(names[id(p)], {}).items():
                    on_device = value if slot == "step" and not group.get("fused") else value.to(p.device)
                    optimizer.state[p][slot] = on_device.clone()
