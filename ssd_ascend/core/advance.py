"""From one verdict to the next round's numbers, as a value: all that is needed to work them out without the host.

`runtime/advance.py` says how. Torch appears in annotations only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch


class Places(NamedTuple):
    """Where n tokens of each of R rows go, to be written: static inputs of forwards, for consecutive positions.

    positions, slots: int64 [R, n], any strides. kv_lens: int32 [R, n], keys up to each token, or [R, 1], of the whole
    row. table: int32 [R, M], blocks of `block_size` slots; it is read.
    """

    positions: torch.Tensor
    slots: torch.Tensor
    kv_lens: torch.Tensor
    table: torch.Tensor
    block_size: int


class Advance(NamedTuple):
    """What was judged, and the tensors that the round after it takes its numbers from.

    pairs: int64 [N, 2], `ModelOutput.greedy`, whose last row equals nothing. rows: int64 [R, K + 1], the rows of
    `pairs` that belong to each sequence, that last one where it had fewer drafts. start: int64 [R], the position of the
    first of them; -1: no sequence.

    Written: ids int64 [R, C] and `feed`, what a drafter catches up with; last int64 [R], the packed row of the last of
    it that counts; steps, the places of its further steps; verify_ids int64 [R, K + 1], whose first column is the
    target's own token, and `verify`, the places of the next verification.
    features: int64 [R, C], the target's slot of the token before each entry; None where an entry is a token alone.
    """

    pairs: torch.Tensor
    rows: torch.Tensor
    start: torch.Tensor
    ids: torch.Tensor
    feed: Places
    last: torch.Tensor
    features: torch.Tensor | None
    steps: Places
    verify_ids: torch.Tensor
    verify: Places
