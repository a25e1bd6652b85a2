"""Attention of a head that is unrolled on its own features: the trunk, and one key a step beside it.

Everything is indexed by the *start* u of a chain, the last entry made from a target feature. At step s the chain of u
sits at entry u + s - 1 and sees the trunk up to u (the keys of step 1) and its own keys of steps 2..s. So the trunk is
plain causal attention at every step, which a fused kernel does, and the chain's keys are folded in one at a time.

The gradient of the whole softmax flows through the same kernel: its backward pass needs only the final output and the
final log-sum-exp, whatever other keys took part in them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch


class Segments(NamedTuple):
    """Packed conversations: starts int32 [M + 1] (empty ones at the end are fine), the longest, and who owns a row.

    `owner` int64 [N] is what the plain trunk masks by.
    """

    starts: torch.Tensor
    longest: int
    owner: torch.Tensor


class Trunk(Protocol):
    """Causal attention over packed rows q, k, v [N, H, D]."""

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: Segments, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor, Any]:
        """Output [N, H, D], float32 log-sum-exp [N, H], and what `backward` wants to be reminded of."""
        ...

    def backward(
        self,
        grad: torch.Tensor,
        qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        out: torch.Tensor,
        lse: torch.Tensor,
        segments: Segments,
        scale: float,
        memory: Any,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Gradients of q, k, v, where out and lse may hold more than the trunk's keys."""
        ...


class PlainTrunk:
    """In plain torch, for any device: the reference for the other."""

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: Segments, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor, Any]:
        """See `Trunk`."""
        scores = self._scores(q, k, segments, scale)
        lse = scores.logsumexp(-1)
        out = torch.einsum("hqk,khd->qhd", (scores - lse.unsqueeze(-1)).exp(), v.float())
        return out.to(q.dtype), lse.t().contiguous(), None

    def backward(
        self,
        grad: torch.Tensor,
        qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        out: torch.Tensor,
        lse: torch.Tensor,
        segments: Segments,
        scale: float,
        memory: Any,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See `Trunk`."""
        q, k, v = qkv
        weights = (self._scores(q, k, segments, scale) - lse.t().unsqueeze(-1)).exp()
        wide, delta = grad.float(), (grad.float() * out.float()).sum(-1)
        grad_v = torch.einsum("hqk,qhd->khd", weights, wide)
        slope = weights * (torch.einsum("qhd,khd->hqk", wide, v.float()) - delta.t().unsqueeze(-1)) * scale
        grad_q = torch.einsum("hqk,khd->qhd", slope, k.float())
        grad_k = torch.einsum("hqk,qhd->khd", slope, q.float())
        return grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype)

    @staticmethod
    def _scores(q: torch.Tensor, k: torch.Tensor, segments: Segments, scale: float) -> torch.Tensor:
        place = torch.arange(q.shape[0], device=q.device)
        seen = (segments.owner.unsqueeze(1) == segments.owner) & (place.unsqueeze(1) >= place)
        scores = torch.einsum("qhd,khd->hqk", q.float(), k.float()) * scale
        return scores.masked_fill_(~seen, float("-inf"))


class FusedTrunk:
    """The flash kernel that torch brings along for packed rows, where the device has one."""

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: Segments, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor, Any]:
        """See `Trunk`."""
        starts, longest = segments.starts, segments.longest
        out, lse, state, unused, _ = torch.ops.aten._flash_attention_forward(
            q, k, v, starts, starts, longest, longest, 0.0, True, False, scale=scale
        )
        return out, lse.t().contiguous(), (state, unused)

    def backward(
        self,
        grad: torch.Tensor,
        qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        out: torch.Tensor,
        lse: torch.Tensor,
        segments: Segments,
        scale: float,
        memory: Any,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See `Trunk`."""
        starts, longest = segments.starts, segments.longest
        grads: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = torch.ops.aten._flash_attention_backward(
            grad.contiguous(), *qkv, out, lse.t().contiguous(), starts, starts, longest, longest, 0.0, True, *memory,
            scale=scale,
        )  # fmt: skip
        return grads


def choose_trunk(device: torch.device, dtype: torch.dtype, heads: int, head_dim: int) -> Trunk:
    """The fused trunk where it runs and agrees with the plain one, forward and backward, on a small example."""
    random = torch.Generator().manual_seed(0)
    q, k, v, grad = (torch.randn(24, heads, head_dim, generator=random).to(device, dtype) for _ in range(4))
    starts = torch.tensor([0, 5, 24, 24], dtype=torch.int32, device=device)
    owner = torch.tensor([0] * 5 + [1] * 19, device=device)
    segments, scale, answers = Segments(starts, 19, owner), head_dim**-0.5, []
    for trunk in (PlainTrunk(), FusedTrunk()):
        try:
            out, lse, memory = trunk.forward(q, k, v, segments, scale)
            grads = trunk.backward(grad, (q, k, v), out, lse, segments, scale, memory)
        except (RuntimeError, NotImplementedError):
            return PlainTrunk()
        answers.append((out, lse, *grads))
    close = all(torch.allclose(a.float(), b.float(), atol=0.05, rtol=0.05) for a, b in zip(*answers, strict=True))
    return FusedTrunk() if close else PlainTrunk()


def fold(
    out: torch.Tensor, lse: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add one key a row to finished attention. out, q [N, H, D]; lse float32 [N, H]; k, v [N, Hkv, D]."""
    score = (grouped(q, k) * k.unsqueeze(2).float()).sum(-1).flatten(1) * scale
    total = torch.logaddexp(lse, score)
    kept, added = (lse - total).exp(), (score - total).exp()
    wide = v.unsqueeze(2).expand(-1, -1, q.shape[1] // k.shape[1], -1).flatten(1, 2)
    return (out * kept.unsqueeze(-1) + wide * added.unsqueeze(-1)).to(out.dtype), total


def unfold(
    grad: torch.Tensor,
    delta: torch.Tensor,
    lse: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k, v through one folded key; `delta` [N, H] is the row sum of grad * final output."""
    groups = k.shape[1]
    wide_q, wide_grad = grouped(q, k), grouped(grad, k)  # [N, Hkv, G, D]
    score = (wide_q * k.unsqueeze(2).float()).sum(-1) * scale
    weight = (score - lse.unflatten(1, (groups, -1))).exp()
    slope = weight * ((wide_grad * v.unsqueeze(2).float()).sum(-1) - delta.unflatten(1, (groups, -1))) * scale
    grad_q = (slope.unsqueeze(-1) * k.unsqueeze(2).float()).flatten(1, 2)
    grad_k = (slope.unsqueeze(-1) * wide_q).sum(2)
    grad_v = (weight.unsqueeze(-1) * wide_grad).sum(2)
    return grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype)


def grouped(x: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """[N, H, D] as float32 [N, Hkv, G, D]: the query heads of each key head together."""
    return x.float().unflatten(1, (k.shape[1], -1))


class Kernels(NamedTuple):
    """What attention is computed with: the trunk, and the two functions above, possibly compiled."""

    trunk: Trunk
    fold: Callable[..., tuple[torch.Tensor, torch.Tensor]] = fold
    unfold: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = unfold


class ChainAttention(torch.autograd.Function):
    """`apply(kernels, segments, scale, q, k1, v1, k2, v2, ...)`: attention of step s over the keys of steps 1..s.

    q [N, H, D]; k, v [N, Hkv, D], already rotated; the result is [N, H, D].
    """

    @staticmethod
    def forward(
        ctx: Any, kernels: Kernels, segments: Segments, scale: float, q: torch.Tensor, *keys_values: torch.Tensor
    ) -> torch.Tensor:
        """The trunk, then the chain's own keys in order."""
        k, v = (_repeat(x, q) for x in keys_values[:2])
        out, lse, ctx.memory = kernels.trunk.forward(q, k, v, segments, scale)
        for key, value in zip(keys_values[2::2], keys_values[3::2], strict=True):
            out, lse = kernels.fold(out, lse, q, key, value, scale)
        ctx.save_for_backward(q, out, lse, *keys_values)
        ctx.kernels, ctx.segments, ctx.scale = kernels, segments, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """All keys share the final output and log-sum-exp."""
        (grad,) = grads
        q, out, lse, *keys_values = ctx.saved_tensors
        k, v = (_repeat(x, q) for x in keys_values[:2])
        grad_q, grad_k, grad_v = ctx.kernels.trunk.backward(
            grad, (q, k, v), out, lse, ctx.segments, ctx.scale, ctx.memory
        )
        groups = keys_values[0].shape[1]
        results = [x.unflatten(1, (groups, -1)).sum(2) for x in (grad_k, grad_v)]
        if len(keys_values) > 2:
            delta = (grad.float() * out.float()).sum(-1)
            for key, value in zip(keys_values[2::2], keys_values[3::2], strict=True):
                more_q, own_k, own_v = ctx.kernels.unfold(grad, delta, lse, q, key, value, ctx.scale)
                grad_q = grad_q + more_q
                results += [own_k, own_v]
        return (None, None, None, grad_q, *results)


def _repeat(x: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Every key head once for each of its query heads: not every kernel groups heads itself."""
    return x.repeat_interleave(q.shape[1] // x.shape[1], dim=1)
