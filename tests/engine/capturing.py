"""A backend that claims to capture, and to work while the host goes on: its graphs are the functions, run again.

So static memory, padding and what is queued ahead are tested on any machine; a GPU runs the same tests. As there,
graphs share their memory: a replay spoils what the others left.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import pytest
import torch

from ssd_ascend.backends.base import Backend
from ssd_ascend.backends.registry import load_backend
from ssd_ascend.core.batch import ForwardBatch, ModelOutput
from ssd_ascend.core.plan import StepPlan
from ssd_ascend.core.speculation import Speculation
from ssd_ascend.engine import builder, gather, rank
from ssd_ascend.engine.run_ahead import Ahead
from ssd_ascend.runtime.graphs import GraphRunner
from tests.engine.harness import DEVICE

T = TypeVar("T")


class _Again:
    def __init__(self, run: Callable[[], None]) -> None:
        self.replay = run


class _Captures:
    def __init__(self, inner: Backend) -> None:
        self._inner = inner
        self.capabilities = replace(inner.capabilities, graphs=True, padded_graphs=True, host_memory=False)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def graphs(self, device: torch.device) -> _Captures:
        return self

    def capture(self, run: Callable[[], None]) -> _Again:
        run()
        return _Again(run)


def capture_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that are built from now on capture whatever the device, on every rank they have."""
    if DEVICE == "cpu":
        monkeypatch.setenv("SSD_CPU_KERNELS", "0")
        own = GraphRunner.replay

        def replay(self: GraphRunner, batch: ForwardBatch) -> ModelOutput | None:
            output = own(self, batch)
            for captured in self._captured if output is not None else ():
                other = captured.outputs[0]
                if captured.buffers.batch.input_ids is not batch.input_ids:
                    for left in (other.logits, other.greedy, other.hidden, other.features):
                        if left is not None:
                            left.fill_(-1)
            return output

        monkeypatch.setattr(GraphRunner, "replay", replay)
        monkeypatch.setattr(builder, "load_backend", lambda name: _Captures(load_backend(name)))
        monkeypatch.setattr(gather, "_ENTRY", f"{__name__}:rank_main")


def rank_main(spec: Mapping[str, Any]) -> None:
    """Body of another rank's process."""
    builder.load_backend = lambda name: _Captures(load_backend(name))  # type: ignore[assignment]
    rank.main(spec)


def record_taken(
    monkeypatch: pytest.MonkeyPatch, kind: type[Ahead], told: Callable[[StepPlan, Speculation], T]
) -> list[T]:
    """What `told` makes of each step that was under way when `kind` was asked for it, from now on."""
    found: list[T] = []
    own = kind.take

    def take(self: Ahead, plan: StepPlan, speculation: Speculation) -> ModelOutput | None:
        output = own(self, plan, speculation)
        if output is not None:
            found.append(told(plan, speculation))
        return output

    monkeypatch.setattr(kind, "take", take)
    return found
