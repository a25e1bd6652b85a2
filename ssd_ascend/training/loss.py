"""The vocabulary head and the loss on top of it, in one pass: logits are never kept, only their gradient.

The loss is linear in what follows (a sum), so the backward pass is finished here. Logits are float32: bfloat16 rounds
them to eighths, which is a law of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

CHUNK = 8192
"""Rows whose logits exist at one time."""


class Teacher(NamedTuple):
    """What the target says of each position's next token.

    probs: [N, Vd], of the draft vocabulary's tokens; their sum is below 1 where others are likely. best: int64 [N], the
    draft id of the likeliest token of all, -1 where it has none.
    """

    probs: torch.Tensor
    best: torch.Tensor

    def shifted(self, by: int) -> Teacher:
        """Row u is what row u + by was; the last rows are the last one's, over and over, for the caller to mask."""
        return Teacher(*(torch.cat((x[by:], x[-1:].expand(by, *x.shape[1:]))) if by else x for x in self))


def slope(
    logits: torch.Tensor, probs: torch.Tensor, best: torch.Tensor, weight: torch.Tensor, overlap_weight: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradient of the weighted loss by logits [C, Vd] (in the teacher's dtype), the loss, and the weight of the rows
    whose best token is the teacher's.

    Cross-entropy -sum p log q, where p need not sum to 1; and -log sum min(p, q), mixed by `overlap_weight`.
    """
    p = probs.float()
    log_q = logits - logits.logsumexp(-1, keepdim=True)
    q = log_q.exp()
    mass = p.sum(-1, keepdim=True)
    loss = -(p * log_q).sum(-1)
    grad = mass * q - p
    if overlap_weight > 0.0:
        below = (q < p).float()
        shared = torch.minimum(p, q).sum(-1, keepdim=True).clamp_min(1e-6)
        grad_overlap = q * ((q * below).sum(-1, keepdim=True) - below) / shared
        # a position the draft vocabulary cannot serve must not scream
        grad = (1.0 - overlap_weight) * grad + overlap_weight * mass * grad_overlap
        loss = (1.0 - overlap_weight) * loss - overlap_weight * (mass * shared.log()).squeeze(-1)
    own = logits.gather(1, best.clamp_min(0).unsqueeze(1)).squeeze(1)
    right = ((own == logits.amax(-1)) & (best >= 0)).float() * weight
    return (grad * weight.unsqueeze(-1)).to(probs.dtype), (loss * weight).sum(), right.sum()


def matmul_float32(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a @ b with float32 sums kept as such, whatever the factors are."""
    if a.dtype == torch.float32:
        return a @ b
    if a.device.type == "cpu":
        return a.float() @ b.float()
    return torch.mm(a, b, out_dtype=torch.float32)


Slope = Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


class VocabularyLoss(torch.autograd.Function):
    """`apply(normed [N, d], head float32 [Vd, d], teacher probs, teacher best, weight [N], overlap_weight, slope)`.

    Gives (loss, right) as scalars; only the loss has a gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        normed: torch.Tensor,
        head: torch.Tensor,
        probs: torch.Tensor,
        best: torch.Tensor,
        weight: torch.Tensor,
        overlap_weight: float,
        slope: Slope,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Chunk by chunk: logits, their gradient, and from it those of `normed` and `head`."""
        grad_normed = torch.empty_like(normed)
        grad_head = torch.zeros(head.shape, dtype=torch.float32, device=head.device)
        loss = torch.zeros((), device=normed.device)
        right = torch.zeros((), device=normed.device)
        cast = head.to(normed.dtype)
        for first in range(0, normed.shape[0], CHUNK):
            part = slice(first, first + CHUNK)
            logits = matmul_float32(normed[part], cast.t())
            grad, loss_part, right_part = slope(logits, probs[part], best[part], weight[part], overlap_weight)
            grad = grad.to(normed.dtype)  # as it is, where teacher and head share a dtype
            grad_normed[part] = grad @ cast
            grad_head += matmul_float32(grad.t(), normed[part])
            loss += loss_part
            right += right_part
        ctx.save_for_backward(grad_normed, grad_head)
        ctx.mark_non_differentiable(right)
        return loss, right

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Scale what was computed on the way."""
        grad_normed, grad_head = ctx.saved_tensors
        by = grads[0]
        return grad_normed * by.to(grad_normed.dtype), grad_head * by, None, None, None, None, None
