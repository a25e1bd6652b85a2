"""The target writes its own training text: conversations that begin with our openings, written in `slots.py`.

Every few steps the host collects what is finished and puts new conversations in its place; it draws those while the
device is busy.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator

import torch

from ssd_ascend.config.training import SynthesisConfig
from ssd_ascend.training.conversations import Conversations
from ssd_ascend.training.prompts import Openings, TurnMarks
from ssd_ascend.training.slots import Job, Slots
from ssd_ascend.training.target import Target

_COLLECT_EVERY = 8
_CUT_ROWS = 4096
Progress = Callable[[int, int], None]


def synthesize(
    target: Target, openings: Openings, marks: TurnMarks, config: SynthesisConfig, *, seed: int, progress: Progress
) -> Conversations:
    """`config.conversations` of them, those without an answer left out; the same again for the same seed and device."""
    rng = random.Random(seed)
    repeats = marks.after_answer is not None

    def jobs() -> Iterator[Job]:
        for _ in range(config.conversations):
            more = int(repeats and rng.random() < config.follow_ups)
            yield _job(openings, marks, config, rng)._replace(more=more)

    return write(target, marks, config, jobs(), seed=seed, cut_loops=True, progress=progress)


def _job(openings: Openings, marks: TurnMarks, config: SynthesisConfig, rng: random.Random) -> Job:
    opening = openings.draw(rng)
    (heat,) = rng.choices(config.temperatures, config.weights)
    tokens = [*marks.before, *opening.tokens] + ([] if opening.is_open else marks.after_user)
    return Job(tokens[: config.max_length - 2], opening.is_open, heat, config.max_length)


def write(
    target: Target,
    marks: TurnMarks,
    config: SynthesisConfig,
    jobs: Iterator[Job],
    *,
    seed: int,
    cut_loops: bool,
    progress: Progress,
) -> Conversations:
    """Have `config.conversations` jobs written, in the order they are finished in. `cut_loops`: see `sane_length`."""
    torch.manual_seed(seed)
    slots, finished, count = Slots(target, marks, config), _Finished(), config.conversations
    waiting: deque[Job] = deque()
    _draw(waiting, jobs, config.slots)
    while finished.count < count:
        idle = slots.done.nonzero().flatten()
        ended = idle[slots.tokens[idle, 0] >= 0]
        if len(ended):
            finished.take(slots, ended)
            slots.tokens[ended] = -1
        begun = [waiting.popleft() for _ in range(min(len(waiting), len(idle)))]
        if begun:
            slots.put(idle.tolist()[: len(begun)], begun)
        if finished.count < count:
            slots.run(_COLLECT_EVERY)
            _draw(waiting, jobs, max(16, config.slots // 8))
        progress(finished.count, count)
    return finished.conversations(cut_loops=cut_loops)


def _draw(waiting: deque[Job], jobs: Iterator[Job], most: int) -> None:
    """Let up to `most` jobs wait."""
    while len(waiting) < most:
        job = next(jobs, None)
        if job is None:
            return
        waiting.append(job)


class _Finished:
    """What has been taken over to the host, in blocks of rows as wide as the slots."""

    def __init__(self) -> None:
        self.count = 0
        self._blocks: list[tuple[torch.Tensor, ...]] = []

    def take(self, slots: Slots, rows: torch.Tensor) -> None:
        """Copy these rows."""
        parts = (slots.tokens, slots.answer, slots.forked, slots.at + 1, slots.temperature)
        tokens, *rest = (part[rows] for part in parts)
        self._blocks.append((tokens.to(torch.int32).cpu(), *(part.cpu() for part in rest)))
        self.count += len(rows)

    def conversations(self, *, cut_loops: bool) -> Conversations:
        """All of them, without those that hold no answer."""
        tokens, answer, forked, lengths, heat = (torch.cat(parts) for parts in zip(*self._blocks, strict=True))
        if cut_loops:
            pieces = zip(tokens.split(_CUT_ROWS), lengths.split(_CUT_ROWS), strict=True)
            lengths = torch.cat([sane_length(*piece) for piece in pieces])
        inside = torch.arange(tokens.shape[1]) < lengths.unsqueeze(1)
        answered = (answer & inside).any(1)
        inside &= answered.unsqueeze(1)
        starts = torch.nn.functional.pad(lengths[answered].cumsum(0), (1, 0))
        return Conversations(tokens[inside], answer[inside], forked[inside], starts, heat[answered] == 0.0)


def sane_length(tokens: torch.Tensor, lengths: torch.Tensor, *, longest: int = 48, repeats: int = 3) -> torch.Tensor:
    """How much of each row [n, L] to keep: a tail that repeats itself is cut after `repeats` periods of up to `longest`
    tokens. Small models end half of their greedy answers in such a loop, which teaches nothing more."""
    columns = torch.arange(tokens.shape[1], device=tokens.device)
    kept = lengths.clone()
    for period in range(1, min(longest, tokens.shape[1] - 1) + 1):
        same = tokens[:, period:] == tokens[:, :-period]
        broken = (~same) & (columns[period:] < lengths.unsqueeze(1))
        last_break = (broken * (columns[period:] + 1)).amax(1)  # the loop's first full period begins after it - period
        begin = (last_break - period).clamp_min(0)
        looping = lengths - begin >= period * (repeats + 1)
        kept = torch.where(looping, torch.minimum(kept, begin + period * repeats), kept)
    return kept
