"""From packed batches to answers that `evaluation.py` counts: of held-out text while training, of prompts later."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from ssd_ascend.config.training import SynthesisConfig
from ssd_ascend.training.batches import epoch, make_batch
from ssd_ascend.training.conversations import Conversations
from ssd_ascend.training.evaluation import Answer
from ssd_ascend.training.head import Weights
from ssd_ascend.training.prompts import TurnMarks
from ssd_ascend.training.slots import Job
from ssd_ascend.training.synthesis import write
from ssd_ascend.training.target import Source, Target
from ssd_ascend.training.unroll import Lesson, outcomes

FAN_OUT = 3
"""Next-best guesses that count as foreseen."""
Progress = Callable[[int, int], None]


def answers_of(
    weights: Weights,
    lesson: Lesson,
    source: Source,
    data: Conversations,
    *,
    batch_tokens: int,
    depth: int,
    sampled: bool,
    ends: frozenset[int],
    seed: int = 0,
    at_most: int | None = None,
) -> list[Answer]:
    """Draft every answer of `data` (of the first `at_most` batches), greedily or as at temperature 1."""
    rng = np.random.default_rng(seed)
    found: list[Answer] = []
    for chosen in epoch(data.lengths, batch_tokens, 0)[:at_most]:
        batch = make_batch(data, chosen, batch_tokens, lesson.target.device)
        result = outcomes(weights, lesson, batch, source.fetch(batch), depth)
        rank, chance = result.rank.cpu().numpy(), result.chance.cpu().numpy()
        stands = rng.random(chance.shape) < chance if sampled else rank == 0
        foreseen = rank <= FAN_OUT
        first = 0
        for index, count in batch.rows:
            begin = int(data.starts[index])
            marks = data.answer[begin : begin + count].numpy()
            for a, e in _runs(marks):
                if a == 0 or e == a:
                    continue  # nothing before it to condition on, or nothing after its first token
                columns = slice(first + a - 1, first + e - 1)
                inside = np.arange(e - a) + np.arange(1, depth + 1)[:, None] <= e - a
                last = int(data.tokens[begin + e])
                found.append(Answer(stands[:, columns] & inside, foreseen[:, columns] & inside, last in ends))
            first += count
    return found


def _runs(marks: np.ndarray[Any, np.dtype[Any]]) -> Iterator[tuple[int, int]]:
    """First and last index of every run of True."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], marks, [False])).astype(np.int8)))
    for begin, end in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
        yield begin, end - 1


def answer_prompts(
    target: Target,
    marks: TurnMarks,
    prompts: Sequence[list[int]],
    *,
    temperature: float,
    seeds: Sequence[int],
    max_tokens: int,
    progress: Progress,
) -> Conversations:
    """The target's own answers to prompts (token ids, ready to be answered), once for each seed."""
    longest = max(map(len, prompts)) + max_tokens + 1
    parts = []
    for seed in seeds:
        config = SynthesisConfig(
            conversations=len(prompts), slots=len(prompts), max_length=longest, temperatures=(temperature,),
            weights=(1.0,), fork_rate=0.0, follow_ups=0.0,
        )  # fmt: skip
        jobs = iter([Job(tokens, False, temperature, len(tokens) + max_tokens) for tokens in prompts])
        parts.append(write(target, marks, config, jobs, seed=seed, cut_loops=False, progress=progress))
    return merge(parts)


def merge(parts: Sequence[Conversations]) -> Conversations:
    """Several as one."""
    starts, offset = [torch.zeros(1, dtype=torch.int64)], 0
    for part in parts:
        starts.append(part.starts[1:] + offset)
        offset += int(part.starts[-1])
    joined = {
        name: torch.cat([getattr(part, name) for part in parts]) for name in ("tokens", "answer", "forked", "greedy")
    }
    return Conversations(starts=torch.cat(starts), **joined)
