"""The front end's side of an engine process that misbehaves: it dies, or talks nonsense, before it was ever ready."""

from __future__ import annotations

import asyncio
import io
import math
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import cast

import pytest

from ssd_ascend.backends.cpu import machine
from ssd_ascend.config.engine import EngineConfig
from ssd_ascend.core.sampling import SamplingParams
from ssd_ascend.engine.async_engine import AsyncEngine, EngineUnavailableError, Loss, State
from ssd_ascend.engine.identity import EngineLimits
from ssd_ascend.engine.messages import Abort, Command, Report, Submit, Tune
from ssd_ascend.engine.process_link import ProcessLink
from ssd_ascend.engine.step_watch import StepWatch, usual_limit_s
from ssd_ascend.errors import RequestError, WorkerError
from tests.unit.test_outputs import Letters

DIES_LATE = "import sys, time; time.sleep(1); sys.exit(3)"
DIES = "import sys; sys.exit(3)"
BABBLES = "import os, sys, time; os.write(int(sys.argv[1]), bytes([0, 0, 0, 1, 0xC1])); time.sleep(60)"


async def start_and_fail(script: str) -> tuple[str, AsyncEngine]:
    engine = await AsyncEngine.start(EngineConfig(model="x"), Letters(), command=(sys.executable, "-c", script))
    try:
        with pytest.raises(EngineUnavailableError, match="starting"):
            await engine.generate([[1]], SamplingParams())
        with pytest.raises(WorkerError) as failed:
            await asyncio.wait_for(engine.wait_until_started(), 60)
        assert engine.state is State.FAILED
        with pytest.raises(EngineUnavailableError) as refused:
            await engine.generate([[1]], SamplingParams())
        assert str(refused.value) == str(failed.value)
    finally:
        await engine.close()
    return str(failed.value), engine


@pytest.mark.parametrize(("script", "words"), [(DIES, "exited with status 3"), (BABBLES, "DecodeError")])
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


def test_an_engine_that_is_not_ready_owes_nothing() -> None:
    """It loads, or compiles what it needs, for as long as that takes, whatever it was told to do afterwards."""

    async def lose_twice() -> list[Loss]:
        losses: list[Loss] = []
        command = (sys.executable, "-c", DIES_LATE)
        engine = await AsyncEngine.start(EngineConfig(model="x"), Letters(), command=command, step_timeout_s=0.1)
        engine.on_loss = losses.append
        engine.tuned = Tune(1)
        await asyncio.wait_for(engine.wait_for_change(State.STARTING), 60)
        await engine.restart()
        await asyncio.wait_for(engine.wait_for_change(State.STARTING), 60)
        await engine.close()
        return losses

    assert asyncio.run(lose_twice()) == [Loss.START, Loss.START]


def test_the_silence_of_an_engine_with_work_is_counted() -> None:
    watch = StepWatch(4.0)
    assert watch.tick_s == 0.5
    assert not any(watch.tick(0.5) for _ in range(99))  # it was told nothing
    watch.asked()
    assert [watch.tick(0.5) for _ in range(9)] == [False] * 8 + [True]  # never early: nobody knows when a tick began
    watch.heard(has_work=True)
    assert not any(watch.tick(0.5) for _ in range(8))
    watch.asked()  # who owes a report owes it no later for being asked again
    assert watch.worry == "no step of the engine has ended for 4 s"
    assert watch.tick(0.5)
    watch.heard(has_work=False)
    assert watch.worry is None
    assert not any(watch.tick(0.5) for _ in range(99))


def test_without_a_limit_given_a_processor_has_none() -> None:
    """Where a hang is no device's, and one step of a large model may take minutes."""
    assert usual_limit_s(machine.description()) == math.inf
    assert usual_limit_s("cuda:0: NVIDIA H200") == usual_limit_s("npu:0: Ascend910B (emulated)") == 300.0


def test_a_time_in_which_nobody_listened_hardly_counts() -> None:
    watch = StepWatch(4.0)
    watch.asked()
    assert not watch.tick(1000.0)
    endless = StepWatch(math.inf)
    endless.asked()
    assert not any(endless.tick(1.0) for _ in range(30))
    assert endless.worry is None
    assert not any(endless.tick(1.0) for _ in range(999))
    assert endless.worry == "no step of the engine has ended for 1028 s"


class Undead:
    """A process in the hands of a driver that hangs: it does not even end when it is killed."""

    pid = 1

    def kill(self) -> None:
        pass

    async def wait(self) -> int:
        await asyncio.Event().wait()
        return 0


def test_nobody_waits_for_a_process_that_cannot_be_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ssd_ascend.engine.process_link._LAST_BREATH_S", 0.01)
    monkeypatch.setattr("ssd_ascend.engine.process_link._DEATH_S", 0.01)

    async def ending() -> str:
        ours, theirs = socket.socketpair()
        with theirs:
            line = await asyncio.open_connection(sock=ours)
            link = ProcessLink(cast(asyncio.subprocess.Process, Undead()), *line, io.BytesIO())
            reading = asyncio.create_task(read_all(link))
            told = await asyncio.wait_for(link.ending(), 60)
            await link.close(0.01)
            await asyncio.wait_for(reading, 60)
        return told

    assert asyncio.run(ending()) == "was killed, and is held by the system"


async def read_all(link: ProcessLink) -> None:
    async for _ in link.reports():
        pass


class Deaf:
    """A line to an engine that says nothing; what it was told is kept."""

    pid = 1

    def __init__(self) -> None:
        self.told: list[Command] = []
        self._over = asyncio.Event()

    def send(self, command: Command) -> None:
        self.told.append(command)

    async def reports(self) -> AsyncIterator[Report]:
        await self._over.wait()
        for report in ():
            yield report

    def hang_up(self) -> None:
        pass

    async def close(self, patience_s: float) -> None:
        self._over.set()


async def with_a_deaf_engine(ask: Callable[[AsyncEngine], Awaitable[None]]) -> list[Command]:
    link = Deaf()
    engine = AsyncEngine(cast(ProcessLink, link), EngineConfig(model="x"), Letters(), (), math.inf)
    engine.limits, engine.state = EngineLimits(max_model_len=64, max_tokens_that_fit=64, vocab_size=64), State.READY
    await ask(engine)
    assert engine.num_sequences == 0
    await engine.close()
    return link.told


def test_many_prompts_leave_the_loop_to_others() -> None:
    """2048 prompts with many biases each took minutes, and nobody else got a word in."""
    seen: list[int] = []

    async def ask(engine: AsyncEngine) -> None:
        async def others() -> None:
            while True:
                seen.append(engine.num_sequences)
                await asyncio.sleep(0)

        watching = asyncio.create_task(others())
        with await engine.generate([[1]] * 1000, SamplingParams(n=2)) as stream:
            watching.cancel()
            assert stream is not None
            assert engine.num_sequences == 2000

    told = asyncio.run(with_a_deaf_engine(ask))
    assert len(seen) > 25
    assert set(seen) == {2000}, "whoever asks in between sees the whole of it, for the limit of the queue"
    assert sum(isinstance(command, Submit) for command in told) == 1000


def test_an_engine_that_is_lost_between_two_prompts_gets_no_more() -> None:
    async def ask(engine: AsyncEngine) -> None:
        async def lose() -> None:
            while engine.num_requests == 0:
                await asyncio.sleep(0)
            engine.state = State.FAILED

        losing = asyncio.create_task(lose())
        with pytest.raises(EngineUnavailableError):
            await engine.generate([[1]] * 1000, SamplingParams())
        await losing

    told = asyncio.run(with_a_deaf_engine(ask))
    begun = [request.id for command in told if isinstance(command, Submit) for request in command.requests]
    assert 0 < len(begun) < 1000
    assert [command.seq_ids for command in told if isinstance(command, Abort)] == [begun]


def test_a_prompt_that_is_refused_lets_none_begin() -> None:
    async def ask(engine: AsyncEngine) -> None:
        with pytest.raises(RequestError, match="no tokens"):
            await engine.generate([[1]] * 999 + [[]], SamplingParams())

    assert not any(isinstance(command, Submit) for command in asyncio.run(with_a_deaf_engine(ask)))
