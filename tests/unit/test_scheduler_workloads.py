"""The scheduler under load, with a toy model: every answer is what its sequence gets alone, and nothing leaks."""

from __future__ import annotations

import random
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ssd_ascend.core.plan import StepPlan
from ssd_ascend.engine.prefill import split_budget
from tests.unit.scheduler_toys import VOCAB, ToyEngine, check_scheduler, make_scheduler, make_sequence, solo

STOPS = frozenset({3, 11})


@settings(max_examples=120, deadline=None)
@given(st.data())
def test_random_workloads_give_every_sequence_its_solo_answer(data: st.DataObject) -> None:
    size = data.draw(st.sampled_from([1, 2, 3, 4, 16]), label="block size")
    capacity = data.draw(st.integers(24, 90), label="slots")
    lookahead = data.draw(st.integers(0, 7), label="lookahead")
    max_num_seqs = data.draw(st.integers(1, 6), label="max_num_seqs")
    scheduler = make_scheduler(
        -(-capacity // size),
        size,
        prefix_cache=data.draw(st.booleans(), label="prefix cache"),
        max_num_seqs=max_num_seqs,
        max_batched_tokens=max_num_seqs * (lookahead + 1) + data.draw(st.integers(0, 24), label="spare budget"),
        lookahead=lookahead,
    )
    rng = random.Random(data.draw(st.integers(0, 1 << 30), label="seed"))
    engine = ToyEngine(scheduler, right=rng.choice([0.0, 0.5, 0.9, 1.0]), rng=rng)
    stems = [[rng.randrange(VOCAB) for _ in range(40)] for _ in range(2)]
    expected, aborted = {}, set()

    def maybe_abort(_: StepPlan | None) -> None:
        if expected and rng.random() < 0.04:
            victim = rng.choice(list(expected))
            for delta in scheduler.abort([victim]):
                aborted.add(delta.seq_id)
                engine.take(delta)
            check_scheduler(scheduler)

    engine.between = maybe_abort
    for seq_id in range(data.draw(st.integers(1, 10), label="sequences")):
        stem = rng.choice(stems)[: rng.randint(1, scheduler.max_tokens_that_fit // 2)]
        prompt = [*stem, rng.randrange(VOCAB)]
        max_total = rng.randint(len(prompt) + 1, min(scheduler.max_tokens_that_fit, len(prompt) + 40))
        stop_ids, min_tokens = rng.choice([frozenset(), STOPS]), rng.choice([0, 0, 4])
        engine.add(make_sequence(seq_id, prompt, max_total, stop_ids=stop_ids, min_tokens=min_tokens))
        expected[seq_id] = solo(prompt, max_total, stop_ids, min_tokens)
        for _ in range(rng.choice([0, 0, 1, 5])):
            if scheduler.has_work:
                engine.step()
            maybe_abort(None)
    engine.run()
    for seq_id, answer in expected.items():
        if seq_id in aborted:
            assert engine.outputs[seq_id] == answer[: len(engine.outputs[seq_id])]
        else:
            assert engine.outputs[seq_id] == answer
            last = engine.last[seq_id]
            assert last.finish_reason == ("length" if last.stop_token is None else "stop")
    stats = scheduler.stats()
    assert (stats.running, stats.waiting, stats.kv_blocks_used) == (0, 0, 0)
    assert stats.generation_tokens == sum(len(tokens) for tokens in engine.outputs.values())
    totals = [delta.stats for delta in engine.last.values() if delta.stats is not None]
    assert stats.speculation.accepted == sum(total.accepted for total in totals)
    assert stats.speculation.drafted == sum(total.drafted for total in totals)
    assert sum(stats.speculation.accepted_per_position) == stats.speculation.accepted


@pytest.mark.parametrize("lookahead", range(1, 8))
def test_b26_every_prompt_length_around_block_edges(lookahead: int) -> None:
    """Blocks of 16, prompts of 1..48: `ToyEngine` checks the slots before each step."""
    for length in range(1, 49):
        scheduler = make_scheduler(16, 16, max_num_seqs=2, lookahead=lookahead)
        engine = ToyEngine(scheduler, right=0.8, rng=random.Random(length))
        prompt = [(7 * length + index) % VOCAB for index in range(length)]
        engine.add(make_sequence(0, prompt, length + 24))
        engine.run()
        assert engine.outputs[0] == solo(prompt, length + 24)


@pytest.mark.parametrize("block_size", [16, 256])
def test_b28_a_cache_of_one_and_a_half_requests_serves_32(block_size: int) -> None:
    """Lengths just past a block's edge (257 tokens in blocks of 256) meet preemption, recompute and prefix hits."""
    longest = 300
    scheduler = make_scheduler(
        -(-longest * 3 // 2 // block_size), block_size, max_num_seqs=8, max_batched_tokens=256, lookahead=3
    )
    engine = ToyEngine(scheduler)
    stem = [index % VOCAB for index in range(255)]
    prompts = {seq_id: [*stem[: 100 + 5 * seq_id], seq_id] for seq_id in range(31)} | {31: [*stem, 1, 2]}
    for seq_id, prompt in prompts.items():
        engine.add(make_sequence(seq_id, prompt, min(longest, len(prompt) + 40)))
    engine.run()
    for seq_id, prompt in prompts.items():
        assert engine.outputs[seq_id] == solo(prompt, min(longest, len(prompt) + 40))
    if block_size == 16:
        assert scheduler.stats().preemptions > 0


def test_preemption_keeps_tokens_budget_and_the_first_hit_count() -> None:
    scheduler = make_scheduler(7, 4, max_num_seqs=4, lookahead=2)
    engine = ToyEngine(scheduler)
    stem = [5, 6, 7, 8]
    engine.add(make_sequence(0, [*stem, 1], 24))
    engine.step()
    engine.add(make_sequence(1, [*stem, 2], 24))
    victim = scheduler._queues.by_id[1]
    engine.run()
    assert victim.num_preemptions > 0
    assert victim.num_cached_tokens == 4
    assert engine.last[1].stats is not None
    assert (engine.last[1].stats.cached_tokens, engine.last[1].stats.preemptions) == (4, victim.num_preemptions)
    assert scheduler.stats().cached_tokens == 4
    assert scheduler.stats().prompt_tokens == 10
    for seq_id in range(2):
        assert engine.outputs[seq_id] == solo([*stem, seq_id + 1], 24)


def test_the_latest_arrival_gives_way() -> None:
    scheduler = make_scheduler(14, 4, max_num_seqs=3, lookahead=3)
    engine = ToyEngine(scheduler)
    sequences = [make_sequence(seq_id, [seq_id + 1] * 3, 48) for seq_id in range(3)]
    for seq in sequences:
        engine.add(seq)
    engine.step()
    assert scheduler.stats().running == 3
    engine.run()
    assert sequences[0].num_preemptions == 0
    assert sequences[1].num_preemptions > 0
    assert sequences[2].num_preemptions > 0
    for seq_id in range(3):
        assert engine.outputs[seq_id] == solo([seq_id + 1] * 3, 48)


def test_no_preemption_while_shorter_drafts_would_do() -> None:
    """Two sequences fill the cache to the last slot: drafts shrink to nothing, and nobody is thrown out."""
    scheduler = make_scheduler(4, 4, max_num_seqs=2, lookahead=7)
    engine = ToyEngine(scheduler, right=1.0)
    for seq_id in range(2):
        engine.add(make_sequence(seq_id, [seq_id + 1] * 3, 9))
    engine.step()
    assert scheduler.stats().running == 2
    engine.run()
    assert scheduler.stats().preemptions == 0
    for seq_id in range(2):
        assert engine.outputs[seq_id] == solo([seq_id + 1] * 3, 9)


def test_a_newcomer_waits_for_blocks_that_a_running_sequence_is_about_to_need() -> None:
    scheduler = make_scheduler(8, 4)
    engine = ToyEngine(scheduler)
    engine.add(make_sequence(0, [1] * 4, 24))
    engine.step()
    engine.add(make_sequence(1, [2] * 12, 24))
    engine.step()
    assert scheduler.blocks.num_free >= scheduler.blocks.blocks_for(12)
    assert (scheduler.stats().running, scheduler.stats().waiting) == (1, 1)
    engine.run()
    assert scheduler.stats().preemptions == 0


def test_a_preempted_sequence_does_not_come_back_in_the_same_step() -> None:
    """Its prompt lies in another sequence's blocks as well, so that it would fit again at once."""
    scheduler = make_scheduler(5, 4)
    engine = ToyEngine(scheduler)
    for seq_id in range(2):
        engine.add(make_sequence(seq_id, [1] * 8, 10))
    engine.step()
    assert scheduler.stats().running == 2
    plan = scheduler.schedule()
    assert plan.preempted == [1]
    assert [row.seq.id for row in plan.decoding] == [0]
    assert plan.prefills == []
    engine.run()
    assert engine.outputs[0] == engine.outputs[1] == solo([1] * 8, 10)


def test_b33_near_the_model_length_everyone_ends_exactly_at_it() -> None:
    scheduler = make_scheduler(40, 16, max_num_seqs=8, max_batched_tokens=512, max_model_len=512, lookahead=7)
    assert scheduler.max_tokens_that_fit == 512
    engine = ToyEngine(scheduler)
    for seq_id in range(8):
        engine.add(make_sequence(seq_id, [(seq_id + index) % VOCAB for index in range(500)], 512))
    engine.run(max_steps=400)
    assert all(delta.finish_reason == "length" for delta in engine.last.values())
    assert all(len(tokens) == 12 for tokens in engine.outputs.values())


def test_a_sequence_as_long_as_the_whole_cache_ends_at_its_last_slot() -> None:
    for size in (1, 4, 16):
        scheduler = make_scheduler(32 // size, size, max_num_seqs=2, lookahead=7)
        engine = ToyEngine(scheduler, right=1.0)
        for seq_id in range(2):
            engine.add(make_sequence(seq_id, [seq_id + 1] * 20, 32))
        engine.run(max_steps=200)
        for seq_id in range(2):
            assert engine.outputs[seq_id] == solo([seq_id + 1] * 20, 32)


@pytest.mark.parametrize("lookahead", [0, 4])
def test_b40a_prompts_shorter_than_a_draft_beside_long_ones(lookahead: int) -> None:
    scheduler = make_scheduler(64, 16, max_num_seqs=8, max_batched_tokens=48, lookahead=lookahead)
    engine = ToyEngine(scheduler)
    prompts = [[index + 1] * length for index, length in enumerate((1, 2, 3, 4, 5, 90))]
    for seq_id, prompt in enumerate(prompts):
        engine.add(make_sequence(seq_id, prompt, len(prompt) + 20))
    engine.run()
    for seq_id, prompt in enumerate(prompts):
        assert engine.outputs[seq_id] == solo(prompt, len(prompt) + 20)


@pytest.mark.parametrize("crossing", range(1, 8))
def test_a_later_request_reuses_blocks_that_a_run_completed(crossing: int) -> None:
    """A run that crosses a block edge must not name the unfinished block: the toy model notices foreign KV."""
    scheduler = make_scheduler(32, 4, lookahead=7)
    engine = ToyEngine(scheduler, right=1.0)
    prompt = [9] * crossing
    engine.add(make_sequence(0, prompt, 24))
    engine.run()
    longer = [*prompt, *engine.outputs[0]]
    for seq_id, tokens in enumerate((longer, longer[:-1], [*longer[:10], 49, 48, 47]), start=1):
        engine.add(make_sequence(seq_id, tokens, len(tokens) + 9))
        engine.run()
        assert engine.outputs[seq_id] == solo(tokens, len(tokens) + 9)
        cached = engine.last[seq_id].stats
        assert cached is not None
        assert cached.cached_tokens == min(23, len(tokens) - 1, 10 if seq_id == 3 else 99) // 4 * 4


def test_b25_the_hit_is_where_the_first_chunk_starts() -> None:
    scheduler = make_scheduler(32, 4)
    engine = ToyEngine(scheduler)
    prompt = [index % VOCAB for index in range(16)]
    engine.add(make_sequence(0, prompt, 20))
    engine.run()
    seq = make_sequence(1, prompt, 20)
    scheduler.add(seq)
    (chunk,) = scheduler.schedule().prefills
    assert (chunk.start, chunk.length, chunk.is_last) == (12, 4, True)
    assert seq.num_cached_tokens == seq.num_computed_tokens == 12


# -- budget and fairness ---------------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 300), max_size=12), st.integers(0, 200))
def test_the_split_spends_the_budget_and_nothing_else(wanted: list[int], budget: int) -> None:
    lengths = split_budget(wanted, budget)
    assert all(0 <= length <= want for length, want in zip(lengths, wanted, strict=True))
    assert sum(lengths) == min(budget, sum(wanted))


def test_a_long_prompt_leaves_half_to_those_behind_and_takes_what_they_do_not_need() -> None:
    assert split_budget([1000, 10, 20], 100) == [70, 10, 20]
    assert split_budget([1000, 80, 20], 100) == [50, 50, 0]
    assert split_budget([1000], 100) == [100]


def test_streams_flow_while_a_long_prompt_is_read() -> None:
    scheduler = make_scheduler(256, 16, max_num_seqs=4, max_batched_tokens=128, prefill_beside_decode=32)
    engine = ToyEngine(scheduler)
    engine.add(make_sequence(0, [1] * 5, 200))
    engine.step()
    engine.add(make_sequence(1, [2] * 640, 700))
    for step in range(1, 21):
        deltas = engine.step()
        assert deltas[0].seq_id == 0
        assert (1 in engine.first_step) == (step == 20)


def test_a_short_prompt_overtakes_the_rest_of_a_long_one() -> None:
    scheduler = make_scheduler(256, 16, max_num_seqs=4, max_batched_tokens=64)
    engine = ToyEngine(scheduler)
    engine.add(make_sequence(0, [1] * 1000, 1010))
    engine.add(make_sequence(1, [2] * 20, 40))
    engine.step()
    assert engine.first_step == {1: 1}


@pytest.mark.parametrize("lengths", [[120] * 32, [20 + 9 * index for index in range(32)]])
def test_32_clients_at_once_none_starves(lengths: list[int]) -> None:
    """The cost of a step is taken as its tokens plus a constant; the slowest first token comes within 3x the median."""
    scheduler = make_scheduler(1000, 16, max_num_seqs=32, max_batched_tokens=512, lookahead=3)
    engine = ToyEngine(scheduler)
    order = random.Random(1).sample(lengths, k=len(lengths))
    for seq_id, length in enumerate(order):
        engine.add(make_sequence(seq_id, [seq_id] * length, length + 30))
    clock, first = 0.0, {}
    while len(first) < 32:
        before = {seq.id: seq.num_computed_tokens for seq in scheduler._queues.by_id.values()}
        deltas = engine.step()
        live = scheduler._queues.by_id
        clock += 30 + sum(live[seq_id].num_computed_tokens - done for seq_id, done in before.items() if seq_id in live)
        for delta in deltas:
            first.setdefault(delta.seq_id, clock)
    assert max(first.values()) <= 3 * statistics.median(first.values())
    engine.run()


def test_the_queue_is_first_come_first_served() -> None:
    scheduler = make_scheduler(64, 4, max_num_seqs=2, max_batched_tokens=16)
    engine = ToyEngine(scheduler)
    for seq_id in range(6):
        engine.add(make_sequence(seq_id, [seq_id + 1] * 4, 10))
    engine.run()
    order = sorted(engine.first_step, key=lambda seq_id: (engine.first_step[seq_id], seq_id))
    assert order == list(range(6))
