"""Runs the target for the engine: what is under way already is taken, the rest is run, and the next step queued early.

The forwards themselves, on every rank the target has, are `all_ranks.py`.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from contextlib import AbstractContextManager

import torch

from ssd_ascend import trace
from ssd_ascend.core.batch import Mode, ModelOutput
from ssd_ascend.core.plan import StepPlan
from ssd_ascend.core.speculation import Speculation
from ssd_ascend.distributed.launch import Ranks
from ssd_ascend.engine.all_ranks import AllRanks
from ssd_ascend.engine.run_ahead import Ahead
from ssd_ascend.runtime.inputs import Row, target_rows
from ssd_ascend.runtime.model_runner import ModelRunner


class Executor:
    """The target. `ranks` are the other ones of a target that has several."""

    def __init__(self, runner: ModelRunner, ranks: Ranks | None = None) -> None:
        self.runner = runner
        self.target = AllRanks(runner, ranks)
        self.ahead: Ahead | None = None
        """What queues steps early."""
        self.kv, self.block_size, self.device = runner.kv, runner.block_size, runner.device

    @property
    def slots_ahead(self) -> int:
        """See `Scheduler`."""
        return 0 if self.ahead is None else self.ahead.slots

    def forward(self, plan: StepPlan, speculation: Speculation) -> ModelOutput:
        """Prefill, decode and verify rows in one ragged batch; logits rows lie in the order of `plan.sampled`.

        Raises WorkerError when a rank is lost.
        """
        if self.ahead is not None:
            return self._forward_ahead(plan, speculation, self.ahead)
        return self._forward(plan, speculation)

    def _forward(self, plan: StepPlan, speculation: Speculation) -> ModelOutput:
        drafts = _on_host(speculation)
        if drafts is not None:
            return self.run(*target_rows(plan, drafts))
        mode, rows = target_rows(plan, [[0] * n for n in speculation.num_tokens])
        return self.run(mode, rows, drafts=speculation)

    def _forward_ahead(self, plan: StepPlan, speculation: Speculation, ahead: Ahead) -> ModelOutput:
        """The step itself, as far as it is not under way already, and then the one after it."""
        output = ahead.take(plan, speculation)
        if output is None:
            output = self._forward(plan, speculation)
        elif plan.prefills:
            logits = output.logits.clone()  # graphs share their memory: the next replay may write there
            rest = self.run(*target_rows(StepPlan([], plan.prefills), []))
            return ModelOutput(logits=torch.cat((logits, rest.logits)))
        with trace.span("ahead"):
            return ahead.queue_next(plan, speculation, output)

    def run(self, mode: Mode, rows: Rows[Row], *, drafts: Speculation | None = None) -> ModelOutput:
        """One forward of these rows on every rank. `drafts` replaces placeholders by tokens that the device has.

        Raises WorkerError when a rank is lost.
        """
        return self.target.run(mode, rows, drafts=drafts)

    def explaining(self) -> AbstractContextManager[None]:
        """Inside, an error of the device that comes of a lost rank is a WorkerError."""
        return self.target.explaining()

    def check(self) -> None:
        """Raises WorkerError when a rank was lost while the device worked: its output means nothing then."""
        self.target.check()

    def health(self) -> str | None:
        """None when all ranks are there, else one sentence."""
        return self.target.health()

    def close(self) -> None:
        """Send the other ranks home."""
        self.target.close()


def _on_host(speculation: Speculation) -> list[list[int]] | None:
    """The drafts of each row where the host has them, None where only the device does."""
    tokens, known = speculation.tokens, speculation.host_tokens
    if speculation.is_empty or tokens is None:
        return [[] for _ in speculation.num_tokens]
    if known is None and tokens.device.type != "cpu":
        return None
    rows = tokens.tolist() if known is None else known
    return [row[:n] for row, n in zip(rows, speculation.num_tokens, strict=True)]
