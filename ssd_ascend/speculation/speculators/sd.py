"""`sd`: classic speculative decoding. Drafts in turn with the target, on the target's device.

Where the device works on while the host goes on, a chain is queued as soon as the outcomes are known: committing and
scheduling then cost nothing. Where the drafter can be told of a verdict on the device, whole rounds are queued before
that (`draft_ahead`, called by `engine/rounds_ahead.py`). Elsewhere a chain is drafted when it is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import replace
from typing import NamedTuple

import torch

from ssd_ascend import trace
from ssd_ascend.core.batch import Awaited, ForwardBatch
from ssd_ascend.core.plan import DecodeRow
from ssd_ascend.core.sequence import Sequence
from ssd_ascend.core.speculation import Source, Speculation, Verification
from ssd_ascend.core.stats import SpeculationStats
from ssd_ascend.runtime.pack import index_on
from ssd_ascend.speculation.base import (
    Chain,
    Drafter,
    DraftSequence,
    FeatureReader,
    FollowingDrafter,
    Speculator,
    Verdict,
    pick,
    spread,
)
from ssd_ascend.speculation.draft_sampler import widen
from ssd_ascend.speculation.ending import surely_ends
from ssd_ascend.speculation.lookahead import LookaheadController
from ssd_ascend.speculation.setup import TargetSide


def build(side: TargetSide) -> Speculator:
    """Loads the drafter into this process."""
    config = side.setup.config
    controller = LookaheadController(config.lookahead, max_lookahead=config.max_lookahead, may_stop=side.kind.is_free)
    store = None if side.features is None else side.features.features
    setup = replace(side.setup, feature_store=store, verifications=side.verifications if controller.is_fixed else None)
    drafter = side.kind.build(setup)
    return SdSpeculator(
        drafter,
        controller,
        side.features,
        target_vocab=side.setup.target.vocab_size,
        early=controller.is_fixed and not side.setup.backend.capabilities.host_memory,
    )


class _Early(NamedTuple):
    """A chain that was queued before anybody asked: row i is for seqs[i], of so many tokens then."""

    seqs: list[DraftSequence]
    num_tokens: list[int]
    chain: Chain


class _Ahead(NamedTuple):
    """A round that was queued before the verdict it follows was on the host: who has which row, and the drafts."""

    rows: dict[int, int]
    tokens: torch.Tensor


class SdSpeculator:
    """Asks its drafter for a chain whenever the engine asks it for drafts, as long and as often as that pays."""

    def __init__(
        self,
        drafter: Drafter,
        controller: LookaheadController,
        features: FeatureReader | None,
        *,
        target_vocab: int,
        early: bool,
    ) -> None:
        """`early`: draft when the outcomes are known, not when drafts are asked for."""
        self.stats = SpeculationStats()
        self.lookahead = self._most = controller.max_lookahead
        self.wants_features = drafter.wants_features
        self._drafter = drafter
        self._controller = controller
        self._features = features
        self._target_vocab = target_vocab
        self._drafts_early = early
        self._following = drafter if early and isinstance(drafter, FollowingDrafter) and drafter.follows else None
        self._early: _Early | None = None
        self._ahead: _Ahead | None = None
        self._was_ahead = False
        """Whether the step under way was drafted that way."""
        self._sequences: dict[int, DraftSequence] = {}
        self._drafted: dict[int, int] = {}
        """Drafts of the step under way, by sequence."""

    def propose(self, rows: Rows[DecodeRow]) -> Speculation:
        """One chain for the rows where drafting pays; what a row may not carry is cut."""
        wanted = self._controller.choose([row.seq.id for row in rows])
        limits = [min(want, row.max_drafts) for want, row in zip(wanted, rows, strict=True)]
        if (under_way := self._under_way(rows, limits)) is not None:
            return under_way
        lookahead = max(limits, default=0)
        self._drafted = {}
        if lookahead < 1:
            return Speculation.declined(len(rows))
        live = [i for i, limit in enumerate(limits) if limit]
        seqs = [self._follow(rows[i].seq) for i in live]
        early, self._early = self._early, None
        found = _rows_of(early, seqs)
        if early is not None:
            self.stats.wasted += sum(early.chain.num_tokens) - (0 if found is None else sum(found.num_tokens))
        chain = spread(self._chain(seqs, lookahead) if found is None else found, live, len(rows))
        num_tokens = [min(n, limit) for n, limit in zip(chain.num_tokens, limits, strict=True)]
        self.stats.wasted += sum(chain.num_tokens) - sum(num_tokens)
        self._drafted = {row.seq.id: n for row, n in zip(rows, num_tokens, strict=True)}
        constrained = any(row.seq.sampling.grammar is not None for row in rows)
        return Speculation(
            tokens=chain.tokens,
            num_tokens=num_tokens,
            source=[Source.MISS if n else Source.DECLINED for n in num_tokens],
            draft_logits=None if chain.law is None else widen(chain.law, self._drafter.to_target, self._target_vocab),
            has_law=chain.has_law,
            host_tokens=chain.tokens.tolist() if constrained else None,
        )

    def _under_way(self, rows: Rows[DecodeRow], limits: list[int]) -> Speculation | None:
        """The drafts of these rows in the round that was queued ahead; None when it was not, or not for all of them."""
        ahead, self._ahead = self._ahead, None
        self._was_ahead = ahead is not None and all(row.seq.id in ahead.rows for row in rows)
        if ahead is None:
            return None
        if not self._was_ahead:
            self.stats.wasted += len(ahead.rows) * self.lookahead
            return None
        index = [ahead.rows[row.seq.id] for row in rows]
        self.stats.wasted += len(ahead.rows) * self.lookahead - sum(limits)
        self._drafted = {row.seq.id: n for row, n in zip(rows, limits, strict=True)}
        tokens = ahead.tokens
        if index != list(range(len(tokens))):
            tokens = tokens.index_select(0, index_on(index, tokens.device))
        source = [Source.MISS if n else Source.DECLINED for n in limits]
        return Speculation(tokens, limits, source, has_law=[False] * len(rows), under_way=index)

    def _chain(self, seqs: Rows[DraftSequence], lookahead: int) -> Chain:
        with trace.span("draft"):
            return self._drafter.chain(seqs, lookahead)

    def _follow(self, seq: Sequence, new_tokens: Rows[int] = ()) -> DraftSequence:
        """The drafter's view of `seq` with `new_tokens` after it, and where the features are that it has not digested
        yet."""
        known = self._sequences.get(seq.id)
        num_tokens = seq.num_tokens + len(new_tokens)
        if known is not None and known.num_tokens == num_tokens:
            return known
        if known is not None and known.num_tokens > num_tokens:  # tokens it was told of early came to nothing
            self._drafter.release(known)
            known = None
        if known is None:
            known = self._sequences[seq.id] = DraftSequence(
                seq.id, [], seq.num_prompt_tokens, seq.sampling, seq.seed, seq.stop_ids
            )
        known.token_ids += seq.token_ids[known.num_tokens :]
        known.token_ids += new_tokens[known.num_tokens - seq.num_tokens :]
        if self._features is not None and known.features_end < num_tokens - 1:
            start = known.features_start
            known.feature_slots = self._features.slots(seq.block_table, start, num_tokens - 1)
        return known

    def prepare(self, sequences: Rows[Sequence]) -> None:
        """It shares the device, which is about to be busy."""

    def observe(self, sequences: Rows[Sequence], verification: Verification, *, read_prompts: bool) -> None:
        """Learn what the step cost and how far its drafts stood; queue the next chain where that pays."""
        if sequences and not read_prompts:
            self._controller.step_ended(len(sequences), max(self._drafted.values(), default=0))
        for outcome in verification.outcomes:
            self._controller.saw(outcome.seq_id, self._drafted.get(outcome.seq_id, 0), outcome.num_accepted)
        if self._drafts_early:
            self._early = self._draft_early(sequences, verification)

    def _draft_early(self, sequences: Rows[Sequence], verification: Verification) -> _Early | None:
        """Queue a chain for all that go on, unless their next round is under way already."""
        seqs = []
        for seq, new_tokens in zip(sequences, verification.new_tokens, strict=True):
            if seq.id in verification.faults or not seq.sampling.speculation or surely_ends(seq, new_tokens):
                continue
            known = self._follow(seq, new_tokens)
            if self._following is not None and self._ahead is not None:
                self._following.caught_up(known)
            elif self._following is not None and self._was_ahead:
                self._following.kept(known, new_tokens[:-1])
            seqs.append(known)
        if not seqs or self._ahead is not None:
            return None
        return _Early(seqs, [seq.num_tokens for seq in seqs], self._chain(seqs, self._most))

    @property
    def goes_ahead(self) -> bool:
        """See `AheadSpeculator`."""
        return self._following is not None

    def draft_ahead(self, sequences: Rows[Sequence], verdict: Verdict, verify: ForwardBatch) -> bool:
        """See `AheadSpeculator`."""
        if self._following is None or self._most < self.lookahead:  # its rounds are captured, whole
            return False
        known = [self._sequences.get(seq.id) for seq in sequences]
        seqs = [own for own, seq in zip(known, sequences, strict=True) if own and own.num_tokens == seq.num_tokens]
        tokens = self._following.follow(seqs, verdict, verify) if len(seqs) == len(sequences) else None
        if tokens is not None:
            self._ahead = _Ahead({seq.id: row for row, seq in enumerate(sequences)}, tokens)
        return tokens is not None

    def meanwhile(self, verdict: Awaited | None) -> None:
        """Nothing is left for later."""

    def release(self, seq_ids: Rows[int]) -> None:
        """Give the drafter's memory of these sequences back."""
        self._controller.forget(seq_ids)
        for seq_id in seq_ids:
            if self._ahead is not None:
                self._ahead.rows.pop(seq_id, None)
            if (seq := self._sequences.pop(seq_id, None)) is not None:
                self._drafter.release(seq)

    def tune(self, lookahead: int, fan_out: Rows[int]) -> None:
        """Chains that are queued before they are asked for are as long; no guesses are prepared."""
        self._most = lookahead

    def health(self) -> str | None:
        """Well: it lives in the engine's own process."""
        return None

    def close(self) -> None:
        """Give everything back."""
        self.release(list(self._sequences))


def _rows_of(early: _Early | None, seqs: Rows[DraftSequence]) -> Chain | None:
    """The rows of a chain that are for `seqs`; None when some are not there, or went on since."""
    if early is None:
        return None
    known = {id(seq): i for i, seq in enumerate(early.seqs) if seq.num_tokens == early.num_tokens[i]}
    index = [known.get(id(seq), -1) for seq in seqs]
    if -1 in index:
        return None
    return early.chain if index == list(range(len(early.seqs))) else pick(early.chain, index)
