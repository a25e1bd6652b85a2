"""Two ways to lay branches out in a batch; they give the same logits, and a device picks the one it can do.

`RowsLayout`: a branch is a row of its own, whose block table shares the trunk's full blocks (every device).
`TreeMaskLayout`: all branches of a sequence are one row, told apart by a mask (where attention honours one): the trunk
is then read once per sequence instead of once per branch.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from typing import Protocol

import torch

from ssd_ascend.core.batch import ForwardBatch, Mode
from ssd_ascend.kv.blocks import BlockManager
from ssd_ascend.kv.cache import KVCache
from ssd_ascend.runtime.inputs import Row, Staging, build_batch
from ssd_ascend.runtime.pack import to_device
from ssd_ascend.speculation.base import Branch, DraftSequence


class BranchLayout(Protocol):
    """The batches of a branch decode, step by step, and the scratch memory they write to."""

    def batch(self, step: int, tokens: torch.Tensor, hidden: torch.Tensor | None) -> ForwardBatch:
        """Feed tokens int64 [W] (step 0: the guesses) with hidden [W, H]; logits come back for all W, in order."""
        ...

    def close(self) -> None:
        """Give the scratch memory back."""
        ...


class RowsLayout:
    """Every branch is a row: the trunk's blocks shared, the partly filled last one copied, own blocks after it."""

    def __init__(
        self,
        branches: Rows[Branch],
        trunk_ends: Rows[int],
        k: int,
        blocks: BlockManager,
        kv: KVCache,
        device: torch.device,
        staging: Staging | None = None,
    ) -> None:
        """`trunk_ends[i]`: entries of the trunk that branch i sees.

        Raises `OutOfBlocksError` and holds nothing then.
        """
        self._blocks = blocks
        self._device = device
        self._staging = staging
        self._starts = list(trunk_ends)
        self._tables: list[list[int]] = []
        copies: list[tuple[int, int]] = []
        try:
            for branch, end in zip(branches, trunk_ends, strict=True):
                fork = blocks.fork(branch.seq.block_table, end)
                self._tables.append(fork.table)
                blocks.grow(fork.table, end + k)
                if fork.copy is not None:
                    copies.append(fork.copy)
        except Exception:
            self.close()
            raise
        kv.copy_blocks(copies)

    @staticmethod
    def blocks_needed(end: int, k: int, block_size: int) -> int:
        """Blocks of its own that one branch takes."""
        return (end + k + block_size - 1) // block_size - end // block_size

    def batch(self, step: int, tokens: torch.Tensor, hidden: torch.Tensor | None) -> ForwardBatch:
        """One token per row."""
        rows = [Row((0,), start + step, table, 1) for start, table in zip(self._starts, self._tables, strict=True)]
        return build_batch(
            Mode.BRANCH,
            rows,
            block_size=self._blocks.block_size,
            device=self._device,
            hidden_states=hidden,
            input_ids=tokens,
            staging=self._staging,
        )

    def close(self) -> None:
        """Free every fork."""
        for table in self._tables:
            self._blocks.free(table)


class TreeMaskLayout:
    """All branches of a sequence are one row. Step m's entries lie behind the trunk and the earlier steps' entries.

    Scratch entry (m, w) of a sequence with W branches sits at base + m * W + w, where base is the end of its glue; its
    rotary position is its true one. A branch sees the trunk up to its depth and its own earlier entries.
    """

    def __init__(
        self,
        branches: Rows[Branch],
        trunk_ends: Rows[int],
        bases: Rows[int],
        k: int,
        blocks: BlockManager,
        device: torch.device,
    ) -> None:
        """`bases[i]`: entries of branch i's sequence after glue. Branches of one sequence must be adjacent."""
        self._blocks = blocks
        self._device = device
        self._ends = list(trunk_ends)
        self._seqs: list[DraftSequence] = []
        self._bases: list[int] = []
        self._widths: list[int] = []
        for branch, base in zip(branches, bases, strict=True):
            if not self._seqs or self._seqs[-1] is not branch.seq:
                self._seqs.append(branch.seq)
                self._bases.append(base)
                self._widths.append(0)
            self._widths[-1] += 1
        for seq, base, width in zip(self._seqs, self._bases, self._widths, strict=True):
            blocks.grow(seq.block_table, base + width * k)

    def batch(self, step: int, tokens: torch.Tensor, hidden: torch.Tensor | None) -> ForwardBatch:
        """One row per sequence, one token per branch."""
        rows = [
            Row((0,) * width, base + step * width, seq.block_table, width)
            for seq, base, width in zip(self._seqs, self._bases, self._widths, strict=True)
        ]
        return build_batch(
            Mode.BRANCH,
            rows,
            block_size=self._blocks.block_size,
            device=self._device,
            hidden_states=hidden,
            input_ids=tokens,
            positions=[end + step for end in self._ends],
            tree_mask=self._mask(step),
        )

    def _mask(self, step: int) -> torch.Tensor:
        """bool [T, M], see `AttentionMetadata.tree_mask`; M reaches back to the shallowest branch point of any row."""
        kv_lens = [base + (step + 1) * width for base, width in zip(self._bases, self._widths, strict=True)]
        first, lows = 0, []
        for width in self._widths:
            lows.append(min(self._ends[first : first + width]))
            first += width
        span = max(kv_len - low for kv_len, low in zip(kv_lens, lows, strict=True))
        mask = torch.zeros((len(self._ends), span), dtype=torch.bool)
        first = 0
        for kv_len, base, width in zip(kv_lens, self._bases, self._widths, strict=True):
            origin = kv_len - span  # the key that column 0 stands for
            for w in range(width):
                mask[first + w, : max(0, self._ends[first + w] - origin)] = True
                mask[first + w, base - origin + w :: width] = True
            first += width
        return to_device(mask, self._device)

    def close(self) -> None:
        """Give back the scratch blocks behind the glue."""
        for seq, base in zip(self._seqs, self._bases, strict=True):
            self._blocks.trim(seq.block_table, base)
