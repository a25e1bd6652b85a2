"""A round of `ssd` as one captured graph, for rows whose drafts came from a branch: glue costs no forward of its own.

A branch was decoded by feeding its guess and its drafts, and what else might have followed each of them was kept. So
the guesses for every depth but the last are known before glue, and glue and their first step are one forward. Guesses
for the last depth, after all drafts, begin one forward later and are one draft shorter: a worker that the target waits
for gives that draft for a round of K forwards instead of K + 1. Greedy rows of models with tree masks; used by
`whole_rounds.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Rows
from contextlib import contextmanager
from itertools import chain
from typing import NamedTuple

import torch

from ssd_ascend.backends.base import Graph, GraphCapture
from ssd_ascend.core.attention import AttentionMetadata
from ssd_ascend.core.batch import ForwardBatch, Mode
from ssd_ascend.kv.blocks import BlockManager
from ssd_ascend.speculation.drafters.ahead_numbers import Numbers, Shape
from ssd_ascend.speculation.drafters.feed import DraftParts, Fork

Ranker = Callable[[torch.Tensor, int], torch.Tensor]
"""float32 logits [R, V] and a count -> the likeliest tokens of each row, best first, int64 [R, count]."""
_MOST_SEQUENCES = 16
_MOST_BRANCHES = 128
"""Of a round. A worker in a hurry has no time for more."""
FEW_BRANCHES = 32
"""As many cost about what one does: no graph for fewer than could be had."""
_FEW_TOKENS = 16
"""But forwards of up to so many take a tenth less than those of some more (docs/performance.md)."""


class Beside(NamedTuple):
    """How to rank what may follow, and how many tokens to keep beside the likeliest one."""

    rank: Ranker
    kept: int


class Early(NamedTuple):
    """Of each early branch its depth, ascending, and the place of its guess in `Kept.others`."""

    depths: tuple[int, ...]
    places: tuple[int, ...]

    @staticmethod
    def of(counts: Rows[int], kept: int) -> Early:
        """counts: guesses for each depth, the last one included; kept: see `Beside`."""
        picks = [(depth, rank) for depth, count in enumerate(counts[:-1]) for rank in range(count)]
        return Early(tuple(depth for depth, _ in picks), tuple(depth * kept + rank for depth, rank in picks))

    def guesses(self, others: Rows[int]) -> list[int]:
        """Their tokens. others: see `Kept`, of what is under verification; empty for a sequence without drafts. Where
        it has too few drafts for a branch, the place holds 0."""
        count = len(others)
        return [others[place] if place < count else 0 for place in self.places]


class _Round:
    """The graph of one number of sequences."""

    def __init__(self, parts: DraftParts, shape: Shape, rank: Ranker) -> None:
        self._parts, self.shape, self._rank = parts, shape, rank
        device, size = parts.runner.device, parts.runner.block_size
        self._max_len = parts.max_len + shape.width * shape.steps
        self._numbers = Numbers(shape, block_size=size, max_len=self._max_len, device=device)
        self._masks = _Masks(shape, device)
        self._out: list[torch.Tensor] = []
        self._graph: Graph | None = None

    def capture(self, graphs: GraphCapture) -> None:
        """Record it."""
        self._graph = graphs.capture(self._run)

    @torch.inference_mode()
    def _run(self) -> None:
        arrays, run = self._numbers.device, self._parts.runner.run
        rows, steps, early, late, kept, _ = self.shape
        most = max(kept + 1, late)
        wanted = torch.cat((arrays["wanted"].flatten(), arrays["wanted_last"]))
        ranked = self._rank(run(self._first(wanted)).logits, most)
        own, last = ranked[: rows * early].view(rows, early, most), ranked[rows * early :].view(rows, 1, most)
        tokens = [torch.cat((own[..., 0], last[:, 0, :late]), dim=1)]
        others = [torch.cat((own[..., 1 : kept + 1], own.new_zeros(rows, late, kept)), dim=1)]
        masks = self._masks.later(arrays["behind"].flatten())
        for step in range(1, steps):
            ranked = self._rank(run(self._later(step, tokens[-1].flatten(), masks[step])).logits, kept + 1)
            ranked = ranked.view(rows, early + late, kept + 1)
            tokens.append(ranked[..., 0])
            others.append(ranked[..., 1:])
        everything = [torch.stack(tokens, dim=2), torch.stack(others, dim=2).flatten(2)]
        self._out[:] = [torch.cat(everything, dim=2).flatten(0, 1)]

    def _first(self, wanted: torch.Tensor) -> ForwardBatch:
        """What is under verification, and the early guesses."""
        arrays, mask = self._numbers.device, self._masks.first(self._numbers.device["first_behind"].flatten())
        slots, positions = arrays["first_slots"].flatten(), arrays["first_positions"].flatten()
        meta = self._attention(0, self.shape.first, arrays["first_start"], slots, mask)
        return ForwardBatch(Mode.BRANCH, arrays["ids"].flatten(), positions, meta, logits_rows=wanted)

    def _later(self, step: int, tokens: torch.Tensor, mask: torch.Tensor) -> ForwardBatch:
        """Each branch a token further."""
        arrays = self._numbers.device
        slots, positions = arrays["slots"][step].flatten(), arrays["positions"][step].flatten()
        meta = self._attention(step, self.shape.width, arrays["query_start"], slots, mask)
        return ForwardBatch(Mode.BRANCH, tokens, positions, meta)

    def _attention(
        self, step: int, each: int, start: torch.Tensor, slots: torch.Tensor, mask: torch.Tensor
    ) -> AttentionMetadata:
        arrays, rows = self._numbers.device, self.shape.rows
        return AttentionMetadata(
            query_lens_host=[each] * rows,
            kv_lens_host=[self._max_len] * rows,
            query_start=start,
            kv_lens=arrays["kv_lens"][step],
            block_table=arrays["table"],
            slot_mapping=slots,
            tree_mask=mask,
        )

    def replay(self, forks: Rows[Fork], guesses: Rows[Rows[int]]) -> torch.Tensor:
        """Run it for these: int64 [n * width, K + K * kept]. Row of an early branch: its K drafts; of a late one: its
        guess and K - 1 drafts. Then what was kept beside each."""
        assert self._graph is not None
        self._numbers.fill(forks, guesses)
        self._graph.replay()
        return self._out[0][: len(forks) * self.shape.width]


class _Masks:
    """What each row of a round sees of the trunk's end and of the scratch entries, which lie step by step behind it."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        rows, steps, early, width = shape.rows, shape.steps, shape.early, shape.width
        # column c is the key `span - c` before the end; `place`: counted from the first scratch entry
        span = steps * width + steps
        step, column = torch.arange(steps, device=device), torch.arange(span, device=device)
        self._place = (step[:, None] + 1) * width - span + column[None]
        branch = torch.arange(width, device=device)
        own = self._place[:, None] % width == branch[None, :, None]
        begun = torch.where(branch < early, 0, width)[None, :, None]
        self._own = (own & (self._place[:, None] >= begun)).repeat(1, rows, 1)
        under = torch.zeros((steps + 1, span), dtype=torch.bool, device=device)
        self._own_first = torch.cat((under, self._place[0][None] == branch[:early, None])).repeat(rows, 1)

    def first(self, behind: torch.Tensor) -> torch.Tensor:
        """bool [rows * first, span]. behind: entries of the trunk that a token does not see."""
        return self._own_first | (self._place[0][None] < -behind[:, None])

    def later(self, behind: torch.Tensor) -> torch.Tensor:
        """bool [steps, rows * width, span]."""
        return self._own | (self._place[:, None] < -behind[None, :, None])


@contextmanager
def scratch(forks: Rows[Fork], blocks: BlockManager, *, entries: int, reach: int, max_len: int) -> Iterator[bool]:
    """Inside, every sequence has room for `entries` more behind its own, up to `reach` positions on; False, and nothing
    borrowed, without it."""
    tables = [fork.feed.seq.block_table for fork in forks]
    need = [blocks.blocks_for(fork.base + entries) - len(table) for fork, table in zip(forks, tables, strict=True)]
    if max(fork.base for fork in forks) + reach > max_len or sum(max(0, more) for more in need) > blocks.num_free:
        yield False
        return
    for fork, table in zip(forks, tables, strict=True):
        blocks.grow(table, fork.base + entries)
    try:
        yield True
    finally:
        for fork, table in zip(forks, tables, strict=True):
            blocks.trim(table, fork.base)


class CapturedAhead:
    """Ahead rounds of up to `_MOST_SEQUENCES` sequences, K = `lookahead` deep."""

    def __init__(
        self, parts: DraftParts, graphs: GraphCapture, beside: Beside, *, lookahead: int, counts: Rows[int],
        max_rows: int,
    ) -> None:  # fmt: skip
        """Captures. RuntimeError when the device cannot. counts: guesses for 0 .. lookahead accepted drafts."""
        self.lookahead, self._parts, self.kept = lookahead, parts, beside.kept
        self._rounds: dict[int, list[_Round]] = {}
        self._early: dict[int, Early] = {}
        """By the number of branches."""
        for rows in (1, 2, 4, 8, _MOST_SEQUENCES):
            if rows > max_rows:
                break
            self._rounds[rows] = []
            for width in widths_ahead(rows, counts):
                own = narrowed(counts, width)
                early = Early.of(own, self.kept)
                shape = Shape(rows, lookahead, len(early.depths), own[-1], self.kept, early.depths)
                self._early[shape.width] = early
                self._rounds[rows].append(_Round(parts, shape, beside.rank))
        for each in chain.from_iterable(reversed(self._rounds.values())):
            each.capture(graphs)

    def __len__(self) -> int:
        """Graphs held."""
        return sum(map(len, self._rounds.values()))

    def widths(self, num_seqs: int) -> list[int]:
        """The numbers of branches that each of so many sequences can have, the largest first; [] without a graph."""
        return [each.shape.width for each in self._for(num_seqs)]

    def _for(self, num_seqs: int) -> list[_Round]:
        return next((rounds for rows, rounds in self._rounds.items() if rows >= num_seqs), [])

    def early(self, width: int) -> Early:
        """The early ones of `width` branches."""
        return self._early[width]

    def run(self, forks: Rows[Fork], guesses: Rows[Rows[int]], width: int, blocks: BlockManager) -> torch.Tensor | None:
        """See `_Round.replay`; None when there is no room for these. width: one of `widths`."""
        found = next(each for each in self._for(len(forks)) if each.shape.width == width)
        with scratch(
            forks, blocks, entries=width * self.lookahead, reach=self.lookahead, max_len=self._parts.max_len
        ) as there_is_room:
            return found.replay(forks, guesses) if there_is_room else None


def widths_ahead(rows: int, counts: Rows[int]) -> list[int]:
    """Branches a sequence of the graphs for `rows` sequences, the most first, and fewer where that saves time."""
    most = min(sum(counts), _MOST_BRANCHES // rows)
    if rows == 1:
        few = _FEW_TOKENS - len(counts) + counts[-1]
        return [most, few] if len(counts) < few < most else [most]
    return [most, most // 2] if rows * (most // 2) >= FEW_BRANCHES else [most]


def narrowed(counts: Rows[int], width: int) -> list[int]:
    """At most `width` of these guesses: a third of them behind the last draft, as sequences without drafts have no
    others, and of the other depths the best ranks first."""
    late = min(counts[-1], max(2, (width + 1) // 3), max(1, width - 1))
    ranked = sorted((rank, depth) for depth, count in enumerate(counts[:-1]) for rank in range(count))
    kept = [depth for _, depth in ranked[: max(1, width - late)]]
    return [*(kept.count(depth) for depth in range(len(counts) - 1)), late]
