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

import numpy as np
import torch

from ssd_ascend.backends.base import Graph, GraphCapture
from ssd_ascend.core.attention import AttentionMetadata
from ssd_ascend.core.batch import ForwardBatch, Mode
from ssd_ascend.kv.blocks import BlockManager
from ssd_ascend.runtime.pack import Field, Pack, write
from ssd_ascend.runtime.static import write_tables
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


class Guess(NamedTuple):
    """One branch of an ahead round: its place in the graph, and the outcome (accepted drafts, token after them).

    token: None for the last depth (`late`), where the graph itself chooses, and for a place that is left empty."""

    place: int
    depth: int
    token: int | None
    late: bool = False


class Found(NamedTuple):
    """What a round gives for a guess: its token, the drafts after it, and what was kept beside each of them."""

    token: int
    drafts: list[int]
    others: list[int]


class _Shape(NamedTuple):
    """rows: sequences; steps: K; early, late: branches of the depths before the last, and of the last; kept: tokens
    kept beside each draft."""

    rows: int
    steps: int
    early: int
    late: int
    kept: int

    @property
    def width(self) -> int:
        """Branches of a sequence."""
        return self.early + self.late

    @property
    def first(self) -> int:
        """Tokens of a sequence in the first forward: what is under verification, and the early guesses."""
        return self.steps + 1 + self.early


class _Round:
    """The graph of one number of sequences."""

    def __init__(self, parts: DraftParts, shape: _Shape, rank: Ranker) -> None:
        self._parts, self.shape, self._rank = parts, shape, rank
        rows, steps, early, _, _ = shape
        width, size, device = shape.width, parts.runner.block_size, parts.runner.device
        self._max_len = parts.max_len + width * steps
        integer = torch.int32
        self.pack = Pack(
            {
                "ids": Field((rows * shape.first,)),
                "first_positions": Field((rows * shape.first,)),
                "first_slots": Field((rows * shape.first,), initial=-1),
                "first_behind": Field((rows * shape.first,)),
                "wanted": Field((rows * (early + 1),)),
                "behind": Field((rows * width,)),
                "positions": Field((steps, rows * width)),
                "slots": Field((steps, rows * width), initial=-1),
                "first_start": Field((rows + 1,), integer),
                "query_start": Field((rows + 1,), integer),
                "kv_lens": Field((steps, rows), integer),
                "table": Field((rows, -(-self._max_len // size)), integer),
            },
            device,
        )
        self._masks = _Masks(shape, device)
        self._out: list[torch.Tensor] = []
        self._graph: Graph | None = None

    def capture(self, graphs: GraphCapture) -> None:
        """Record it."""
        self._graph = graphs.capture(self._run)

    @torch.inference_mode()
    def _run(self) -> None:
        arrays, run = self.pack.device, self._parts.runner.run
        rows, steps, early, late, kept = self.shape
        most = max(kept + 1, late)
        mask = self._masks.first(arrays["first_behind"])
        ranked = self._rank(run(self._batch(0, arrays["ids"], mask, arrays["wanted"])).logits, most)
        own, last = ranked[: rows * early].view(rows, early, most), ranked[rows * early :].view(rows, 1, most)
        tokens = [torch.cat((own[..., 0], last[:, 0, :late]), dim=1)]
        others = [torch.cat((own[..., 1 : kept + 1], own.new_zeros(rows, late, kept)), dim=1)]
        for step in range(1, steps):
            mask = self._masks.later(step, arrays["behind"])
            ranked = self._rank(run(self._batch(step, tokens[-1].flatten(), mask, None)).logits, kept + 1)
            ranked = ranked.view(rows, early + late, kept + 1)
            tokens.append(ranked[..., 0])
            others.append(ranked[..., 1:])
        everything = [torch.stack(tokens, dim=2), torch.stack(others, dim=2).flatten(2)]
        self._out[:] = [torch.cat(everything, dim=2).flatten(0, 1)]

    def _batch(
        self, step: int, tokens: torch.Tensor, mask: torch.Tensor, logits_rows: torch.Tensor | None
    ) -> ForwardBatch:
        arrays, shape = self.pack.device, self.shape
        meta = AttentionMetadata(
            query_lens_host=[shape.first if step == 0 else shape.width] * shape.rows,
            kv_lens_host=[self._max_len] * shape.rows,
            query_start=arrays["first_start" if step == 0 else "query_start"],
            kv_lens=arrays["kv_lens"][step],
            block_table=arrays["table"],
            slot_mapping=arrays["first_slots"] if step == 0 else arrays["slots"][step],
            tree_mask=mask,
        )
        positions = arrays["first_positions"] if step == 0 else arrays["positions"][step]
        return ForwardBatch(Mode.BRANCH, tokens, positions, meta, logits_rows=logits_rows)

    def replay(self, forks: Rows[Fork], guesses: Rows[Rows[Guess]]) -> torch.Tensor:
        """Run it for these: int64 [n * width, K + K * kept]. Row of an early branch: its K drafts; of a late one: its
        guess and K - 1 drafts. Then what was kept beside each."""
        assert self._graph is not None
        stage, shape = self.pack.next(), self.shape
        write_tables(stage, [fork.feed.row.block_table for fork in forks])
        self._write_first(stage.arrays, forks, guesses)
        self._write_later(stage.arrays, forks, guesses)
        self.pack.send()
        self._graph.replay()
        return self._out[0][: len(forks) * shape.width]

    def _write_first(self, arrays: dict[str, np.ndarray], forks: Rows[Fork], guesses: Rows[Rows[Guess]]) -> None:
        """What is under verification, at its places, and the early guesses behind it."""
        (_, steps, early, _, _), first = self.shape, self.shape.first
        ids, positions, slots, behind = (
            arrays[name].reshape(-1, first) for name in ("ids", "first_positions", "first_slots", "first_behind")
        )
        slots.fill(-1)
        for i, (fork, own) in enumerate(zip(forks, guesses, strict=True)):
            count, start = len(fork.drafts) + 1, fork.end - 1
            place = start + np.arange(count)
            ids[i, :count] = (fork.feed.row.tokens[0], *fork.drafts)
            positions[i, :count] = place
            slots[i, :count] = self._slots(arrays, i, place)
            behind[i, :count] = count - 1 - np.arange(count)
            ids[i, steps + 1 :] = [guess.token or 0 for guess in own[:early]]
            depths = np.array([guess.depth for guess in own[:early]])
            positions[i, steps + 1 :] = fork.end + depths
            slots[i, steps + 1 :] = self._slots(arrays, i, fork.base + np.arange(early))
            behind[i, steps + 1 :] = count - 1 - depths
        number = np.arange(len(forks))
        wanted = number[:, None] * first + steps + 1 + np.arange(early)
        arrays["wanted"].fill(0)
        arrays["wanted"][: wanted.size] = wanted.reshape(-1)
        last = self.shape.rows * early
        arrays["wanted"][last : last + len(forks)] = number * first + [len(fork.drafts) for fork in forks]
        write(arrays["first_start"], number * first, rest=len(forks) * first)

    def _write_later(self, arrays: dict[str, np.ndarray], forks: Rows[Fork], guesses: Rows[Rows[Guess]]) -> None:
        """Each branch a token further every step; the late ones began a step later."""
        (_, steps, early, _, _), width = self.shape, self.shape.width
        count, step = len(forks), np.arange(steps)
        bases, ends = np.array([fork.base for fork in forks]), np.array([fork.end for fork in forks])
        depths = np.array([[guess.depth for guess in own] for own in guesses])
        starts = ends[:, None] + depths - (np.arange(width) >= early)
        write(arrays["behind"], (bases[:, None] - ends[:, None] - depths).reshape(-1))
        write(arrays["positions"], starts.reshape(1, -1) + step[:, None], rest=0)
        place = (bases[None, :, None] + step[:, None, None] * width + np.arange(width)).reshape(steps, -1)
        write(arrays["slots"], self._slots(arrays, np.repeat(np.arange(count), width)[None], place), rest=-1)
        write(arrays["query_start"], np.arange(count) * width, rest=count * width)
        write(arrays["kv_lens"], bases[None] + (step[:, None] + 1) * width, rest=0)

    def _slots(self, arrays: dict[str, np.ndarray], owner: int | np.ndarray, place: np.ndarray) -> np.ndarray:
        block, inside = np.divmod(place, self._parts.runner.block_size)
        slots: np.ndarray = arrays["table"][owner, block].astype(np.int64) * self._parts.runner.block_size + inside
        return slots


class _Masks:
    """What each row of a round sees of the trunk's end and of the scratch entries, which lie step by step behind it."""

    def __init__(self, shape: _Shape, device: torch.device) -> None:
        rows, steps, early = shape.rows, shape.steps, shape.early
        width = shape.width
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

    def later(self, step: int, behind: torch.Tensor) -> torch.Tensor:
        """bool [rows * width, span]."""
        return self._own[step] | (self._place[step][None] < -behind[:, None])


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
        self._counts: dict[int, list[int]] = {}
        """Guesses per depth, by their sum."""
        for rows in (1, 2, 4, 8, _MOST_SEQUENCES):
            if rows > max_rows:
                break
            self._rounds[rows] = []
            for width in widths_ahead(rows, counts):
                own = narrowed(counts, width)
                self._counts[sum(own)] = own
                shape = _Shape(rows, lookahead, sum(own[:-1]), own[-1], self.kept)
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

    def guesses(self, others: Rows[Rows[int]], width: int) -> list[Guess]:
        """A guess for each of `width` branches. others: what might have followed instead of each draft under
        verification; [] for a sequence without drafts."""
        counts = self._counts[width]
        depth_of = [(depth, rank) for depth, count in enumerate(counts[:-1]) for rank in range(count)]
        early = [
            Guess(place, depth, others[depth][rank]) if depth < len(others) else Guess(place, 0, None)
            for place, (depth, rank) in enumerate(depth_of)
        ]
        return early + [Guess(len(early) + rank, len(others), None, late=True) for rank in range(counts[-1])]

    def read(self, guess: Guess, row: list[int]) -> Found | None:
        """What its row of the result says of a guess; None for a place that was left empty."""
        k = self.lookahead
        if guess.late:
            return Found(row[0], row[1:k], row[k + self.kept :])
        return None if guess.token is None else Found(guess.token, row[:k], row[k:])

    def run(self, forks: Rows[Fork], guesses: Rows[Rows[Guess]], blocks: BlockManager) -> torch.Tensor | None:
        """See `_Round.replay`; None when there is no graph or no room for these."""
        found = next((each for each in self._for(len(forks)) if each.shape.width == len(guesses[0])), None)
        if found is None:
            return None
        entries = found.shape.width * self.lookahead
        with scratch(
            forks, blocks, entries=entries, reach=self.lookahead, max_len=self._parts.max_len
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
