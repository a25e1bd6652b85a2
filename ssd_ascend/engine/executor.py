"""Runs the target for the engine: builds the step's batch and forwards it, on every rank the target has.

Rank 0 says what the step is, in one small message, before it builds its own batch; so the ranks prepare it together.
"""

from __future__ import annotations

from ssd_ascend import trace
from ssd_ascend.core.batch import ModelOutput
from ssd_ascend.core.plan import StepPlan
from ssd_ascend.core.speculation import Speculation
from ssd_ascend.distributed.launch import Ranks
from ssd_ascend.engine.step_message import pack_step
from ssd_ascend.runtime.inputs import build_batch, build_inputs, place_drafts, target_rows
from ssd_ascend.runtime.model_runner import ModelRunner

_WAIT_S = 2.0
"""A broken collective may be seen before the broken line that explains it."""


class Executor:
    """The target. `ranks` are the other ones of a target that has several."""

    def __init__(self, runner: ModelRunner, ranks: Ranks | None = None) -> None:
        self.runner = runner
        self._ranks = ranks

    def forward(self, plan: StepPlan, speculation: Speculation) -> ModelOutput:
        """Prefill, decode and verify rows in one ragged batch; logits rows lie in the order of `plan.sampled`.

        Raises WorkerError when a rank is lost.
        """
        if self._ranks is not None:
            return self._lead(self._ranks, plan, speculation)
        with trace.span("inputs"):
            batch = build_inputs(
                plan,
                speculation,
                block_size=self.runner.block_size,
                device=self.runner.device,
                staging=self.runner.graphs,
            )
        with trace.span("forward"):
            return self.runner.forward(batch)

    def check(self) -> None:
        """Raises WorkerError when a rank was lost while the device worked: its output means nothing then."""
        if self._ranks is not None:
            self._ranks.leader.check()

    def health(self) -> str | None:
        """None when all ranks are there, else one sentence."""
        return None if self._ranks is None else self._ranks.leader.failure

    def close(self) -> None:
        """Send the other ranks home."""
        if self._ranks is not None:
            self._ranks.close()

    # -- several ranks ---------------------------------------------------------------------------------------------

    def _lead(self, ranks: Ranks, plan: StepPlan, speculation: Speculation) -> ModelOutput:
        with trace.span("inputs"):
            drafts = _on_host(speculation)
            follow = drafts is None
            mode, rows = target_rows(plan, [[0] * n for n in speculation.num_tokens] if drafts is None else drafts)
            ranks.leader.post(pack_step(mode, rows, drafts_follow=follow))
            batch = build_batch(
                mode,
                rows,
                block_size=self.runner.block_size,
                device=self.runner.device,
                staging=self.runner.graphs,
            )
        with trace.span("forward"):
            try:
                if follow:
                    place_drafts(batch.input_ids, speculation)
                    ranks.collectives.broadcast(batch.input_ids)
                return self.runner.forward(batch)
            except RuntimeError as error:  # how every collective library says that it lost somebody
                if lost := ranks.leader.lost(wait_s=_WAIT_S):
                    raise lost from error
                raise


def _on_host(speculation: Speculation) -> list[list[int]] | None:
    """The drafts of each row where the host has them, None where only the device does."""
    tokens = speculation.tokens
    if speculation.is_empty or tokens is None:
        return [[] for _ in speculation.num_tokens]
    if tokens.device.type != "cpu":
        return None
    return [row[:n] for row, n in zip(tokens.tolist(), speculation.num_tokens, strict=True)]
