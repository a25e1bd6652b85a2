"""Two "hosts" on this machine: network namespaces with a cable of their own, which can be cut, or be slow.

For tests; they are skipped where the system does not let us make namespaces.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
TARGET, SPECULATOR = "ssd-test-target", "ssd-test-spec"
HERE, THERE = "10.201.77.1", "10.201.77.2"
PORT = 7070
ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "SSD_SPECULATOR_SECRET": "a secret of the tests",
    "PYTHONPATH": str(ROOT),
}


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@contextmanager
def two_hosts(delay_ms: float | None = None) -> Iterator[None]:
    """The namespaces `TARGET` and `SPECULATOR`. Without a delay their cable is the kernel's (a veth pair); with one it
    is a program that holds every packet back so long, for not every kernel can."""
    try:
        ip("netns", "add", TARGET)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"network namespaces are not permitted here: {error}")
    cable = None
    try:
        ip("netns", "add", SPECULATOR)
        if delay_ms is None:
            ip("link", "add", "here", "netns", TARGET, "type", "veth", "peer", "name", "there", "netns", SPECULATOR)
        else:
            cable = subprocess.Popen(
                [sys.executable, "-m", "tests.slow_cable", TARGET, SPECULATOR, str(delay_ms)],
                cwd=ROOT, stdout=subprocess.PIPE, text=True,
            )  # fmt: skip
            assert cable.stdout is not None
            if cable.stdout.readline().strip() != "ready":
                pytest.skip("no /dev/net/tun here, of which a slow cable is made")
        for namespace, name, address in ((TARGET, "here", HERE), (SPECULATOR, "there", THERE)):
            ip("-n", namespace, "addr", "add", f"{address}/24", "dev", name)
            ip("-n", namespace, "link", "set", name, "up")
            ip("-n", namespace, "link", "set", "lo", "up")
        yield
    finally:
        if cable is not None:
            cable.terminate()
            cable.wait()
        for namespace in (TARGET, SPECULATOR):
            subprocess.run(["ip", "netns", "del", namespace], check=False, capture_output=True)


def cut() -> None:
    """Pull the cable."""
    ip("-n", SPECULATOR, "link", "set", "there", "down")


def mend() -> None:
    """Put it back."""
    ip("-n", SPECULATOR, "link", "set", "there", "up")


def start(namespace: str, *words: str) -> subprocess.Popen[str]:
    """A Python process on a host; its standard output is for us."""
    return subprocess.Popen(
        ["ip", "netns", "exec", namespace, sys.executable, *words],
        env=ENVIRONMENT, cwd=ROOT, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip


@contextmanager
def running(namespace: str, *words: str) -> Iterator[subprocess.Popen[str]]:
    """The same, for as long as the block lasts."""
    process = start(namespace, *words)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(60)


def told(process: subprocess.Popen[str]) -> dict[str, Any]:
    """The next line of a process that reports in JSON."""
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, "the process that reports ended early"
    found: dict[str, Any] = json.loads(line)
    return found


def until_hits_grow(process: subprocess.Popen[str], *, by: int = 20, after: float = 0.0) -> dict[str, Any]:
    """The first report after a time whose hits are `by` more than in the first one after that time."""
    while (first := told(process))["time"] < after:
        pass
    report = first
    while report["hits"] < first["hits"] + by:
        report = told(process)
    return report
