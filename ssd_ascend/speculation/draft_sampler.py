"""How a drafter turns logits into tokens: the same law as the verifier's, plus what only drafts have.

That is: a temperature of their own, cache-aware sampling, a reduced vocabulary, and rounding to the dtype in which the
law travels. The token is drawn from exactly the law that is handed on, so none of these can bias the verifier.

Reproducible requests are drafted by coupling instead (Daliri, Musco, Suresh, arXiv 2408.07978): the draft token is
drawn with the very number the target will draw its own token with, and counts as a point mass. The target's tokens are
then its own whatever was drafted, so a seeded answer is the one plain decoding gives; the two still agree wherever
their laws do.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Rows
from typing import NamedTuple

import torch

from ssd_ascend.core.random import Stream
from ssd_ascend.runtime.sampler import (
    RowContext,
    TokenCounts,
    TokenMasks,
    cache_aware,
    draw,
    process_logits,
    row_uniforms,
    shape_logits,
    top_tokens,
)
from ssd_ascend.speculation.base import DraftSequence


class Drawn(NamedTuple):
    """tokens: int64 [R], target vocabulary. law: [R, Vd] log-weights, or None when every row is a point mass."""

    tokens: torch.Tensor
    law: torch.Tensor | None


class DraftSampler:
    """Draws draft tokens. `law_dtype` is what a law is stored and sent in; `num_target_tokens` is the target's V."""

    def __init__(
        self,
        *,
        num_target_tokens: int,
        law_dtype: torch.dtype,
        to_target: torch.Tensor | None = None,
        temperature: float | None = None,
        cache_bias: float = 1.0,
        cache_width: int = 0,
        masks: TokenMasks | None = None,
    ) -> None:
        self.to_target = to_target
        self._num_target_tokens = num_target_tokens
        self._law_dtype = law_dtype
        self._temperature = temperature
        self._cache_bias = cache_bias
        self._cache_width = cache_width
        self._counts = TokenCounts()
        self._masks = masks

    def release(self, keys: Iterable[int]) -> None:
        """Forget token counts and matchers of sequences that ended, see `DraftSequence.key`."""
        ended = list(keys)
        self._counts.release(ended)
        if self._masks is not None:
            self._masks.release(ended)

    def has_law(self, seq: DraftSequence) -> bool:
        """Whether this sequence's drafts are judged by the law they were drawn from (else they are point masses)."""
        sampling = seq.sampling
        temperature = sampling.temperature if self._temperature is None else self._temperature
        return temperature > 0.0 and not sampling.greedy and not sampling.reproducible

    def context(self, seq: DraftSequence, offset: int, tail: torch.Tensor | None, drafts: Rows[int] = ()) -> RowContext:
        """The row that draws the token `offset` places after the next one of `seq`, past the drafts in `tail`, which
        are on the host in `drafts` where `seq` has a grammar."""
        return RowContext(
            params=seq.sampling,
            seed=seq.seed,
            position=seq.num_tokens + offset,
            num_prompt_tokens=seq.num_prompt_tokens,
            stop_ids=seq.stop_ids,
            temperature=self._temperature if not seq.sampling.greedy else None,
            seq_id=seq.key,
            token_ids=seq.token_ids,
            tail=tail if seq.sampling.has_penalties else None,
            drafts=drafts,
        )

    def is_arg_max(self, seq: DraftSequence) -> bool:
        """Whether this sequence's drafts are the arg-max of the logits as they are."""
        return seq.sampling.greedy and seq.sampling.is_plain

    def draw(self, logits: torch.Tensor, rows: Rows[RowContext], greedy: torch.Tensor | None = None) -> Drawn:
        """One token per row of draft logits [R, Vd]. `greedy`: see `ModelOutput`."""
        full = self._widen_if_shaped(logits, rows)
        if all(row.law_temperature == 0.0 for row in rows):
            if greedy is not None and all(row.params.is_plain for row in rows):
                return Drawn(self._target_ids(greedy[:, 0].clamp(min=0)), None)
            tokens = top_tokens(shape_logits(full, rows, self._counts, self._masks))[0]
            return Drawn(tokens if full is not logits else self._target_ids(tokens), None)
        law = self._narrow(process_logits(full, rows, self._counts, self._masks), logits)
        coupled = [row.params.reproducible for row in rows]
        if not all(coupled):
            law = cache_aware(law, self._cache_width, self._cache_bias).to(self._law_dtype)
        tokens = draw(law.float(), _numbers(rows, coupled, law.device))
        return Drawn(self._target_ids(tokens), None if all(coupled) else law)

    def scores(self, logits: torch.Tensor, rows: Rows[RowContext]) -> torch.Tensor:
        """Log-weights of the next token over the target vocabulary [R, Vt], float32: what forks are chosen by."""
        full = self._widen_if_shaped(logits, rows)
        scores = shape_logits(full, rows, self._counts, self._masks).to(torch.float32)
        temperatures = [row.law_temperature or 1.0 for row in rows]
        if any(t != 1.0 for t in temperatures):
            scores = scores / torch.tensor(temperatures, device=scores.device)[:, None]
        return scores if scores.shape[1] == self._num_target_tokens else self._widen(scores)

    def _widen_if_shaped(self, logits: torch.Tensor, rows: Rows[RowContext]) -> torch.Tensor:
        """Penalties, bias, bans and masks name target ids, so a reduced vocabulary is spread out first when a row has
        any."""
        shaped = any(
            row.params.has_penalties or row.params.logit_bias or row.bans_stops or row.params.grammar is not None
            for row in rows
        )
        return self._widen(logits) if shaped and self.to_target is not None else logits

    def _widen(self, logits: torch.Tensor) -> torch.Tensor:
        """[R, Vd] -> [R, Vt], -inf where the draft has no token."""
        return widen(logits, self.to_target, self._num_target_tokens)

    def _narrow(self, law: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Back to the draft vocabulary, when the law was computed over the target's."""
        if self.to_target is None or law.shape[1] == logits.shape[1]:
            return law
        return law.index_select(1, self.to_target)

    def _target_ids(self, tokens: torch.Tensor) -> torch.Tensor:
        return tokens if self.to_target is None else self.to_target.index_select(0, tokens)


def _numbers(rows: Rows[RowContext], coupled: Rows[bool], device: torch.device) -> torch.Tensor:
    """The number each row's token is drawn with: the target's own where the row is coupled to it, else the draft's."""
    if not any(coupled):
        return row_uniforms(rows, Stream.DRAFT, device)
    own = row_uniforms(rows, Stream.RECOVER, device)
    return (
        own
        if all(coupled)
        else torch.where(torch.tensor(coupled, device=device), own, row_uniforms(rows, Stream.DRAFT, device))
    )


def widen(logits: torch.Tensor, to_target: torch.Tensor | None, num_target_tokens: int) -> torch.Tensor:
    """Log-weights [..., Vd] over the draft vocabulary as float32 [..., Vt], -inf where the draft has no token."""
    if to_target is None:
        return logits.to(torch.float32)
    full = torch.full((*logits.shape[:-1], num_target_tokens), float("-inf"), device=logits.device)
    return full.index_copy_(-1, to_target, logits.to(torch.float32))
