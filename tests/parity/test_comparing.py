"""Which differences pass, and as what."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ssd_ascend.errors import ConfigError
from ssd_ascend.parity.comparing import Row, Verdict, compare, passed
from ssd_ascend.parity.golden import Golden, Model
from tests.parity.runs import golden, nudged, retold

# plain decoding parts at token 1, whose rival 2 lost by 0.01; logits apart by this much make that a tie
TIE = [5, 2, 9, 9]


def row(fresh: Golden, check: str) -> Row:
    return next(row for row in compare(golden(), fresh) if row.check == check)


def with_loose_logits(run: Golden) -> Golden:
    return nudged(run, "logits", "decode", 0.008)


def test_a_run_equals_itself() -> None:
    rows = compare(golden(), golden())
    assert {row.verdict for row in rows} == {Verdict.EQUAL}
    assert passed(rows)
    assert [row.check for row in rows] == [
        "op linear", "op attention", "logits", "verdicts greedy", "tokens plain", "tokens ssd model",
        "acceptance ssd model",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("by", "verdict"), [(0.02, Verdict.CLOSE), (0.5, Verdict.DIFFERENT), (torch.nan, Verdict.DIFFERENT)]
)
def test_numbers(by: float, verdict: Verdict) -> None:
    found = row(nudged(golden(), "op linear", "y", by), "op linear")
    assert found.verdict is verdict
    assert found.detail == "y"
    assert passed([found]) == (verdict is Verdict.CLOSE)


def test_a_whole_model_may_be_further_apart_than_an_operator() -> None:
    largest = float(golden().tensors["logits"]["decode"].abs().max())
    assert row(nudged(golden(), "logits", "decode", 0.04 * largest), "logits").verdict is Verdict.CLOSE
    assert row(nudged(golden(), "logits", "decode", 0.06 * largest), "logits").verdict is Verdict.DIFFERENT


def test_what_is_stored_must_be_what_was_given() -> None:
    found = row(nudged(golden(), "op attention", "stored", 0.01), "op attention")
    assert found.verdict is Verdict.DIFFERENT
    assert (found.detail, found.tolerance) == ("stored", 0.0)


def test_a_small_difference_does_not_hide_a_forbidden_one() -> None:
    both = nudged(nudged(golden(), "op attention", "stored", 0.01), "op attention", "out", 0.02)
    assert row(both, "op attention").verdict is Verdict.DIFFERENT


def test_infinities_in_the_same_places_are_no_difference() -> None:
    def masked(run: Golden) -> Golden:
        return nudged(run, "logits", "decode", -torch.inf)

    moved = masked(golden())
    moved.tensors["logits"]["decode"][1, 1] += 1e-3
    assert compare(masked(golden()), moved)[2].verdict is Verdict.CLOSE
    assert compare(golden(), masked(golden()))[2].verdict is Verdict.DIFFERENT


def test_wider_numbers_are_compared_as_the_narrower() -> None:
    wide = golden()
    wide.tensors["op linear"]["y"] = wide.tensors["op linear"]["y"].float() * (1 + 1e-4)
    assert row(wide, "op linear").verdict is Verdict.EQUAL


@pytest.mark.parametrize("change", ["missing", "shape"])
def test_what_is_missing_is_different(change: str) -> None:
    other = golden()
    if change == "missing":
        del other.tensors["op linear"]["y"]
    else:
        other.tensors["op linear"]["y"] = other.tensors["op linear"]["y"][:-1]
    assert row(other, "op linear").verdict is Verdict.DIFFERENT
    assert row(replace(golden(), verdicts={}), "verdicts greedy").verdict is Verdict.DIFFERENT
    plain_only = replace(golden(), traces={"plain": golden().traces["plain"]})
    assert row(plain_only, "tokens ssd model").verdict is Verdict.DIFFERENT


def test_a_verdict_has_no_tolerance() -> None:
    found = row(replace(golden(), verdicts={"greedy": [[1, 2], [4]]}), "verdicts greedy")
    assert (found.verdict, found.detail) == (Verdict.DIFFERENT, "1 of 2 rows differ")


def test_another_token_is_a_tie_only_where_the_logits_explain_it() -> None:
    assert row(with_loose_logits(retold(golden(), "plain", tokens=TIE)), "tokens plain").verdict is Verdict.TIE
    assert row(retold(golden(), "plain", tokens=TIE), "tokens plain").verdict is Verdict.DIFFERENT  # logits agree


@pytest.mark.parametrize("tokens", [[5, 3, 9, 9], [1, 6, 7, 8], [5, 6], [5, 6, 7, 8, 9]])
def test_other_differences_of_tokens_are_differences(tokens: list[int]) -> None:
    """Not the rival; the rival, but far away; an answer that ends early; one that goes on."""
    found = row(with_loose_logits(retold(golden(), "plain", tokens=tokens)), "tokens plain")
    assert found.verdict is Verdict.DIFFERENT


@pytest.mark.parametrize(
    ("steps", "verdict"), [([(4, 2, 1)], Verdict.TIE), ([(4, 1, 0), (4, 0, 0)], Verdict.DIFFERENT)]
)
def test_drafts_fare_alike_on_the_whole(steps: list[tuple[int, int, int]], verdict: Verdict) -> None:
    assert row(retold(golden(), "ssd model", steps=steps), "acceptance ssd model").verdict is verdict


@pytest.mark.parametrize(("source", "remedy"), [(None, "same version"), ("m", "the model it was recorded with")])
def test_other_weights_are_refused(source: str | None, remedy: str) -> None:
    with pytest.raises(ConfigError, match="other weights") as caught:
        compare(golden(model=Model("other", source)), golden())
    assert remedy in str(caught.value)
