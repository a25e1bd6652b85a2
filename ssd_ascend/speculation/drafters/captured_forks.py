"""Glue, fork and branches as two captured graphs, queued one behind the other: a round of `ssd` with one copy back.

The first runs over what is under verification and leaves the likeliest tokens of every row on the device; the second
decodes a branch per guess: all branches of a sequence in one row under a tree mask where the device has such masks
(here), else each in a row of its own (`captured_rows.py`). For greedy rows and a fixed fan-out. Used by
`whole_rounds.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Rows
from contextlib import contextmanager
from functools import partial
from itertools import chain

import numpy as np
import torch

from ssd_ascend.backends.base import Graph, GraphCapture
from ssd_ascend.core.attention import AttentionMetadata
from ssd_ascend.core.batch import ForwardBatch, Mode, ModelOutput
from ssd_ascend.kv.blocks import BlockManager
from ssd_ascend.runtime.pack import Field, Pack, write
from ssd_ascend.runtime.static import write_tables
from ssd_ascend.speculation.drafters.captured_ahead import FEW_BRANCHES, Beside, Ranker, scratch
from ssd_ascend.speculation.drafters.captured_chain import Rolled, roll
from ssd_ascend.speculation.drafters.captured_rows import BranchRows
from ssd_ascend.speculation.drafters.feed import (
    DraftParts,
    Feed,
    FeedSize,
    Fork,
    GlueOutput,
    StaticFeed,
    feed_sizes,
)

_MOST_BRANCHES = 256
"""Branches of one graph. In a larger batch every sequence gets fewer."""
_MOST_SEQUENCES = 64


class _Glue:
    """The glue of one size."""

    def __init__(self, parts: DraftParts, size: FeedSize, lookahead: int, shared: GlueOutput, rank: Ranker) -> None:
        self._parts, self._rank = parts, rank
        self._stride = lookahead + 1
        self._shared = shared
        wanted = size.rows * self._stride
        more = {"wanted": Field((wanted,)), "fell": Field((wanted,), initial=-1)}
        self.feed = StaticFeed(parts, size, tails=size.rows * lookahead, more=more)
        self._graph: Graph | None = None

    def capture(self, graphs: GraphCapture) -> None:
        """Record it."""
        self._graph = graphs.capture(self._run)

    @torch.inference_mode()
    def _run(self) -> None:
        arrays, (best, hidden) = self.feed.pack.device, self._shared
        output = self._parts.runner.run(self.feed.batch(Mode.GLUE, arrays["wanted"]))
        top = self._rank(output.logits, best.shape[1] + 1)
        tokens = top if self._parts.to_target is None else self._parts.to_target[top]
        rank = torch.arange(best.shape[1], device=best.device)
        # a draft that is rejected cannot come back as the recovery token: leave its place out
        place = torch.where(tokens == arrays["fell"].unsqueeze(1), torch.arange(tokens.shape[1], device=best.device),
                            tokens.shape[1]).amin(dim=1, keepdim=True)  # fmt: skip
        best[: tokens.shape[0]] = tokens.gather(1, rank + (place <= rank))
        if hidden is not None:
            assert output.hidden is not None
            hidden[: tokens.shape[0]] = output.hidden

    def replay(self, forks: Rows[Fork]) -> None:
        """Run it for these."""
        assert self._graph is not None
        feeds = [fork.feed for fork in forks]
        stage = self.feed.fill(feeds)
        wanted, fell = (stage.arrays[name].reshape(-1, self._stride) for name in ("wanted", "fell"))
        wanted.fill(0)
        fell.fill(-1)
        end = 0
        for i, fork in enumerate(forks):
            end += len(fork.feed.row.tokens)
            count = len(fork.drafts)
            wanted[i, : count + 1] = np.arange(end - count - 1, end)
            fell[i, :count] = fork.drafts
        self.feed.pack.send()
        self.feed.replan(feeds)
        self._graph.replay()


class _Branches:
    """The branches of up to `rows` sequences, `width` each, `steps` deep."""

    def __init__(
        self, parts: DraftParts, rows: int, width: int, steps: int, shared: GlueOutput, *, beside: Beside | None
    ) -> None:
        self._parts, self.rows, self.width, self._steps, self._shared = parts, rows, width, steps, shared
        self._beside = beside
        size, tokens, device = parts.runner.block_size, rows * width, parts.runner.device
        self._max_len = parts.max_len + width * steps
        integer = torch.int32
        self.pack = Pack(
            {
                "glue_rows": Field((tokens,)),
                "ranks": Field((tokens,)),
                "behind": Field((tokens,)),
                "positions": Field((steps, tokens)),
                "slots": Field((steps, tokens), initial=-1),
                "query_start": Field((rows + 1,), integer),
                "kv_lens": Field((steps, rows), integer),
                "table": Field((rows, -(-self._max_len // size)), integer),
            },
            device,
        )
        # column c of a mask is the key `span - c` before the end of the row's keys; scratch entry (m, w) of step s lies
        # (s + 1 - m) * width - w before it
        self._span = steps * width + steps
        step, branch = torch.arange(steps, device=device), torch.arange(width, device=device).repeat(rows)
        scratch = (step[:, None] + 1) * width - self._span + torch.arange(self._span, device=device)[None]
        own = (scratch[:, None] % width == branch[None, :, None]) & (scratch >= 0)[:, None]
        self._own, self._before_scratch = own, scratch
        self._out: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        self._graph: Graph | None = None

    def capture(self, graphs: GraphCapture) -> None:
        """Record it."""
        self._graph = graphs.capture(self._run)

    @torch.inference_mode()
    def _run(self) -> None:
        parts, arrays, (best, hidden) = self._parts, self.pack.device, self._shared
        # a branch sees the trunk up to its depth, which ends `behind` entries before the scratch, and its own entries
        masks = self._own | (self._before_scratch[:, None] < -arrays["behind"][None, :, None])
        guesses = best[arrays["glue_rows"], arrays["ranks"]]
        own = None if hidden is None else hidden.index_select(0, arrays["glue_rows"])

        def forward(step: int, tokens: torch.Tensor, hidden: torch.Tensor | None) -> ModelOutput:
            return parts.runner.run(self._batch(step, tokens, hidden, masks[step]))

        others: list[torch.Tensor] = []

        def token(logits: torch.Tensor) -> torch.Tensor:
            if self._beside is None:
                return parts.token(logits)
            ranked = self._beside.rank(logits, self._beside.kept + 1)
            others.append(ranked[:, 1:])
            return ranked[:, 0]

        output = forward(0, guesses, own)
        rolled: Rolled = roll(parts, output, self._steps, lambda step, *fed: forward(step + 1, *fed), token)
        self._out[:] = [(torch.cat((guesses.unsqueeze(1), rolled.tokens, *others), dim=1), rolled.hidden)]

    def _batch(self, step: int, tokens: torch.Tensor, hidden: torch.Tensor | None, mask: torch.Tensor) -> ForwardBatch:
        arrays = self.pack.device
        meta = AttentionMetadata(
            query_lens_host=[self.width] * self.rows,
            kv_lens_host=[self._max_len] * self.rows,
            query_start=arrays["query_start"],
            kv_lens=arrays["kv_lens"][step],
            block_table=arrays["table"],
            slot_mapping=arrays["slots"][step],
            tree_mask=mask,
        )
        return ForwardBatch(Mode.BRANCH, tokens, arrays["positions"][step], meta, hidden_states=hidden)

    @contextmanager
    def room(self, forks: Rows[Fork], blocks: BlockManager) -> Iterator[bool]:
        """See `BranchRows.room`: scratch behind every sequence's own entries."""
        entries, steps = self.width * self._steps, self._steps
        with scratch(forks, blocks, entries=entries, reach=steps, max_len=self._parts.max_len) as there_is_room:
            yield there_is_room

    def replay(self, forks: Rows[Fork], stride: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run it for these: (int64 [n * width, 1 + steps ..], guess and drafts of every branch, and what is kept beside
        each draft; hidden [.., steps, H])."""
        assert self._graph is not None
        stage = self.pack.next()
        write_tables(stage, [fork.feed.row.block_table for fork in forks])
        arrays, width, size = stage.arrays, self.width, self._parts.runner.block_size
        count, step = len(forks), np.arange(self._steps)
        picks = np.array([(fork.picks + [(0, 0)] * width)[:width] for fork in forks])
        depths, bases = picks[..., 0], np.array([fork.base for fork in forks])
        ends = np.array([fork.end for fork in forks])[:, None] + depths
        write(arrays["glue_rows"], (np.arange(count)[:, None] * stride + depths).reshape(-1), rest=0)
        write(arrays["ranks"], picks[..., 1].reshape(-1), rest=0)
        write(arrays["behind"], (bases[:, None] - ends).reshape(-1))
        write(arrays["positions"], ends.reshape(1, -1) + step[:, None], rest=0)
        place = (bases[None, :, None] + step[:, None, None] * width + np.arange(width)).reshape(self._steps, -1)
        block, inside = np.divmod(place, size)
        owner = np.repeat(np.arange(count), width)[None]
        write(arrays["slots"], arrays["table"][owner, block].astype(np.int64) * size + inside, rest=-1)
        write(arrays["query_start"], np.arange(count) * width, rest=count * width)
        write(arrays["kv_lens"], bases[None] + (step[:, None] + 1) * width, rest=0)
        self.pack.send()
        self._graph.replay()
        result, hidden = self._out[0]
        return result[: count * width], None if hidden is None else hidden[: count * width]


class CapturedForks:
    """Rounds of branches that are `lookahead` deep, for up to `max_rows` sequences."""

    def __init__(
        self,
        parts: DraftParts,
        graphs: GraphCapture,
        *,
        lookahead: int,
        width: int,
        max_rows: int,
        per_row: int,
        masks: bool,
        rank: Ranker,
        beside: Beside | None = None,
    ) -> None:
        """Captures. RuntimeError when the device cannot. width: the most branches a sequence gets; per_row: entries to
        catch up with, beside the drafts; masks: whether branches share a row; beside: what is kept beside drafts, where
        they do."""
        self.lookahead, self.catch_up = lookahead, per_row
        self.max_rows = min(max_rows, _MOST_SEQUENCES)
        device = parts.runner.device
        self.num_ranks = min(width, parts.num_tokens - 1)
        table = parts.table
        rows = self.max_rows * (lookahead + 1)
        shared = GlueOutput(
            torch.zeros((rows, self.num_ranks), dtype=torch.int64, device=device),
            None if table is None else torch.zeros((rows, table.hidden_size), dtype=table.dtype, device=device),
        )
        sizes = feed_sizes(self.max_rows, per_row + lookahead)
        self._glues = [_Glue(parts, size, lookahead, shared, rank) for size in sizes]
        kind = partial(_Branches, beside=beside) if masks else BranchRows
        self._branches: dict[int, list[_Branches | BranchRows]] = {
            rows: [kind(parts, rows, most, lookahead, shared) for most in widths_of(rows, width, _MOST_BRANCHES)]
            for rows in sorted({size.rows for size in sizes})
        }
        largest_first = chain.from_iterable(reversed(self._branches.values()))
        parts_of_rounds: list[_Glue | _Branches | BranchRows] = [*self._glues, *largest_first]
        for part in parts_of_rounds:
            part.capture(graphs)

    def __len__(self) -> int:
        """Graphs held."""
        return len(self._glues) + sum(map(len, self._branches.values()))

    def holds(self, feeds: Rows[Feed]) -> bool:
        """Whether some size holds them."""
        wanted = FeedSize.of(feeds)
        return any(glue.feed.size.holds(wanted) for glue in self._glues)

    def run(
        self, forks: Rows[Fork], blocks: BlockManager, width: int
    ) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """Guess and drafts of every branch, `width` a sequence, int64 [n * width, 1 + lookahead ..]; their features.
        What is kept beside each draft, if anything, follows them.

        width: one of `widths`. Good until the next call. What lies in the places of picks that a sequence lacks means
        nothing. None without room in `blocks` for the branches' entries, which is only borrowed.
        """
        wanted = FeedSize.of([fork.feed for fork in forks])
        glue = next(glue for glue in reversed(self._glues) if glue.feed.size.holds(wanted))
        branches = next(branches for branches in self._for(len(forks)) if branches.width == width)
        with branches.room(forks, blocks) as there_is_room:
            if not there_is_room:
                return None
            glue.replay(forks)
            return branches.replay(forks, self.lookahead + 1)

    def _for(self, num_seqs: int) -> list[_Branches | BranchRows]:
        return next(branches for rows, branches in self._branches.items() if rows >= num_seqs)

    def widths(self, num_seqs: int) -> list[int]:
        """The numbers of branches that each of so many sequences can have, the largest first."""
        return [branches.width for branches in self._for(num_seqs)]


def widths_of(rows: int, width: int, most: int) -> list[int]:
    """Branches a sequence of graphs for `rows` of them: as many as wanted and as `most` in all allow, the half, and the
    quarter, down to what is not worth a graph."""
    first = max(1, min(width, most // rows))
    return [first, *(less for less in (first // 2, first // 4) if less > 1 and rows * less >= FEW_BRANCHES)]
