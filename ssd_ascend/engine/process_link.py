"""The front end's end of the line to an engine process: starts it, sends commands, hands on reports, says how it ended.

`engine/async_engine.py` holds one for as long as a process lives; `engine/process.py` is the other end.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from typing import Self

from ssd_ascend.config.engine import EngineConfig
from ssd_ascend.engine.messages import HEADER, Command, Report, Shutdown, Start, frame, parse_report
from ssd_ascend.errors import WorkerError

ENGINE_COMMAND = (sys.executable, "-m", "ssd_ascend.engine.process")
_STDERR = 2
_LAST_BREATH_S = 1.0
"""How long a process that has closed its line may take to end."""
_DEATH_S = 10.0
"""How long we wait for one that was killed: a device that hangs may hold it for ever."""


class ProcessLink:
    """One engine process. Lives in one asyncio loop."""

    def __init__(
        self, process: asyncio.subprocess.Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, command: Sequence[str], config: EngineConfig) -> Self:
        """Start `command`, which gets two more arguments (the descriptor of its socket, our process id), and have it
        build the engine that `config` describes. Raises WorkerError when the system has no room for a process."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                process = await asyncio.create_subprocess_exec(
                    *command,
                    str(theirs.fileno()),
                    str(os.getpid()),
                    pass_fds=(theirs.fileno(),),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=_STDERR,  # standard output is ours: for answers
                )
            except OSError as error:
                ours.close()
                raise WorkerError(f"no engine process can be started: {error}") from error
        link = cls(process, *await asyncio.open_connection(sock=ours))
        link.send(Start(config))
        return link

    @property
    def pid(self) -> int:
        """The engine's process id."""
        return self._process.pid

    def send(self, command: Command) -> None:
        """Send a command; nothing when the process has gone, which `reports` tells."""
        if not self._writer.is_closing():
            self._writer.write(frame(command))

    async def reports(self) -> AsyncIterator[Report]:
        """What the engine says, until it says no more. Raises what a report raises that makes no sense."""
        try:
            while True:
                (size,) = HEADER.unpack(await self._reader.readexactly(HEADER.size))
                yield parse_report(await self._reader.readexactly(size))
        except (asyncio.IncompleteReadError, ConnectionError):
            return  # the other side has gone

    def hang_up(self) -> None:
        """Close the line, which ends the process."""
        self._writer.close()

    def kill(self) -> None:
        """End the process, and the line, too: a device's driver may hold the process beyond its death."""
        with contextlib.suppress(ProcessLookupError):  # it has gone by itself
            self._process.kill()
        self._writer.transport.abort()

    async def ending(self) -> str:
        """How the process ended; one that does not after its line was closed is killed."""
        return _describe(await self._end(_LAST_BREATH_S))

    async def close(self, patience_s: float) -> None:
        """End the process: asked first, killed when it takes longer."""
        self.send(Shutdown())
        if await self._end(patience_s) is None:
            self._writer.transport.abort()  # or `reports` would wait for as long as it is held

    async def _end(self, patience_s: float) -> int | None:
        """The exit status; None for a process that does not end even when it is killed."""
        with contextlib.suppress(TimeoutError):
            return await asyncio.wait_for(self._process.wait(), timeout=patience_s)
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        with contextlib.suppress(TimeoutError):
            return await asyncio.wait_for(self._process.wait(), timeout=_DEATH_S)
        return None


def _describe(status: int | None) -> str:
    if status is None:
        return "killed, and held by the system"
    if status >= 0:
        return f"exit status {status}"
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"killed by signal {-status}"
