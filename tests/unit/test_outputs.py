"""Scripted engine steps through the output side: what counts, what shows, what ends an answer. No model, no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from ssd_ascend.core.request import EngineRequest, SequenceStats, TokenDelta
from ssd_ascend.core.sampling import SamplingParams
from ssd_ascend.core.speculation import TokenLogprobs
from ssd_ascend.engine import outputs
from ssd_ascend.engine.answers import Answer, stats_dict
from ssd_ascend.engine.outputs import OutputProcessor
from ssd_ascend.text import StopMatcher

STOP = 0  # the end-of-sequence token; special, spelt <eos>


class Letters:
    """Token 1 is "a", 2 is "b", ... 27 is a space; 200 + i is byte i of an emoji; 0 is the end of sequence."""

    strip_spaces = 0
    emoji = "🙂".encode()

    def token_bytes(self, token_id: int) -> bytes:
        if token_id == STOP:
            return b"<eos>"
        if token_id >= 200:
            return self.emoji[token_id - 200 : token_id - 199]
        return b" " if token_id == 27 else bytes([96 + token_id])

    def is_special(self, token_id: int) -> bool:
        return token_id == STOP


def spell(text: str) -> list[int]:
    return [27 if c == " " else ord(c) - 96 for c in text]


def make(clock: Iterator[float] | None = None) -> OutputProcessor:
    ticks = clock or iter(float(i) for i in range(10_000))
    return OutputProcessor(Letters(), clock=lambda: next(ticks))


def run(processor: OutputProcessor, sampling: SamplingParams, runs: list[TokenDelta], answer: Answer) -> list[int]:
    """Feed scripted deltas to the one sequence of a new request; returns what was aborted."""
    request = processor.add([1, 2, 3], sampling).requests[0]
    aborted: list[int] = []
    for delta in runs:
        outputs, abort = processor.process(
            [TokenDelta(**{name: getattr(delta, name) for name in TokenDelta.__slots__} | {"seq_id": request.id})]
        )
        for output in outputs:
            answer.extend(output)
        aborted += [seq - request.id for seq in abort]
    return aborted


def delta(token_ids: list[int], **more: object) -> TokenDelta:
    return TokenDelta(seq_id=-1, token_ids=token_ids, **more)  # type: ignore[arg-type]


def test_stop_token_counts_but_has_no_text() -> None:
    """B01: emitted up to the stop, which is hidden in the text and billed."""
    answer = Answer(0)
    stats = SequenceStats(prompt_tokens=3, steps=1, drafted=4, accepted=0)
    last = delta([10, 11, STOP], finish_reason="stop", stop_token=STOP, stats=stats)
    assert run(make(), SamplingParams(max_tokens=5), [last], answer) == []
    assert (answer.text, answer.token_ids, answer.finish_reason) == ("jk", [10, 11, STOP], "stop")
    assert answer.stop_reason is None
    assert answer.stats is not None
    assert answer.stats.completion_tokens == 3


def test_named_stop_token_is_the_stop_reason_and_may_be_shown() -> None:
    for include, text in ((False, "ab"), (True, "abz")):
        answer = Answer(0)
        sampling = SamplingParams(stop_token_ids=(26,), include_stop_str_in_output=include)
        run(make(), sampling, [delta(spell("abz"), finish_reason="stop", stop_token=26)], answer)
        assert (answer.text, answer.stop_reason, answer.token_ids) == (text, 26, spell("abz"))


def test_length_releases_held_text() -> None:
    answer = Answer(0)
    run(make(), SamplingParams(stop=("bcd",)), [delta(spell("abc")), delta(spell("b"), finish_reason="length")], answer)
    assert (answer.text, answer.finish_reason) == ("abcb", "length")


@pytest.mark.parametrize("position", range(6))
@pytest.mark.parametrize("width", range(1, 10))
def test_stop_string_anywhere_in_a_run(position: int, width: int) -> None:
    """B02, B04: the result depends neither on where in a run the stop lies nor on how the tokens are cut into runs."""
    tokens = spell("x" * position + "end" + "abcdefgh")
    runs = [
        delta(tokens[i : i + width], sources=[0] * len(tokens[i : i + width])) for i in range(0, len(tokens), width)
    ]
    answer = Answer(0)
    processor = make()
    aborted = run(processor, SamplingParams(stop=("end",)), runs, answer)
    assert (answer.text, answer.finish_reason, answer.stop_reason) == ("x" * position, "stop", "end")
    assert answer.token_ids == tokens[: position + 3]
    assert aborted == [0]
    assert processor.num_requests == 0


def test_no_chunk_shows_the_start_of_a_stop() -> None:
    processor = make()
    request = processor.add([1], SamplingParams(stop=("beta gamma",))).requests[0]
    shown: list[str] = []
    for token in spell("alpha beta gamma delta"):
        shown += [out.text for out in processor.process([TokenDelta(seq_id=request.id, token_ids=[token])]).deltas]
    assert "".join(shown) == "alpha "
    assert not any("b" in text for text in shown)


def test_stop_string_beats_a_later_stop_token_and_needs_no_abort() -> None:
    answer = Answer(0)
    run_of_stop = delta([*spell("axb"), STOP], finish_reason="stop", stop_token=STOP)
    assert run(make(), SamplingParams(stop=("x",)), [run_of_stop], answer) == []
    assert (answer.text, answer.token_ids, answer.stop_reason) == ("a", spell("ax"), "x")


def test_min_tokens_disarms_the_first_stops() -> None:
    answer = Answer(0)
    run(make(), SamplingParams(stop=("x",), min_tokens=2), [delta(spell("axaxa"))], answer)
    assert (answer.text, answer.token_ids) == ("axa", spell("axax"))


def test_included_stop_string() -> None:
    answer = Answer(0)
    sampling = SamplingParams(stop=("xy",), include_stop_str_in_output=True)
    run(make(), sampling, [delta(spell("axyz"))], answer)
    assert answer.text == "axy"


def test_logprobs_sources_and_acceptance_are_cut_with_the_tokens() -> None:
    """B06, B12: drafts past the stop are neither shown nor counted."""
    tokens = spell("axbbb")
    logprobs = [TokenLogprobs(token, -0.5, 1, ()) for token in tokens]
    run_of_drafts = delta(
        tokens, logprobs=logprobs, sources=[2, 2, 2, 2, 0], stats=SequenceStats(steps=1, drafted=4, accepted=4)
    )
    answer = Answer(0)
    run(make(), SamplingParams(stop=("x",), logprobs=0), [run_of_drafts], answer)
    assert answer.logprobs == logprobs[:2]
    assert answer.sources == [2, 2]
    assert answer.offsets == [0, 1]
    assert answer.stats is not None
    assert (answer.stats.drafted, answer.stats.accepted, answer.stats.rejected) == (4, 2, 2)
    assert answer.stats.completion_tokens == len(answer.token_ids) == 2


def test_a_character_cut_over_tokens_comes_whole() -> None:
    answer = Answer(0)
    run(make(), SamplingParams(), [delta([200]), delta([201, 202]), delta([203, 1], finish_reason="length")], answer)
    assert answer.text == "🙂a"


def test_unfinished_character_is_flushed_at_the_end() -> None:
    answer = Answer(0)
    run(make(), SamplingParams(), [delta([1, 200]), delta([], finish_reason="length")], answer)
    assert answer.text == "a\ufffd"


def test_seeds() -> None:
    """n answers draw from seeds of their own; a given seed repeats, no seed never does (B15)."""
    processor = make()

    def seeds(sampling: SamplingParams) -> list[int | None]:
        return [request.sampling.seed for request in processor.add([1], sampling).requests]

    given = seeds(SamplingParams(seed=7, n=4))
    assert given == seeds(SamplingParams(seed=7, n=4))
    assert given[0] == 7
    assert len(set(given)) == 4
    assert seeds(SamplingParams(seed=-1, n=2))[0] == -1
    fresh = [seeds(SamplingParams())[0] for _ in range(20)]
    assert len(set(fresh)) == 20


def test_expansion_gives_single_requests_with_unique_ids() -> None:
    processor = make()
    first, second = processor.add([1, 2], SamplingParams(n=3)), processor.add([1], SamplingParams())
    ids = [request.id for request in (*first.requests, *second.requests)]
    assert len(set(ids)) == 4
    assert all(request.sampling.n == 1 for request in first.requests)
    assert processor.num_requests == 2


def test_answers_of_one_request_end_apart_and_the_map_empties() -> None:
    processor = make()
    request_id, requests = processor.add([1], SamplingParams(n=2, stop=("x",)))
    a, b = (request.id for request in requests)
    outputs, abort = processor.process([TokenDelta(seq_id=a, token_ids=[24]), TokenDelta(seq_id=b, token_ids=[1])])
    assert [(out.index, out.finish_reason) for out in outputs] == [(0, "stop"), (1, None)]
    assert abort == [a]
    assert processor.process([TokenDelta(seq_id=a, token_ids=[1])]).deltas == []  # already gone
    assert processor.cancel(request_id) == [b]
    assert processor.cancel(request_id) == []
    assert processor.num_requests == 0


def test_engine_death_ends_every_answer_with_an_error() -> None:
    processor = make()
    processor.add([1], SamplingParams(n=2))
    processor.add([1], SamplingParams())
    failed = processor.fail("the engine process died")
    assert len(failed) == 3
    assert {out.finish_reason for out in failed} == {"error"}
    assert {out.error for out in failed} == {"the engine process died"}
    assert processor.num_requests == 0


def test_stats_have_the_contracted_names() -> None:
    ticks = iter([0.0, 1.0, 3.0])
    answer = Answer(0)
    last = delta(
        [4, 5, STOP],
        sources=[1, 1, 0],
        finish_reason="stop",
        stop_token=STOP,
        stats=SequenceStats(prompt_tokens=3, cached_tokens=2, steps=1, drafted=5, accepted=2, lookups=1, hits=1),
    )
    run(make(ticks), SamplingParams(), [delta([3], sources=[0]), last], answer)
    assert answer.stats is not None
    assert stats_dict(answer.stats, device="cpu") == {
        "device": "cpu",
        "prompt_tokens": 3,
        "cached_tokens": 2,
        "completion_tokens": 4,
        "steps": 1,
        "drafted": 5,
        "accepted": 2,
        "acceptance_length": 3.0,
        "cache_lookups": 1,
        "cache_hits": 1,
        "preemptions": 0,
        "ttft_s": 1.0,
        "decode_tokens_per_s": 1.5,
    }


def drawn_by(seed: int | None, requests: list[SamplingParams]) -> list[EngineRequest]:
    processor = OutputProcessor(Letters(), seed=seed)
    return [request for sampling in requests for request in processor.add([1], sampling).requests]


def seeds_of(seed: int | None, requests: list[SamplingParams]) -> list[int | None]:
    return [request.sampling.seed for request in drawn_by(seed, requests)]


@pytest.mark.parametrize("seed", [0, 7, -7, 2**64 - 1])
def test_the_same_requests_in_the_same_order_draw_from_the_same_seeds(seed: int) -> None:
    """Of an engine with a seed; every answer from another, also where one request wants several."""
    requests = [SamplingParams(n=3), SamplingParams(), SamplingParams(n=2), SamplingParams()]
    seeds = seeds_of(seed, requests)
    assert seeds == seeds_of(seed, requests)
    assert len(set(seeds)) == 7
    assert not set(seeds) & set(seeds_of(seed + 1 if seed < 2**63 else 5, requests))
    assert all(request.sampling.reproducible for request in drawn_by(seed, requests))


def test_a_number_and_its_negative_are_seeds_of_their_own() -> None:
    assert seeds_of(7, [SamplingParams()]) != seeds_of(-7, [SamplingParams()])


def test_a_request_with_a_seed_takes_none_of_the_engines() -> None:
    alone = seeds_of(7, [SamplingParams(), SamplingParams()])
    assert seeds_of(7, [SamplingParams(), SamplingParams(seed=5), SamplingParams()]) == [alone[0], 5, alone[1]]


def test_an_engine_without_a_seed_draws_fresh_ones() -> None:
    requests = [SamplingParams()] * 4
    assert not set(seeds_of(None, requests)) & set(seeds_of(None, requests))
    assert not any(request.sampling.reproducible for request in drawn_by(None, requests))


def test_prompts_and_requests_share_the_automaton_of_their_stop_strings(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[int] = []

    class Counted(StopMatcher):
        def __init__(self, stops: Sequence[str]) -> None:
            built.append(len(stops))
            super().__init__(stops)

    monkeypatch.setattr(outputs, "StopMatcher", Counted)
    processor = make()
    submissions = [processor.add([1, 2], SamplingParams(n=2, stop=("bc", "x"))) for _ in range(3)]
    assert built == [2]
    ids = [request.id for submission in submissions for request in submission.requests]
    ended = processor.process([TokenDelta(seq_id=seq_id, token_ids=spell("abcd")) for seq_id in ids])
    assert [(delta.text, delta.stop_reason) for delta in ended.deltas] == [("a", "bc")] * 6
    assert ended.abort == ids
    processor.add([1], SamplingParams(stop=("bc", "x")))
    assert built == [2, 2], "kept for nobody"


def test_stop_strings_do_not_travel_to_the_engine() -> None:
    assert make().add([1], SamplingParams(stop=("b" * 1024,))).requests[0].sampling.stop == ()
