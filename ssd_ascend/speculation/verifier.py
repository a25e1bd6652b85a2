"""The target's verdict on a step: which drafts stand, which token follows. The engine calls it once per step.

Everything is decided on the device; one packed copy brings the verdict to the host, where it becomes a `Verification`.
The rules themselves are in `speculation/acceptance.py`, the law they apply in `runtime/sampler.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from ssd_ascend.core.batch import Awaited
from ssd_ascend.core.random import Stream
from ssd_ascend.core.sequence import Sequence as TokenSequence
from ssd_ascend.core.speculation import Speculation, Verification, VerificationOutcome
from ssd_ascend.runtime.logprobs import LogprobColumns, gather_logprobs, read_logprobs
from ssd_ascend.runtime.pack import to_device
from ssd_ascend.runtime.sampler import (
    RowContext,
    TokenCounts,
    TokenMasks,
    draw_weights,
    process_logits,
    row_uniforms,
    shape_logits,
    top_tokens,
)
from ssd_ascend.speculation.acceptance import count_equal, judge_drawn

ToHost = Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]
"""`Backend.to_host`: copies all tensors to the host together."""


@dataclass(frozen=True, slots=True)
class _Layout:
    """Which rows of logits belong to whom: sequence i owns num_drafts[i] + 1 rows from starts[i] on."""

    num_drafts: list[int]
    starts: list[int]
    num_rows: int

    @staticmethod
    def of(num_sequences: int, speculation: Speculation) -> _Layout:
        """Sequences beyond the rows of `speculation` (those that finish their prefill) carry no drafts."""
        num_drafts = speculation.num_tokens + [0] * (num_sequences - speculation.num_rows)
        starts, end = [], 0
        for count in num_drafts:
            starts.append(end)
            end += count + 1
        return _Layout(num_drafts, starts, end)

    def rows(self, i: int) -> range:
        """The rows of sequence i."""
        return range(self.starts[i], self.starts[i] + self.num_drafts[i] + 1)


class _Judged(NamedTuple):
    """On the device. token: int64 [R], what row r emits if it emits; sound: bool [R], the row had a law at all;
    accepted: int64 [L], for the sequences judged by the ratio test."""

    token: torch.Tensor
    sound: torch.Tensor
    accepted: torch.Tensor | None = None


class Verifier:
    """Judges speculations. Its only state is what the law needs of a sequence's past: the token counts of those with
    penalties, the matchers of those with a grammar (which none may have without `masks`)."""

    def __init__(self, to_host: ToHost, counts: TokenCounts | None = None, masks: TokenMasks | None = None) -> None:
        self._to_host = to_host
        self._counts = TokenCounts() if counts is None else counts
        self._masks = masks

    def release(self, seq_ids: Iterable[int]) -> None:
        """Forget sequences that ended."""
        ended = list(seq_ids)
        self._counts.release(ended)
        if self._masks is not None:
            self._masks.release(ended)

    def verify(
        self,
        sequences: Sequence[TokenSequence],
        speculation: Speculation,
        logits: torch.Tensor,
        greedy: torch.Tensor | None = None,
        verdict: Awaited | None = None,
    ) -> Verification:
        """Judge row i of `speculation` for sequences[i] with target logits [R, V], packed in order, drafts + 1 each.

        Sequences beyond the speculation's rows carry no drafts. `logits` are not changed. `greedy`: what a captured
        step found of them (`ModelOutput.greedy`), `verdict`: the same on its way to the host, or None.
        """
        layout = _Layout.of(len(sequences), speculation)
        if verdict is not None:  # which is not sent for where somebody wants more
            return self._found(sequences, layout, verdict.rows())
        if greedy is not None and all(seq.sampling.wants_only_arg_max for seq in sequences):
            return self._found(sequences, layout, self._to_host([greedy])[0].tolist())
        assert logits.shape[0] == layout.num_rows, f"{logits.shape[0]} logit rows for {layout.num_rows} sampled ones"
        if speculation.tokens is not None and speculation.tokens.device != logits.device:
            speculation = replace(speculation, tokens=to_device(speculation.tokens, logits.device))
        drawn = _drawn_rows(sequences, speculation)
        if all(seq.sampling.greedy for seq in sequences):
            judged = self._greedy(sequences, speculation, layout, logits)
        else:
            judged = self._sampled(sequences, speculation, layout, logits, drawn)
        columns = _logprob_columns(sequences, layout, logits, judged.token)
        tokens, sound, drafts, accepted, *entries = self._copy(judged, speculation, columns)
        kept = dict(zip(drawn, accepted.tolist(), strict=True))
        verification = _assemble(sequences, layout, tokens.tolist(), sound.tolist(), drafts.tolist(), kept)
        self._explain(verification)
        if entries:
            _attach_logprobs(verification, sequences, layout, entries)
        return verification

    def _found(self, sequences: Sequence[TokenSequence], layout: _Layout, pairs: list[list[int]]) -> Verification:
        """The device found all: what each row emits (-1: nothing), and what was fed there. A draft stands where it is
        what the row before it emits. Nothing is launched before this is told, so it is one pass over few objects."""
        outcomes, new_tokens, faults = list[VerificationOutcome](), list[list[int]](), dict[int, str]()
        for seq, start, count in zip(sequences, layout.starts, layout.num_drafts, strict=True):
            at, last = start, start + count
            token = pairs[at][0]
            emitted = [token]
            while at < last and pairs[at + 1][1] == token:
                at += 1
                token = pairs[at][0]
                emitted.append(token)
            if token < 0:  # those before it are drafts, which are tokens
                outcomes.append(_nothing_of(seq))
                faults[seq.id] = _fault(seq, at - start)
                emitted = []
            else:
                outcomes.append(VerificationOutcome(seq.id, at - start, token))
            new_tokens.append(emitted)
        return Verification(outcomes, new_tokens, [None] * len(sequences), faults)

    def _contexts(
        self, sequences: Sequence[TokenSequence], speculation: Speculation, layout: _Layout
    ) -> list[RowContext]:
        """A context per row of logits; row j of a sequence knows the j drafts before it."""
        rows, drafts = [], speculation.tokens
        on_host = self._drafts_on_host(sequences, speculation)
        for i, seq in enumerate(sequences):
            penalized = seq.sampling.has_penalties
            known = on_host[i] if i < len(on_host) and seq.sampling.grammar is not None else []
            for j in range(layout.num_drafts[i] + 1):
                tail = drafts[i, :j] if penalized and j and drafts is not None else None
                rows.append(RowContext.of(seq, offset=j, tail=tail, drafts=known[:j]))
        return rows

    def _drafts_on_host(self, sequences: Sequence[TokenSequence], speculation: Speculation) -> list[list[int]]:
        """The drafts of every row, when a sequence has a grammar that must read them."""
        if speculation.tokens is None or all(seq.sampling.grammar is None for seq in sequences):
            return []
        if speculation.host_tokens is not None:
            return speculation.host_tokens
        copied: list[list[int]] = self._to_host([speculation.tokens])[0].tolist()
        return copied

    def _explain(self, verification: Verification) -> None:
        """Where no token was left because the grammar could not be followed, say that instead."""
        if self._masks is not None:
            for seq_id in verification.faults:
                if (reason := self._masks.fault(seq_id)) is not None:
                    verification.faults[seq_id] = reason
                    verification.refused.add(seq_id)

    def _greedy(
        self, sequences: Sequence[TokenSequence], speculation: Speculation, layout: _Layout, logits: torch.Tensor
    ) -> _Judged:
        """All rows at temperature 0: the arg-max of the logits as they are, or after penalties, bias and ban."""
        if not all(seq.sampling.is_plain for seq in sequences):
            contexts = self._contexts(sequences, speculation, layout)
            logits = shape_logits(logits, contexts, self._counts, self._masks)
        token, value = top_tokens(logits)
        return _Judged(token, torch.isfinite(value))

    def _sampled(
        self,
        sequences: Sequence[TokenSequence],
        speculation: Speculation,
        layout: _Layout,
        logits: torch.Tensor,
        drawn: list[int],
    ) -> _Judged:
        """Rows of all kinds: the target's own token at every row, and the ratio test for sequences in `drawn`."""
        contexts = self._contexts(sequences, speculation, layout)
        weights = process_logits(logits, contexts, self._counts, self._masks).exp_()
        totals = weights.sum(-1)
        recover = row_uniforms(contexts, Stream.RECOVER, logits.device)
        sound = torch.isfinite(totals) & (totals > 0)
        if not drawn:
            return _Judged(draw_weights(weights, recover), sound)
        token = torch.zeros(layout.num_rows, dtype=torch.int64, device=logits.device)
        others = set(range(len(sequences))).difference(drawn)
        own = [row for i in sorted(others) for row in layout.rows(i)]
        if own:
            index = torch.tensor(own, dtype=torch.int64, device=logits.device)
            token[index] = draw_weights(weights[index], recover[index])
        accept = row_uniforms(contexts, Stream.ACCEPT, logits.device)
        accepted = _judge_drawn_rows(speculation, layout, drawn, weights, totals, accept, recover, token)
        return _Judged(token, sound, accepted)

    def _copy(self, judged: _Judged, speculation: Speculation, columns: LogprobColumns | None) -> list[torch.Tensor]:
        """The step's one device-to-host copy."""
        none = judged.token[:0]
        drafts = none if speculation.tokens is None else speculation.tokens
        accepted = none if judged.accepted is None else judged.accepted
        return self._to_host([judged.token, judged.sound, drafts, accepted, *(columns or ())])


def _drawn_rows(sequences: Sequence[TokenSequence], speculation: Speculation) -> list[int]:
    """The sequences whose drafts were drawn from a known law and whose own answer is sampled: the ratio test's."""
    if speculation.draft_logits is None or speculation.tokens is None:
        return []
    return [
        i
        for i, (count, has_law) in enumerate(zip(speculation.num_tokens, speculation.has_law, strict=True))
        if count and has_law and not sequences[i].sampling.greedy
    ]


def _judge_drawn_rows(
    speculation: Speculation,
    layout: _Layout,
    drawn: list[int],
    weights: torch.Tensor,
    totals: torch.Tensor,
    accept: torch.Tensor,
    recover: torch.Tensor,
    token: torch.Tensor,
) -> torch.Tensor:
    """The ratio test for the sequences in `drawn`: writes what they emit into `token` [R], returns drafts kept [L]."""
    assert speculation.tokens is not None
    assert speculation.draft_logits is not None
    device = weights.device
    drafts, draft_law = speculation.tokens, speculation.draft_logits
    lookahead = drafts.shape[1]
    if len(drawn) < speculation.num_rows:
        index = torch.tensor(drawn, dtype=torch.int64, device=device)
        drafts, draft_law = drafts[index], draft_law[index]
    num_drafts = [layout.num_drafts[i] for i in drawn]
    padded = [[layout.starts[i] + min(j, layout.num_drafts[i]) for j in range(lookahead + 1)] for i in drawn]
    rows = torch.tensor(padded, dtype=torch.int64, device=device)
    counts = torch.tensor(num_drafts, dtype=torch.int64, device=device)
    verdict = judge_drawn(weights, totals, rows, draft_law, drafts, counts, accept[rows[:, :-1]], recover[rows])
    depth = torch.arange(lookahead + 1, device=device)
    shown = torch.nn.functional.pad(drafts, (0, 1)).clamp(0, weights.shape[1] - 1)
    # padded places repeat a sequence's last row; all of them lie at or past `accepted`, so they agree on its value
    token[rows] = torch.where(depth < verdict.accepted.unsqueeze(1), shown, verdict.token.unsqueeze(1))
    return verdict.accepted


def _logprob_columns(
    sequences: Sequence[TokenSequence], layout: _Layout, logits: torch.Tensor, token: torch.Tensor
) -> LogprobColumns | None:
    """Log-probabilities for every row that may emit a token of a sequence that asked for them."""
    asking = [i for i, seq in enumerate(sequences) if seq.sampling.logprobs is not None]
    if not asking:
        return None
    rows = [r for i in asking for r in layout.rows(i)]
    num_top = max(sequences[i].sampling.logprobs or 0 for i in asking)
    if len(rows) < layout.num_rows:
        index = torch.tensor(rows, dtype=torch.int64, device=logits.device)
        logits, token = logits[index], token[index]
    return gather_logprobs(logits, token, num_top)


def _assemble(
    sequences: Sequence[TokenSequence],
    layout: _Layout,
    tokens: list[int],
    sound: list[bool],
    drafts: list[list[int]],
    kept: dict[int, int],
) -> Verification:
    """Host values to a verdict. `kept` holds the ratio test's counts; the other rows compare drafts with own tokens."""
    outcomes, new_tokens, faults = [], [], {}
    for i, seq in enumerate(sequences):
        start, count = layout.starts[i], layout.num_drafts[i]
        accepted = kept.get(i)
        if accepted is None:
            accepted = count_equal(drafts[i][:count], tokens[start : start + count]) if count else 0
        needed = sound[start : start + accepted + 1]
        if all(needed):
            emitted = tokens[start : start + accepted + 1]
            outcomes.append(VerificationOutcome(seq.id, accepted, emitted[-1]))
        else:
            emitted = []
            faults[seq.id] = _fault(seq, needed.index(False))
            outcomes.append(_nothing_of(seq))
        new_tokens.append(emitted)
    return Verification(outcomes, new_tokens, [None] * len(sequences), faults)


def _nothing_of(seq: TokenSequence) -> VerificationOutcome:
    """Stands where a sequence had no law."""
    return VerificationOutcome(seq.id, 0, 0)


def _fault(seq: TokenSequence, depth: int) -> str:
    return f"target logits at position {seq.num_tokens + depth} are not finite"


def _attach_logprobs(
    verification: Verification, sequences: Sequence[TokenSequence], layout: _Layout, columns: list[torch.Tensor]
) -> None:
    """Give each sequence that asked the entries of the tokens it emits; rows past them were rejected."""
    asking = [i for i, seq in enumerate(sequences) if seq.sampling.logprobs is not None]
    wanted = [sequences[i].sampling.logprobs or 0 for i in asking for _ in layout.rows(i)]
    entries = iter(read_logprobs(columns, wanted))
    for i in asking:
        own = [next(entries) for _ in layout.rows(i)]
        verification.logprobs[i] = own[: len(verification.new_tokens[i])]
