"""Stop strings: found wherever they lie in a run, hidden exactly, never leaked in a stream."""

from __future__ import annotations

import tracemalloc
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ssd_ascend.errors import RequestError
from ssd_ascend.text import IncrementalDetokenizer, StopChecker, StopMatcher, TextStream


class Pieces:
    """A tokenizer whose token i is the i-th given piece: runs can be scripted without a vocabulary."""

    strip_spaces = 0

    def __init__(self, pieces: list[str]) -> None:
        self._bytes = [piece.encode("utf-8") for piece in pieces]

    def token_bytes(self, token_id: int) -> bytes:
        return self._bytes[token_id]

    def is_special(self, token_id: int) -> bool:
        return False


class Answer:
    """What came of streaming `pieces` with `size` tokens a step."""

    def __init__(
        self, pieces: list[str], stops: list[str], size: int, *, include_stop_str: bool = False, min_tokens: int = 0
    ) -> None:
        stream = TextStream(
            IncrementalDetokenizer(Pieces(pieces)),
            StopChecker(StopMatcher(stops), include_stop_str=include_stop_str),
            min_tokens=min_tokens,
        )
        self.deltas: list[str] = []
        self.num_tokens = 0
        self.stop: str | None = None
        for at in range(0, len(pieces), size):
            delta = stream.feed(range(at, min(at + size, len(pieces))))
            self.deltas.append(delta.text)
            self.num_tokens += delta.num_tokens
            self.stop = delta.stop
            if self.stop is not None:
                break
        self.deltas.append(stream.finish())
        self.text = "".join(self.deltas)
        self.offsets = stream.offsets
        assert stream.text_length == len(self.text)

    def key(self) -> tuple[str, int, str | None, list[int]]:
        return self.text, self.num_tokens, self.stop, self.offsets


def expected(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The rule, written the slow way: the first end wins, then the longest."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


def test_stop_early_in_a_long_accepted_run() -> None:
    """B02: only the tail of a run used to be searched."""
    pieces = ["x ", "EN", "D", " a", " b", " c", " d", " e", " f", " g", " h"]
    answer = Answer(pieces, ["END"], len(pieces))
    assert (answer.text, answer.num_tokens, answer.stop) == ("x ", 3, "END")


@pytest.mark.parametrize("run", range(1, 8))
@pytest.mark.parametrize("position", range(9))
def test_result_does_not_depend_on_where_in_a_run_the_stop_lies(position: int, run: int) -> None:
    """B02: swept through every position of a run of K+1 tokens, whole and cut in three."""
    for stop_pieces in (["END"], ["E", "N", "D"], ["ENDING"], [" E", "ND"]):
        pieces = ["t"] * position + stop_pieces + ["after", "more"]
        answer = Answer(pieces, ["END"], run)
        assert answer.text == "t" * position + (" " if stop_pieces[0] == " E" else "")
        assert answer.num_tokens == position + len(stop_pieces)
        assert answer.stop == "END"
        assert len(answer.offsets) == answer.num_tokens


@pytest.mark.parametrize("run", range(1, 7))
@pytest.mark.parametrize("width", range(1, 7))
def test_stop_that_straddles_tokens_never_leaks(run: int, width: int) -> None:
    """B04: the stop string cut by tokens of every width, and tokens grouped in every way."""
    text = "alpha beta gamma delta"
    answer = Answer([text[at : at + width] for at in range(0, len(text), width)], ["beta gamma"], run)
    assert answer.text == "alpha "
    assert not any("b" in delta for delta in answer.deltas)
    assert answer.stop == "beta gamma"


@pytest.mark.parametrize("run", range(1, 6))
def test_stop_and_length_are_ordered_by_token(run: int) -> None:
    """B01: the scheduler feeds only what the cap leaves, so whichever comes first in the run ends the answer."""
    pieces = ["10 ", "11 ", "STOP", "20", "21", "22"]
    within = Answer(pieces[:5], ["STOP"], run)
    assert (within.text, within.num_tokens, within.stop) == ("10 11 ", 3, "STOP")
    at_cap = Answer(pieces[:3], ["STOP"], run)
    assert at_cap.key() == within.key()
    before = Answer(pieces[:2], ["STOP"], run)
    assert (before.text, before.num_tokens, before.stop) == ("10 11 ", 2, None)


@settings(max_examples=300, deadline=None)
@given(
    pieces=st.lists(st.text(alphabet="abc", max_size=4), max_size=14),
    stops=st.lists(st.text(alphabet="abc", min_size=1, max_size=5), max_size=4),
    include=st.booleans(),
)
def test_every_grouping_follows_the_one_rule(pieces: list[str], stops: list[str], include: bool) -> None:
    text, stop = expected("".join(pieces), stops)
    answers = [Answer(pieces, stops, size, include_stop_str=include) for size in range(1, 7)]
    assert len({repr(answer.key()) for answer in answers}) == 1
    first = answers[0]
    assert first.stop == stop
    assert first.text == text + (stop if stop is not None and include else "")
    ends = [sum(map(len, pieces[: index + 1])) for index in range(len(pieces))]
    if stop is None:
        assert first.num_tokens == len(pieces)
    else:
        assert first.num_tokens == 1 + next(i for i, end in enumerate(ends) if end >= len(text) + len(stop))
    assert all(left <= right for left, right in pairwise(first.offsets))
    assert not first.offsets or first.offsets[-1] <= len(first.text)


@settings(max_examples=200, deadline=None)
@given(
    text=st.text(alphabet="ab", max_size=30), stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=6), min_size=1)
)
def test_exactly_the_longest_possible_beginning_is_held(text: str, stops: list[str]) -> None:
    checker = StopChecker(StopMatcher(stops))
    shown = ""
    for index, character in enumerate(text):
        shown += checker.feed(character)
        if checker.matched is not None:
            return
        seen = text[: index + 1]
        could_grow = [n for stop in stops for n in range(len(stop)) if seen.endswith(stop[:n])]
        assert len(seen) - len(shown) == max(could_grow)
    assert shown + checker.flush() == text


def test_held_back_text_comes_out_when_the_answer_ends_otherwise() -> None:
    answer = Answer(["see the ", "EN"], ["END"], 1)
    assert answer.deltas == ["see the ", "", "EN"]
    assert answer.stop is None


def test_stop_string_can_be_kept() -> None:
    answer = Answer(["a", "END of it"], ["END"], 2, include_stop_str=True)
    assert (answer.text, answer.stop, answer.num_tokens) == ("aEND", "END", 2)


def test_stop_within_a_character_of_several_tokens() -> None:
    pieces = Pieces(["x"])
    pieces._bytes = [b"x", "😀".encode()[:2], "😀".encode()[2:], b"y"]
    stream = TextStream(IncrementalDetokenizer(pieces), StopChecker(StopMatcher(["😀"])))
    delta = stream.feed([0, 1, 2, 3])
    assert (delta.text, delta.num_tokens, delta.stop) == ("x", 3, "😀")


@pytest.mark.parametrize("run", range(1, 6))
def test_min_tokens_turns_an_early_stop_into_text(run: int) -> None:
    answer = Answer(["END", " a", " END", " b"], ["END"], run, min_tokens=1)
    assert (answer.text, answer.num_tokens) == ("END a ", 3)
    none = Answer(["END", " a", " END", " b"], ["END"], run, min_tokens=4)
    assert (none.text, none.num_tokens, none.stop) == ("END a END b", 4, None)


@pytest.mark.parametrize("stops", [None, ["zz"]])
def test_stop_token_has_no_text(stops: list[str] | None) -> None:
    """B01: the stop token counts, but its text is hidden."""
    checker = None if stops is None else StopChecker(StopMatcher(stops))
    stream = TextStream(IncrementalDetokenizer(Pieces(["a", "b", "<stop>"])), checker)
    delta = stream.feed([0, 1, 2], hide_last=True)
    assert (delta.text + stream.finish(), delta.num_tokens) == ("ab", 3)
    assert stream.offsets == [0, 1, 2]


def test_unfinished_character_is_flushed_behind_held_text() -> None:
    pieces = Pieces([])
    pieces._bytes = [b"E", b"\xf0\x9f"]
    stream = TextStream(IncrementalDetokenizer(pieces), StopChecker(StopMatcher(["END"])))
    assert stream.feed([0, 1]).text == ""
    assert stream.finish() == "E�"


def test_matcher_is_shared_between_answers() -> None:
    matcher = StopMatcher(["END"])
    first, second = StopChecker(matcher), StopChecker(matcher)
    assert first.feed("E") == ""
    assert second.feed("ND") == "ND"
    assert first.feed("ND") == ""
    assert (first.matched, second.matched) == ("END", None)


def test_each_character_is_stepped_once_whatever_the_tokens() -> None:
    """Linear: the worst text for naive search, 20 000 characters that nearly match a stop of 1 000."""

    class Counting(StopMatcher):
        steps = 0

        def step(self, state: int, character: str) -> int:
            self.steps += 1
            return super().step(state, character)

    matcher = Counting(["a" * 1000 + "b"])
    building = matcher.steps
    checker = StopChecker(matcher)
    assert sum(len(checker.feed("a")) for _ in range(20_000)) == 19_000
    assert matcher.steps - building == 20_000


def test_empty_stop_string_is_refused() -> None:
    with pytest.raises(RequestError, match="empty") as caught:
        StopMatcher(["x", ""])
    assert caught.value.param == "stop"


def test_long_stop_strings_take_little_memory() -> None:
    """An object for each character took 600 bytes; a client may send 16 times 1024 of them."""
    stops = [chr(97 + i) + "x" * 1023 for i in range(16)]
    tracemalloc.start()
    try:
        matcher = StopMatcher(stops)
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert used < 64 * len(matcher.match)
    checker = StopChecker(matcher)
    assert checker.feed("see " + stops[7] + " on") == "see "
    assert checker.matched == stops[7]
