"""The rows of a captured step as arrays of a `Pack`: what `inputs.build_batch` makes anew, written over static memory.

`graphs.py` uses it for single steps; drafters add to it what their captured chains need (`ahead`).
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from itertools import repeat
from struct import Struct
from typing import NamedTuple

import numpy as np
import torch

from ssd_ascend.core.attention import AttentionMetadata
from ssd_ascend.core.batch import ForwardBatch, Mode
from ssd_ascend.runtime.inputs import Row
from ssd_ascend.runtime.pack import Field, Pack, Stage, write

_INT = torch.int32
_FEW = 48
"""Tokens: from here on arrays are faster than lists."""


def row_fields(rows: int, tokens: int, max_len: int, block_size: int) -> dict[str, Field]:
    """Arrays of a batch of up to `rows` rows and `tokens` tokens in all. A padded token has the slot -1."""
    return {
        "ids": Field((tokens,)),
        "positions": Field((tokens,)),
        "slots": Field((tokens,), initial=-1),
        "query_start": Field((rows + 1,), _INT),
        "kv_lens": Field((rows,), _INT),
        "table": Field((rows, -(-max_len // block_size)), _INT),
    }


def ahead_fields(rows: int, steps: int) -> dict[str, Field]:
    """Arrays of `steps` further steps of one token a row."""
    return {
        "ahead_positions": Field((steps, rows)),
        "ahead_slots": Field((steps, rows), initial=-1),
        "ahead_kv_lens": Field((steps, rows), _INT),
        "ahead_start": Field((rows + 1,), _INT),
    }


def static_batch(pack: Pack, mode: Mode, *, per_row: int, max_len: int) -> ForwardBatch:
    """The batch a step is captured with: host lengths are the most that a replay may bring."""
    arrays = pack.device
    rows = arrays["kv_lens"].shape[0]
    meta = AttentionMetadata(
        query_lens_host=[per_row] * rows,
        kv_lens_host=[max_len] * rows,
        query_start=arrays["query_start"],
        kv_lens=arrays["kv_lens"],
        block_table=arrays["table"],
        slot_mapping=arrays["slots"],
    )
    return ForwardBatch(mode, arrays["ids"], arrays["positions"], meta)


def ahead_batch(
    pack: Pack, step: int, tokens: torch.Tensor, hidden: torch.Tensor | None, *, max_len: int
) -> ForwardBatch:
    """Step `step` of those ahead: one token a row, `tokens` int64 [rows]."""
    arrays = pack.device
    rows = arrays["kv_lens"].shape[0]
    meta = AttentionMetadata(
        query_lens_host=[1] * rows,
        kv_lens_host=[max_len] * rows,
        query_start=arrays["ahead_start"],
        kv_lens=arrays["ahead_kv_lens"][step],
        block_table=arrays["table"],
        slot_mapping=arrays["ahead_slots"][step],
    )
    return ForwardBatch(Mode.DECODE, tokens, arrays["ahead_positions"][step], meta, hidden_states=hidden)


def write_tables(stage: Stage, tables: Rows[Rows[int]]) -> None:
    """Block tables, where they changed since this buffer was last used; scratch beyond its reach is left out."""
    table, known = stage.arrays["table"], stage.tables
    known += [[] for _ in range(len(tables) - len(known))]
    for i, blocks in enumerate(tables):
        if blocks != known[i]:
            known[i] = list(blocks)
            held = blocks[: table.shape[1]]
            table[i, : len(held)] = held


def write_rows(stage: Stage, rows: Rows[Row], lengths: list[int], block_size: int) -> None:
    """Fill in a batch. Stale numbers stay only where nothing reads them: ids and positions of padding."""
    write_tables(stage, [row.block_table for row in rows])
    arrays, total = stage.arrays, sum(lengths)
    if total <= _FEW:
        places, slots, first, ends = _counted(rows, lengths, block_size)
    else:
        places, slots, first, ends = _computed(rows, lengths, block_size, arrays["table"])
    arrays["ids"][:total] = [token for row in rows for token in row.tokens]
    arrays["positions"][:total] = places
    write(arrays["slots"], slots, rest=-1)
    write(arrays["query_start"], first, rest=total)
    write(arrays["kv_lens"], ends, rest=0)


class Reach(NamedTuple):
    """Where a row that is to come may lie: the cache's slots of positions first, first + 1, ... of its sequence."""

    first: int
    slots: list[int]


class ReachedRows:
    """Writes rows whose tables are written, and whose slots are known: all their numbers at once, where `write_rows`
    turns ten lists into arrays."""

    def __init__(self, rows: int, tokens: int) -> None:
        """Of `row_fields`, which a `Pack` lays out in this order."""
        self._rows, self._tokens = rows, tokens
        self._numbers = Struct(f"={3 * tokens}q{rows + 1}i{'' if rows % 2 else '4x'}{rows}i")

    def write(self, stage: Stage, rows: Rows[Row], reaches: Rows[Reach], lengths: list[int], ends: list[int]) -> bool:
        """False, and nothing written, where a row goes beyond its reach. What `lengths` and `ends` hold becomes the
        length of each row, and how many tokens its sequence has by then."""
        ids, places, slots, first = list[int](), list[int](), list[int](), list[int]()
        lengths.clear()
        ends.clear()
        for (tokens, at, _, _), (low, reach) in zip(rows, reaches, strict=True):
            length = len(tokens)
            end = at + length
            first.append(len(ids))
            ids += tokens
            places += range(at, end)
            slots += reach[at - low : end - low]
            lengths.append(length)
            ends.append(end)
        total, count = len(ids), len(ends)
        if len(slots) < total:
            return False
        idle, empty = self._tokens - total, self._rows - count
        self._numbers.pack_into(
            stage.whole, 0,
            *ids, *repeat(0, idle), *places, *repeat(0, idle), *slots, *repeat(-1, idle),
            *first, *repeat(total, empty + 1), *ends, *repeat(0, empty),
        )  # fmt: skip
        return True


class _Numbers(NamedTuple):
    """Of a batch: position and slot of each token, first token of each row, and tokens of its sequence by then."""

    places: Rows[int] | np.ndarray
    slots: Rows[int] | np.ndarray
    first: Rows[int] | np.ndarray
    ends: Rows[int] | np.ndarray


def _counted(rows: Rows[Row], lengths: list[int], block_size: int) -> _Numbers:
    """By lists: for few tokens, which are in a hurry, in a third of the time that arithmetic on arrays takes."""
    places, slots, first, ends = list[int](), list[int](), list[int](), list[int]()
    total = 0
    for row, length in zip(rows, lengths, strict=True):
        at, end = row.start, row.start + length
        places += range(at, end)
        slots += slots_between(row.block_table, at, end, block_size)
        first.append(total)
        ends.append(end)
        total += length
    return _Numbers(places, slots, first, ends)


def slots_between(table: Rows[int], at: int, end: int, block_size: int) -> list[int]:
    """Where the cache keeps positions [at, end) of the sequence with this block table."""
    slots = list[int]()
    while at < end:
        block, inside = divmod(at, block_size)
        slot, count = table[block] * block_size + inside, min(end - at, block_size - inside)
        slots += range(slot, slot + count)
        at += count
    return slots


def _computed(rows: Rows[Row], lengths: list[int], block_size: int, table: np.ndarray) -> _Numbers:
    """The same by arrays, for many tokens. table: of the rows, as it was written."""
    count, token = len(rows), np.arange(sum(lengths))
    starts = np.array([row.start for row in rows])
    per_row = lengths[0]
    first: np.ndarray
    if lengths.count(per_row) == count:
        owner, first = token // per_row, np.arange(count) * per_row
    else:
        first = np.cumsum(lengths) - lengths
        owner = np.repeat(np.arange(count), lengths)
    places = starts[owner] + token - first[owner]
    return _Numbers(places, _slots(table, owner, places, block_size), first, starts + lengths)


def write_ahead(stage: Stage, count: int, block_size: int) -> None:
    """The steps after the batch of `count` rows that `write_rows` put there: each row grows by one token a step."""
    arrays = stage.arrays
    steps = arrays["ahead_positions"].shape[0]
    place = arrays["kv_lens"][None, :count] + np.arange(steps)[:, None]
    write(arrays["ahead_positions"], place)
    write(arrays["ahead_slots"], _slots(arrays["table"], np.arange(count)[None], place, block_size), rest=-1)
    write(arrays["ahead_kv_lens"], place + 1, rest=0)
    write(arrays["ahead_start"], np.arange(count), rest=count)


def _slots(table: np.ndarray, owner: np.ndarray, place: np.ndarray, block_size: int) -> np.ndarray:
    """Where the cache keeps the positions `place` of the rows `owner`."""
    block, inside = np.divmod(place, block_size)
    slots: np.ndarray = table[owner, block].astype(np.int64) * block_size + inside
    return slots
