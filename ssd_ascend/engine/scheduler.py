"""Who runs in the next step; the only writer of `Sequence`. Called by the step loop in `engine/engine.py`. Torch-free.

One step is one ragged batch: every decoding sequence, then prefill chunks in what is left of the token budget.
Admission is strictly first come, first served, and whoever must give way is the latest arrival; so every running
sequence is older than every waiting one, the oldest always moves on, and nothing can livelock.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ssd_ascend.core.plan import DecodeRow, PrefillChunk, StepPlan
from ssd_ascend.core.request import TokenDelta
from ssd_ascend.core.sequence import FinishReason, Sequence, Status
from ssd_ascend.core.speculation import Speculation, TokenLogprobs, Verification
from ssd_ascend.core.stats import EngineStats, SpeculationStats
from ssd_ascend.engine.prefill import fair_share, split_budget
from ssd_ascend.engine.queues import Queues
from ssd_ascend.engine.stopping import find_ending
from ssd_ascend.engine.tally import RowDraft, count_row, row_draft, summary
from ssd_ascend.errors import ConfigError, RequestError
from ssd_ascend.kv.blocks import BlockManager

_HORIZON = 16
"""Tokens ahead for which admission leaves blocks to those already running, lest a newcomer be thrown out at once."""


def _uncomputed(seq: Sequence) -> int:
    return seq.num_tokens - seq.num_computed_tokens


class Scheduler:
    """Continuous batching over a paged cache, with chunked prefill and preemption by recompute.

    `lookahead` is the most drafts a row may get; it may be lowered and raised (up to its first value) between steps.
    `prefill_beside_decode` bounds the prompt tokens of a step that also decodes, so that streams keep flowing while a
    long prompt is read; None takes a quarter of `max_batched_tokens`. `slots_ahead`: KV slots that decode rows get for
    tokens of later steps, where blocks are free. `speculation_stats` is the speculator's own.
    """

    def __init__(
        self,
        blocks: BlockManager,
        *,
        max_num_seqs: int,
        max_batched_tokens: int,
        max_model_len: int,
        lookahead: int = 0,
        prefill_beside_decode: int | None = None,
        slots_ahead: int = 0,
        speculation_stats: SpeculationStats | None = None,
    ) -> None:
        if max_num_seqs * (lookahead + 1) > max_batched_tokens:
            raise ConfigError(
                f"max_batched_tokens is {max_batched_tokens}, but {max_num_seqs} sequences with lookahead {lookahead} "
                f"verify {max_num_seqs * (lookahead + 1)} tokens a step",
                remedy="raise max_batched_tokens, or lower max_num_seqs or lookahead",
            )
        self.blocks = blocks
        self.max_num_seqs = max_num_seqs
        self.max_batched_tokens = max_batched_tokens
        self.max_model_len = max_model_len
        self.lookahead = lookahead
        self.slots_ahead = slots_ahead
        beside = max_batched_tokens // 4 if prefill_beside_decode is None else prefill_beside_decode
        self.prefill_beside_decode = max(1, beside)
        self._queues = Queues()
        self._prompt_keys: dict[int, list[bytes]] = {}
        """Content keys of the waiting sequence at the head, which may be tried many times."""
        self._stats = EngineStats(
            kv_blocks_total=blocks.num_blocks, speculation=speculation_stats or SpeculationStats()
        )

    # -- requests come and go ----------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """True while some sequence is unfinished."""
        return bool(self._queues.by_id)

    @property
    def live_ids(self) -> list[int]:
        """Every unfinished sequence."""
        return list(self._queues.by_id)

    @property
    def max_tokens_that_fit(self) -> int:
        """The most tokens, prompt and answer together, that one sequence can ever have here."""
        return min(self.max_model_len, self.blocks.capacity)

    def add(self, seq: Sequence) -> None:
        """Queue `seq`. Raises `RequestError` when it could never be served, however long it waited."""
        if seq.id in self._queues.by_id:
            raise RequestError(f"id {seq.id} belongs to a request that is still running", param="id")
        if seq.num_tokens == 0:
            raise RequestError("the prompt has no tokens", param="prompt", remedy="give at least one token")
        if seq.max_total_tokens > self.max_tokens_that_fit:
            raise RequestError(
                f"{seq.num_prompt_tokens} prompt tokens and up to {seq.max_total_tokens - seq.num_prompt_tokens} new "
                f"ones make {seq.max_total_tokens}, but at most {self.max_tokens_that_fit} fit (model length "
                f"{self.max_model_len}, KV cache {self.blocks.capacity})",
                param="max_tokens",
                remedy="shorten the prompt or lower max_tokens",
            )
        if seq.num_remaining < 1:
            raise RequestError(
                f"the prompt has {seq.num_tokens} tokens and the limit is {seq.max_total_tokens}: nothing can be added",
                param="prompt",
                remedy="shorten the prompt",
            )
        self._queues.add(seq)

    def abort(self, seq_ids: Iterable[int]) -> list[TokenDelta]:
        """End sequences now, in whatever state they are; unknown and finished ids are skipped.

        May come between `schedule` and `commit`: the step's result for them is then dropped.
        """
        return self._end(seq_ids, FinishReason.ABORT, error=None)

    def fail(self, seq_id: int, message: str) -> TokenDelta | None:
        """End one sequence with an error; None when it is not there any more."""
        return next(iter(self._end([seq_id], FinishReason.ERROR, error=message)), None)

    def stats(self) -> EngineStats:
        """A snapshot of the counters."""
        speculation = self._stats.speculation
        return replace(
            self._stats,
            running=len(self._queues.running),
            waiting=len(self._queues.waiting),
            kv_blocks_used=self.blocks.num_used,
            speculation=replace(
                speculation,
                accepted_per_position=list(speculation.accepted_per_position),
                drafted_per_position=list(speculation.drafted_per_position),
            ),
        )

    # -- one step: plan ----------------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan:
        """Decide the next step and reserve its KV slots. Empty only when there is no work."""
        preempted = self._secure_last_tokens()
        decoding = self._decode_rows()
        budget = self.max_batched_tokens - sum(1 + row.max_drafts for row in decoding)
        if decoding:
            budget = min(budget, self.prefill_beside_decode)
        if not preempted:
            self._admit(budget)
        plan = StepPlan(decoding, self._prefill_chunks(budget), preempted)
        assert not (plan.is_empty and self.has_work), "sequences wait and nothing runs"
        return plan

    def _secure_last_tokens(self) -> list[int]:
        """Give every decoding sequence a slot for its last token, oldest first; the latest arrivals pay for it."""
        preempted: list[int] = []
        for seq in self._queues.decoding:
            while seq.status is Status.RUNNING and not self.blocks.can_grow(seq.block_table, seq.num_tokens):
                preempted.append(self._preempt_latest())
            if seq.status is not Status.RUNNING:
                break  # it was the latest itself, so there is nobody after it
            self.blocks.grow(seq.block_table, seq.num_tokens)
        return preempted

    def _preempt_latest(self) -> int:
        """Take the blocks of the latest arrival. It keeps its tokens and comes back first, to compute them again."""
        seq = self._queues.put_back_latest()
        self.blocks.free(seq.block_table)
        seq.num_computed_tokens = 0
        seq.num_preemptions += 1
        self._stats.preemptions += 1
        return seq.id

    def _decode_rows(self) -> list[DecodeRow]:
        """A row for each decoding sequence, with slots for as many drafts as limits and free blocks allow."""
        rows = []
        for seq in self._queues.decoding:
            wanted = self.lookahead if seq.sampling.speculation else 0
            room = self.blocks.room(seq.block_table) - seq.num_tokens
            drafts = min(wanted, seq.num_remaining - 1, room)
            self.blocks.grow(seq.block_table, seq.num_tokens + drafts + min(self.slots_ahead, room - drafts))
            rows.append(DecodeRow(seq, drafts))
        return rows

    def _admit(self, budget: int) -> None:
        """Let waiting sequences in, in order, while the step has tokens for them and the cache holds all they have."""
        share = fair_share(budget)
        unclaimed = budget - sum(min(share, _uncomputed(seq)) for seq in self._queues.prefilling)
        if not self._queues.waiting or unclaimed <= 0:
            return
        headroom = sum(self._soon_needed(seq) for seq in self._queues.running)
        while self._queues.waiting and unclaimed > 0 and len(self._queues.running) < self.max_num_seqs:
            seq = self._queues.waiting[0]
            cached = self.blocks.match(seq.token_ids, known_keys=self._prompt_keys.setdefault(seq.id, []))
            if self.blocks.num_needed(seq.num_tokens, cached) + headroom > self.blocks.num_free:
                return
            self._start_next(cached)
            headroom += self._soon_needed(seq)
            unclaimed -= min(share, _uncomputed(seq))

    def _soon_needed(self, seq: Sequence) -> int:
        """Blocks that a running sequence is about to ask for."""
        reach = min(seq.num_tokens + self.lookahead + _HORIZON, seq.max_total_tokens)
        return max(0, self.blocks.blocks_for(reach) - len(seq.block_table))

    def _start_next(self, cached: list[int]) -> None:
        seq = self._queues.start_next()
        seq.block_table = self.blocks.allocate(seq.num_tokens, cached)
        seq.num_computed_tokens = len(cached) * self.blocks.block_size
        self._prompt_keys.pop(seq.id, None)
        if seq.num_preemptions == 0:
            seq.num_cached_tokens = seq.num_computed_tokens
            self._stats.prompt_tokens += seq.num_prompt_tokens
            self._stats.cached_tokens += seq.num_cached_tokens

    def _prefill_chunks(self, budget: int) -> list[PrefillChunk]:
        queue = self._queues.prefilling
        lengths = split_budget([_uncomputed(seq) for seq in queue], budget)
        pairs = zip(queue, lengths, strict=True)
        return [PrefillChunk(seq, seq.num_computed_tokens, length) for seq, length in pairs if length > 0]

    # -- one step: result --------------------------------------------------------------------------------------------

    def commit(
        self, plan: StepPlan, verification: Verification, speculation: Speculation | None = None
    ) -> list[TokenDelta]:
        """Write the step's result into its sequences and say what each gained.

        Row i of `verification` belongs to `plan.sampled[i]`, row i of `speculation` to `plan.decoding[i]`. Sequences
        that were ended since `schedule` are skipped.
        """
        self._stats.steps += 1
        sampled = plan.sampled  # before any token is appended: whether a chunk is the last depends on it
        for chunk in plan.prefills:
            self._advance(chunk)
        deltas = []
        for index, seq in enumerate(sampled):
            if seq.status is not Status.RUNNING:
                continue
            num_accepted = verification.outcomes[index].num_accepted
            draft = None
            if index < len(plan.decoding):
                draft = row_draft(speculation, index, plan.decoding[index].max_drafts)
            deltas.append(
                self._extend(seq, verification.new_tokens[index], verification.logprobs[index], num_accepted, draft)
            )
        self._queues.sweep()
        return deltas

    def _advance(self, chunk: PrefillChunk) -> None:
        seq = chunk.seq
        if seq.status is not Status.RUNNING:
            return
        seq.num_computed_tokens = chunk.start + chunk.length
        if chunk.is_last:
            self._queues.mark_decoding(seq)
        self.blocks.register(seq.block_table, seq.token_ids, seq.num_computed_tokens)

    def _extend(
        self,
        seq: Sequence,
        new_tokens: list[int],
        logprobs: list[TokenLogprobs] | None,
        num_accepted: int,
        draft: RowDraft | None,
    ) -> TokenDelta:
        """Append accepted drafts and the recovery token, as far as they may go. `draft` is None after prefill."""
        ending = find_ending(seq, new_tokens)
        emitted = new_tokens[: ending.num_kept]
        num_accepted = min(num_accepted, ending.num_kept)
        sources = [0] * ending.num_kept
        if draft is not None:
            count_row(self._stats.speculation, seq, draft, num_accepted=num_accepted, num_emitted=ending.num_kept)
            sources[:num_accepted] = [int(draft.source)] * num_accepted
        # the step computed the old last token and every draft; of what was emitted only the recovery token is missing
        seq.num_computed_tokens = seq.num_tokens + num_accepted
        seq.token_ids.extend(emitted)
        self._stats.generation_tokens += ending.num_kept
        self.blocks.register(seq.block_table, seq.token_ids, seq.num_computed_tokens)
        if ending.reason is None:
            # a round that is queued already writes behind the last token: its blocks must stay this sequence's
            self.blocks.trim(seq.block_table, seq.num_tokens + max(0, self.slots_ahead - 1))
        else:
            seq.stop_token = ending.stop_token
            self._finish(seq, ending.reason)
        return TokenDelta(
            seq_id=seq.id,
            token_ids=emitted,
            logprobs=None if logprobs is None else logprobs[: ending.num_kept],
            sources=sources,
            finish_reason=None if ending.reason is None else ending.reason.value,
            stop_token=ending.stop_token,
            stats=summary(seq),
        )

    # -- endings -----------------------------------------------------------------------------------------------------

    def _end(self, seq_ids: Iterable[int], reason: FinishReason, *, error: str | None) -> list[TokenDelta]:
        deltas = []
        for seq_id in seq_ids:
            seq = self._queues.by_id.get(seq_id)
            if seq is None:
                continue
            self._finish(seq, reason)
            deltas.append(
                TokenDelta(seq_id=seq_id, token_ids=[], finish_reason=reason.value, error=error, stats=summary(seq))
            )
        self._queues.sweep()
        return deltas

    def _finish(self, seq: Sequence, reason: FinishReason) -> None:
        """Give everything back at once; the caller sweeps the queues, once for all that end together."""
        self._queues.finish(seq)
        seq.finish_reason = reason
        self.blocks.free(seq.block_table)
        self._prompt_keys.pop(seq.id, None)
        self._stats.finished += 1
