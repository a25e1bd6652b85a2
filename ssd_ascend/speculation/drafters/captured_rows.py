"""The branches of a round as one captured graph where there are no tree masks: every branch is a row of its own.

A row's block table shares the trunk's full blocks; the partly filled last one is copied in the graph. For devices whose
attention takes lengths from device memory, or anew for each step of a graph. Used by `captured_forks.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Rows
from contextlib import contextmanager
from typing import NamedTuple

import torch

from ssd_ascend.backends.base import Graph, GraphCapture, StepwiseAttention
from ssd_ascend.core.attention import AttentionMetadata
from ssd_ascend.core.batch import ModelOutput
from ssd_ascend.kv.blocks import BlockManager
from ssd_ascend.runtime.pack import Field, Pack
from ssd_ascend.runtime.static import ahead_batch, ahead_fields, write_ahead, write_tables
from ssd_ascend.speculation.branches import RowsLayout
from ssd_ascend.speculation.drafters.captured_chain import Rolled, roll
from ssd_ascend.speculation.drafters.feed import DraftParts, Fork, GlueOutput


class _Branch(NamedTuple):
    """A row that is in use: where it lies, entries of the trunk that it sees, its table, and its guess."""

    row: int
    end: int
    table: list[int]
    glue_row: int
    rank: int


class BranchRows:
    """The branches of up to `rows` sequences, `width` each, `steps` deep: rows * width rows of one token a step."""

    def __init__(self, parts: DraftParts, rows: int, width: int, steps: int, glue: GlueOutput) -> None:
        self._parts, self.rows, self.width, self._steps, self._glue = parts, rows, width, steps, glue
        self._count = rows * width
        integer, blocks = torch.int32, -(-parts.max_len // parts.runner.block_size)
        self._pack = Pack(
            {
                "glue_rows": Field((self._count,)),
                "ranks": Field((self._count,)),
                "copied": Field((self._count,)),
                "copies": Field((self._count,)),
                "kv_lens": Field((self._count,), integer),
                "table": Field((self._count, blocks), integer),
                **ahead_fields(self._count, steps),
            },
            parts.runner.device,
        )
        self._tables: list[list[int]] = []
        self._copies: list[tuple[int, int]] = []
        self._out: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        self._graph: Graph | None = None

    def capture(self, graphs: GraphCapture) -> None:
        """Record it."""
        self._graph = graphs.capture(self._run)

    @torch.inference_mode()
    def _run(self) -> None:
        parts, arrays, (best, hidden) = self._parts, self._pack.device, self._glue
        parts.runner.kv.copy_blocks_at(arrays["copied"], arrays["copies"])
        guesses = best[arrays["glue_rows"], arrays["ranks"]]
        own = None if hidden is None else hidden.index_select(0, arrays["glue_rows"])

        def forward(step: int, tokens: torch.Tensor, hidden: torch.Tensor | None) -> ModelOutput:
            return parts.runner.run(ahead_batch(self._pack, step, tokens, hidden, max_len=parts.max_len))

        output = forward(0, guesses, own)
        rolled: Rolled = roll(parts, output, self._steps, lambda step, *fed: forward(step + 1, *fed))
        self._out[:] = [(torch.cat((guesses.unsqueeze(1), rolled.tokens), dim=1), rolled.hidden)]

    @contextmanager
    def room(self, forks: Rows[Fork], blocks: BlockManager) -> Iterator[bool]:
        """A table for every branch while inside; False, and nothing held, without room.

        They may be given back as soon as the work is queued: whoever writes there next is queued behind it.
        """
        ends = [fork.end + depth for fork in forks for depth, _ in fork.picks]
        need = sum(RowsLayout.blocks_needed(end, self._steps, blocks.block_size) for end in ends)
        if max(ends) + self._steps > self._parts.max_len or need > blocks.num_free:
            yield False
            return
        try:
            for fork in forks:
                for depth, _ in fork.picks:
                    self._branch_off(fork.feed.seq.block_table, fork.end + depth, blocks)
            yield True
        finally:
            for table in self._tables:
                blocks.free(table)
            self._tables, self._copies = [], []

    def _branch_off(self, trunk: list[int], end: int, blocks: BlockManager) -> None:
        table, copy = blocks.fork(trunk, end)
        self._tables.append(table)
        blocks.grow(table, end + self._steps)
        if copy is not None:
            self._copies.append(copy)

    def replay(self, forks: Rows[Fork], stride: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run it inside `room`: (int64 [n * width, 1 + steps], guess and drafts of every branch; hidden [.., K, H])."""
        assert self._graph is not None
        tables = iter(self._tables)
        branches = [
            _Branch(i * self.width + j, fork.end + depth, next(tables), i * stride + depth, rank)
            for i, fork in enumerate(forks)
            for j, (depth, rank) in enumerate(fork.picks)
        ]
        count = len(forks) * self.width
        self._write(branches, count)
        self._pack.send()
        self._replan(branches, count)
        self._graph.replay()
        result, hidden = self._out[0]
        return result[:count], None if hidden is None else hidden[:count]

    def _write(self, branches: Rows[_Branch], count: int) -> None:
        """Rows without a branch, in between and behind, store nothing and see nothing that matters."""
        stage = self._pack.next()
        arrays, used = stage.arrays, [branch.row for branch in branches]
        tables: list[list[int]] = [[] for _ in range(count)]
        for branch in branches:
            tables[branch.row] = branch.table
        write_tables(stage, tables)
        for name in ("glue_rows", "ranks", "kv_lens"):
            arrays[name].fill(0)
        arrays["glue_rows"][used] = [branch.glue_row for branch in branches]
        arrays["ranks"][used] = [branch.rank for branch in branches]
        arrays["kv_lens"][used] = [branch.end for branch in branches]
        # the first copy once more, or a block over itself, where there is nothing to copy
        copies = self._copies + [self._copies[0] if self._copies else (0, 0)] * (self._count - len(self._copies))
        arrays["copied"][:], arrays["copies"][:] = zip(*copies, strict=True)
        write_ahead(stage, count, self._parts.runner.block_size)
        idle = sorted(set(range(count)).difference(used))
        arrays["ahead_slots"][:, idle] = -1

    def _replan(self, branches: Rows[_Branch], count: int) -> None:
        """Where lengths are the host's: one token more for each step."""
        attention, arrays = self._parts.runner.attention, self._pack.device
        if not isinstance(attention, StepwiseAttention):
            return
        ends = [0] * count
        for branch in branches:
            ends[branch.row] = branch.end
        for step in range(self._steps):
            meta = AttentionMetadata(
                [1] * count, [end + step + 1 for end in ends], arrays["ahead_start"], arrays["ahead_kv_lens"][step],
                arrays["table"], arrays["ahead_slots"][step],
            )  # fmt: skip
            attention.replan_step(meta, self._count, step)
