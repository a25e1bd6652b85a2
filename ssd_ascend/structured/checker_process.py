"""The process that tries grammars out before an engine sees them: `python -m ssd_ascend.structured.checker_process`.

`structured/checker.py` starts it. What a hostile text does to llguidance (an overflow of the stack, minutes, gigabytes)
happens here, to nobody else. A grammar a line comes in as JSON; out go "began" and then a verdict. It leaves when its
standard input is closed.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ssd_ascend.core.grammar import Grammar, GrammarKind
from ssd_ascend.errors import RequestError, SsdError
from ssd_ascend.structured.compiler import GrammarCompiler
from ssd_ascend.text import Tokenizer

_STACK_BYTES = 2 << 20
"""An eighth of what engines compile with, so that what passes here has room there; some 200 references in a chain."""


def main(argv: Sequence[str]) -> int:
    """`argv`: the model, the processor time one grammar may take in seconds, and the memory, in bytes."""
    model, max_cpu_s, max_bytes = argv
    # a terminal's Ctrl-C and a supervisor's SIGTERM reach the whole group; the front end decides when we stop
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # which ends us; it may have been inherited otherwise
    say = _speaker()
    try:
        tokenizer = Tokenizer.load(model)
        compiler = GrammarCompiler(
            lambda: tokenizer,
            vocab_size=tokenizer.vocab_size,
            eos_ids=tokenizer.eos_ids or {tokenizer.vocab_size - 1},  # a model without an end is the engine's to refuse
            stack_bytes=_STACK_BYTES,
        )
        compiler.warm()
    except RequestError as error:  # no llguidance
        say({"failed": error.message, "code": error.code, "remedy": error.remedy})
        return 1
    except SsdError as error:
        say({"failed": str(error), "code": None, "remedy": None})
        return 1
    _limit_memory(int(max_bytes))
    say({"ready": True})
    for line in sys.stdin.buffer:
        asked = json.loads(line)
        say({"began": True})
        with _limited_time(float(max_cpu_s)):
            verdict = _verdict(compiler, Grammar(GrammarKind(asked["kind"]), asked["source"], asked["strict"]))
        say(verdict)
    return 0


def _speaker() -> Callable[[dict[str, Any]], None]:
    """Writes to what was standard output, which from now on is standard error: libraries may print."""
    out = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    return lambda said: _write(out.fileno(), json.dumps(said).encode() + b"\n")


def _write(descriptor: int, data: bytes) -> None:
    with contextlib.suppress(BrokenPipeError):  # the other side has gone, which reading will tell
        while data:
            data = data[os.write(descriptor, data) :]


def _verdict(compiler: GrammarCompiler, grammar: Grammar) -> dict[str, Any]:
    try:
        compiler.examine(grammar)
    except RequestError as error:
        return {"refused": error.message, "code": error.code, "remedy": error.remedy}
    return {"refused": None}


@contextlib.contextmanager
def _limited_time(cpu_s: float) -> Iterator[None]:
    """Have the system end this process when it has worked for longer than `cpu_s`. Not by a clock on the wall: a busy
    machine makes no grammar worse."""
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _limit_memory(more: int) -> None:
    """Have the system refuse this process more than so many bytes beside what it has, where it says what that is."""
    with contextlib.suppress(FileNotFoundError):  # not Linux; time bounds memory, too
        (used,) = [row.split()[1] for row in Path("/proc/self/status").read_text().splitlines() if row[:7] == "VmData:"]
        most = int(used) * 1024 + more
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
