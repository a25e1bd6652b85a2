"""What becomes of a step on several ranks when a device fails: asked once whether a rank was lost, not twice over."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from ssd_ascend.core.batch import ForwardBatch, Mode, ModelOutput
from ssd_ascend.distributed import launch
from ssd_ascend.distributed.control import Leader
from ssd_ascend.distributed.launch import Ranks
from ssd_ascend.engine.all_ranks import AllRanks
from ssd_ascend.errors import WorkerError
from ssd_ascend.runtime.inputs import Row, build_batch

ROWS = [Row([5], 3, [1], 1)]
DONE = ModelOutput(logits=torch.zeros(1, 8))


class Runner:
    """As much of a model as a step takes."""

    block_size, device, graphs = 16, torch.device("cpu"), None

    def __init__(self, forward: Callable[[], ModelOutput]) -> None:
        self._forward = forward

    def forward(self, batch: ForwardBatch) -> ModelOutput:
        return self._forward()


class OneOfOne:
    """Rank 0 without the others."""

    rank, size = 0, 1

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        return x


@pytest.fixture(params=["run", "run_after", "run_staged"])
def step(request: pytest.FixtureRequest) -> Callable[[AllRanks], ModelOutput]:
    """Each way of having a step run."""

    def run_staged(target: AllRanks) -> ModelOutput:
        return target.run_staged(
            build_batch(Mode.DECODE, ROWS, block_size=16, device=torch.device("cpu")), ROWS, placed=True
        )

    ways: dict[str, Callable[[AllRanks], ModelOutput]] = {
        "run": lambda target: target.run(Mode.DECODE, ROWS),
        "run_after": lambda target: target.run_after(DONE, [Row([0], 3, [1], 1)]),
        "run_staged": run_staged,
    }
    return ways[request.param]


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    monkeypatch.setattr(launch, "_LAST_WORDS_S", 0.01)
    leader = Leader({})
    yield Ranks(OneOfOne(), leader, contextlib.ExitStack())  # type: ignore[arg-type]
    leader.close()


def test_an_ordinary_error_waits_for_last_words_once(
    ranks: Ranks, step: Callable[[AllRanks], ModelOutput], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[float] = []
    own = ranks.leader.lost

    def lost(**options: Any) -> WorkerError | None:
        asked.append(options["wait_s"])
        return own(**options)

    def fail() -> ModelOutput:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(ranks.leader, "lost", lost)
    target = AllRanks(Runner(fail), ranks)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="out of memory"), target.explaining():
        step(target)
    assert asked == [0.01]


def test_a_loss_during_a_forward_ends_the_step_before_its_output_is_waited_for(
    ranks: Ranks, step: Callable[[AllRanks], ModelOutput]
) -> None:
    def forward() -> ModelOutput:
        ranks.leader.failure = "rank 1 is gone"
        return DONE

    target = AllRanks(Runner(forward), ranks)  # type: ignore[arg-type]
    with pytest.raises(WorkerError, match="rank 1 is gone"):
        step(target)
