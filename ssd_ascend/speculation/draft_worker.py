"""The other end of `ssd`: answers requests from the speculation cache, then drafts for every likely outcome.

A round: apply the request, look up, answer at once; then glue over what is now under verification, fork, decode the
branches, fill the cache, and tell the target what is in it. `serve` loops over a transport; `pump` handles one message,
for the in-process variant.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Rows
from functools import partial

import torch

from ssd_ascend import trace
from ssd_ascend.core.speculation import Source, VerificationOutcome
from ssd_ascend.errors import TransportError
from ssd_ascend.speculation.base import Drafter, DraftSequence, ForeseeingDrafter, Foresight
from ssd_ascend.speculation.branch_budget import BranchBudget
from ssd_ascend.speculation.branch_depth import BranchDepth, FixedDepth
from ssd_ascend.speculation.cache import CachedSpeculation, Carried, SpeculationCache, drafts_of
from ssd_ascend.speculation.fallback import FallbackPolicy
from ssd_ascend.speculation.fan_out import FanOut, FixedFanOut
from ssd_ascend.speculation.guesser import Guesser
from ssd_ascend.speculation.outcome_odds import Judged, OutcomeOdds
from ssd_ascend.speculation.pace import Pace
from ssd_ascend.speculation.replies import DECLINED, Reply, pack, replies_of
from ssd_ascend.speculation.told_ahead import foreseen_of
from ssd_ascend.transport.base import Transport
from ssd_ascend.transport.messages import Attach, Message, Request, Shutdown, Update, WorkerStats


class DraftWorker:
    """Serves one target. Holds nothing that a request cannot rebuild, so it may be killed at any time."""

    def __init__(
        self,
        drafter: Drafter,
        transport: Transport,
        *,
        lookahead: int,
        fan_out: FanOut,
        fallback: FallbackPolicy,
        depth: BranchDepth | None = None,
        budget: BranchBudget | None = None,
        others_wait: Callable[[], bool] = lambda: False,
    ) -> None:
        """lookahead: the most drafts of an answer. None for the others means no bound of their own: depth is how many
        drafts a branch gets, budget how many branches a round may have. others_wait: whether somebody else who shares
        the drafter has a request; branches are then cut short as for one of our own."""
        self._drafter = drafter
        self._at_once = drafter if isinstance(drafter, ForeseeingDrafter) else None
        self._transport = transport
        self._lookahead = lookahead
        self._fan_out = self._built_for = fan_out
        self._fallback = fallback
        self._depth = FixedDepth(lookahead) if depth is None else depth
        self._budget = budget
        self._others_wait = others_wait
        self._odds = OutcomeOdds(lookahead)
        self._guesser = (
            Guesser(fan_out.counts, self._odds, lookahead, by_clock=budget is not None)
            if isinstance(fan_out, FixedFanOut)
            else None
        )
        self._judged: list[Judged] = []
        """Outcomes of this round, to be learnt from when nobody waits."""
        self._told: set[int] = set()
        """Sequences whose guesses the target has."""
        self._worth_from = 1
        """As it was told: for fewer missing rows than that it does not wait."""
        self._began_s = self._worked_s = 0.0
        """When this round's request was taken up, and what the round before took."""
        self._is_usual = True
        """Whether this round is like most: nobody came, nobody waited for drafts."""
        self._cache = SpeculationCache()
        self._pace = Pace()
        self._sequences: dict[int, DraftSequence] = {}
        self._offered: dict[int, int] = {}
        """Drafts under verification, by sequence."""
        self._next: Message | None = None
        self._cached_drafts = 0
        self._used_drafts = 0
        self._idle_s = 0.0
        self._unsent: Callable[[], None] | None = None
        """Sends the answer, as long as that has not gone out."""
        self._answered_s: float | None = None
        """When the last answer went out, until the next request is there."""
        self._is_late = False
        """Whether this request was there before the round before it was over."""

    # -- loops -------------------------------------------------------------------------------------------------------

    def serve(self) -> None:
        """Handle messages until the target says goodbye or is gone."""
        while True:
            start = time.perf_counter()
            try:
                message = self._take(None)
            except TransportError:
                return
            waited = time.perf_counter() - start
            self._idle_s += waited
            if message is None or isinstance(message, Shutdown):
                return
            self._handle(message)
            self._pace.saw_round(waited, time.perf_counter() - start - waited)

    def pump(self) -> int:
        """Handle every message that is waiting; returns how many there were."""
        count = 0
        while (message := self._take(0.0)) is not None and not isinstance(message, Shutdown):
            self._handle(message)
            count += 1
        return count

    def rested(self, seconds: float) -> None:
        """Whoever calls `pump` had nothing to do for so long."""
        self._idle_s += seconds

    def close(self) -> None:
        """Give back what the drafter holds of this target's sequences, for whoever shares it."""
        self._release(list(self._sequences))

    def request_waits(self) -> bool:
        """True when the next request is there already: branches still being drafted are then cut short."""
        if self._next is None:
            self._next = self._receive(0.0)
        return self._next is not None

    def _must_hurry(self) -> bool:
        return self.request_waits() or self._others_wait()

    def _take(self, timeout_s: float | None) -> Message | None:
        message, self._next = self._next, None
        self._is_late = message is not None
        return self._receive(timeout_s) if message is None else message

    def _receive(self, timeout_s: float | None) -> Message | None:
        """What comes next. A request that follows an answer ends the time the target verified in."""
        message = self._transport.recv(timeout_s)
        if isinstance(message, Request) and self._answered_s is not None:
            window_s, self._answered_s = time.perf_counter() - self._answered_s, None
            self._fallback.saw_verification(window_s)
            self._depth.saw_window(window_s)
        return message

    @torch.inference_mode()
    def _handle(self, message: Message) -> None:
        if not isinstance(message, Request):
            raise TransportError(f"the target sent a {type(message).__name__} where a request was due")
        self._clock_round()
        self._is_usual = not message.attaches
        with trace.span("worker.apply"):
            wanted = self._apply(message)
        if self.request_waits():  # the target has moved on; only its latest outcomes are worth an answer
            self._cache.drop([seq.id for seq, _ in wanted])  # what was foreseen is of a step that is over
            self._told, self._is_usual = set(), False
            self._send(message.number, [], [], self._stats())
            return
        seqs = [seq for seq, _ in wanted]
        with trace.span("worker.answer"):
            replies = self._answer(wanted)
        self._offered.update({seq.id: len(reply.tokens) for seq, reply in zip(seqs, replies, strict=True)})
        self._unsent = partial(self._send, message.number, seqs, replies, self._stats())
        if not (self._is_late and all(reply.source is Source.HIT and reply.law is None for reply in replies)):
            self._send_answer()  # else the target will wait for this round too: its device first
        with trace.span("worker.foresee"):
            self._foresee(seqs, replies)
        self._beside_device()
        if not self.request_waits():  # else its answer says as much, and comes sooner without this
            self._tell_ahead(message.number, seqs)
        self._worked_s = time.perf_counter() - self._began_s

    def _beside_device(self) -> None:
        """What can wait until the device works on the round."""
        self._send_answer()
        self._learn()

    def _send_answer(self) -> None:
        unsent, self._unsent = self._unsent, None
        if unsent is not None:
            unsent()
            self._answered_s = time.perf_counter()

    def _send(self, number: int, seqs: Rows[DraftSequence], replies: Rows[Reply], stats: WorkerStats) -> None:
        with trace.span("worker.send"):
            self._transport.send(pack(number, seqs, replies, width=self._lookahead, stats=stats))

    def _clock_round(self) -> None:
        """The round before lasted until now."""
        before_s, self._began_s = self._began_s, time.perf_counter()
        if self._guesser is not None and self._worked_s:
            waited_s = self._began_s - before_s - self._worked_s
            self._guesser.saw_round(waited_s, self._worked_s, usual=self._is_usual)

    def _tell_ahead(self, number: int, seqs: Rows[DraftSequence]) -> None:
        """Give the target what it may look up itself."""
        worth_from = self._fallback.worth_from(num_rows=len(seqs), lookahead=self._lookahead, whole=self._drafts_whole)
        known = [(seq.id, seq.num_tokens, self._cache.of_sequence(seq.id)) for seq in seqs]
        foreseen = foreseen_of(number, self._lookahead, known, worth_from=worth_from, stats=self._stats())
        if foreseen is not None:
            self._transport.send(foreseen)
            self._told, self._worth_from = set(foreseen.seq_ids), worth_from

    # -- a round -----------------------------------------------------------------------------------------------------

    def _apply(self, request: Request) -> list[tuple[DraftSequence, VerificationOutcome | None]]:
        """Bring the sequences up to date; returns those to answer for, with the outcome to look up if there is one."""
        self._release(request.released)
        if request.fan_out:
            self._change_fan_out(request.fan_out)
        wanted: list[tuple[DraftSequence, VerificationOutcome | None]] = []
        for attach in request.attaches:
            self._release([attach.seq_id])
            self._sequences[attach.seq_id] = seq = _sequence(attach)
            wanted.append((seq, None))
        wanted += [(self._update(update), update.outcome) for update in request.updates]
        return wanted

    def _change_fan_out(self, per_depth: list[int]) -> None:
        """Prepare for so many guesses from now on; memory was set aside for as many as there were at the start."""
        if len(per_depth) != self._lookahead + 1 or sum(per_depth) > self._built_for.width:
            raise TransportError(f"fan-out {per_depth} does not fit a worker built for {self._built_for.width} guesses")
        self._fan_out = FixedFanOut(tuple(per_depth))

    def _update(self, update: Update) -> DraftSequence:
        seq = self._sequences.get(update.outcome.seq_id)
        if seq is None or seq.num_tokens != update.num_tokens_before:
            known = "no such sequence" if seq is None else f"{seq.num_tokens} tokens"
            raise TransportError(
                f"update of sequence {update.outcome.seq_id} after {update.num_tokens_before} tokens, but here: {known}"
            )
        slots = None if update.slots is None else update.slots.flatten().numpy()
        seq.grow(update.new_tokens, update.features, slots)
        accepted, num_drafted = update.outcome.num_accepted, self._offered.pop(seq.id, 0)
        self._fan_out.learn(seq.id, accepted)
        self._fallback.saw_outcome(num_drafted, accepted)
        rank, num_guesses = self._cache.rank_of(update.outcome)
        self._judged.append(Judged(accepted, num_drafted, rank, num_guesses))
        return seq

    def _learn(self) -> None:
        """Which guesses came true."""
        for judged in self._judged:
            self._odds.saw(judged)
        self._judged.clear()

    def _release(self, seq_ids: Rows[int]) -> None:
        self._cache.drop(seq_ids)
        self._fallback.forget(seq_ids)
        for seq_id in seq_ids:
            self._fan_out.forget(seq_id)
            self._offered.pop(seq_id, None)
            if (seq := self._sequences.pop(seq_id, None)) is not None:
                self._drafter.release(seq)

    def _answer(self, wanted: Rows[tuple[DraftSequence, VerificationOutcome | None]]) -> list[Reply]:
        """Hits from the cache; each missing row by the fallback. Hits are never thrown away for a neighbour's miss."""
        replies = [DECLINED] * len(wanted)
        missing: list[int] = []
        for i, (_, outcome) in enumerate(wanted):
            entry = None if outcome is None else self._cache.look_up(outcome)
            if entry is not None:
                replies[i] = self._hit(entry)
            elif outcome is not None:
                missing.append(i)
        if missing:
            fallbacks = self._draft_on_demand([wanted[i][0] for i in missing], num_rows=len(wanted))
            for i, reply in zip(missing, fallbacks, strict=True):
                replies[i] = reply
        return replies

    def _hit(self, entry: CachedSpeculation) -> Reply:
        self._used_drafts += len(entry.tokens)
        return Reply.of(entry, Source.HIT)

    @property
    def _drafts_whole(self) -> bool:
        """Whether a chain on demand comes in one go, as long as it may be."""
        return self._at_once is not None and self._at_once.whole_chain == self._lookahead

    def _draft_on_demand(self, seqs: Rows[DraftSequence], *, num_rows: int) -> list[Reply]:
        """What sequences get whose outcome was not foreseen: a short chain, an n-gram, or nothing."""
        if len(seqs) < self._worth_from and all(seq.id in self._told for seq in seqs):
            return [DECLINED] * len(seqs)  # the target, told as much, went on without
        depth = self._fallback.depth(
            num_missing=len(seqs), num_rows=num_rows, lookahead=self._lookahead, whole=self._drafts_whole
        )
        if depth > 0:
            self._is_usual = False
            start = time.perf_counter()
            chain = self._drafter.chain(seqs, depth)
            replies = replies_of(chain)  # which waits for the device
            if any(chain.num_tokens):
                self._fallback.saw_chain(depth, time.perf_counter() - start)
            return replies
        if self._fallback.uses_ngram:
            return [
                Reply(Source.MISS, tokens) if tokens else DECLINED
                for tokens in self._fallback.ngrams(seqs, self._lookahead)
            ]
        return [DECLINED] * len(seqs)

    def _foresee(self, seqs: Rows[DraftSequence], replies: Rows[Reply]) -> None:
        """Draft for every likely outcome of the verification that is now under way."""
        needs_hidden = self._drafter.wants_features
        sent = [() if needs_hidden and reply.hidden is None else tuple(reply.tokens) for reply in replies]
        hidden = [reply.hidden if drafts else None for reply, drafts in zip(replies, sent, strict=True)]
        self._cache.drop([seq.id for seq in seqs])
        self._told = set()
        if not seqs:
            return
        foreseen = self._foresee_at_once(seqs, sent, hidden)
        if foreseen is not None:
            self._remember(foreseen.outcomes, foreseen.drafts, Carried(hidden=foreseen.hidden))
            return
        self._beside_device()  # of what follows nothing is launched at once and waited for later
        started = time.perf_counter()
        glue = self._drafter.glue(seqs, sent, hidden)
        guesses = self._fan_out.choose(seqs, sent, glue)
        if self._budget is not None:
            guesses = self._budget.cut(guesses, len(seqs))
        outcomes = [
            VerificationOutcome(branch.seq.id, branch.depth, token)
            for branch, token in zip(guesses.branches, guesses.tokens.tolist(), strict=True)
        ]
        glued = time.perf_counter()
        self._depth.saw_glue(glued - started)
        if not guesses.branches:
            return
        sent_of = {seq.id: drafts for seq, drafts in zip(seqs, sent, strict=True)}
        sent_by_branch = [sent_of[branch.seq.id] for branch in guesses.branches]
        depth = self._depth.depth()
        chain = self._drafter.branch(guesses.branches, guesses.tokens, glue, sent_by_branch, depth, self._must_hurry)
        self._remember(outcomes, drafts_of(chain), Carried.by(chain))
        if steps := max(chain.num_tokens):
            self._depth.saw_branches(steps, time.perf_counter() - glued)
            if self._budget is not None:
                self._budget.saw_round(len(guesses.branches), steps, depth)

    def _foresee_at_once(
        self, seqs: Rows[DraftSequence], sent: Rows[Rows[int]], hidden: Rows[torch.Tensor | None]
    ) -> Foresight | None:
        """The whole round in one go, where drafter, fan-out and depth allow it."""
        if (
            self._at_once is None
            or self._guesser is None
            or self._fan_out != self._built_for
            or not isinstance(self._depth, FixedDepth)
        ):
            return None
        return self._at_once.foresee(
            seqs, sent, hidden, self._depth.depth(), self._guesser,
            hurry=self._pace.hurries, meanwhile=self._beside_device,
        )  # fmt: skip

    def _remember(self, outcomes: Rows[VerificationOutcome], drafts: Rows[list[int]], carried: Carried) -> None:
        self._cache.fill(outcomes, drafts, carried)
        self._cached_drafts += sum(map(len, drafts))

    # -- the answer ----------------------------------------------------------------------------------------------------

    def _stats(self) -> WorkerStats:
        return WorkerStats(
            idle_s=self._idle_s,
            cached_drafts=self._cached_drafts,
            used_drafts=self._used_drafts,
            cache_bytes=self._cache.num_bytes,
        )


def _sequence(attach: Attach) -> DraftSequence:
    return DraftSequence(
        id=attach.seq_id,
        token_ids=list(attach.token_ids),
        num_prompt_tokens=attach.num_prompt_tokens,
        sampling=attach.sampling,
        seed=attach.seed,
        stop_ids=attach.stop_ids,
        features=attach.features,
        feature_slots=None if attach.slots is None else attach.slots.flatten().numpy(),
    )
