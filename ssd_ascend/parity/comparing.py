"""Two runs side by side: per check how far they are apart, and a verdict.

bit-equal: the same bits, or tokens. within tolerance: apart by no more than rounding explains. near-tie: another token
where the golden run's own two best lay closer together than the devices' logits do. different: everything else.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from ssd_ascend.errors import ConfigError
from ssd_ascend.parity.engines import Trace
from ssd_ascend.parity.golden import Golden
from ssd_ascend.parity.ops import OPERATOR, Tensors

_TOLERANCE = {"float32": 1e-5, "bfloat16": 1.6e-2, "float16": 2e-3}
"""Of a difference against the golden run's largest number, for one operator: two roundings of the coarser dtype."""
_DEPTH = 3.0
"""Roundings add up: a whole model may be this much further apart than one operator."""
_EXACT = ("stored", "rows")
"""Outputs that are copies of inputs: nothing may round them, but for their own dtype."""
_APART = 0.1
"""Drafts are not held to the target's exactness: their ties fall either way, but on the whole they fare alike."""
_BY_THE_CLOCK = ("plain", "ngram")
"""Nothing is drafted, or only where that pays by the clock, which no two machines share."""
_SIDES = 2.0
"""Two tokens change places when each one's logit moves by half their distance."""


class Verdict(enum.StrEnum):
    """How two runs agree; all but the last pass."""

    EQUAL = "bit-equal"
    CLOSE = "within tolerance"
    TIE = "near-tie"
    DIFFERENT = "different"


class Row(NamedTuple):
    """One line of the table. error: relative to the largest number, None where there is none."""

    check: str
    error: float | None
    tolerance: float | None
    verdict: Verdict
    detail: str = ""


def compare(golden: Golden, fresh: Golden) -> list[Row]:
    """All checks of two runs over the same models. ConfigError when they did not run the same things."""
    if golden.model.weights != fresh.model.weights:
        raise ConfigError(
            "the golden run was made with other weights than are here",
            remedy="check with the model it was recorded with"
            if golden.model.source
            else "record and check with the same version of ssd_ascend",
        )
    tolerance = max(_TOLERANCE[run.about[kind]] for run in (golden, fresh) for kind in ("dtype", "activations"))
    rows = [
        _numbers(name, golden, fresh, tolerance if name.startswith(OPERATOR) else _DEPTH * tolerance)
        for name in golden.tensors
    ]
    rows += [_judged(name, golden.verdicts[name], fresh.verdicts.get(name)) for name in golden.verdicts]
    reach = _SIDES * _furthest(golden, fresh)
    for way, traces in golden.traces.items():
        rows += _answers(way, traces, fresh.traces.get(way), reach)
    return rows


def passed(rows: Sequence[Row]) -> bool:
    """Whether nothing is different."""
    return all(row.verdict is not Verdict.DIFFERENT for row in rows)


def _numbers(section: str, golden: Golden, fresh: Golden, tolerance: float) -> Row:
    """All outputs of one section; the worst decides."""
    expected, ours = golden.tensors[section], fresh.tensors.get(section, {})
    for name, tensor in expected.items():
        if name not in ours or ours[name].shape != tensor.shape:
            return Row(section, None, tolerance, Verdict.DIFFERENT, f"{name}: missing, or of another shape")
    error, bound, where = worst(ours, expected, tolerance)
    verdict = Verdict.EQUAL if not where else Verdict.CLOSE if error <= bound else Verdict.DIFFERENT
    return Row(section, error, bound, verdict, where)


def operator_error(found: Tensors, expected: Tensors, dtype: str) -> tuple[float, float, str]:
    """How far an operator is from a reference, how far it may be in this dtype, and which output that is about."""
    return worst(found, expected, _TOLERANCE[dtype])


def worst(found: Tensors, expected: Tensors, tolerance: float) -> tuple[float, float, str]:
    """(error, what is allowed, name) of the output that exceeds its tolerance most; no name when all are equal."""
    error, bound, where, excess = 0.0, tolerance, "", -1.0
    for name, tensor in expected.items():
        narrow = min(tensor.dtype, found[name].dtype, key=lambda dtype: dtype.itemsize)
        a, b = found[name].to(narrow), tensor.to(narrow)
        if torch.equal(a, b):
            continue
        own, allowed = _relative(a.double(), b.double()), 0.0 if name.startswith(_EXACT) else tolerance
        if not own - allowed <= excess:  # also true for NaN
            error, bound, where, excess = own, allowed, name, own - allowed
    return error, bound, where


def _relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference, against the largest number."""
    apart = torch.where(actual == expected, 0.0, actual - expected).abs().max()  # also where both are infinite
    largest = torch.where(expected.isinf(), 0.0, expected).abs().max()
    return float(apart / largest.clamp_min(1e-30))


def _furthest(golden: Golden, fresh: Golden) -> float:
    """The largest difference of any two logits."""
    ours = fresh.tensors.get("logits", {})
    both = [(ours[name].double(), logits.double()) for name, logits in golden.tensors["logits"].items() if name in ours]
    return max((float((a - b).abs().max()) for a, b in both if a.shape == b.shape), default=0.0)


def _judged(name: str, expected: list[list[int]], actual: list[list[int]] | None) -> Row:
    check = f"verdicts {name}"
    if actual is None or len(actual) != len(expected):
        return Row(check, None, None, Verdict.DIFFERENT, "missing")
    other = sum(a != b for a, b in zip(actual, expected, strict=True))
    detail = f"{other} of {len(expected)} rows differ" if other else f"{len(expected)} rows"
    return Row(check, None, None, Verdict.DIFFERENT if other else Verdict.EQUAL, detail)


def _answers(way: str, expected: list[Trace], actual: list[Trace] | None, reach: float) -> Iterator[Row]:
    """Tokens, then how drafting fared where the tokens are the same."""
    if actual is None or len(actual) != len(expected):
        yield Row(f"tokens {way}", None, None, Verdict.DIFFERENT, "missing")
        return
    margins: list[float] = []
    same: list[tuple[Trace, Trace]] = []
    for ours, theirs in zip(actual, expected, strict=True):
        at = _parting(ours.tokens, theirs.tokens)
        if at is None:
            same.append((ours, theirs))
            continue
        rival, margin = theirs.rivals[at] if at < len(theirs.rivals) else (-1, float("inf"))
        if at >= len(ours.tokens) or rival != ours.tokens[at] or margin > reach:
            detail = f"token {at}: {ours.tokens[at : at + 1]} for {theirs.tokens[at : at + 1]}, margin {margin:.3g}"
            yield Row(f"tokens {way}", margin, reach, Verdict.DIFFERENT, detail)
            return
        margins.append(margin)
    count = sum(len(trace.tokens) for trace in expected)
    if margins:
        detail = f"{len(margins)} of {len(expected)} answers part at a near-tie"
        yield Row(f"tokens {way}", max(margins), reach, Verdict.TIE, detail)
    else:
        yield Row(f"tokens {way}", None, None, Verdict.EQUAL, f"{count} tokens")
    if not way.endswith(_BY_THE_CLOCK) and same:
        yield _acceptance(way, same)


def _parting(a: list[int], b: list[int]) -> int | None:
    """Where two answers part, None when they are one."""
    if a == b:
        return None
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _acceptance(way: str, pairs: Sequence[tuple[Trace, Trace]]) -> Row:
    """Step by step the same drafts and the same verdicts; one that fell otherwise is a near-tie of the drafter's."""
    lengths = [
        sum(len(trace.tokens) - 1 for trace in side) / max(1, sum(len(trace.steps) for trace in side))
        for side in ([ours for ours, _ in pairs], [theirs for _, theirs in pairs])
    ]
    if all(ours.steps == theirs.steps for ours, theirs in pairs):
        return Row(f"acceptance {way}", 0.0, None, Verdict.EQUAL, f"{lengths[1]:.3f} tokens a step")
    error = abs(lengths[0] - lengths[1]) / lengths[1]
    verdict = Verdict.TIE if error <= _APART else Verdict.DIFFERENT
    return Row(f"acceptance {way}", error, _APART, verdict, f"{lengths[0]:.3f} tokens a step for {lengths[1]:.3f}")
