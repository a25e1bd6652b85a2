"""The engine in a process of its own: `python -m ssd_ascend.engine.process FD`, started by `engine/async_engine.py`.

It owns the step loop and nothing else: no text, no HTTP. Commands are taken between steps, so that a cancelled request
costs at most the step under way; all tokens of a step leave in one message. It dies with the front end, by end of file
or, in the middle of a long build, by the kernel's parent-death signal.
"""

from __future__ import annotations

import faulthandler
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from ssd_ascend.config.engine import EngineConfig
from ssd_ascend.core.request import EngineRequest, TokenDelta
from ssd_ascend.core.stats import EngineStats
from ssd_ascend.engine.channel import ChannelClosedError, EngineChannel
from ssd_ascend.engine.identity import EngineInfo, EngineLimits
from ssd_ascend.engine.messages import (
    WHERE_SIGNAL,
    Abort,
    Command,
    Failed,
    Progress,
    Ready,
    Rejected,
    Shutdown,
    Start,
    Stats,
    Stepped,
    Submit,
    Tune,
)
from ssd_ascend.errors import RequestError, SsdError, in_one_line
from ssd_ascend.log import get_logger
from ssd_ascend.speculation.worker_process import die_with_parent

log = get_logger("ssd_ascend.engine.process")  # run as __main__, it would lose its name

_STATS_EVERY_S = 0.5


class StepEngine(Protocol):
    """What the loop asks of an engine (`engine/engine.py` is one; tests script others)."""

    @property
    def limits(self) -> EngineLimits: ...
    @property
    def info(self) -> EngineInfo: ...
    @property
    def has_work(self) -> bool: ...
    def submit(self, request: EngineRequest) -> None: ...
    def abort(self, seq_ids: Iterable[int]) -> None: ...
    def step(self) -> list[TokenDelta]: ...
    def tune(self, lookahead: int, fan_out: Sequence[int]) -> None: ...
    def stats(self) -> EngineStats: ...
    def health(self) -> str | None: ...
    def check(self) -> None: ...
    def close(self) -> None: ...


Report = Callable[[int, int], None]
Build = Callable[[EngineConfig, Report], StepEngine]
"""Builds an engine; the second argument is told how much of how much is loaded."""


def serve(channel: EngineChannel, build: Build) -> int:
    """Build the engine that the first command asks for and step it until told to stop. Returns the exit status."""
    try:
        (start, *rest) = channel.commands(most_s=None)
        assert isinstance(start, Start), "the front end did not start with Start"
        engine = build(start.config, lambda done, total: channel.send(Progress("loading", done, total)))
        try:
            engine.check()
            channel.send(Ready(engine.limits, engine.info))
            _Loop(channel, engine).run(rest)
        finally:
            engine.close()
    except ChannelClosedError:
        return 1  # nobody is left to tell
    except SsdError as error:
        return _fail(channel, str(error))
    except Exception as error:  # the last resort of a process: log all, tell one sentence, end
        log.exception("the engine failed")
        return _fail(channel, f"the engine failed: {in_one_line(error)}")
    return 0


class _Loop:
    """Commands, step, report; asleep while there is nothing to do."""

    def __init__(self, channel: EngineChannel, engine: StepEngine) -> None:
        self._channel = channel
        self._engine = engine
        self._report_s = 0.0
        self._reported: Stats | None = None
        self._stopping = False

    def run(self, commands: Sequence[Command]) -> None:
        for command in commands:
            self._obey(command)
        while not self._stopping:
            if not self._engine.has_work:
                self._engine.check()
                self._report_stats(only_news=not commands)
            # a worker may be lost, and be back, while nobody asks for anything
            commands = self._channel.commands(most_s=0.0 if self._engine.has_work else _STATS_EVERY_S)
            for command in commands:
                self._obey(command)
            if self._engine.has_work and not self._stopping:
                deltas = self._engine.step()
                # before the tokens, so that who has seen an answer end finds it counted
                if any(delta.finish_reason for delta in deltas) or time.monotonic() >= self._report_s:
                    self._report_stats()
                self._tell(deltas)

    def _tell(self, deltas: list[TokenDelta]) -> None:
        if told := [delta for delta in deltas if not delta.refused]:
            self._channel.send(Stepped(told))
        for delta in deltas:
            if delta.refused:
                self._channel.send(
                    Rejected(delta.seq_id, delta.error or "the request cannot be served", "grammar", None)
                )

    def _obey(self, command: Command) -> None:
        match command:
            case Submit(requests):
                for request in requests:
                    self._submit(request)
                self._report_s = 0.0  # with the next step
            case Abort(seq_ids):
                self._engine.abort(seq_ids)
            case Tune(lookahead, fan_out):
                self._engine.tune(lookahead, fan_out)
            case Shutdown():
                self._stopping = True
            case Start():
                raise AssertionError("started twice")

    def _submit(self, request: EngineRequest) -> None:
        try:
            self._engine.submit(request)
        except RequestError as error:
            self._channel.send(Rejected(request.id, str(error), error.param, error.code))

    def _report_stats(self, *, only_news: bool = False) -> None:
        self._report_s = time.monotonic() + _STATS_EVERY_S
        health = self._engine.health()  # which looks after the worker's counters, too
        stats = Stats(self._engine.stats(), health)
        if not only_news or stats != self._reported:
            self._channel.send(stats)
        self._reported = stats


def _fail(channel: EngineChannel, message: str) -> int:
    try:
        channel.send(Failed(message))
    except ChannelClosedError:
        log.error("%s", message)
    channel.drain(timeout_s=5.0)
    return 1


def _build_real(config: EngineConfig, report: Report) -> StepEngine:
    from ssd_ascend.engine.builder import build_engine  # torch: seconds, and tests do without

    engine = build_engine(config, progress=report)
    if engine.grammars is not None:
        engine.grammars.warm_beside()
    return engine


def main(argv: Sequence[str], build: Build = _build_real) -> int:
    """`argv`: the file descriptor of the socket, the process id of the front end, and the descriptor of a file for
    where we are when we crash, or are asked because a step does not end (the loop itself cannot tell then)."""
    descriptor, parent, stacks = (int(word) for word in argv)
    faulthandler.enable(stacks)
    faulthandler.register(WHERE_SIGNAL, stacks)
    # a terminal's Ctrl-C and a supervisor's SIGTERM reach the whole group; the front end decides when we stop
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    die_with_parent(parent)
    with EngineChannel(socket.socket(fileno=descriptor)) as channel:
        return serve(channel, build)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
