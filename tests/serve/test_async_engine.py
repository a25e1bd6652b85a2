"""The front end's side of an engine process that misbehaves: it dies, or talks nonsense, before it was ever ready."""

from __future__ import annotations

import asyncio
import sys

import pytest

from ssd_ascend.config.engine import EngineConfig
from ssd_ascend.core.sampling import SamplingParams
from ssd_ascend.engine.async_engine import AsyncEngine, EngineUnavailableError, Loss, State
from ssd_ascend.errors import WorkerError
from tests.unit.test_outputs import Letters

DIES = "import sys; sys.exit(3)"
BABBLES = "import os, sys, time; os.write(int(sys.argv[1]), bytes([0, 0, 0, 1, 0xC1])); time.sleep(60)"


async def start_and_fail(script: str) -> tuple[str, AsyncEngine]:
    engine = await AsyncEngine.start(EngineConfig(model="x"), Letters(), command=(sys.executable, "-c", script))
    try:
        with pytest.raises(EngineUnavailableError, match="starting"):
            engine.generate([[1]], SamplingParams())
        with pytest.raises(WorkerError) as failed:
            await asyncio.wait_for(engine.wait_until_started(), 60)
        assert engine.state is State.FAILED
        with pytest.raises(EngineUnavailableError) as refused:
            engine.generate([[1]], SamplingParams())
        assert str(refused.value) == str(failed.value)
    finally:
        await engine.close()
    return str(failed.value), engine


@pytest.mark.parametrize(("script", "words"), [(DIES, "exit status 3"), (BABBLES, "DecodeError")])
def test_the_reason_is_told(script: str, words: str) -> None:
    reason, engine = asyncio.run(start_and_fail(script))
    assert words in reason
    assert engine.num_requests == 0


def test_a_process_that_cannot_be_had_is_an_engine_lost_again() -> None:
    """As where the system has no memory for one more."""

    async def lose_twice() -> tuple[AsyncEngine, list[Loss]]:
        losses: list[Loss] = []
        engine = await AsyncEngine.start(EngineConfig(model="x"), Letters(), command=(sys.executable, "-c", DIES))
        engine.on_loss = losses.append
        await asyncio.wait_for(engine.wait_for_change(State.STARTING), 60)
        engine._command = ("/nowhere/at/all",)
        await engine.restart()
        await engine.close()
        return engine, losses

    engine, losses = asyncio.run(lose_twice())
    assert engine.state is State.FAILED
    assert "/nowhere/at/all" in (engine.failure or "")
    assert losses == [Loss.START, Loss.START]
