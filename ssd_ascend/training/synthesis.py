"""The target writes its own training text: thousands of conversations side by side, one token of each a step.

The engine's runtime without its scheduler: a `ModelRunner` over a cache in which every slot owns a fixed stretch of
blocks. Prompts are fed token by token, sampling, turn-taking and forks happen on the device, and where the device has
graphs a step is one replay. Every few steps the host collects what is finished and puts new conversations in its place.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator

import torch

from ssd_ascend.backends.base import Graph
from ssd_ascend.config.training import SynthesisConfig
from ssd_ascend.core.attention import AttentionMetadata
from ssd_ascend.core.batch import ForwardBatch, Mode
from ssd_ascend.kv.cache import KVCache
from ssd_ascend.log import get_logger
from ssd_ascend.runtime.model_runner import ModelRunner
from ssd_ascend.training.conversations import Conversations, pack
from ssd_ascend.training.prompts import Openings, TurnMarks
from ssd_ascend.training.target import Target

_log = get_logger(__name__)
_COLLECT_EVERY = 8
_TINY = 1e-10
Progress = Callable[[int, int], None]
Prompt = tuple[list[int], bool, float]
"""Tokens up to where writing begins, whether that is within the user's turn, and the temperature of answers."""
Job = tuple[Prompt, int]
"""With the number of rounds that are to follow the first."""


class Slots:
    """The state of all conversations being written, on the device; `step` advances each by one token."""

    def __init__(self, target: Target, marks: TurnMarks, config: SynthesisConfig) -> None:
        device, runner = target.device, target.loaded.runner
        self.count, self.length = config.slots, config.max_length
        self._config = config
        block = runner.block_size
        per_slot = -(-self.length // block)
        kv = KVCache(
            runner.attention, num_layers=target.loaded.config.num_layers, num_blocks=self.count * per_slot,
            block_size=block, dtype=target.activations, device=device,
        )  # fmt: skip
        self._runner = ModelRunner(target.loaded.model, kv, runner.attention, device)
        self._host_lengths = not target.backend.capabilities.device_lengths
        tail = max(len(marks.after_user), len(marks.after_answer or ()))

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        # -1: not written yet. The extra columns take marks that no longer fit.
        self.tokens = torch.full((self.count, self.length + tail + 2), -1, dtype=torch.int64, device=device)
        self.answer = zeros(self.count, self.length + tail + 2, dtype=torch.bool)
        self.forked = zeros(self.count, self.length + tail + 2, dtype=torch.bool)
        self.at = zeros(self.count)
        """Position of the token fed next."""
        self.asking = zeros(self.count, dtype=torch.bool)
        self.done = torch.ones(self.count, dtype=torch.bool, device=device)
        self.temperature = zeros(self.count, dtype=torch.float32)
        self.more = zeros(self.count)
        """Rounds that are to follow."""
        self.asked = zeros(self.count)
        """Tokens written in this user turn."""
        self._after_user = torch.tensor(marks.after_user, device=device)
        self._after_answer = torch.tensor(marks.after_answer or [], dtype=torch.int64, device=device)
        self._is_end = zeros(target.loaded.config.vocab_size, dtype=torch.bool)
        self._is_end[torch.tensor(sorted(marks.ends), device=device)] = True
        self._is_user_end = zeros(target.loaded.config.vocab_size, dtype=torch.bool)
        self._is_user_end[marks.after_user[0]] = True
        self._user_end = marks.after_user[0]
        self._rows = torch.arange(self.count, device=device)
        self._table = torch.arange(self.count * per_slot, dtype=torch.int32, device=device).view(self.count, per_slot)
        self._query_start = torch.arange(self.count + 1, dtype=torch.int32, device=device)
        self._block = block
        self._graph: Graph | None = None
        self._graphs = None if self._host_lengths else target.backend.graphs(device)

    def put(self, slots: list[int], prompts: list[Prompt], rounds: list[int]) -> None:
        """Begin new conversations in these slots."""
        where = torch.tensor(slots, device=self.at.device)
        width = self.tokens.shape[1]
        rows = torch.full((len(slots), width), -1, dtype=torch.int64)
        for row, (tokens, _, _) in zip(rows, prompts, strict=True):
            row[: len(tokens)] = torch.tensor(tokens)
        self.tokens[where] = rows.to(self.at.device)
        self.answer[where] = False
        self.forked[where] = False
        self.at[where] = 0
        self.asked[where] = 0
        self.asking[where] = torch.tensor([prompt[1] for prompt in prompts], device=self.at.device)
        self.temperature[where] = torch.tensor([prompt[2] for prompt in prompts], device=self.at.device)
        self.more[where] = torch.tensor(rounds, device=self.at.device)
        self.done[where] = False

    def run(self, steps: int) -> None:
        """Advance by `steps` tokens."""
        if self._graphs is not None and self._graph is None:
            try:
                self._graph = self._graphs.capture(self.step)  # which runs it once, too
            except RuntimeError as error:
                _log.info("writing without a graph: %s", str(error).partition("\n")[0])
                self._graphs = None
        for _ in range(steps):
            if self._graph is not None:
                self._graph.replay()
            else:
                self.step()

    @torch.inference_mode()
    def step(self) -> None:
        """Feed every slot's token, write the next. Finished slots stand still."""
        logits = self._forward()
        written, forked = self._sample(logits)
        after = self.at + 1
        planned = self.tokens[self._rows, after]
        free = planned < 0
        too_long = self.asking & (self.asked >= self._config.max_user_tokens)
        written = torch.where(too_long, self._user_end, written)
        token = torch.where(free, written, planned)
        going = ~self.done
        self._write(self.tokens, after, token, going)
        self._write(self.answer, after, free & ~self.asking, going)
        self._write(self.forked, after, forked & free & ~self.asking, going)
        self.asked += (going & free & self.asking).long()
        user_ended = going & free & self.asking & self._is_user_end[token]
        answer_ended = going & free & ~self.asking & self._is_end[token]
        self._plan(user_ended, after, self._after_user[1:])
        again = answer_ended & (self.more > 0)
        self._plan(again, after, self._after_answer)
        self.more -= again.long()
        self.asked.masked_fill_(again, 0)
        self.asking.copy_((self.asking & ~user_ended) | again)
        self.at += going.long()
        self.done |= (answer_ended & ~again) | (self.at >= self.length - 1)

    def _forward(self) -> torch.Tensor:
        """Logits [S, V] after the tokens at `at`."""
        ids = self.tokens[self._rows, self.at].clamp_min(0)  # a slot that was never used holds none
        slots = self._rows * (self._table.shape[1] * self._block) + self.at
        lengths = (self.at + 1).tolist() if self._host_lengths else [self.length] * self.count
        meta = AttentionMetadata(
            query_lens_host=[1] * self.count,
            kv_lens_host=lengths,
            query_start=self._query_start,
            kv_lens=(self.at + 1).to(torch.int32),
            block_table=self._table,
            slot_mapping=slots,
        )
        self._runner.attention.plan(meta)
        return self._runner.model(ForwardBatch(Mode.DECODE, ids, self.at.clone(), meta), self._runner.kv.layers).logits

    def _sample(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """One token a row: drawn at its temperature, or, now and then, a likely one in its place (and then True)."""
        config = self._config
        heat = torch.where(self.asking, config.user_temperature, self.temperature)
        noise = torch.empty_like(logits).exponential_().clamp_min_(_TINY).log_().neg_()
        drawn = (logits + noise * heat.unsqueeze(1)).argmax(-1)
        if config.fork_rate <= 0.0:
            return drawn, torch.zeros_like(self.done)
        best = logits.amax(-1)
        others = logits.scatter(1, drawn.unsqueeze(1), float("-inf"))
        other = (others + noise * 0.5).argmax(-1)
        likely = logits.gather(1, other.unsqueeze(1)).squeeze(1) > best - config.fork_floor
        chosen = torch.rand(self.count, device=logits.device) < config.fork_rate
        forked = likely & chosen & ~self.asking
        return torch.where(forked, other, drawn), forked

    def _write(self, table: torch.Tensor, column: torch.Tensor, value: torch.Tensor, where: torch.Tensor) -> None:
        """table[row, column[row]] = value[row] in the rows of the mask `where`."""
        kept = table[self._rows, column]
        table[self._rows, column] = torch.where(where, value, kept)

    def _plan(self, where: torch.Tensor, after: torch.Tensor, marks: torch.Tensor) -> None:
        """Lay marks down behind position `after` in the rows of the mask."""
        for offset in range(len(marks)):
            self._write(self.tokens, after + 1 + offset, marks[offset].expand(self.count), where)


def synthesize(
    target: Target, openings: Openings, marks: TurnMarks, config: SynthesisConfig, *, seed: int, progress: Progress
) -> Conversations:
    """`config.conversations` of them, those without an answer left out; the same again for the same seed and device."""
    rng = random.Random(seed)
    repeats = marks.after_answer is not None

    def jobs() -> Iterator[Job]:
        for _ in range(config.conversations):
            yield _prompt(openings, marks, config, rng), int(repeats and rng.random() < config.follow_ups)

    return write(target, marks, config, jobs(), config.conversations, seed=seed, cut_loops=True, progress=progress)


def write(
    target: Target,
    marks: TurnMarks,
    config: SynthesisConfig,
    jobs: Iterator[Job],
    count: int,
    *,
    seed: int,
    cut_loops: bool,
    progress: Progress,
) -> Conversations:
    """Have `count` jobs written, in the order they are finished in. `cut_loops`: see `sane_length`."""
    torch.manual_seed(seed)
    slots = Slots(target, marks, config)
    written, exhausted = 0, False
    rows: list[list[torch.Tensor]] = [[], [], []]
    heat: list[torch.Tensor] = []
    while written < count:
        idle = slots.done.nonzero().flatten()
        finished = idle[slots.tokens[idle, 0] >= 0]
        if len(finished):
            _collect(slots, finished, rows, heat, cut_loops=cut_loops)
            written += len(finished)
            slots.tokens[finished] = -1
        if not exhausted and len(idle):
            begun = list(itertools.islice(jobs, len(idle)))
            exhausted = len(begun) < len(idle)
            if begun:
                slots.put(idle.tolist()[: len(begun)], [job[0] for job in begun], [job[1] for job in begun])
        if written < count:
            slots.run(_COLLECT_EVERY)
        progress(written, count)
    kept = [i for i, marked in enumerate(rows[1]) if bool(marked.any())]
    chosen = tuple([part[i] for i in kept] for part in rows)
    return pack(chosen, torch.cat(heat)[torch.tensor(kept, dtype=torch.int64)] == 0.0)


def _prompt(openings: Openings, marks: TurnMarks, config: SynthesisConfig, rng: random.Random) -> Prompt:
    opening = openings.draw(rng)
    (heat,) = rng.choices(config.temperatures, config.weights)
    tokens = [*marks.before, *opening.tokens] + ([] if opening.is_open else marks.after_user)
    return tokens[: config.max_length - 2], opening.is_open, heat


def _collect(
    slots: Slots, finished: torch.Tensor, rows: list[list[torch.Tensor]], heat: list[torch.Tensor], *, cut_loops: bool
) -> None:
    """Take the finished conversations over to the host, cut, if asked for, where they began to go in circles."""
    tokens, answer, forked = slots.tokens[finished], slots.answer[finished], slots.forked[finished]
    lengths = slots.at[finished] + 1
    ends = (sane_length(tokens, lengths) if cut_loops else lengths).tolist()
    heat.append(slots.temperature[finished].cpu())
    for part, kept in zip((tokens.to(torch.int32), answer, forked), rows, strict=True):
        kept += [row[:end].clone() for row, end in zip(part.cpu(), ends, strict=True)]


def sane_length(tokens: torch.Tensor, lengths: torch.Tensor, *, longest: int = 48, repeats: int = 3) -> torch.Tensor:
    """How much of each row [n, L] to keep: a tail that repeats itself is cut after `repeats` periods of up to `longest`
    tokens. Small models end half of their greedy answers in such a loop, which teaches nothing more."""
    columns = torch.arange(tokens.shape[1], device=tokens.device)
    kept = lengths.clone()
    for period in range(1, longest + 1):
        same = tokens[:, period:] == tokens[:, :-period]
        broken = (~same) & (columns[period:] < lengths.unsqueeze(1))
        last_break = (broken * (columns[period:] + 1)).amax(1)  # the loop's first full period begins after it - period
        begin = (last_break - period).clamp_min(0)
        looping = lengths - begin >= period * (repeats + 1)
        kept = torch.where(looping, torch.minimum(kept, begin + period * repeats), kept)
    return kept
