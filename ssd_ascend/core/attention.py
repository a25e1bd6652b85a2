"""What attention must know about a ragged batch, on the host and on the device. Torch appears in annotations only.

The host lists come first because the hardest device (the Ascend NPU) takes lengths as host integers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """B rows of queries, packed: row i owns query_lens_host[i] tokens of the T in the batch.

    Row i attends bottom-right causally: its queries are the *last* query_lens_host[i] of its kv_lens_host[i]
    positions, so query j sees the first kv_len - query_len + j + 1 keys. All index tensors are int32 except
    slot_mapping (int64): slot = block * block_size + offset, -1 for a padded token that must not be stored.

    query_start: [B+1] cumulative; kv_lens: [B]; block_table: [B, M]; slot_mapping: [T].
    tree_mask: None, or bool [T, M]: column c stands for key kv_len - M + c of the query's own row, that is, for the
        row's last M keys; earlier keys are always visible, and columns before the row's first key mean nothing. It
        replaces causality over those M keys, so M >= query_len. Only where `Capabilities.tree_mask` is true.
    """

    query_lens_host: list[int]
    kv_lens_host: list[int]
    query_start: torch.Tensor
    kv_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    tree_mask: torch.Tensor | None = None

    @property
    def max_query_len(self) -> int:
        """The longest row of queries."""
        return max(self.query_lens_host, default=0)
