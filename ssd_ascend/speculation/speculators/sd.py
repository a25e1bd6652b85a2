"""`sd`: classic speculative decoding. Drafts on demand, in turn with the target, on the target's device."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import replace

from ssd_ascend import trace
from ssd_ascend.core.plan import DecodeRow
from ssd_ascend.core.sequence import Sequence
from ssd_ascend.core.speculation import Source, Speculation, Verification
from ssd_ascend.core.stats import SpeculationStats
from ssd_ascend.speculation.base import Drafter, DraftSequence, FeatureReader, Speculator, spread
from ssd_ascend.speculation.draft_sampler import widen
from ssd_ascend.speculation.lookahead import LookaheadController
from ssd_ascend.speculation.setup import TargetSide


def build(side: TargetSide) -> Speculator:
    """Loads the drafter into this process."""
    config = side.setup.config
    controller = LookaheadController(config.lookahead, max_lookahead=config.max_lookahead, may_stop=side.kind.is_free)
    store = None if side.features is None else side.features.features
    drafter = side.kind.build(replace(side.setup, feature_store=store))
    return SdSpeculator(drafter, controller, side.features, target_vocab=side.setup.target.vocab_size)


class SdSpeculator:
    """Asks its drafter for a chain whenever the engine asks it for drafts, as long and as often as that pays."""

    def __init__(
        self, drafter: Drafter, controller: LookaheadController, features: FeatureReader | None, *, target_vocab: int
    ) -> None:
        self.stats = SpeculationStats()
        self.lookahead = controller.max_lookahead
        self.wants_features = drafter.wants_features
        self._drafter = drafter
        self._controller = controller
        self._features = features
        self._target_vocab = target_vocab
        self._sequences: dict[int, DraftSequence] = {}
        self._drafted: dict[int, int] = {}
        """Drafts of the step under way, by sequence."""

    def propose(self, rows: Rows[DecodeRow]) -> Speculation:
        """One chain for the rows where drafting pays; what a row may not carry is cut."""
        wanted = self._controller.choose([row.seq.id for row in rows])
        limits = [min(want, row.max_drafts) for want, row in zip(wanted, rows, strict=True)]
        lookahead = max(limits, default=0)
        self._drafted = {}
        if lookahead < 1:
            return Speculation.declined(len(rows))
        seqs = [self._follow(row.seq) for row, limit in zip(rows, limits, strict=True) if limit]
        with trace.span("draft"):
            chain = spread(
                self._drafter.chain(seqs, lookahead), [i for i, limit in enumerate(limits) if limit], len(rows)
            )
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

    def _follow(self, seq: Sequence) -> DraftSequence:
        """The drafter's view of `seq`: its very token list, and the features that the drafter has not digested yet."""
        known = self._sequences.get(seq.id)
        if known is None:
            known = self._sequences[seq.id] = DraftSequence(
                seq.id, seq.token_ids, seq.num_prompt_tokens, seq.sampling, seq.seed, seq.stop_ids
            )
        if self._features is not None and known.features_end < seq.num_tokens - 1:
            start = known.features_start
            known.feature_slots = self._features.slots(seq.block_table, start, seq.num_tokens - 1)
        return known

    def observe(self, sequences: Rows[Sequence], verification: Verification) -> None:
        """Learn what the step cost and how far its drafts stood."""
        if self._drafted or sequences:
            self._controller.step_ended(len(sequences), max(self._drafted.values(), default=0))
        for outcome in verification.outcomes:
            self._controller.saw(outcome.seq_id, self._drafted.get(outcome.seq_id, 0), outcome.num_accepted)

    def release(self, seq_ids: Rows[int]) -> None:
        """Give the drafter's memory of these sequences back."""
        self._controller.forget(seq_ids)
        for seq_id in seq_ids:
            if (seq := self._sequences.pop(seq_id, None)) is not None:
                self._drafter.release(seq)

    def health(self) -> str | None:
        """Well: it lives in the engine's own process."""
        return None

    def close(self) -> None:
        """Give everything back."""
        self.release(list(self._sequences))
