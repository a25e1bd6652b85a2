"""What the front end asks before a grammar reaches the engine: does it compile, within bounds of time and memory?

The work is done in a process of its own (`checker_process.py`), started when the first grammar comes, one grammar at a
time. One that ends it, or takes too much, is refused, and the next grammar finds a fresh process. Verdicts are
remembered. `serve/state.py` holds one checker. Lives in one asyncio loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import signal
import sys
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ssd_ascend.core.exit_status import how_it_ended
from ssd_ascend.core.grammar import Grammar
from ssd_ascend.errors import RequestError, SsdError
from ssd_ascend.log import get_logger
from ssd_ascend.structured.reasons import NAMES, too_much

log = get_logger(__name__)

MAX_SOURCE_BYTES = 1 << 20
CHECKER_COMMAND = (sys.executable, "-m", "ssd_ascend.structured.checker_process")
_REMEMBERED = 4096
_TRIES = 2
_BY_THE_GRAMMAR = (signal.SIGPROF, signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS)
"""What ends a process that would end the next one, too. Others may kill by SIGKILL."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckLimits:
    """What one check may take. `cpu_s` and `memory_bytes` are about the grammar, the others about a busy machine."""

    cpu_s: float = 2.0
    """Of processor time: reading, compiling, and the first masks."""
    memory_bytes: int = 128 << 20
    patience_s: float = 10.0
    """How long a check may wait for those before it."""
    wall_s: float = 30.0
    start_s: float = 60.0


class CheckerError(SsdError):
    """Nothing can be said about a grammar now, which is not its fault. The server answers 500."""


class CheckerBusyError(CheckerError):
    """Too many grammars wait. The server answers 503."""


@dataclass(frozen=True, slots=True)
class _Verdict:
    """What is wrong with a grammar; `message` is None where nothing is."""

    message: str | None = None
    code: str | None = None
    remedy: str | None = None
    passes_on: bool = False
    """It may be another next time."""


class _LostError(Exception):
    """The process has gone. `began`: while it was at the grammar."""

    def __init__(self, *, began: bool, status: int) -> None:
        super().__init__(status)
        self.began = began
        self.status = status


class _UnsupportedError(Exception):
    """This installation has no grammars at all."""

    def __init__(self, verdict: _Verdict) -> None:
        super().__init__(verdict.message)
        self.verdict = verdict


class GrammarChecker:
    """One process that checks grammars, and what it found."""

    def __init__(self, find_model: Callable[[], Path], limits: CheckLimits | None = None) -> None:
        """find_model: where the tokenizer of the served model is; called in a thread."""
        self._find_model = find_model
        self._limits = CheckLimits() if limits is None else limits
        self._known: OrderedDict[bytes, _Verdict] = OrderedDict()
        self._asked: dict[bytes, asyncio.Task[_Verdict]] = {}
        self._turn = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None
        self._replacing: asyncio.Task[None] | None = None
        self._is_closed = False

    @property
    def pid(self) -> int | None:
        """The process id, if there is a process."""
        return None if self._process is None else self._process.pid

    async def check(self, grammar: Grammar, *, param: str) -> None:
        """Raises RequestError naming `param` when a grammar is not sound, or too much; CheckerError when nobody can
        tell."""
        source = grammar.source.encode("utf-8", "surrogatepass")
        if len(source) > MAX_SOURCE_BYTES:
            raise RequestError(f"the grammar is over the limit of {MAX_SOURCE_BYTES} bytes", param=param)
        key = hashlib.sha256(f"{grammar.kind} {grammar.strict} ".encode() + source).digest()
        verdict = self._known.get(key)
        if verdict is None:
            verdict = await self._find_out(key, grammar)
        else:
            self._known.move_to_end(key)
        if verdict.message is not None:
            raise RequestError(verdict.message, param=param, code=verdict.code, remedy=verdict.remedy)

    async def _find_out(self, key: bytes, grammar: Grammar) -> _Verdict:
        """One task a grammar, however many wait for it; it goes on when they leave, for the process is at it."""
        task = self._asked.get(key)
        if task is None:
            task = self._asked[key] = asyncio.create_task(self._in_turn(grammar))
            task.add_done_callback(lambda done: self._note(key, done))
        return await asyncio.shield(task)

    def _note(self, key: bytes, done: asyncio.Task[_Verdict]) -> None:
        del self._asked[key]
        if done.cancelled() or done.exception() is not None or done.result().passes_on:
            return
        self._known[key] = done.result()
        if len(self._known) > _REMEMBERED:
            self._known.popitem(last=False)

    async def _in_turn(self, grammar: Grammar) -> _Verdict:
        try:
            async with asyncio.timeout(self._limits.patience_s):
                await self._turn.acquire()
        except TimeoutError as error:
            raise CheckerBusyError(
                f"other grammars are being checked, and for {self._limits.patience_s:g} s it was not this one's turn"
            ) from error
        try:
            return await self._examine(grammar)
        finally:
            self._turn.release()

    async def _examine(self, grammar: Grammar) -> _Verdict:
        for _ in range(_TRIES):
            try:
                process = self._process or await self._start()
                async with asyncio.timeout(self._limits.wall_s):
                    return await self._ask(process, grammar)
            except _UnsupportedError as error:
                return error.verdict
            except _LostError as lost:
                self._process = None
                if lost.began:
                    self._replacing = asyncio.create_task(self._replace())
                    return self._verdict_on_death(grammar, lost.status)
                log.warning("the grammar checker %s; starting another", how_it_ended(lost.status))
            except TimeoutError as error:
                await self._end()
                raise CheckerBusyError("the machine is too busy to check the grammar now") from error
        raise CheckerError("the grammar checker ends as soon as it is asked")

    async def _replace(self) -> None:
        """Start the next process before anybody asks for it."""
        async with self._turn:
            if self._process is None:
                try:
                    await self._start()
                except (CheckerError, _UnsupportedError) as error:
                    log.debug("no grammar checker: %s", error)  # whoever asks is told

    def _verdict_on_death(self, grammar: Grammar, status: int) -> _Verdict:
        log.warning("a grammar was refused: the grammar checker %s", how_it_ended(status))
        limits = self._limits
        why = f"it takes over {limits.cpu_s:g} s to compile" if -status == signal.SIGPROF else "compiling it fails"
        if -status == signal.SIGABRT:
            why = f"it takes over {limits.memory_bytes >> 20} MB to compile"
        if -status in (signal.SIGSEGV, signal.SIGBUS):
            why = "its rules or references make too long a chain"
        told = too_much(NAMES[grammar.kind], why)
        return _Verdict(told.message, told.code, told.remedy, passes_on=-status not in _BY_THE_GRAMMAR)

    async def _ask(self, process: asyncio.subprocess.Process, grammar: Grammar) -> _Verdict:
        asked = json.dumps({"kind": grammar.kind.value, "source": grammar.source, "strict": grammar.strict})
        assert process.stdin is not None
        with contextlib.suppress(ConnectionError):  # reading tells that it has gone
            process.stdin.write(asked.encode() + b"\n")
            await process.stdin.drain()
        if await _read(process) is None:
            raise _LostError(began=False, status=await process.wait())
        verdict = await _read(process)
        if verdict is None:
            raise _LostError(began=True, status=await process.wait())
        return _Verdict(verdict["refused"], verdict.get("code"), verdict.get("remedy"))

    async def _start(self) -> asyncio.subprocess.Process:
        limits = self._limits
        if self._is_closed:
            raise CheckerError("the server is shutting down")
        try:
            model = await asyncio.to_thread(self._find_model)
            process = await asyncio.create_subprocess_exec(
                *CHECKER_COMMAND,
                str(model),
                str(limits.cpu_s),
                str(limits.memory_bytes),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,  # pages of a library's own words; verdicts come as JSON
            )
        except (OSError, SsdError) as error:
            raise CheckerError(f"no process to check grammars can be started: {error}") from error
        self._process = process
        try:
            async with asyncio.timeout(limits.start_s):
                said = await _read(process)
                if said is None or "failed" in said:
                    await process.wait()  # it leaves by itself; a signal now could cost us its exit status
        except TimeoutError as error:
            await self._end()
            raise CheckerBusyError(f"the grammar checker was not ready within {limits.start_s:g} s") from error
        if said is None or "failed" in said:
            self._process = None
            self._raise_failed(said, process.returncode)
        return process

    @staticmethod
    def _raise_failed(said: dict[str, Any] | None, status: int | None) -> None:
        if said is None:
            raise CheckerError(f"the grammar checker {how_it_ended(status or 0)} before it was ready")
        if said["code"] is not None:
            raise _UnsupportedError(_Verdict(said["failed"], said["code"], said["remedy"], passes_on=True))
        raise CheckerError(f"the grammar checker cannot start: {said['failed']}")

    async def close(self) -> None:
        """End the process, whatever it is at, and start no other."""
        self._is_closed = True
        if self._replacing is not None:
            self._replacing.cancel()
            await asyncio.gather(self._replacing, return_exceptions=True)
            self._replacing = None
        await self._end()

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):  # it has gone by itself
                process.kill()
            await process.wait()


async def _read(process: asyncio.subprocess.Process) -> dict[str, Any] | None:
    """What the process says next; None when it has gone."""
    assert process.stdout is not None
    line = await process.stdout.readline()
    return json.loads(line) if line.endswith(b"\n") else None
