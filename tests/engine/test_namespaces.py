"""Target and remote speculator on two "hosts", network namespaces with a cable of their own, which is then cut.

Skipped where the system does not let us make namespaces.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
TARGET, SPECULATOR = "ssd-test-target", "ssd-test-spec"
HERE, THERE = "10.201.77.1", "10.201.77.2"
PORT = 7070
STREAMS, CUT_S, BACK_S = 16, 5.0, 5.0
FLAGS = ["--dtype", "float32", "--speculator", "ssd", "--drafter", "model", "--lookahead", "4", "--fan-out", "2"]
ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "SSD_SPECULATOR_SECRET": "a secret of the tests",
    "PYTHONPATH": str(ROOT),
}


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def hosts() -> Iterator[None]:
    """Two namespaces and the pair of interfaces between them."""
    try:
        ip("netns", "add", TARGET)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("network namespaces are not permitted here")
    try:
        ip("netns", "add", SPECULATOR)
        ip("link", "add", "here", "netns", TARGET, "type", "veth", "peer", "name", "there", "netns", SPECULATOR)
        for namespace, name, address in ((TARGET, "here", HERE), (SPECULATOR, "there", THERE)):
            ip("-n", namespace, "addr", "add", f"{address}/24", "dev", name)
            ip("-n", namespace, "link", "set", name, "up")
            ip("-n", namespace, "link", "set", "lo", "up")
        yield
    finally:
        for namespace in (TARGET, SPECULATOR):
            subprocess.run(["ip", "netns", "del", namespace], check=False, capture_output=True)


def start(namespace: str, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        ["ip", "netns", "exec", namespace, sys.executable, *words],
        env=ENVIRONMENT, cwd=ROOT, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip


def told(process: subprocess.Popen[str]) -> dict[str, Any]:
    """The next line of a target."""
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, "the target ended early"
    found: dict[str, Any] = json.loads(line)
    return found


def until_hits_grow(process: subprocess.Popen[str], *, by: int, after: float = 0.0) -> dict[str, Any]:
    """The first report after a time whose hits are `by` more than in the first one after that time."""
    first = told(process)
    while first["time"] < after:
        first = told(process)
    report = first
    while report["hits"] < first["hits"] + by:
        report = told(process)
    return report


@pytest.mark.slow
def test_a_cut_cable_costs_speed_only(pair: Path, hosts: None) -> None:
    """5 s without a cable under 16 streams: nothing fails, tokens stay, and hits are back within 5 s."""
    flags = ["--model", str(pair / "target"), "--draft", str(pair / "model"), *FLAGS]
    speculator = start(SPECULATOR, "-m", "ssd_ascend.speculate", *flags, "--host", THERE, "--port", str(PORT))
    target = None
    try:
        assert speculator.stdout is not None
        assert speculator.stdout.readline().startswith("ready")
        target = start(
            TARGET, "-m", "tests.engine.remote_target", str(pair), f"{THERE}:{PORT}", str(STREAMS), "45"
        )  # fmt: skip
        until_hits_grow(target, by=20)
        ip("-n", SPECULATOR, "link", "set", "there", "down")
        cut = time.monotonic()
        report = told(target)
        while time.monotonic() < cut + CUT_S:
            last, report = report, told(target)
            assert report["steps"] > last["steps"], "the target stands still without its speculator"
        ip("-n", SPECULATOR, "link", "set", "there", "up")
        mended = time.monotonic()
        back = until_hits_grow(target, by=20, after=mended)
        print(f"speculation came back {back['time'] - mended:.2f} s after the cable")
        assert back["time"] - mended < BACK_S
        while "right" not in (report := told(target)):
            pass
        assert report["right"]
        assert target.wait(30) == 0
    finally:
        for process in (target, speculator):
            if process is not None:
                process.terminate()
                process.wait(30)
