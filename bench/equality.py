"""Do two engines say the same, greedily? If not: where they part, and how close the choice was."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from bench.cases import Case
from bench.modes import OwnEngine
from bench.samples import Sample
from bench.summary import Row


@dataclass(frozen=True, slots=True)
class Difference:
    """The first token two answers disagree on; None stands for the end of an answer."""

    case: Case
    common: list[int]
    tokens: tuple[int | None, int | None]

    @property
    def at(self) -> int:
        """Tokens both agree on."""
        return len(self.common)


def differences(waves: Sequence[Sequence[Case]], left: Sequence[Sample], right: Sequence[Sample]) -> list[Difference]:
    """One entry per answer that differs, earliest difference first. Runs i of both sides served waves[i]."""
    found = []
    for cases, a, b in zip(waves, left, right, strict=True):
        for case, ours, theirs in zip(cases, a.outputs, b.outputs, strict=True):
            pairs = enumerate(itertools.zip_longest(ours, theirs))
            at, tokens = next(((i, (x, y)) for i, (x, y) in pairs if x != y), (None, (None, None)))
            if at is not None:
                found.append(Difference(case, ours[:at], tokens))
    return sorted(found, key=lambda difference: difference.at)


def put_equality(row: Row, num_answers: int, found: Sequence[Difference], judge: OwnEngine | None) -> None:
    """Add how many answers equal those of the first mode, and the widest gap at a place where two part.

    `gap_nats` is how much more likely the judge (plain decoding) finds the token of the first mode; a gap within the
    rounding of the dtype means that either is right.
    """
    row["answers"] = num_answers
    row["same_answers"] = num_answers - len(found)
    if not found:
        return
    row["first_difference_at"] = found[0].at
    if judge is None:
        return
    gaps = [gap for difference in found[:8] if (gap := _gap(judge, difference)) is not None]
    row["gap_nats"] = round(max(gaps), 4) if gaps else None


def _gap(judge: OwnEngine, difference: Difference) -> float | None:
    law = judge.top_logprobs([*difference.case.token_ids, *difference.common])
    first, second = difference.tokens
    if first is None or second is None or first not in law or second not in law:
        return None
    return abs(law[first] - law[second])
