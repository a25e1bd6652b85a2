"""The front end's end of the line to an engine process: starts it, sends commands, hands on reports, says how it ended.

`engine/async_engine.py` holds one for as long as a process lives; `engine/process.py` is the other end.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from typing import IO, Self

from ssd_ascend.config.engine import EngineConfig
from ssd_ascend.core.exit_status import how_it_ended
from ssd_ascend.engine.messages import HEADER, WHERE_SIGNAL, Command, Report, Shutdown, Start, frame, parse_report
from ssd_ascend.errors import WorkerError

ENGINE_COMMAND = (sys.executable, "-m", "ssd_ascend.engine.process")
_STDERR = 2
_LAST_BREATH_S = 1.0
"""How long a process that has closed its line may take to end."""
_PUTTING_DOWN_S = 0.5
_DEATH_S = 10.0
"""How long we wait for one that was killed: a device that hangs may hold it for ever."""


class ProcessLink:
    """One engine process. Lives in one asyncio loop."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        stacks: IO[bytes],
    ) -> None:
        self._process = process
        self._stacks = stacks
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, command: Sequence[str], config: EngineConfig) -> Self:
        """Start `command`, which gets three more arguments (the descriptor of its socket, our process id, and the
        descriptor of a file for where it is when it crashes), and have it build the engine that `config` describes.
        Raises WorkerError when the system has no room for a process."""
        ours, theirs = socket.socketpair()
        stacks = _file_for_stacks()
        with theirs:
            try:
                process = await asyncio.create_subprocess_exec(
                    *command,
                    str(theirs.fileno()),
                    str(os.getpid()),
                    str(stacks.fileno()),
                    pass_fds=(theirs.fileno(), stacks.fileno()),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=_STDERR,  # standard output is ours: for answers
                )
            except OSError as error:
                ours.close()
                stacks.close()
                raise WorkerError(f"no engine process can be started: {error}") from error
        link = cls(process, *await asyncio.open_connection(sock=ours), stacks)
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

    async def kill(self) -> None:
        """End the process, once it has put down where it is, and the line, too: a device's driver may hold the process
        beyond its death."""
        with contextlib.suppress(ProcessLookupError):  # it has gone by itself
            self._process.send_signal(WHERE_SIGNAL)
            await asyncio.sleep(_PUTTING_DOWN_S)
            self._process.kill()
        self._writer.transport.abort()

    async def ending(self) -> str:
        """How the process ended, as "the process ..." goes on. One that stays when its line is closed is killed."""
        status = await self._end(_LAST_BREATH_S)
        return "was killed, and is held by the system" if status is None else how_it_ended(status)

    def where(self) -> str:
        """The Python stacks of a process that has ended, if it crashed or was killed by `kill`. To be asked once."""
        with self._stacks:
            self._stacks.seek(0)
            return self._stacks.read().decode(errors="replace").strip()

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


def _file_for_stacks() -> IO[bytes]:
    """In memory where the system has that: a disk may be full."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("stacks"), "rb")
    return tempfile.TemporaryFile()
