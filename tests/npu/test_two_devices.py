"""A target on two devices, and a draft worker on a device of its own, over HCCL: the tokens of one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ssd_ascend.backends.base import Backend
from ssd_ascend.config.engine import EngineConfig
from ssd_ascend.config.speculation import SpeculationConfig
from ssd_ascend.core.stats import EngineStats
from ssd_ascend.engine.builder import build_engine
from ssd_ascend.errors import ConfigError
from ssd_ascend.parity.checkpoints import write_checkpoints
from tests.engine.harness import drive, greedy, prompts_of

PROMPTS = prompts_of([1, 5, 140])
Decode = Callable[..., tuple[list[list[int]], EngineStats]]


@pytest.fixture(scope="module")
def decode(backend: Backend, tmp_path_factory: pytest.TempPathFactory) -> Decode:
    folder = tmp_path_factory.mktemp("models")
    write_checkpoints(folder)

    def run(drafter: str | None = None, *, ranks: int = 1, **speculation: Any) -> tuple[list[list[int]], EngineStats]:
        config = SpeculationConfig()
        if drafter is not None:
            config = SpeculationConfig(
                drafter=drafter,
                draft=str(folder / drafter),
                lookahead=4,
                fan_out=2,
                worker_timeout_s=60.0,
                **speculation,
            )
        engine = build_engine(
            EngineConfig(
                model=str(folder / "target"), device="npu", dtype="float16", tensor_parallel=ranks, max_num_seqs=4,
                max_model_len=256, max_batched_tokens=256, speculation=config,
            )
        )  # fmt: skip
        try:
            found = drive(engine, PROMPTS, greedy(24))
        finally:
            engine.close()
        return found.tokens, found.stats

    return run


@pytest.fixture(scope="module")
def alone(decode: Decode) -> list[list[int]]:
    return decode()[0]


@pytest.fixture(autouse=True)
def _for_other_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSD_NPU_EMULATOR", "1")


def test_a_target_on_two_devices(decode: Decode, alone: list[list[int]]) -> None:
    tokens, stats = decode("model", ranks=2, speculator="sd")
    assert tokens == alone
    assert stats.speculation.accepted > 20


@pytest.mark.parametrize("drafter", ["model", "eagle3"])
def test_a_worker_on_a_device_of_its_own(decode: Decode, alone: list[list[int]], drafter: str) -> None:
    tokens, stats = decode(drafter, speculator="ssd", draft_device="npu:1", worker_line="device")
    assert tokens == alone
    assert stats.speculation.accepted > 0
    assert stats.speculation.hits > 0
    assert stats.speculation.worker_restarts == 0


@pytest.mark.parametrize(("device", "words"), [(None, "needs two of them"), ("cpu", "between npu and cpu")])
def test_lines_that_cannot_be(decode: Decode, device: str | None, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        decode("model", speculator="ssd", draft_device=device, worker_line="device")
