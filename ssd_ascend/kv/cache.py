"""The tensors of a paged KV cache, and beside them the target features an EAGLE-3 head conditions on.

Features live in the same slots as the keys and values of their token. So a prefix hit, a preemption, or a draft worker
that starts late finds the features of every computed token by the block table it already has: one rule, one home.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows

import numpy as np
import torch

from ssd_ascend.backends.base import AttentionBackend

_FEW = 8
"""Slots that are worked out sooner one by one than as arrays."""


class KVCache:
    """One model's cache: `layers[i]` is layer i's tensor of shape `attention.kv_shape(num_blocks)`, blocks second."""

    def __init__(
        self,
        attention: AttentionBackend,
        *,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        feature_width: int = 0,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        shape = attention.kv_shape(num_blocks)
        self.tensor = torch.zeros((num_layers, *shape), dtype=dtype, device=device)
        self.layers: tuple[torch.Tensor, ...] = tuple(self.tensor.unbind(0))
        self.features: torch.Tensor | None = None
        if feature_width:
            # one row more than there are slots, for padding
            self.features = torch.zeros((num_blocks * block_size + 1, feature_width), dtype=dtype, device=device)

    @property
    def num_bytes(self) -> int:
        """Bytes held."""
        held = self.tensor.numel() * self.tensor.element_size()
        return held + (0 if self.features is None else self.features.numel() * self.features.element_size())

    def store_features(self, slots: torch.Tensor, features: torch.Tensor) -> None:
        """Keep features [T, F] of the tokens at `slots` [T]; those of padding (slot -1) go where nobody looks."""
        assert self.features is not None
        places = torch.where(slots < 0, self.features.shape[0] - 1, slots)
        self.features.index_copy_(0, places, features.to(self.features.dtype))

    def read_features(self, block_table: Rows[int], start: int, end: int) -> torch.Tensor:
        """Features of positions [start, end) of the sequence with this block table: [end - start, F]."""
        assert self.features is not None
        slots = torch.from_numpy(self.slots(block_table, start, end))
        return self.features.index_select(0, slots.to(self.features.device))

    def slots(self, block_table: Rows[int], start: int, end: int) -> np.ndarray:
        """Where the tokens at positions [start, end) of this block table are kept: int64 [end - start], on the host."""
        size = self.block_size
        if end - start <= _FEW:
            return np.array([block_table[at // size] * size + at % size for at in range(start, end)], np.int64)
        table = np.asarray(block_table[start // size : (end + size - 1) // size], np.int64)
        slots: np.ndarray = (table[:, None] * size + np.arange(size)).reshape(-1)[start % size :][: end - start]
        return slots

    def copy_blocks(self, pairs: Rows[tuple[int, int]]) -> None:
        """Copy whole blocks (from, to) in every layer: what a fork does with a block it shares only in part."""
        if not pairs:
            return
        index = torch.tensor(pairs, dtype=torch.int64).to(self.tensor.device, non_blocking=True)
        self.copy_blocks_at(index[:, 0], index[:, 1])

    def copy_blocks_at(self, copied: torch.Tensor, copies: torch.Tensor) -> None:
        """The same, as launches that a graph may hold: blocks `copied` int64 [N] over `copies` [N], on the device."""
        self.tensor.index_copy_(2, copies, self.tensor.index_select(2, copied))
