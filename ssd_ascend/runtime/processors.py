"""The stages that shape one row of logits into a law, each applied to just the rows that ask for it, in place.

Called by `runtime/sampler.py` only. Order: penalties, bias, ban of stops, grammar (`runtime/token_masks.py`);
temperature; top-k, top-p, min-p.
Supports are cut by value, never by rank, so equal logits share their fate and every device keeps the same set.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from ssd_ascend.runtime.row_context import RowContext, TokenCounts

_FIRST_CANDIDATES = 256
_NO = float("-inf")


def column(values: Sequence[float], like: torch.Tensor) -> torch.Tensor:
    """Host numbers as a float32 column [n, 1] beside `like`."""
    return torch.tensor(values, dtype=torch.float32, device=like.device).unsqueeze(1)


def on_rows(logits: torch.Tensor, rows: Sequence[int], stage: Callable[[torch.Tensor], None]) -> None:
    """Apply an in-place stage to some rows of logits [R, V]."""
    if not rows:
        return
    if len(rows) == logits.shape[0]:
        stage(logits)
        return
    index = torch.tensor(rows, dtype=torch.int64, device=logits.device)
    part = logits.index_select(0, index)
    stage(part)
    logits.index_copy_(0, index, part)


def penalize(logits: torch.Tensor, rows: Sequence[RowContext], counts: TokenCounts) -> None:
    """Repetition penalty over prompt and output, then frequency and presence over the output only. logits: [P, V]."""
    generated, prompted = counts.gather(rows, logits)
    occurs = generated > 0
    if any(row.params.repetition_penalty != 1.0 for row in rows):
        factor = column([row.params.repetition_penalty for row in rows], logits)
        repeated = torch.where(logits > 0, logits / factor, logits * factor)
        logits.copy_(torch.where(occurs | prompted, repeated, logits))
    frequency = column([row.params.frequency_penalty for row in rows], logits)
    presence = column([row.params.presence_penalty for row in rows], logits)
    logits.sub_(generated.mul_(frequency)).sub_(occurs * presence)


def add_bias(logits: torch.Tensor, rows: Sequence[RowContext]) -> None:
    """Add `logit_bias`; ids beyond the vocabulary have no logit to change. logits: [R, V], a context for every row."""
    vocab = logits.shape[1]
    entries = [
        (i, token, bias) for i, row in enumerate(rows) for token, bias in row.params.logit_bias.items() if token < vocab
    ]
    if entries:
        places = torch.tensor([entry[:2] for entry in entries], dtype=torch.int64, device=logits.device)
        values = torch.tensor([entry[2] for entry in entries], dtype=torch.float32, device=logits.device)
        logits.index_put_((places[:, 0], places[:, 1]), values, accumulate=True)


def ban_stops(logits: torch.Tensor, rows: Sequence[RowContext]) -> None:
    """Take the stop tokens out of rows that have not reached `min_tokens`. logits: [R, V], a context for every row."""
    vocab = logits.shape[1]
    entries = [(i, token) for i, row in enumerate(rows) if row.bans_stops for token in row.stop_ids if token < vocab]
    if entries:
        places = torch.tensor(entries, dtype=torch.int64, device=logits.device)
        logits.index_put_((places[:, 0], places[:, 1]), logits.new_tensor(_NO))


def keep_top_k(logits: torch.Tensor, ks: Sequence[int]) -> None:
    """Keep the k most likely tokens of each row, and whatever ties with the last of them."""
    best = logits.topk(max(ks)).values
    last = torch.tensor(ks, dtype=torch.int64, device=logits.device).sub_(1).unsqueeze(1)
    logits.masked_fill_(logits < best.gather(1, last), _NO)


def keep_top_p(logits: torch.Tensor, top_ps: Sequence[float]) -> None:
    """Keep the smallest set of most likely tokens with at least `top_p` of the mass, and ties. Row maxima must be 0."""
    wanted = column(top_ps, logits) * logits.exp().sum(-1, keepdim=True)
    vocab = logits.shape[1]
    # A full sort of a row costs 20 times a look at its best 256, which nearly always suffice. Looking whether they did
    # is free where the host computes; elsewhere it would stall the device, so the whole row is sorted there.
    size = min(_FIRST_CANDIDATES, vocab) if logits.is_cpu else vocab
    logits.masked_fill_(logits < _nucleus_edge(logits, wanted, size), _NO)


def _nucleus_edge(logits: torch.Tensor, wanted: torch.Tensor, size: int) -> torch.Tensor:
    """The least logit [P, 1] of the smallest set that holds `wanted` [P, 1] mass, looked for among the best `size`."""
    vocab = logits.shape[1]
    best = logits.topk(size).values if size < vocab else logits.sort(dim=-1, descending=True).values
    mass = best.exp().cumsum(-1)
    edge = best.gather(1, (mass[:, :-1] < wanted).sum(-1, keepdim=True))
    if size < vocab:
        short = (mass[:, -1] < wanted[:, 0]).nonzero().squeeze(1)
        if short.numel():
            edge[short] = _nucleus_edge(logits[short], wanted[short], min(size * 8, vocab))
    return edge


def keep_min_p(logits: torch.Tensor, min_ps: Sequence[float]) -> None:
    """Keep tokens at least `min_p` times as likely as the most likely one. Row maxima must be 0."""
    logits.masked_fill_(logits < column([math.log(min_p) for min_p in min_ps], logits), _NO)
