"""Matrix products with what comes right before them, which keep little for the backward pass and compute the rest again.

N batch, T positions, D width, F feed-forward width, H heads, K channels of a head.

Autograd would keep every step between two matrix products: of one sub-layer the normalised stream, the modulated one and what the short convolution
makes of it, beside the stream that they all follow from. They cost a few operations a number, so the functions here make them anew. No matrix product
is computed twice. Gradients are those of the plain expressions, up to rounding; there are no second derivatives.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

EPS = 1e-6  # of every norm


def rms_norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.size(-1),), eps=EPS)


def _rstd(x: Tensor) -> Tensor:
    """1 / the root mean square of each row, float32 or finer."""
    return (
        torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.promote_types(x.dtype, torch.float32))
        .square_()
        .div_(x.size(-1))
        .add_(EPS)
        .rsqrt_()
    )


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair of channels by its position's angle: x (N, H, T, K), cos and sin (T, K / 2)."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1).to(x.dtype)


def mixed(h: Tensor, taps: Tensor | None) -> Tensor:
    """h_t + sum over k of taps_k * h_(t - k): h (N, T, D), taps (K, D) -> (N, T, D)."""
    if taps is None or not len(taps):
        return h
    out = h.clone()
    for k, tap in enumerate(taps[: h.size(1) - 1], 1):
        out[:, k:].addcmul_(h[:, :-k], tap)
    return out


def _norm_gradient(back: Tensor, x: Tensor, n: Tensor, gain: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of rms_norm(x) * gain, given that of the product and n = rms_norm(x): (that of x, that of gain before it is summed)."""
    along = back * n
    return (back * gain).addcmul_(n, (along * gain).mean(-1, keepdim=True), value=-1).mul_(_rstd(x)), along


def _modulated(n: Tensor, gain: Tensor, shift: Tensor | None) -> Tensor:
    return n * gain if shift is None else torch.addcmul(shift, n, gain)


class _Project(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor, shift: Tensor | None, taps: Tensor | None, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, gain, shift, taps, *weights)
        read = mixed(_modulated(rms_norm(x), gain, shift), taps)
        return tuple(F.linear(read, weight) for weight in weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, gain, shift, taps, *weights = ctx.saved_tensors
        n = x * _rstd(x)
        h = _modulated(n, gain, shift)
        rows, read = [grad.flatten(0, -2) for grad in grads], mixed(h, taps).flatten(0, -2).to(grads[0].dtype)
        by_weight = [(grad.T @ read).to(weight.dtype) for grad, weight in zip(rows, weights, strict=True)]
        del read  # here and below: as little at a time as can be, since all layers before this one are still kept
        back = rows[0] @ weights[0].to(rows[0].dtype)  # gradient of what the products read
        for grad, weight in zip(rows[1:], weights[1:], strict=True):
            back = back.addmm_(grad, weight.to(grad.dtype))
        back, by_taps = back.view_as(x).to(x.dtype), None
        if taps is not None:
            by_taps, after = torch.zeros_like(taps), back
            back = back.clone()
            for k, tap in enumerate(taps[: x.size(1) - 1], 1):
                back[:, :-k].addcmul_(after[:, k:], tap)
                by_taps[k - 1] = (after[:, k:] * h[:, :-k]).sum((0, 1))
            del after
        del h
        by_shift = None if shift is None else back.sum_to_size(shift.shape).to(shift.dtype)
        by_x, along = _norm_gradient(back, x, n, gain)
        by_gain = along.sum_to_size(gain.shape).to(gain.dtype)
        return by_x, by_gain, by_shift, by_taps, *by_weight


def project(x: Tensor, gain: Tensor, shift: Tensor | None, taps: Tensor | None, *weights: Tensor) -> tuple[Tensor, ...]:
    """mixed(rms_norm(x) * gain + shift, taps) times each of the matrices; keeps x alone.

    x (N, T, D), gain and shift broadcast to it, taps (K, D), weights (F_i, D) -> (N, T, F_i) each.
    """
    return _Project.apply(x, gain, shift, taps, *weights)  # type: ignore[return-value]


class _NormRotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        out = rotate(rms_norm(x), cos, sin).to(x.dtype)
        ctx.save_for_backward(out, _rstd(x), cos, sin)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (grad,), (out, rstd, cos, sin) = grads, ctx.saved_tensors
        # A rotation keeps lengths and angles: the norm's gradient is taken of what was turned, and turned back.
        g = (grad - out * (grad * out).mean(-1, keepdim=True)) * rstd
        return rotate(g, cos, -sin).to(grad.dtype), None, None


def norm_rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """rotate(rms_norm(x), cos, sin), x (N, H, T, K); keeps the result, which attention keeps too, and one number a row."""
    return _NormRotate.apply(x, cos, sin)  # type: ignore[return-value]


class _HeadsProject(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(y, weight)
        return F.linear(y.transpose(1, 2).flatten(2), weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (grad,), (y, weight) = grads, ctx.saved_tensors
        rows = grad.flatten(0, -2)
        by_weight = rows.T @ y.transpose(1, 2).flatten(2).flatten(0, 1).to(grad.dtype)
        by_y = (rows @ weight.to(grad.dtype)).view(y.transpose(1, 2).shape).transpose(1, 2)
        return by_y.to(y.dtype), by_weight.to(weight.dtype)


def heads_project(y: Tensor, weight: Tensor) -> Tensor:
    """Heads side by side, times a matrix: y (N, H, T, K), weight (D, H K) -> (N, T, D); keeps y, which attention keeps too."""
    return _HeadsProject.apply(y, weight)  # type: ignore[return-value]


class _SquareProject(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, up: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(up, weight)
        return F.linear(F.relu(up).square_(), weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (grad,), (up, weight) = grads, ctx.saved_tensors
        rows, positive = grad.flatten(0, -2), F.relu(up)
        by_weight = rows.T @ positive.square().flatten(0, -2).to(grad.dtype)
        by_hidden = (rows @ weight.to(grad.dtype)).view_as(up)
        return by_hidden.mul_(positive).mul_(2), by_weight.to(weight.dtype)


def square_project(up: Tensor, weight: Tensor) -> Tensor:
    """relu(up)^2 times a matrix: up (N, T, F), weight (D, F) -> (N, T, D); keeps `up` alone."""
    return _SquareProject.apply(up, weight)  # type: ignore[return-value]


class _GateProject(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up, weight)
        return F.linear(F.silu(gate).mul_(up), weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (grad,), (gate, up, weight) = grads, ctx.saved_tensors
        rows, open_ = grad.flatten(0, -2), torch.sigmoid(gate)
        soft = gate * open_
        by_weight = rows.T @ (soft * up).flatten(0, -2).to(grad.dtype)
        by_hidden = (rows @ weight.to(grad.dtype)).view_as(up)
        by_gate = by_hidden * up * open_.mul_(1 + gate - soft)
        return by_gate, by_hidden.mul_(soft), by_weight.to(weight.dtype)


def gate_project(gate: Tensor, up: Tensor, weight: Tensor) -> Tensor:
    """silu(gate) * up times a matrix: gate and up (N, T, F), weight (D, F) -> (N, T, D); keeps gate and up."""
    return _GateProject.apply(gate, up, weight)  # type: ignore[return-value]


LOGITS = {"cpu": 1 << 18}  # that are there at once: what fits a cache
LOGITS_ELSEWHERE = 1 << 22  # few launches


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gain: Tensor, head: Tensor, y: Tensor, share: Tensor, others: Tensor | None, vote_weight: float
    ) -> tuple[Tensor, Tensor]:
        rows, ids, shares = x.flatten(0, 1), y.flatten(), share.repeat_interleave(y.size(1))
        ce, by_x, by_gain, by_head = torch.empty_like(shares), torch.empty_like(rows), torch.zeros_like(gain), torch.zeros_like(head)
        loss, others = torch.empty_like(ce), None if others is None else others.flatten(0, 1)
        count = max(1, LOGITS.get(x.device.type, LOGITS_ELSEWHERE) // head.size(0))
        for part in (slice(at, at + count) for at in range(0, len(rows), count)):
            n = rms_norm(rows[part])
            features = n * gain
            logits = F.linear(features, head)
            log_p = torch.log_softmax(logits.to(shares.dtype), dim=-1)
            loss[part] = ce[part] = -log_p.gather(1, ids[part, None])[:, 0]
            log_vote = None if others is None else torch.log_softmax(log_p + others[part], dim=-1)
            if log_vote is not None:
                loss[part] = torch.lerp(loss[part], -log_vote.gather(1, ids[part, None])[:, 0], vote_weight)
            if not any(ctx.needs_input_grad):
                continue
            p = log_p.exp_() if log_vote is None else torch.lerp(log_p.exp_(), log_vote.exp_(), vote_weight)
            p.scatter_add_(1, ids[part, None], torch.full_like(p[:, :1], -1))
            p = p.mul_(shares[part, None]).to(logits.dtype)
            by_head += p.T @ features.to(p.dtype)
            back = (p @ head.to(p.dtype)).to(x.dtype)
            by_x[part], along = _norm_gradient(back, rows[part], n, gain)
            by_gain += along.sum(0)
        ctx.save_for_backward(by_x.view_as(x), by_gain, by_head)
        mean = ce.view_as(y).mean(1)
        ctx.mark_non_differentiable(mean)
        return (loss * shares).sum(), mean

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return *(kept * grads[0] for kept in ctx.saved_tensors), None, None, None, None


def head_loss(
    x: Tensor, gain: Tensor, head: Tensor, y: Tensor, weight: Tensor, others: Tensor | None = None, vote_weight: float = 0.0
) -> tuple[Tensor, Tensor]:
    """The mean over samples of weight * cross entropy of (rms_norm(x) * gain) times a head, and each sample's plain cross entropy, in nats.

    x (N, T, D), gain (D), head (V, D), ids y (N, T), weight (N,) float32 -> scalar with a gradient, (N,) without. With `others` (N, T, V),
    log-probabilities that are added to the head's own, `vote_weight` of the loss is the cross entropy of the sum, normalised. Logits exist for some
    rows at a time, and the gradient is computed while they are there: what is kept is as large as x and the head.
    """
    share = weight / y.numel()
    return _HeadLoss.apply(x, gain, head, y, share, others, vote_weight)  # type: ignore[return-value]
