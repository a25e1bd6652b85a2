"""Small sums over two GPUs through memory they share: the library's bits, in graphs too; no hang when a rank dies."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def test_sums_are_the_librarys_and_a_dead_rank_ends_them(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.backends.two_ranks"]
    other = subprocess.Popen([*command, "1", str(tmp_path / "store")])
    try:
        first = subprocess.run([*command, "0", str(tmp_path / "store")], capture_output=True, text=True, timeout=120)
    finally:
        other.kill()
        other.wait()
    assert first.returncode == 0, first.stderr[-2000:]
    found = json.loads(first.stdout.splitlines()[-1])
    assert found["different"] == []
    assert not found["replays_differ"]
    assert found["is_nan"], "whatever comes of a sum with a dead rank, it must not look like a number"
    assert 0.9 < found["woken_after_s"] < 10.0
