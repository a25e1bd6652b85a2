"""Experts by torch's grouped matrix product: who chose whom stays on the card, so a forward can be captured.

A token's answer must not depend on who else chose its expert. Nobody promises that of the library's kernel, so it is
tried on the very weights before it is used; where it fails, `layers/moe.py` goes from expert to expert instead.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from ssd_ascend.backends.base import Experts
from ssd_ascend.errors import first_line
from ssd_ascend.log import get_logger

_log = get_logger(__name__)
_ROWS = (1, 2, 17, 64, 130, 300)
"""Tokens of one expert in the trial: on either side of every tile's height."""


def grouped_experts(
    gate_up: torch.Tensor, down: torch.Tensor, silu_and_mul: Callable[[torch.Tensor], torch.Tensor]
) -> Experts:
    """`ExpertOps.experts` in torch's own operators, whose shapes depend on nothing but the number of tokens."""
    to_inner, to_hidden = gate_up.transpose(1, 2), down.transpose(1, 2)
    names = torch.arange(gate_up.shape[0], device=gate_up.device).unsqueeze(1)

    def apply(x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        pairs = chosen.flatten()
        order = pairs.argsort(stable=True)
        ends = (pairs <= names).sum(1, dtype=torch.int32)
        rows = x.index_select(0, order // chosen.shape[1])
        inner = silu_and_mul(F.grouped_mm(rows, to_inner, offs=ends))
        answers = F.grouped_mm(inner, to_hidden, offs=ends)
        return torch.empty_like(answers).index_copy_(0, order, answers).view(*chosen.shape, -1)

    return apply


def is_exact(experts: Experts, count: int, hidden: int, *, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether tokens get the same, bit for bit, alone, scattered, and crowding on one expert. False when it fails."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(max(_ROWS), hidden, generator=generator).to(device=device, dtype=dtype)
    scattered = (torch.arange(len(x), device=device) % count).unsqueeze(1)
    try:
        apart = torch.cat([experts(x[i : i + 1], scattered[i : i + 1]) for i in range(min(len(x), 2 * count))])
        together = experts(x, scattered)
        same = torch.equal(apart, together[: len(apart)])
        crowd = torch.zeros_like(scattered)
        first = experts(x[:1], crowd[:1])
        whole = experts(x, crowd)
        parts = [experts(x[:rows], crowd[:rows]) for rows in _ROWS]
        return same and torch.equal(first, whole[:1]) and all(torch.equal(p, whole[: len(p)]) for p in parts)
    except RuntimeError as error:
        _log.warning("torch's grouped matrix product fails here: %s", first_line(error))
        return False
