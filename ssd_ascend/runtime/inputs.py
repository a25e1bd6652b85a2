"""From rows of tokens to one packed `ForwardBatch`; used for target steps and by every drafter.

Index arithmetic is numpy on the host; one int64 and one int32 buffer go to the device, whatever the number of rows.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from typing import NamedTuple, Protocol

import numpy as np
import torch

from ssd_ascend.core.attention import AttentionMetadata
from ssd_ascend.core.batch import ForwardBatch, Mode
from ssd_ascend.core.plan import StepPlan
from ssd_ascend.core.speculation import Speculation
from ssd_ascend.runtime.pack import to_device


class Row(NamedTuple):
    """One row of a batch: `tokens` at positions start, start + 1, ... of the sequence behind `block_table`.

    num_logits: how many of its last tokens want a logit row.
    """

    tokens: Rows[int]
    start: int
    block_table: Rows[int]
    num_logits: int


class Staging(Protocol):
    """Buffers that are there already, those of a captured graph."""

    def stage(
        self,
        mode: Mode,
        rows: Rows[Row],
        hidden_states: torch.Tensor | None = None,
        input_ids: torch.Tensor | None = None,
    ) -> ForwardBatch | None:
        """The rows in those buffers, whose tensors may be longer than the batch; None when none fit."""
        ...


def build_batch(
    mode: Mode,
    rows: Rows[Row],
    *,
    block_size: int,
    device: torch.device,
    hidden_states: torch.Tensor | None = None,
    input_ids: torch.Tensor | None = None,
    positions: Rows[int] | None = None,
    tree_mask: torch.Tensor | None = None,
    staging: Staging | None = None,
) -> ForwardBatch:
    """Pack `rows`, into the buffers of `staging` where it has some for such a batch.

    `input_ids` [T] on the device replaces the rows' tokens (which then only say how many there are). `positions`
    overrides the rotary positions (T of them), for rows whose KV slots are not their places.
    """
    if staging is not None and positions is None and tree_mask is None:
        staged = staging.stage(mode, rows, hidden_states, input_ids)
        if staged is not None:
            return staged
    lengths = np.fromiter((len(row.tokens) for row in rows), np.int64, len(rows))
    starts = np.fromiter((row.start for row in rows), np.int64, len(rows))
    ends = np.cumsum(lengths)
    total = int(ends[-1])
    row_of_token = np.repeat(np.arange(len(rows)), lengths)
    place = np.arange(total) - np.repeat(ends - lengths, lengths) + np.repeat(starts, lengths)
    table = _pad_tables([row.block_table for row in rows])
    slots = table[row_of_token, place // block_size].astype(np.int64) * block_size + place % block_size
    token_ids = np.fromiter((token for row in rows for token in row.tokens), np.int64, total)
    rotary = place if positions is None else np.asarray(positions, np.int64)
    wanted = np.fromiter((row.num_logits for row in rows), np.int64, len(rows))
    logits_rows = _last_rows(ends, wanted)
    kv_lens = starts + lengths
    everywhere = len(logits_rows) == total
    long = to_device(torch.from_numpy(np.concatenate((token_ids, rotary, slots, logits_rows))), device)
    short_parts = (np.zeros(1, np.int32), ends.astype(np.int32), kv_lens.astype(np.int32), table.reshape(-1))
    short = to_device(torch.from_numpy(np.concatenate(short_parts)), device)
    meta = AttentionMetadata(
        query_lens_host=lengths.tolist(),
        kv_lens_host=kv_lens.tolist(),
        query_start=short[: len(rows) + 1],
        kv_lens=short[len(rows) + 1 : 2 * len(rows) + 1],
        block_table=short[2 * len(rows) + 1 :].view(table.shape),
        slot_mapping=long[2 * total : 3 * total],
        tree_mask=tree_mask,
    )
    return ForwardBatch(
        mode=mode,
        input_ids=long[:total] if input_ids is None else input_ids,
        positions=long[total : 2 * total],
        attention=meta,
        hidden_states=hidden_states,
        logits_rows=None if everywhere else long[3 * total :],
    )


def target_rows(plan: StepPlan, drafts: Rows[Rows[int]]) -> tuple[Mode, list[Row]]:
    """The rows of one step; `drafts` of each decode row, or as many placeholders."""
    rows = [
        Row([row.seq.token_ids[-1], *own], row.seq.num_tokens - 1, row.seq.block_table, len(own) + 1)
        for row, own in zip(plan.decoding, drafts, strict=False)
    ]
    rows += [
        Row(c.seq.token_ids[c.start : c.start + c.length], c.start, c.seq.block_table, int(c.is_last))
        for c in plan.prefills
    ]
    return Mode.PREFILL if plan.prefills else Mode.VERIFY if any(drafts) else Mode.DECODE, rows


def place_drafts(input_ids: torch.Tensor, speculation: Speculation) -> None:
    """Write the drafts, which may never have been on the host, over their placeholders."""
    assert speculation.tokens is not None
    most, rows = max(speculation.num_tokens), speculation.num_rows
    if speculation.num_tokens.count(most) == rows:
        input_ids[: rows * (most + 1)].view(rows, most + 1)[:, 1:].copy_(speculation.tokens[:, :most])
        return
    counts = np.asarray(speculation.num_tokens, np.int64)
    begins = np.cumsum(counts + 1) - counts  # one past each row's own token
    column = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    target = np.repeat(begins, counts) + column
    source = np.repeat(np.arange(len(counts)) * speculation.tokens.shape[1], counts) + column
    index = to_device(torch.from_numpy(np.concatenate((target, source))), input_ids.device)
    drafts = speculation.tokens.reshape(-1).index_select(0, index[len(target) :])
    input_ids.index_copy_(0, index[: len(target)], drafts)


def _pad_tables(tables: Rows[Rows[int]]) -> np.ndarray:
    """Block tables of unequal length as one int32 [B, M], padded with block 0 (never read: lengths bound every row)."""
    width = max(map(len, tables))
    padded = np.zeros((len(tables), width), np.int32)
    for i, table in enumerate(tables):
        padded[i, : len(table)] = table
    return padded


def _last_rows(ends: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Packed indices of the last `wanted[i]` tokens of every row."""
    total = int(wanted.sum())
    offset = np.arange(total) - np.repeat(np.cumsum(wanted) - wanted, wanted)
    return np.repeat(ends - wanted, wanted) + offset
