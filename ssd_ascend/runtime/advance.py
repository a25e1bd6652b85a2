"""The next round's numbers worked out from a verdict that the host has not seen; a device may do it in one launch.

Captured by `speculation/drafters/captured_next.py`. What a verification judged is on the device already: how many
drafts stood says where each sequence goes on, what the drafter has yet to compute, and where the next drafts go.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ssd_ascend.backends.base import AdvancingOps, Backend
from ssd_ascend.core.advance import Advance, Places


def advancer(backend: Backend) -> Callable[[Advance], None]:
    """How this device does it."""
    return backend.ops.advance if isinstance(backend.ops, AdvancingOps) else advance


def advance(to: Advance) -> None:
    """Launch by launch. Rows without a sequence get no slots and no keys.

    Where an entry is a token alone, those of accepted drafts stand, and the last two tokens are computed. Where it is
    made with a feature, all new ones are; those behind the last accepted draft repeat it, and are written over later.
    """
    live, start = (to.start >= 0).unsqueeze(1), to.start.clamp(min=0)
    own, fed = to.pairs[to.rows].unbind(-1)
    accepted = (own[:, :-1] == fed[:, 1:]).long().cumprod(1).sum(1)
    at = accepted.unsqueeze(1)
    own = own.clamp(min=0)  # -1: no finite logits, and the sequence ends
    recovery, end = own.gather(1, at), start + accepted + 1
    width = to.ids.shape[1]
    count = torch.arange(width, device=own.device)
    if to.features is None:
        to.ids.copy_(torch.cat((fed.gather(1, at).clamp(min=0), recovery), dim=1))
        to.last.copy_(width * torch.arange(len(start), device=own.device) + width - 1)
        _place(to.feed, end - 1, live)
        _place(to.steps, end + 1, live)
    else:
        known = torch.minimum(count, at)
        to.ids.copy_(own.gather(1, known))
        to.last.copy_(width * torch.arange(len(start), device=own.device) + accepted)
        to.features.copy_(_slots(to.verify, start.unsqueeze(1) + known))
        _place(to.feed, start, live)
        _place(to.steps, end, live)
    to.verify_ids[:, :1].copy_(recovery)
    _place(to.verify, end, live)


def _place(places: Places, first: torch.Tensor, live: torch.Tensor) -> None:
    """Write the places of positions first, first + 1, ... of each row."""
    count = places.positions.shape[1]
    place = torch.where(live, first.unsqueeze(1) + torch.arange(count, device=first.device), 0)
    places.positions.copy_(place)
    places.slots.copy_(torch.where(live, _slots(places, place), -1))
    places.kv_lens.copy_(torch.where(live, place + 1, 0)[:, count - places.kv_lens.shape[1] :])


def _slots(places: Places, place: torch.Tensor) -> torch.Tensor:
    block = places.table.gather(1, place // places.block_size).long()
    return block * places.block_size + place % places.block_size
