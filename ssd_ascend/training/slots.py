"""Conversations being written, thousands side by side, one token of each a step; `synthesis.py` feeds and empties them.

The engine's runtime without its scheduler: a `ModelRunner` over a cache in which every slot owns a fixed stretch of
blocks. Prompts are fed token by token, sampling, turn-taking and forks happen on the device, and where the device has
graphs a step is one replay.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from ssd_ascend.backends.base import Graph
from ssd_ascend.config.training import SynthesisConfig
from ssd_ascend.core.attention import AttentionMetadata
from ssd_ascend.core.batch import ForwardBatch, Mode
from ssd_ascend.errors import first_line
from ssd_ascend.kv.cache import KVCache
from ssd_ascend.log import get_logger
from ssd_ascend.runtime.model_runner import ModelRunner
from ssd_ascend.training.prompts import TurnMarks
from ssd_ascend.training.target import Target

_log = get_logger(__name__)
_TINY = 1e-10


class Job(NamedTuple):
    """A conversation to be written: its first tokens, whether they break off within the user's turn, the temperature of
    answers, tokens in all at most, and rounds that are to follow the first."""

    tokens: list[int]
    is_open: bool
    temperature: float
    limit: int
    more: int = 0


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
        self.limit = zeros(self.count)
        """Tokens that its conversation may have."""
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

    def put(self, slots: list[int], jobs: list[Job]) -> None:
        """Begin new conversations in these slots."""
        where = torch.tensor(slots, device=self.at.device)
        rows = np.full((len(slots), self.tokens.shape[1]), -1, dtype=np.int64)
        for row, job in zip(rows, jobs, strict=True):
            row[: len(job.tokens)] = job.tokens
        self.tokens[where] = torch.from_numpy(rows).to(self.at.device)
        self.answer[where] = False
        self.forked[where] = False
        self.at[where] = 0
        self.asked[where] = 0
        self.asking[where] = torch.tensor([job.is_open for job in jobs], device=self.at.device)
        self.temperature[where] = torch.tensor([job.temperature for job in jobs], device=self.at.device)
        self.limit[where] = torch.tensor([job.limit for job in jobs], device=self.at.device)
        self.more[where] = torch.tensor([job.more for job in jobs], device=self.at.device)
        self.done[where] = False

    def run(self, steps: int) -> None:
        """Advance by `steps` tokens."""
        if self._graphs is not None and self._graph is None:
            try:
                self._graph = self._graphs.capture(self.step)  # which runs it once, too
            except RuntimeError as error:
                _log.info("writing without a graph: %s", first_line(error))
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
        self.done |= (answer_ended & ~again) | (self.at >= self.limit - 1)

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
