"""The target writing its own text: prompts untouched, answers its own, turns in order, forks where they are marked."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ssd_ascend.backends.registry import load_backend
from ssd_ascend.config.training import SynthesisConfig
from ssd_ascend.core.sampling import SamplingParams
from ssd_ascend.llm import LLM
from ssd_ascend.training.conversations import Conversations
from ssd_ascend.training.judge import answer_prompts
from ssd_ascend.training.prompts import Openings, TurnMarks, turn_marks
from ssd_ascend.training.synthesis import synthesize
from ssd_ascend.training.target import Target, load_target
from tests.training.chatty import write_chatty
from tests.training.toys import nothing

OPENINGS = "ask\nthe den...\n"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Target, Openings, TurnMarks]:
    path, tokenizer = write_chatty(tmp_path_factory.mktemp("chatty"))
    target = load_target(path, load_backend("cpu"), dtype="float32", read_tokens=256, max_length=96)
    return path, target, Openings(OPENINGS, tokenizer, where="o.txt"), turn_marks(tokenizer)


def made(world: tuple[Path, Target, Openings, TurnMarks], **changes: object) -> Conversations:
    _, target, openings, marks = world
    values = {"conversations": 12, "max_length": 64, "slots": 5, "max_user_tokens": 6, **changes}
    return synthesize(target, openings, marks, SynthesisConfig(**values), seed=4, progress=nothing)  # type: ignore[arg-type]


def greedy_next(target: Target, row: list[int]) -> list[int]:
    return target.read([row]).best.tolist()


def test_greedy_answers_are_the_targets_own(world: tuple[Path, Target, Openings, TurnMarks]) -> None:
    """Every answer token at temperature 0 is the arg-max after what stands before it, and answers follow the mark."""
    data = made(world, temperatures=(0.0,), weights=(1.0,), fork_rate=0.0, follow_ups=1.0)
    _, target, _, marks = world
    assert len(data) == 12
    assert bool(data.greedy.all())
    for i in range(len(data)):
        row, begin = data.row(i), int(data.starts[i])
        own = data.answer[begin : begin + len(row)].tolist()
        best = greedy_next(target, row)
        assert row[: len(marks.before)] == marks.before
        assert all(row[at] == best[at - 1] for at in range(1, len(row)) if own[at])
        first = own.index(True)
        assert row[first - len(marks.after_user) : first] == marks.after_user


def test_a_seed_makes_the_same_text(world: tuple[Path, Target, Openings, TurnMarks]) -> None:
    first, again = made(world, fork_rate=0.2), made(world, fork_rate=0.2)
    assert torch.equal(first.tokens, again.tokens)
    assert torch.equal(first.forked, again.forked)


def test_forks_are_other_likely_tokens(world: tuple[Path, Target, Openings, TurnMarks]) -> None:
    """In greedy answers a token is the arg-max exactly where it is not marked as a fork; forks come near their rate."""
    data = made(world, temperatures=(0.0,), weights=(1.0,), fork_rate=0.5, fork_floor=50.0, conversations=16)
    _, target, _, _ = world
    for i in range(len(data)):
        row, begin = data.row(i), int(data.starts[i])
        best = greedy_next(target, row)
        for at in range(1, len(row)):
            if bool(data.answer[begin + at]):
                assert (row[at] != best[at - 1]) == bool(data.forked[begin + at])
    share = float(data.forked.sum()) / float(data.answer.sum())
    assert 0.35 < share < 0.65
    assert not bool((data.forked & ~data.answer).any())


def test_answers_to_prompts_are_those_of_the_engine(world: tuple[Path, Target, Openings, TurnMarks]) -> None:
    """Token for token what the engine answers."""
    path, target, _, marks = world
    prompts = [[*marks.before, *range(5 + i, 20 + 2 * i), *marks.after_user] for i in range(3)]
    text = answer_prompts(target, marks, prompts, temperature=0.0, seeds=(0,), max_tokens=20, progress=nothing)
    with LLM(str(path), dtype="float32", device="cpu", max_num_seqs=4) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=20)
        theirs = {tuple(p): llm.generate([p], params)[0].answers[0].token_ids for p in prompts}
    ours = [text.row(i) for i in range(len(text))]
    assert sorted(ours) == sorted([*prompt, *answer] for prompt, answer in theirs.items())
