"""What hardware or CANN refuses the emulator refuses, each with its reason: luck must not pass for correctness."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

REASONS = {
    "attention in float32": "float16 or bfloat16",
    "a block size of 64": "only block size 128",
    "a head width of 24": "multiple of 16",
    "a head width of 512": "at most 256",
    "query lengths that are not cumulative": "cumulative",
    "query lengths that leave tokens over": "the number of tokens",
    "cumulative key lengths": "per sequence",
    "lists of another batch": "must agree",
    "a block table of another batch": "must agree",
    "a block table of int64": "int32",
    "a block beyond the cache": "a block beyond the cache",
    "no mask": "wants atten_mask",
    "a full mask": "2048 x 2048",
    "a mask upside down": "1 means masked",
    "a mask of floats": "bool, int8 or uint8",
    "sparse mode 0 with a mask": "sparse_mode 3",
    "another layout": "only TND",
    "the default number of key-value heads": "kv_heads * width",
    "rows as inner_precise would fix them": "inner_precise 0",
    "the default cache mode": "PA_NZ",
    "a slot beyond the cache": "a slot beyond the cache",
    "two tokens for one slot": "two tokens for one slot",
    "a cache of another dtype": "another data type",
    "an operator that is not emulated": "operator Gelu is not emulated",
    "an operator that NPUs do not have": "CPU fallback is disabled",
    "a synchronisation in a capture": "107041",
    "a pageable copy in a capture": "107041",
    "reading a value in a capture": "107041",
    "a product of whole numbers": "507015",
    "random numbers in a capture": "107041",
    "more graphs than streams": "207008",
}


@cache
def outcomes() -> dict[str, str]:
    """What became of each call in `refusals.py`."""
    environment = {**os.environ, "SSD_NPU_EMULATOR": "1", "TASK_QUEUE_ENABLE": "0", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.npu.refusals"]
    done = subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True, text=True, timeout=300)
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_legal_calls_pass_and_all_others_have_a_reason() -> None:
    assert {name for name, said in outcomes().items() if said == "passed"} == {"legal attention", "legal store"}
    assert set(outcomes()) == {"legal attention", "legal store", *REASONS}


@pytest.mark.parametrize("name", list(REASONS))
def test_refused(name: str) -> None:
    assert REASONS[name] in outcomes()[name]
    if "batch" in name:
        assert "561002" in outcomes()[name]


LOST = """
import glob, time
from pathlib import Path
from ssd_ascend.backends.registry import load_backend

def is_queue(name):
    try:
        return Path(name).read_text().strip() == "acl_thread"
    except OSError:  # it has ended since its name was listed
        return False

def queue_works():
    return any(is_queue(name) for name in glob.glob("/proc/self/task/*/comm"))

device = load_backend("npu").device(0)
import torch
x = torch.ones(4, device=device)
x.cpu()
print("works" if queue_works() else "no queue")
has_failed = False
try:
    torch.nn.functional.gelu(x)
except RuntimeError:  # a quick queue has failed before this has launched all it does; its thread may stay then
    has_failed = True
end = time.monotonic() + 120
while not has_failed and queue_works() and time.monotonic() < end:
    time.sleep(0.01)
for attempt in range(2):
    try:
        x.cpu()
    except RuntimeError:
        print("raised")
"""


def test_after_a_refusal_on_the_queue_nothing_passes_any_more() -> None:
    """torch_npu drops what is launched after an error on its queue; without this, rubbish would come back quietly.

    What is launched while the queue fails can be lost, and the wait for it never ends, on NPUs as well (docs/npu.md):
    this launches when the queue's thread has ended.
    """
    environment = {**os.environ, "SSD_NPU_EMULATOR": "1", "TASK_QUEUE_ENABLE": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", LOST]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout.splitlines() == ["works", "raised", "raised"], (done.returncode, done.stderr[-2000:])
