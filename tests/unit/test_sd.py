"""The `sd` speculator without a model: what it makes of the steps it sees, against a clock that the test moves."""

from __future__ import annotations

from collections.abc import Sequence as Rows

import pytest
import torch

from ssd_ascend.core.plan import DecodeRow
from ssd_ascend.core.sampling import SamplingParams
from ssd_ascend.core.sequence import Sequence
from ssd_ascend.core.speculation import Verification, VerificationOutcome
from ssd_ascend.speculation import lookahead
from ssd_ascend.speculation.base import Chain, DraftSequence
from ssd_ascend.speculation.lookahead import LookaheadController
from ssd_ascend.speculation.speculators.sd import SdSpeculator

K = 4
PLAIN_S, DRAFT_S = 0.010, 0.004


class Fives:
    """A drafter that foresees the same token for ever."""

    wants_features = False
    to_target = None

    def __init__(self) -> None:
        self.asked: list[int] = []
        """How long the chains were to be."""

    def chain(self, seqs: Rows[DraftSequence], k: int) -> Chain:
        self.asked.append(k)
        return Chain(torch.full((len(seqs), k), 5), [k] * len(seqs), None, [False] * len(seqs), None)

    def release(self, seq: DraftSequence) -> None:
        pass


class Play:
    """Requests to an `sd` that may stop drafting."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        monkeypatch.setattr(lookahead.time, "perf_counter", lambda: self.now_s)
        self.controller = LookaheadController(K, max_lookahead=K, may_stop=True)
        self.speculator = SdSpeculator(Fives(), self.controller, None, target_vocab=32, early=False)  # type: ignore[arg-type]
        self._ids = 0

    def prompt(self, seconds: float, *others: Sequence) -> Sequence:
        """A step that reads a prompt, in which these others decode; the sequence with its first token."""
        self._ids += 1
        seq = Sequence(
            id=self._ids, token_ids=[5] * 10, num_prompt_tokens=10, sampling=SamplingParams(temperature=0.0),
            stop_ids=frozenset(), max_total_tokens=10_000, seed=0,
        )  # fmt: skip
        drafts = self.speculator.propose([DecodeRow(other, K) for other in others]).num_tokens
        self.now_s += seconds
        self._observe([*others, seq], [*[0 for _ in drafts], 0], read_prompts=True)
        return seq

    def part(self, seconds: float, *seqs: Sequence) -> None:
        """A step of these sequences that also reads a part of somebody's prompt, which brings no token yet."""
        drafts = self.speculator.propose([DecodeRow(seq, K) for seq in seqs]).num_tokens
        self.now_s += seconds
        self._observe(seqs, [0 for _ in drafts], read_prompts=True)

    def decode(self, *seqs: Sequence, stands: bool) -> int:
        """A step of these sequences; how many drafts it had."""
        drafts = self.speculator.propose([DecodeRow(seq, K) for seq in seqs]).num_tokens
        self.now_s += PLAIN_S + DRAFT_S * max(drafts)
        self._observe(seqs, [own if stands else 0 for own in drafts], read_prompts=False)
        return sum(drafts)

    def _observe(self, seqs: Rows[Sequence], accepted: Rows[int], *, read_prompts: bool) -> None:
        outcomes = [VerificationOutcome(seq.id, stood, 5) for seq, stood in zip(seqs, accepted, strict=True)]
        tokens = [[5] * (stood + 1) for stood in accepted]
        verification = Verification(outcomes, tokens, [None] * len(outcomes))
        self.speculator.observe(seqs, verification, read_prompts=read_prompts)
        for seq, new in zip(seqs, tokens, strict=True):
            seq.token_ids += new


@pytest.mark.parametrize("prompt_s", [0.01, 0.3])
def test_the_time_of_a_prompt_is_not_that_of_a_step_without_drafts(
    monkeypatch: pytest.MonkeyPatch, prompt_s: float
) -> None:
    """After good requests, drafts fall: however long prompts take, drafting ends."""
    play = Play(monkeypatch)
    for _ in range(12):
        seq = play.prompt(prompt_s)
        for _ in range(30):
            play.decode(seq, stands=True)
        play.speculator.release([seq.id])
    drafted = 0
    for _ in range(10):
        seq = play.prompt(prompt_s)
        drafted += sum(play.decode(seq, stands=False) > 0 for _ in range(30))
        play.speculator.release([seq.id])
    assert drafted < 60  # of 300: the first few of each request, whose sequence is new


def test_a_long_prompt_starts_no_drafting_that_does_not_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is read in parts, each of which makes a step of somebody who decodes take long."""
    play = Play(monkeypatch)
    seq = play.prompt(0.01)
    for _ in range(200):
        play.decode(seq, stands=False)
    for _ in range(7):
        play.part(0.3, seq)
    assert sum(play.decode(seq, stands=False) > 0 for _ in range(300)) < 10


def test_no_step_is_measured_that_read_a_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    play = Play(monkeypatch)
    others = [play.prompt(0.3) for _ in range(2)]
    for _ in range(10):
        play.part(0.3, *others)
        seq = play.prompt(0.3, *others)
        play.decode(seq, *others, stands=True)
        play.speculator.release([seq.id])
    measured = [seconds for times in play.controller._times.values() for seconds in times]
    assert len(measured) == 10
    assert max(measured) < 0.1


def test_steps_that_only_read_prompts_use_no_try_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """What drafting costs, and not drafting, is tried out in steps that decode."""
    tried = []
    for prompts in (1, 12):
        play = Play(monkeypatch)
        seqs = [play.prompt(0.01) for _ in range(prompts)]
        tried.append([play.decode(seqs[-1], stands=True) for _ in range(10)])
    assert tried[0] == tried[1]
    assert {0, K} == set(tried[0])
