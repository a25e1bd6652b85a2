"""The logic of the GPU backend's kernels on any machine that has Triton, in its interpreter; see `interpreted.py`."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

CANNOT = 3
CASES = ("attention-together", "attention-by-tile", "attention-float32", "matrices", "small", "next-round")


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize("case", CASES)
def test_interpreted(case: str) -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    child = subprocess.run(
        [sys.executable, "-m", "tests.backends.interpreted", case], env=environment, capture_output=True, text=True
    )
    if child.returncode == CANNOT:
        pytest.skip("this version of Triton does not interpret what the kernels are made of")
    assert child.returncode == 0, child.stderr[-2000:]
