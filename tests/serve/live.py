"""Starts servers as users do, in a process of their own on a port from the system, and talks to them."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx

# an emulated NPU takes its time to capture
PATIENCE_S = 400.0 if os.environ.get("TEST_DEVICE") == "npu" else 60.0
FAKE = "tests.serve.fake_server"
_ROOT = Path(__file__).resolve().parents[2]


class LiveServer:
    """A server process; `url` is known once it listens, and it answers once `wait_until_ready` returns."""

    def __init__(self, *flags: str, module: str = FAKE, port: str = "0", own_group: bool = False) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, "--port", port, *flags],
            cwd=_ROOT,
            start_new_session=own_group,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.admin_url = ""
        self.lines: list[str] = []
        self.errors: list[str] = []
        self._arrivals: queue.Queue[str | None] = queue.Queue()
        self._readers = [
            threading.Thread(target=self._collect, args=(self.process.stdout, self.lines, True), daemon=True),
            threading.Thread(target=self._collect, args=(self.process.stderr, self.errors, False), daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    def _collect(self, pipe: Any, into: list[str], announces: bool) -> None:
        for line in pipe:
            into.append(line)
            if announces:
                self._arrivals.put(line)
        if announces:
            self._arrivals.put(None)

    def wait_for_line(self, start: str) -> str:
        deadline = time.monotonic() + PATIENCE_S
        while (line := self._arrivals.get(timeout=max(0.1, deadline - time.monotonic()))) is not None:
            if line.startswith(start):
                return line
        raise AssertionError(f"the server ended: {self.lines} {self.errors}")

    def wait_until_ready(self) -> LiveServer:
        line = self.wait_for_line("ready: ")
        self.url = line.split(" on ")[1].split(" ")[0]
        return self

    def wait_until_listening(self) -> LiveServer:
        self.url = self.wait_for_line("loading ").split("; ")[1].split("/health")[0]
        return self

    def engine_pid(self) -> int:
        engines = [pid for pid, words in self.children().items() if "structured.checker_process" not in words]
        assert len(engines) == 1, engines
        return engines[0]

    def checker_pid(self) -> int | None:
        """The process that checks grammars, if there is one."""
        return next((pid for pid, words in self.children().items() if "structured.checker_process" in words), None)

    def children(self) -> dict[int, str]:
        """The command lines of the server's own processes."""
        pids = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return {int(pid): Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ") for pid in pids}

    def stop(self) -> int:
        """SIGTERM, then the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.wait()

    def wait(self) -> int:
        try:
            status = self.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise
        for reader in self._readers:
            reader.join(PATIENCE_S)
        return status

    def __enter__(self) -> LiveServer:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for reader in self._readers:
            reader.join(PATIENCE_S)
        for pipe in (self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()

    # -- requests ----------------------------------------------------------------------------------------------------

    def get(self, path: str, *, base: str | None = None, **more: Any) -> httpx.Response:
        return httpx.get((base or self.url) + path, timeout=PATIENCE_S, **more)

    def options(self, path: str, **more: Any) -> httpx.Response:
        return httpx.options(self.url + path, timeout=PATIENCE_S, **more)

    def post(self, path: str, body: object, *, base: str | None = None, **more: Any) -> httpx.Response:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return httpx.post((base or self.url) + path, content=content, timeout=PATIENCE_S, **more)

    def events(self, path: str, body: dict[str, Any], **more: Any) -> Iterator[Any]:
        """The events of a stream, parsed; "[DONE]" as it is."""
        asked = {**body, "stream": True}
        with httpx.stream("POST", self.url + path, json=asked, timeout=PATIENCE_S, **more) as response:
            assert response.status_code == 200, response.read()
            assert response.headers["content-type"].startswith("text/event-stream")
            for line in response.iter_lines():
                if line:
                    assert line.startswith("data: ")
                    data = line.removeprefix("data: ")
                    yield data if data == "[DONE]" else json.loads(data)

    def metric(self, name: str) -> float:
        """The value of a metric without labels."""
        for line in self.get("/metrics").text.splitlines():
            if line.startswith(f"{name} "):
                return float(line.split()[1])
        raise KeyError(name)

    def wait_until_idle(self) -> None:
        """Until the engine says that nothing runs, nothing waits and no block is used."""
        names = ("ssd_requests_running", "ssd_requests_waiting", "ssd_kv_blocks_used")
        eventually(lambda: [self.metric(name) for name in names] == [0, 0, 0], "the engine is idle")


def eventually(condition: Callable[[], bool], what: str) -> None:
    """Wait until `condition` holds."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"not in {PATIENCE_S:g} s: {what}"
        time.sleep(0.02)
