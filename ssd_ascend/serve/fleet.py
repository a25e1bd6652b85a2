"""The processes of a plan on this machine: started, watched, started anew when one ends, and stopped together.

Each dies with us, however we go. A process that comes back keeps its address, so nobody has to be told.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ssd_ascend import env
from ssd_ascend.core.exit_status import how_it_ended
from ssd_ascend.log import fields, get_logger
from ssd_ascend.serve.roles import Role
from ssd_ascend.serve.silence import until_silent

_LOOPBACK: Final = "127.0.0.1"
_FIRST_PAUSE_S: Final = 0.5
_LONGEST_PAUSE_S: Final = 30.0
_HEALTHY_S: Final = 60.0
_BOOT: Final = """
import runpy, sys
from ssd_ascend.speculation.worker_process import die_with_parent
die_with_parent(int(sys.argv[1]))
module, sys.argv = sys.argv[2], sys.argv[2:]
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""
log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Placed:
    """A role and the address it listens at."""

    role: Role
    host: str
    port: int

    @property
    def address(self) -> str:
        """For flags."""
        return f"{self.host}:{self.port}"


def place(roles: Sequence[Role]) -> list[Placed]:
    """A free port of this machine for each role."""
    sockets = [socket.create_server((_LOOPBACK, 0)) for _ in roles]
    placed = [Placed(role, _LOOPBACK, sock.getsockname()[1]) for role, sock in zip(roles, sockets, strict=True)]
    for sock in sockets:
        sock.close()
    return placed


def speculators_of(placed: Sequence[Placed], replica: int) -> list[str]:
    """The addresses of a replica's speculators."""
    return [each.address for each in placed if each.role.kind == "speculator" and each.role.replica == replica]


def booted(command: Sequence[str]) -> list[str]:
    """Arguments of an interpreter that runs a module with its flags, and dies with this process."""
    return ["-c", _BOOT, str(os.getpid()), *command]


class Fleet:
    """The processes. `start` returns at once; who answers when is for `/health` to tell."""

    def __init__(self, placed: Sequence[Placed], silence_s: float = math.inf) -> None:
        """silence_s: a target that answers nothing for so long is ended, and so started anew."""
        self.placed = list(placed)
        self._silence_s = silence_s
        self.restarts = 0
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self._keepers: list[asyncio.Task[None]] = []
        self._retired = asyncio.Event()

    def start(self) -> None:
        """Start all and keep them alive, until `close`."""
        self._keepers = [asyncio.create_task(self._keep(each)) for each in self.placed]

    def pid(self, name: str) -> int | None:
        """The process of a role, None while there is none."""
        process = self._processes.get(name)
        return None if process is None or process.returncode is not None else process.pid

    def retire(self) -> None:
        """Start nothing anew from now on: a signal that stops us may have reached all of us."""
        self._retired.set()

    async def close(self, grace_s: float) -> None:
        """Ask all to leave; end those that are still there after a while, or when this is cancelled."""
        self.retire()
        for process in self._processes.values():
            if process.returncode is None:
                process.terminate()
        try:
            await asyncio.wait(self._keepers, timeout=grace_s)
        finally:
            for process in self._processes.values():
                if process.returncode is None:
                    process.kill()
            for keeper in self._keepers:
                keeper.cancel()
            await asyncio.gather(*self._keepers, return_exceptions=True)

    async def _keep(self, placed: Placed) -> None:
        pause_s, clock = _FIRST_PAUSE_S, asyncio.get_running_loop().time
        while not self._retired.is_set():
            began = clock()
            how = await self._run(placed)
            if self._retired.is_set():
                return
            pause_s = _FIRST_PAUSE_S if clock() - began > _HEALTHY_S else pause_s
            log.warning("%s ended %s", placed.role.name, fields(how=how, again_in_s=pause_s))
            self.restarts += 1
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._retired.wait(), pause_s)
            pause_s = min(2.0 * pause_s, _LONGEST_PAUSE_S)

    async def _run(self, placed: Placed) -> str:
        """One life of a role; how it ended, or why it could not begin."""
        role = placed.role
        speculators = speculators_of(self.placed, role.replica) if role.kind == "target" else []
        command = role.command(placed.host, placed.port, speculators)
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable, *booted(command), env=env.child(role.env), stdout=sys.stderr
            )
        except OSError as error:  # no memory for another process, say, which there may be later
            return str(error)
        self._processes[role.name] = process
        log.info("%s starts %s", role.name, fields(pid=process.pid, port=placed.port))
        watching = asyncio.create_task(self._end_when_silent(placed, process))
        try:
            return how_it_ended(await process.wait())
        finally:
            watching.cancel()

    async def _end_when_silent(self, placed: Placed, process: asyncio.subprocess.Process) -> None:
        if placed.role.kind != "target" or math.isinf(self._silence_s):
            return  # a speculator that hangs is its targets' business, which go on without it
        await until_silent(placed.host, placed.port, self._silence_s)
        log.error("%s has said nothing for %g s, and is ended", placed.role.name, self._silence_s)
        with contextlib.suppress(ProcessLookupError):  # it has just gone by itself
            process.kill()  # its engine dies with it
