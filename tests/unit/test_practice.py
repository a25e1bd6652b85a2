"""Practice of the way to the next launch: it is walked with a verdict like any other, and keeps nobody waiting."""

from __future__ import annotations

import torch

from ssd_ascend.core.batch import ModelOutput
from ssd_ascend.core.sampling import SamplingParams
from ssd_ascend.core.sequence import Sequence
from ssd_ascend.core.speculation import Source, Speculation, Verification, VerificationOutcome
from ssd_ascend.engine.practice import Practice
from ssd_ascend.speculation.base import NextRow
from ssd_ascend.speculation.verifier import Verifier

DRAFTS = [[5, 6, 7], [8, 0, 0], [0, 0, 0]]
SPECULATION = Speculation(torch.tensor(DRAFTS), [3, 1, 0], [Source.HIT] * 3, host_tokens=DRAFTS)
OUTCOMES = [VerificationOutcome(0, 2, 9), VerificationOutcome(1, 1, 4), VerificationOutcome(2, 0, 3)]


def sequence(seq_id: int) -> Sequence:
    sampling = SamplingParams(temperature=0.0)
    return Sequence(
        id=seq_id, token_ids=[1, 2], num_prompt_tokens=1, sampling=sampling, stop_ids=frozenset(),
        max_total_tokens=90, seed=0,
    )  # fmt: skip


class Verdict:
    """There when it was looked for so many times."""

    def __init__(self, looks: int) -> None:
        self.looks = looks

    def is_there(self) -> bool:
        self.looks -= 1
        return self.looks < 0

    def rows(self) -> list[list[int]]:
        raise AssertionError("practice reads no verdict")


class Foretelling:
    """Knows these outcomes, and writes down what it is asked about."""

    is_apart = True

    def __init__(self, outcomes: list[VerificationOutcome]) -> None:
        self.outcomes = outcomes
        self.asked: list[Verification] = []

    def foretold(self, sequences: list[Sequence]) -> list[VerificationOutcome]:
        return self.outcomes

    def next_rows(self, sequences: list[Sequence], verification: Verification) -> list[NextRow]:
        self.asked.append(verification)
        return []


class Launches:
    def __init__(self) -> None:
        self.walks = 0

    def practise(self, rows: list[NextRow]) -> None:
        self.walks += 1


def practised(verdict: Verdict | None, outcomes: list[VerificationOutcome]) -> tuple[Foretelling, Launches]:
    speculator, launches = Foretelling(outcomes), Launches()
    practice = Practice(Verifier(lambda tensors: list(tensors)), speculator, launches)  # type: ignore[arg-type]
    greedy = torch.zeros((7, 2), dtype=torch.int64)
    output = ModelOutput(torch.zeros(7, 9), greedy=greedy, verdict=verdict)
    practice.until_there([sequence(i) for i in range(3)], SPECULATION, output)
    return speculator, launches


def test_a_walk_begins_with_the_outcomes_that_were_foreseen() -> None:
    speculator, launches = practised(Verdict(50), OUTCOMES)
    assert launches.walks == len(speculator.asked) > 0
    for verification in speculator.asked:
        assert verification.outcomes == OUTCOMES
        assert verification.new_tokens == [[5, 6, 9], [8, 4], [3]]
        assert not verification.faults


def test_nothing_is_walked_once_the_verdict_is_there_or_where_nothing_was_foreseen() -> None:
    for verdict, outcomes in ((None, OUTCOMES), (Verdict(0), OUTCOMES), (Verdict(50), OUTCOMES[:2])):
        assert practised(verdict, outcomes)[1].walks == 0
