"""The scheduler with scripted tokens: where runs end, what is counted, what is refused, who is aborted."""

from __future__ import annotations

import pytest

from ssd_ascend.core.plan import StepPlan
from ssd_ascend.core.request import TokenDelta
from ssd_ascend.core.sequence import FinishReason, Sequence, Status
from ssd_ascend.core.speculation import Source, Speculation, TokenLogprobs, Verification, VerificationOutcome
from ssd_ascend.engine.scheduler import Scheduler
from ssd_ascend.errors import ConfigError, RequestError
from tests.unit.scheduler_toys import STOP, ToyEngine, check_scheduler, make_scheduler, make_sequence, solo


def say(
    scheduler: Scheduler,
    runs: dict[int, list[int]],
    *,
    source: Source = Source.MISS,
    drafts: int | None = None,
) -> list[TokenDelta]:
    """One step in which sequence i gains `runs[i]`: all but the last are accepted drafts, out of `drafts` offered."""
    plan = scheduler.schedule()
    outcomes, new_tokens, logprobs = [], [], []
    for seq in plan.sampled:
        run = runs[seq.id]
        outcomes.append(VerificationOutcome(seq.id, len(run) - 1, run[-1]))
        new_tokens.append(run)
        logprobs.append([TokenLogprobs(token, -1.0, 1, ()) for token in run])
    offered = [len(runs[row.seq.id]) - 1 if drafts is None else drafts for row in plan.decoding]
    sources = [source if count else Source.DECLINED for count in offered]
    speculation = Speculation(None, offered, sources, looked_up=[True] * len(offered))
    deltas = scheduler.commit(plan, Verification(outcomes, new_tokens, logprobs), speculation)
    check_scheduler(scheduler)
    return deltas


def decoding(lookahead: int, max_new: int, output: list[int], **options: int) -> tuple[Scheduler, Sequence]:
    """A scheduler whose one sequence, of prompt [1, 2, 3], has said `output` so far."""
    scheduler = make_scheduler(lookahead=lookahead)
    seq = make_sequence(0, [1, 2, 3], 3 + max_new, stop_ids=frozenset({STOP}), **options)
    scheduler.add(seq)
    for token in output:
        say(scheduler, {0: [token]})
    return scheduler, seq


# -- where a run ends ------------------------------------------------------------------------------------------------


def test_b01_a_stop_token_inside_a_run_that_also_crosses_the_cap_ends_with_stop() -> None:
    scheduler, seq = decoding(4, 5, [10, 11])
    (delta,) = say(scheduler, {0: [STOP, 20, 21, 22]})
    assert (delta.token_ids, delta.finish_reason, delta.stop_token) == ([STOP], "stop", STOP)
    assert seq.output_token_ids == [10, 11, STOP]
    assert (seq.finish_reason, seq.stop_token) == (FinishReason.STOP, STOP)


def test_b01_a_stop_token_beyond_the_cap_ends_with_length() -> None:
    scheduler, seq = decoding(4, 2, [])
    say(scheduler, {0: [10]})
    (delta,) = say(scheduler, {0: [11, STOP, 20]})
    assert (delta.token_ids, delta.finish_reason, delta.stop_token) == ([11], "length", None)
    assert seq.output_token_ids == [10, 11]


def test_a_stop_token_on_the_last_place_is_a_stop() -> None:
    scheduler, _ = decoding(4, 3, [10])
    (delta,) = say(scheduler, {0: [11, STOP, 20]})
    assert (delta.token_ids, delta.finish_reason) == ([11, STOP], "stop")


@pytest.mark.parametrize(("lookahead", "place"), [(k, place) for k in range(8) for place in range(k + 1)])
def test_the_stop_ends_a_run_at_every_position(lookahead: int, place: int) -> None:
    scheduler, seq = decoding(lookahead, 50, [10])
    run = [20 + index for index in range(lookahead + 1)]
    run[place] = STOP
    (delta,) = say(scheduler, {0: run})
    assert delta.token_ids == run[: place + 1]
    assert delta.finish_reason == "stop"
    assert seq.accepted == min(place + 1, lookahead)
    assert scheduler.blocks.num_used == 0
    assert not scheduler.has_work


def test_the_first_token_can_be_the_stop() -> None:
    scheduler, _ = decoding(3, 50, [])
    (delta,) = say(scheduler, {0: [STOP]})
    assert (delta.token_ids, delta.finish_reason) == ([STOP], "stop")
    assert delta.stats is not None
    assert (delta.stats.steps, delta.stats.drafted) == (0, 0)


def test_a_stop_token_counts_only_after_min_tokens() -> None:
    scheduler, _ = decoding(4, 50, [10], min_tokens=3)
    (delta,) = say(scheduler, {0: [STOP, 11, STOP, 12]})
    assert (delta.token_ids, delta.finish_reason) == ([STOP, 11, STOP], "stop")


@pytest.mark.parametrize("cap", range(1, 9))
def test_max_tokens_ends_a_run_exactly(cap: int) -> None:
    scheduler, seq = decoding(7, cap, [])
    deltas = say(scheduler, {0: [10]})
    if cap > 1:
        deltas = say(scheduler, {0: [20, 21, 22, 23, 24, 25, 26, 27]})
    assert deltas[0].finish_reason == "length"
    assert seq.num_output_tokens == cap


# -- counting --------------------------------------------------------------------------------------------------------


def test_b06_drafts_behind_the_stop_count_as_drafted_not_as_accepted() -> None:
    scheduler, seq = decoding(5, 50, [10])
    (delta,) = say(scheduler, {0: [20, 21, STOP, 23, 24, 25]}, source=Source.HIT)
    assert delta.token_ids == [20, 21, STOP]
    assert delta.sources == [2, 2, 2]
    assert (seq.drafted, seq.accepted, seq.steps, seq.lookups, seq.hits) == (5, 3, 1, 1, 1)
    stats = scheduler.stats()
    assert (stats.speculation.drafted, stats.speculation.accepted) == (5, 3)
    assert stats.speculation.drafted_per_position == [1, 1, 1, 1, 1]
    assert stats.speculation.accepted_per_position == [1, 1, 1, 0, 0]
    assert stats.speculation.hit_tokens == 3
    assert stats.generation_tokens == seq.num_output_tokens == 4
    assert delta.stats is not None
    assert (delta.stats.drafted, delta.stats.accepted, delta.stats.prompt_tokens) == (5, 3, 3)


def test_b10_every_accepted_token_is_in_the_history_before_the_next_step() -> None:
    scheduler, seq = decoding(3, 50, [10])
    say(scheduler, {0: [9, 9, 9, 11]})
    assert seq.output_token_ids.count(9) == 3


def test_sources_and_logprobs_have_one_entry_for_each_emitted_token() -> None:
    scheduler, _ = decoding(3, 50, [10])
    (delta,) = say(scheduler, {0: [20, 21, 22]}, drafts=3)
    assert delta.sources == [1, 1, 0]
    (delta,) = say(scheduler, {0: [23, STOP, 24]})
    assert delta.logprobs is not None
    assert [entry.token for entry in delta.logprobs] == [23, STOP]
    speculation = scheduler.stats().speculation
    assert (speculation.verify_rows, speculation.miss_rows, speculation.miss_tokens) == (2, 2, 5)
    assert speculation.drafted_per_position == [2, 2, 1]
    assert speculation.accepted_per_position == [2, 2, 0]


def test_a_row_declines_only_where_it_could_have_drafted() -> None:
    scheduler, _ = decoding(2, 3, [10])
    say(scheduler, {0: [11]})
    say(scheduler, {0: [12]})  # the last token: there was room for none
    assert scheduler.stats().speculation.declined_rows == 1
    assert scheduler.stats().finished == 1


def test_a_snapshot_does_not_change_afterwards() -> None:
    scheduler, _ = decoding(2, 50, [10])
    say(scheduler, {0: [20, 21, 22]})
    before = scheduler.stats()
    say(scheduler, {0: [23, 24, 25]})
    assert before.speculation.accepted_per_position == [1, 1]
    assert (before.running, before.waiting, before.steps, before.kv_blocks_total) == (1, 0, 2, 64)
    assert before.kv_blocks_used > 0


def test_the_cache_holds_all_but_the_recovery_token() -> None:
    scheduler, seq = decoding(4, 50, [10])
    say(scheduler, {0: [20, 21, 22]}, drafts=4)
    assert seq.num_computed_tokens == seq.num_tokens - 1
    assert seq.is_decoding


# -- what is refused -------------------------------------------------------------------------------------------------


def test_a_sequence_that_can_never_fit_is_refused_with_numbers() -> None:
    scheduler = make_scheduler(num_blocks=4, block_size=4)
    assert scheduler.max_tokens_that_fit == 16
    with pytest.raises(
        RequestError, match=r"10 prompt tokens and up to 7 new ones make 17, but at most 16 fit"
    ) as caught:
        scheduler.add(make_sequence(0, list(range(10)), 17))
    assert caught.value.param == "max_tokens"
    engine = ToyEngine(scheduler)
    engine.add(make_sequence(0, list(range(10)), 16))
    engine.run()
    assert engine.outputs[0] == solo(list(range(10)), 16)


def test_nothing_to_read_or_nothing_to_say_is_refused() -> None:
    scheduler = make_scheduler(max_model_len=8)
    with pytest.raises(RequestError, match="no tokens") as caught:
        scheduler.add(make_sequence(0, [], 5))
    assert caught.value.param == "prompt"
    with pytest.raises(RequestError, match="8 tokens and the limit is 8"):
        scheduler.add(make_sequence(0, [1] * 8, 8))
    with pytest.raises(RequestError, match="at most 8 fit"):
        scheduler.add(make_sequence(0, [1], 9))
    scheduler.add(make_sequence(0, [1], 8))
    with pytest.raises(RequestError, match="id 0"):
        scheduler.add(make_sequence(0, [1], 8))


def test_a_budget_below_one_verify_row_for_all_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="verify 48 tokens"):
        make_scheduler(max_num_seqs=8, lookahead=5, max_batched_tokens=47)


# -- endings from outside --------------------------------------------------------------------------------------------


def test_b30_an_abort_frees_everything_whatever_the_state() -> None:
    scheduler = make_scheduler(num_blocks=8, block_size=4, max_num_seqs=2, max_batched_tokens=8)
    engine = ToyEngine(scheduler)
    for seq_id in range(4):
        engine.add(make_sequence(seq_id, [seq_id + 1] * 12, 30))
    for _ in range(3):
        engine.step()
    states = {seq.status for seq in scheduler._queues.by_id.values()}
    assert states == {Status.RUNNING, Status.WAITING}
    deltas = scheduler.abort([0, 1, 2, 3, 99])
    check_scheduler(scheduler)
    assert [delta.finish_reason for delta in deltas] == ["abort"] * 4
    assert all(delta.stats is not None for delta in deltas)
    stats = scheduler.stats()
    assert (stats.running, stats.waiting, stats.kv_blocks_used, stats.finished) == (0, 0, 0, 4)
    assert scheduler.abort([0, 1]) == []
    engine.add(make_sequence(0, [3, 3], 9))
    engine.last.clear()
    engine.run()
    assert engine.outputs[0] == solo([3, 3], 9)


def test_b30_a_preempted_sequence_can_be_aborted() -> None:
    scheduler = make_scheduler(num_blocks=6, block_size=4)
    engine = ToyEngine(scheduler)
    for seq_id in range(2):
        engine.add(make_sequence(seq_id, [seq_id + 1] * 4, 20))
    while not scheduler._queues.by_id[1].num_preemptions:
        engine.step()
    assert scheduler._queues.by_id[1].status is Status.WAITING
    scheduler.abort([1])
    check_scheduler(scheduler)
    engine.run()
    assert engine.outputs[0] == solo([1] * 4, 20)


def test_an_abort_between_schedule_and_commit_is_skipped_cleanly() -> None:
    scheduler = make_scheduler(lookahead=2)
    engine = ToyEngine(scheduler)
    for seq_id in range(3):
        engine.add(make_sequence(seq_id, [seq_id + 1] * 5, 25))
    engine.step()
    engine.add(make_sequence(3, [9] * 5, 25))

    def drop(_: StepPlan) -> None:
        assert len(scheduler.abort([1, 3])) == 2
        engine.add(make_sequence(1, [8] * 5, 25))  # the id lives again before the old result arrives

    engine.between = drop
    deltas = engine.step()
    assert [delta.seq_id for delta in deltas] == [0, 2]
    engine.between = None
    assert engine.outputs[1] == []
    engine.run()
    assert engine.outputs[1] == solo([8] * 5, 25)
    assert engine.outputs[0] == solo([1] * 5, 25)
    assert engine.outputs[2] == solo([3] * 5, 25)


def test_a_failure_ends_one_sequence_with_an_error() -> None:
    scheduler = make_scheduler()
    engine = ToyEngine(scheduler)
    engine.add(make_sequence(0, [1, 2], 12))
    engine.add(make_sequence(1, [3, 4], 12))
    engine.step()
    delta = scheduler.fail(0, "NaN in its logits")
    assert delta is not None
    assert (delta.finish_reason, delta.error) == ("error", "NaN in its logits")
    assert scheduler.fail(0, "again") is None
    check_scheduler(scheduler)
    engine.run()
    assert engine.outputs[1] == solo([3, 4], 12)


def test_a_step_that_was_lost_can_be_planned_again() -> None:
    scheduler = make_scheduler(num_blocks=6, block_size=4, lookahead=3, max_batched_tokens=32)
    engine = ToyEngine(scheduler)
    for seq_id in range(3):
        engine.add(make_sequence(seq_id, [seq_id + 1] * 6, 20))
    while scheduler.has_work:
        scheduler.schedule()
        engine.step()
    for seq_id in range(3):
        assert engine.outputs[seq_id] == solo([seq_id + 1] * 6, 20)
