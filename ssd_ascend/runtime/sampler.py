"""The sampling law, and the only place that computes it: logits + context -> log-weights -> a token.

Called by the verifier for target rows and by drafters for draft rows, possibly in different processes; both get the
same law for the same row. Randomness comes in as numbers (`core/random.py`): nothing here has state but token counts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ssd_ascend.core.random import Stream, uniforms
from ssd_ascend.runtime.processors import (
    add_bias,
    ban_stops,
    column,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    on_rows,
    penalize,
)
from ssd_ascend.runtime.row_context import RowContext, TokenCounts
from ssd_ascend.runtime.token_masks import TokenMasks

__all__ = [
    "RowContext",
    "TokenCounts",
    "TokenMasks",
    "cache_aware",
    "draw",
    "draw_weights",
    "process_logits",
    "row_uniforms",
    "shape_logits",
    "top_tokens",
]

_MASK = (1 << 64) - 1
_SMALL_VOCAB = 512


def process_logits(
    logits: torch.Tensor,
    rows: Sequence[RowContext],
    counts: TokenCounts | None = None,
    masks: TokenMasks | None = None,
) -> torch.Tensor:
    """The log-weights [R, V] (float32) whose softmax is the law of each row of logits [R, V]; logits are not changed.

    Every row's maximum is 0; tokens outside the support are -inf; a greedy row is 0 at its arg-max and -inf elsewhere.
    A row whose logits hold NaN or +inf, or nothing but -inf, comes out with NaN in it. `counts` is needed when a row
    has penalties, `masks` when one has a grammar.
    """
    shaped = shape_logits(logits, rows, counts, masks)
    # the maximum goes first: dividing by a tiny temperature must drive the others to -inf, never the best to +inf
    best = shaped.amax(-1, keepdim=True)
    law = shaped.to(torch.float32)
    law = law - best if law is logits else law.sub_(best)
    temperatures = [row.law_temperature for row in rows]
    if any(temperature not in (0.0, 1.0) for temperature in temperatures):
        law.div_(column([temperature or 1.0 for temperature in temperatures], law))
    on_rows(law, [i for i, temperature in enumerate(temperatures) if temperature == 0.0], _sharpen)
    _truncate(law, rows)
    return law


def shape_logits(
    logits: torch.Tensor,
    rows: Sequence[RowContext],
    counts: TokenCounts | None = None,
    masks: TokenMasks | None = None,
) -> torch.Tensor:
    """What comes before temperature: penalties, bias, min_tokens, grammar. Returns `logits` itself when no row asks
    for any."""
    penalized = [i for i, row in enumerate(rows) if row.params.has_penalties]
    masked = [i for i, row in enumerate(rows) if row.params.grammar is not None]
    if not penalized and not masked and not any(row.params.logit_bias or row.bans_stops for row in rows):
        return logits
    shaped = logits.to(torch.float32, copy=True)
    if penalized:
        assert counts is not None, "penalties need TokenCounts"
        some, known = [rows[i] for i in penalized], counts
        on_rows(shaped, penalized, lambda part: penalize(part, some, known))
    add_bias(shaped, rows)
    ban_stops(shaped, rows)
    if masked:
        assert masks is not None, "grammars need TokenMasks"
        constrained, states = [rows[i] for i in masked], masks
        on_rows(shaped, masked, lambda part: states.apply(part, constrained))
    return shaped


def _sharpen(law: torch.Tensor) -> None:
    """Temperature 0: all weight on the arg-max (a NaN there stays, so that the row is seen to be broken)."""
    token, value = top_tokens(law)
    law.fill_(float("-inf")).scatter_(1, token.unsqueeze(1), value.unsqueeze(1))


def _truncate(law: torch.Tensor, rows: Sequence[RowContext]) -> None:
    """Cut the support of the rows that ask for it; greedy rows have one token already."""
    drawn = [(i, row.params) for i, row in enumerate(rows) if row.law_temperature != 0.0]
    by_k = [(i, params.top_k) for i, params in drawn if 0 < params.top_k < law.shape[1]]
    by_p = [(i, params.top_p) for i, params in drawn if params.top_p < 1.0]
    by_min_p = [(i, params.min_p) for i, params in drawn if params.min_p > 0.0]
    on_rows(law, [i for i, _ in by_k], lambda part: keep_top_k(part, [k for _, k in by_k]))
    on_rows(law, [i for i, _ in by_p], lambda part: keep_top_p(part, [p for _, p in by_p]))
    on_rows(law, [i for i, _ in by_min_p], lambda part: keep_min_p(part, [p for _, p in by_min_p]))


def top_tokens(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Arg-max of each row (the first of equals) and its value: (int64 [R], [R]). NaN counts as the largest.

    Two levels, because a maximum alone is vectorised everywhere and an arg-max is not: 8 times faster on a CPU.
    """
    num_rows, vocab = logits.shape
    block = min(vocab & -vocab, 256)  # the largest power of two that divides V
    if vocab <= _SMALL_VOCAB or block < 32:
        value, token = logits.max(-1)
        return token, value
    blocks = logits.reshape(num_rows, -1, block)
    best = blocks.amax(-1).argmax(-1)
    value, inside = blocks.gather(1, best[:, None, None].expand(-1, 1, block)).squeeze(1).max(-1)
    return best * block + inside, value


def row_uniforms(rows: Sequence[RowContext], stream: Stream, device: torch.device) -> torch.Tensor:
    """The number in [0, 1) of each row for one purpose: float32 [R] on `device`."""
    numbers = uniforms([row.seed & _MASK for row in rows], [row.position for row in rows], stream)
    return torch.from_numpy(numbers).to(device)


def draw(log_weights: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """One token per row of log-weights [R, V] from numbers in [0, 1) [R], by inverse CDF: int64 [R].

    Never a token of weight zero. Rows without a law (NaN, all -inf) give some id below V.
    """
    exact = log_weights.to(torch.float32)
    return draw_weights(torch.sub(exact, exact.amax(-1, keepdim=True)).exp_(), numbers)


def draw_weights(weights: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """`draw` for weights [R, V] that are already exponentiated, of any sum.

    Float32 throughout, as NPUs have nothing wider. Two levels keep that accurate (and fast): a sum over blocks, then
    one inside the chosen block, so a boundary of the CDF is off by about 1e-7 of the total, the grain of the 24-bit
    numbers themselves.
    """
    num_rows, vocab = weights.shape
    if vocab <= _SMALL_VOCAB:
        return _locate(weights, numbers)[0]
    block = 256
    if vocab % block:
        weights = torch.nn.functional.pad(weights, (0, -vocab % block))
    blocks = weights.reshape(num_rows, -1, block)
    chosen, rest = _locate(blocks.sum(-1), numbers)
    inside, _ = _locate(blocks[torch.arange(num_rows, device=weights.device), chosen], rest)
    return (chosen * block + inside).clamp_(max=vocab - 1)


def _locate(mass: torch.Tensor, numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The cell of mass [R, n] each number falls into, and how far into it, as a number in [0, 1]."""
    cdf = mass.cumsum(-1)
    cdf = torch.where(mass > 0, cdf, torch.zeros_like(cdf))  # an empty cell is never chosen, however a scan may round
    total = cdf.amax(-1, keepdim=True)
    point = numbers.unsqueeze(1) * total
    # "or the last cell": the product may round up to the total
    cell = ((cdf > point) | (cdf == total)).to(torch.int32).argmax(-1, keepdim=True)
    size = mass.gather(1, cell)
    rest = ((point - (cdf.gather(1, cell) - size)) / size).clamp_(0.0, 1.0)
    return cell.squeeze(1), rest.squeeze(1)


def cache_aware(law: torch.Tensor, fan_out: int | Sequence[int], c: float) -> torch.Tensor:
    """Saguaro sampling (arXiv 2603.03251, definition 14): the likeliest fan_out + 1 tokens weigh `c` times as much.

    A drafter that samples from this leaves more of the target's residual on tokens it has prepared branches for. The
    set is cut by value (ties are in); the result is the row's law, sent as such: the verifier needs no knowledge of it.
    law: log-weights [R, V]; fan_out: one number, or one per row; 0 < c <= 1.
    """
    if c == 1.0:
        return law
    sizes = [fan_out] * law.shape[0] if isinstance(fan_out, int) else fan_out
    ranks = torch.tensor([min(size, law.shape[1] - 1) for size in sizes], dtype=torch.int64, device=law.device)
    best = law.topk(min(max(sizes) + 1, law.shape[1])).values
    inside = law >= best.gather(1, ranks.unsqueeze(1))
    return law + inside * torch.log(column([c], law))
