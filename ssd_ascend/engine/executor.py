"""Runs the target for the engine: builds the step's batch and forwards it (on every rank, once there are several)."""

from __future__ import annotations

from ssd_ascend import trace
from ssd_ascend.core.batch import ModelOutput
from ssd_ascend.core.plan import StepPlan
from ssd_ascend.core.speculation import Speculation
from ssd_ascend.runtime.inputs import build_inputs
from ssd_ascend.runtime.model_runner import ModelRunner


class Executor:
    """The target on one rank."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner

    def forward(self, plan: StepPlan, speculation: Speculation) -> ModelOutput:
        """Prefill, decode and verify rows in one ragged batch; logits rows lie in the order of `plan.sampled`."""
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
