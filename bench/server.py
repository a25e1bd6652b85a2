"""Our own server as a child process: started, timed from its first moment, its memory watched, and stopped again."""

from __future__ import annotations

import queue
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Self

from ssd_ascend.errors import SsdError

_ROOT = Path(__file__).resolve().parents[1]
_START_S = 600.0
_STOP_S = 60.0
_WATCH_S = 0.2


class OwnServer:
    """`python -m ssd_ascend.serve` on a free port; a context manager. `url` answers once the block is entered."""

    def __init__(self, *flags: str, module: str = "ssd_ascend.serve") -> None:
        self._flags = flags
        self._module = module
        self.began_ns = 0
        self.ready_ns = 0
        self.url = ""

    def __enter__(self) -> Self:
        self.began_ns = time.perf_counter_ns()
        self._process = subprocess.Popen(
            [sys.executable, "-m", self._module, "--port", "0", *self._flags],
            cwd=_ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.memory = MemoryWatch(self._process.pid)
        self._lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        try:
            self.url = self._wait_until_ready()
        except BaseException:
            self._stop()
            raise
        self.ready_ns = time.perf_counter_ns()
        return self

    @property
    def pid(self) -> int:
        """The front end's process id."""
        return self._process.pid

    def __exit__(self, *_: object) -> None:
        self._stop()

    def _read(self) -> None:
        assert self._process.stdout is not None, "it is a pipe"
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def _wait_until_ready(self) -> str:
        deadline = time.monotonic() + _START_S
        while True:
            try:
                line = self._lines.get(timeout=max(0.1, deadline - time.monotonic()))
            except queue.Empty:
                raise SsdError(f"the server was not ready within {_START_S:.0f} s") from None
            if line is None:
                raise SsdError(f"the server ended with status {self._process.wait()} before it was ready")
            if line.startswith("ready: "):
                return line.split(" on ")[1].split()[0]

    def _stop(self) -> None:
        """SIGTERM and its grace; only a server that ignores it is killed."""
        self.memory.stop()
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()


class MemoryWatch:
    """The most memory a process and all its descendants held together, looked at five times a second."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._peak_kb = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    @property
    def peak_mb(self) -> float | None:
        """Resident megabytes, pages that processes share counted once each; None where /proc is missing."""
        return round(self._peak_kb / 1024, 1) if self._peak_kb else None

    def _watch(self) -> None:
        while not self._ended.wait(_WATCH_S):
            self._peak_kb = max(self._peak_kb, sum(map(resident_kb, process_tree(self._pid))))

    def stop(self) -> None:
        """Look no more."""
        self._ended.set()
        self._thread.join()


def process_tree(pid: int) -> list[int]:
    """`pid` and all its descendants, as far as they still live."""
    found, queue_ = [], [pid]
    while queue_:
        process = queue_.pop()
        found.append(process)
        for task in Path(f"/proc/{process}/task").glob("*/children"):
            try:
                queue_ += [int(child) for child in task.read_text().split()]
            except OSError:
                continue  # it ended while we looked
    return found


def resident_kb(pid: int) -> int:
    """Proportional set size where the kernel tells it (it splits shared pages), else the resident set; 0 if gone."""
    for file, key in (("smaps_rollup", "Pss:"), ("status", "VmRSS:")):
        try:
            lines = Path(f"/proc/{pid}/{file}").read_text().splitlines()
        except OSError:
            continue
        for line in lines:
            if line.startswith(key):
                return int(line.split()[1])
    return 0
