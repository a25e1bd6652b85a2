"""Where everything of a round that goes ahead lies: positions, slots, and what each token sees, written for its graph.

A round waits for the host here, so next to nothing is computed: of sequences with the same number of drafts all numbers
are alike but for the sequence's length, and lie ready in a table. Used by `captured_ahead.py`.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from typing import NamedTuple

import numpy as np
import torch

from ssd_ascend.runtime.pack import Field, Pack, write
from ssd_ascend.runtime.static import write_tables
from ssd_ascend.speculation.drafters.feed import Fork


class Shape(NamedTuple):
    """rows: sequences; steps: K; early, late: branches of the depths before the last, and of the last; kept: tokens
    kept beside each draft; depths: of the early branches."""

    rows: int
    steps: int
    early: int
    late: int
    kept: int
    depths: tuple[int, ...]

    @property
    def width(self) -> int:
        """Branches of a sequence."""
        return self.early + self.late

    @property
    def first(self) -> int:
        """Tokens of a sequence in the first forward: what is under verification, and the early guesses."""
        return self.steps + 1 + self.early


class Numbers:
    """The arrays of one graph, and how they are filled.

    Behind a sequence's entries, drafts included, lies the scratch of its branches, step by step. `device[name]` are the
    graph's tensors; those of the first forward begin with `first_`.
    """

    def __init__(self, shape: Shape, *, block_size: int, max_len: int, device: torch.device) -> None:
        """max_len: positions that scratch may reach."""
        rows, steps, width, first = shape.rows, shape.steps, shape.width, shape.first
        self._shape, self._size = shape, block_size
        integer = torch.int32
        self._pack = Pack(
            {
                "ids": Field((rows, first)),
                "first_positions": Field((rows, first)),
                "first_slots": Field((rows, first), initial=-1),
                "first_behind": Field((rows, first)),
                "wanted": Field((rows, shape.early)),
                "wanted_last": Field((rows,)),
                "behind": Field((rows, width)),
                "positions": Field((steps, rows, width)),
                "slots": Field((steps, rows, width), initial=-1),
                "first_start": Field((rows + 1,), integer),
                "query_start": Field((rows + 1,), integer),
                "kv_lens": Field((steps, rows), integer),
                "table": Field((rows, -(-max_len // block_size)), integer),
            },
            device,
        )
        self.device = self._pack.device
        self._of = _Tables(shape)

    def fill(self, forks: Rows[Fork], guesses: Rows[Rows[int]]) -> None:
        """Write a round, and queue its copy. guesses: the tokens of each sequence's early branches, anything in the
        places of depths that it lacks."""
        stage, shape, own = self._pack.next(), self._shape, self._of
        write_tables(stage, [fork.feed.row.block_table for fork in forks])
        arrays, count, first = stage.arrays, len(forks), shape.first
        drafts = np.array([len(fork.drafts) for fork in forks])
        ends = np.array([[fork.end] for fork in forks])
        for ids, fork, tokens in zip(arrays["ids"], forks, guesses, strict=False):
            ids[: len(fork.drafts) + 1] = (fork.feed.row.tokens[0], *fork.drafts)
            ids[shape.steps + 1 :] = tokens
        row = np.arange(count)
        block, inside = np.divmod(own.places[drafts] + ends, self._size)
        slots = arrays["table"][row[:, None], block] * self._size + inside
        positions = own.positions[drafts] + ends
        arrays["first_positions"][:count] = positions[:, :first]
        arrays["first_slots"][:count] = np.where(own.unused[drafts], -1, slots[:, :first])
        arrays["first_behind"][:count] = own.first_behind[drafts]
        arrays["wanted"][:count] = (row[:, None] * first + shape.steps + 1) + own.early
        arrays["wanted_last"][:count] = row * first + drafts
        arrays["behind"][:count] = own.behind[drafts]
        later = count, shape.steps, shape.width
        arrays["positions"][:, :count] = positions[:, first:].reshape(later).swapaxes(0, 1)
        arrays["slots"][:, :count] = slots[:, first:].reshape(later).swapaxes(0, 1)
        arrays["kv_lens"][:, :count] = (own.kv_lens[drafts] + ends).T
        write(arrays["first_start"], row * first, rest=count * first)
        write(arrays["query_start"], row * shape.width, rest=count * shape.width)
        if count < shape.rows:
            _empty(arrays, count)
        self._pack.send()


def _empty(arrays: dict[str, np.ndarray], first: int) -> None:
    """Rows from `first` on hold no sequence."""
    arrays["first_slots"][first:] = -1
    arrays["slots"][:, first:] = -1
    arrays["kv_lens"][:, first:] = 0
    arrays["wanted"][first:] = 0
    arrays["wanted_last"][first:] = 0


class _Tables:
    """Numbers of a sequence whose tokens end at position 0, [K + 1, ..]: row i is for one with i drafts.

    positions, places: [.., first + steps * width] of the first forward's tokens and of each later step's; places are
    entries. unused: [.., first] tokens that it has no draft for. first_behind [.., first], behind [.., width]: entries
    of the trunk, from its end, that a token does not see. kv_lens: [.., steps].
    """

    def __init__(self, shape: Shape) -> None:
        steps, width = shape.steps, shape.width
        count = np.arange(steps + 1)[:, None]
        depth = np.where(np.array(shape.depths) < count, shape.depths, 0)
        under, step = np.arange(steps + 1), np.arange(steps)
        self.early = np.arange(shape.early)
        # late branches begin a step later, with the token after all drafts
        starts = np.hstack((depth, np.repeat(count - 1, shape.late, axis=1)))
        flat = steps + 1, steps * width
        later = (starts[:, None] + step[:, None]).reshape(flat)
        scratch = (count[:, None] + step[:, None] * width + np.arange(width)).reshape(flat)
        trunk = np.repeat(under[None] - 1, steps + 1, axis=0)
        self.positions = np.hstack((trunk, depth, later))
        self.places = np.hstack((np.where(under > count, 0, trunk), count + self.early, scratch))
        self.unused = np.hstack((under > count, np.zeros((steps + 1, shape.early), dtype=bool)))
        self.first_behind = np.hstack((np.maximum(count - under, 0), count - depth))
        self.behind = np.hstack((count - depth, np.zeros((steps + 1, shape.late), dtype=np.int64)))
        self.kv_lens = count + (step + 1) * width
