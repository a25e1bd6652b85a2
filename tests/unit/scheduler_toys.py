"""A model of integers for the scheduler's tests: its next token depends on every token before, and its KV cache tells.

A slot holds a digest of the whole prefix that was computed into it, so a block that is shared, registered or reused
wrongly is noticed when it is read, and a token lost or drawn twice changes everything after it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from ssd_ascend.core.plan import StepPlan
from ssd_ascend.core.request import TokenDelta
from ssd_ascend.core.sampling import SamplingParams
from ssd_ascend.core.sequence import Sequence, Status
from ssd_ascend.core.speculation import Source, Speculation, Verification, VerificationOutcome
from ssd_ascend.engine.scheduler import Scheduler
from ssd_ascend.kv.blocks import BlockManager

VOCAB = 50
STOP = 7


def extend_digest(digest: int, token: int) -> int:
    return (digest * 1_000_003 + token * 7_919 + 12_345) % ((1 << 61) - 1)


def digests(tokens: list[int]) -> list[int]:
    """One digest per position, over everything up to and including it."""
    out, digest = [], 1
    for token in tokens:
        digest = extend_digest(digest, token)
        out.append(digest)
    return out


def next_token(tokens: list[int]) -> int:
    return digests(tokens)[-1] // 97 % VOCAB


def solo(prompt: list[int], max_total: int, stop_ids: frozenset[int] = frozenset(), min_tokens: int = 0) -> list[int]:
    """What plain decoding of one sequence alone gives."""
    tokens = list(prompt)
    while len(tokens) < max_total:
        tokens.append(next_token(tokens))
        if tokens[-1] in stop_ids and len(tokens) - len(prompt) > min_tokens:
            break
    return tokens[len(prompt) :]


def make_sequence(
    seq_id: int, prompt: list[int], max_total: int, *, stop_ids: frozenset[int] = frozenset(), min_tokens: int = 0
) -> Sequence:
    return Sequence(
        id=seq_id,
        token_ids=list(prompt),
        num_prompt_tokens=len(prompt),
        sampling=SamplingParams(min_tokens=min_tokens),
        stop_ids=stop_ids,
        max_total_tokens=max_total,
        seed=0,
    )


def make_scheduler(
    num_blocks: int = 64,
    block_size: int = 4,
    *,
    prefix_cache: bool = True,
    max_num_seqs: int = 8,
    max_batched_tokens: int = 64,
    max_model_len: int = 4096,
    lookahead: int = 0,
    prefill_beside_decode: int | None = None,
) -> Scheduler:
    return Scheduler(
        BlockManager(num_blocks, block_size, prefix_cache=prefix_cache),
        max_num_seqs=max_num_seqs,
        max_batched_tokens=max_batched_tokens,
        max_model_len=max_model_len,
        lookahead=lookahead,
        prefill_beside_decode=prefill_beside_decode,
    )


def check_scheduler(scheduler: Scheduler) -> None:
    """What must hold between any two calls."""
    running, waiting = scheduler._queues.running, list(scheduler._queues.waiting)
    scheduler.blocks.check(seq.block_table for seq in running)
    assert len(running) <= scheduler.max_num_seqs
    assert all(seq.status is Status.RUNNING for seq in running)
    for seq in waiting:
        assert (seq.status, seq.block_table, seq.num_computed_tokens) == (Status.WAITING, [], 0)
    assert scheduler._queues._prefilling <= {seq.id for seq in running}
    assert {seq.id for seq in [*running, *waiting]} == set(scheduler._queues.by_id)
    arrivals = [seq.arrival_s for seq in [*running, *waiting]]
    assert arrivals == sorted(arrivals), "somebody overtook an earlier arrival"
    for seq in running:
        if seq.id not in scheduler._queues._prefilling:
            assert seq.is_decoding
    assert set(scheduler._prompt_keys) <= {seq.id for seq in waiting}


@dataclass
class ToyEngine:
    """The step loop without tensors. `right` is the chance that a draft is what the model will say."""

    scheduler: Scheduler
    right: float = 0.6
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    slots: dict[int, int] = field(default_factory=dict)
    outputs: dict[int, list[int]] = field(default_factory=dict)
    last: dict[int, TokenDelta] = field(default_factory=dict)
    first_step: dict[int, int] = field(default_factory=dict)
    num_steps: int = 0
    num_arrivals: int = 0
    between: Callable[[StepPlan], None] | None = None
    """Called after `schedule` and the forward pass, before `commit`."""

    def add(self, seq: Sequence) -> None:
        self.num_arrivals += 1
        seq.arrival_s = float(self.num_arrivals)
        self.scheduler.add(seq)
        self.outputs[seq.id] = []

    def run(self, max_steps: int = 5000) -> None:
        for _ in range(max_steps):
            if not self.scheduler.has_work:
                assert self.scheduler.blocks.num_used == 0
                return
            self.step()
        raise AssertionError(f"still busy after {max_steps} steps")

    def step(self) -> list[TokenDelta]:
        plan = self.scheduler.schedule()
        self.num_steps += 1
        planned = {row.seq.id for row in plan.decoding} | {chunk.seq.id for chunk in plan.prefills}
        assert planned.isdisjoint(plan.preempted)
        assert len(planned) == len(plan.decoding) + len(plan.prefills)
        assert sum(1 + r.max_drafts for r in plan.decoding) + sum(c.length for c in plan.prefills) <= (
            self.scheduler.max_batched_tokens
        )
        drafts = [self.draft(row.seq, row.max_drafts) for row in plan.decoding]
        verification = self.forward(plan, drafts)
        source = [self.rng.choice([Source.MISS, Source.HIT]) if run else Source.DECLINED for run in drafts]
        speculation = Speculation(None, [len(run) for run in drafts], source, looked_up=[True] * len(drafts))
        if self.between is not None:
            self.between(plan)
        deltas = self.scheduler.commit(plan, verification, speculation)
        for delta in deltas:
            self.take(delta)
        check_scheduler(self.scheduler)
        for seq in self.scheduler._queues.running:
            assert len(seq.block_table) <= self.scheduler.blocks.blocks_for(seq.num_tokens), "slots of drafts were kept"
        return deltas

    def take(self, delta: TokenDelta) -> None:
        assert delta.seq_id not in self.last, "a delta after the last one"
        self.outputs[delta.seq_id] += delta.token_ids
        if delta.token_ids:
            self.first_step.setdefault(delta.seq_id, self.num_steps)
        if delta.finish_reason is not None:
            self.last[delta.seq_id] = delta

    def draft(self, seq: Sequence, max_drafts: int) -> list[int]:
        assert 0 <= max_drafts <= min(self.scheduler.lookahead, max(0, seq.num_remaining - 1))
        tokens = list(seq.token_ids)
        count = max_drafts if self.rng.random() < 0.8 else self.rng.randint(0, max_drafts)
        for _ in range(count):
            said = next_token(tokens)
            tokens.append(said if self.rng.random() < self.right else (said + 1) % VOCAB)
        return tokens[seq.num_tokens :]

    def forward(self, plan: StepPlan, drafts: list[list[int]]) -> Verification:
        outcomes, new_tokens = [], []
        rows = [(row.seq, row.seq.num_tokens - 1, run) for row, run in zip(plan.decoding, drafts, strict=True)]
        for row in plan.decoding:
            room = len(row.seq.block_table) * self.scheduler.blocks.block_size
            assert room >= row.seq.num_tokens + row.max_drafts, "no slot for a draft"
        for chunk in plan.prefills:
            assert chunk.length > 0
            self.compute(chunk.seq, chunk.seq.token_ids, chunk.start, chunk.start + chunk.length)
            if chunk.is_last:
                rows.append((chunk.seq, chunk.seq.num_tokens, []))
        for index, (seq, start, run) in enumerate(rows):
            if index < len(drafts):
                self.compute(seq, [*seq.token_ids, *run], start, seq.num_tokens + len(run))
            accepted = 0
            while accepted < len(run) and run[accepted] == next_token([*seq.token_ids, *run[:accepted]]):
                accepted += 1
            recovery = next_token([*seq.token_ids, *run[:accepted]])
            outcomes.append(VerificationOutcome(seq.id, accepted, recovery))
            new_tokens.append([*run[:accepted], recovery])
        assert [outcome.seq_id for outcome in outcomes] == [seq.id for seq in plan.sampled]
        return Verification(outcomes, new_tokens, [None] * len(outcomes))

    def compute(self, seq: Sequence, tokens: list[int], start: int, end: int) -> None:
        """Read the cache below `start`, write [start, end)."""
        assert start == seq.num_computed_tokens, "a token is computed twice or never"
        size = self.scheduler.blocks.block_size
        slot_of = [seq.block_table[p // size] * size + p % size for p in range(end)]
        for position, digest in enumerate(digests(tokens[:end])):
            if position < start:
                assert self.slots[slot_of[position]] == digest, f"sequence {seq.id} reads foreign KV at {position}"
            else:
                self.slots[slot_of[position]] = digest
