"""What holds for every test: offline, seeded, and blind to the settings of the developer's own shell."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"  # before any test imports the hub's client, which reads it once
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# several test processes share the cores: one thread each, and none that spins for a core another one needs
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")


_OF_DEVICES = {"npu": "float16", "cuda": "bfloat16"}
_KEPT = {"SSD_NPU_EMULATOR"}
"""Belongs to the machine, as a driver does: processes that a test starts need it, too."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default=None, help="run the conformance, engine and server suites on this device")


def pytest_configure(config: pytest.Config) -> None:
    """`tests/engine/harness.py` reads what is set here; servers that tests start read SSD_DEVICE."""
    device = config.getoption("--device")
    if device is None:
        return
    os.environ["TEST_DEVICE"] = device
    os.environ.setdefault("TEST_DTYPE", _OF_DEVICES.get(device, "float32"))
    from ssd_ascend.backends.registry import load_backend

    load_backend(device)  # before transformers imports torch_npu, which must find its emulator


@pytest.fixture(autouse=True)
def _same_start(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[None]:
    """Fixed seeds, no SSD_* variables; torch is seeded only where a test uses it, so that the others stay quick."""
    device = request.config.getoption("--device")
    for name in [name for name in os.environ if name.startswith("SSD_")]:
        if device is None or name not in _KEPT:
            monkeypatch.delenv(name)
    if device is not None:
        monkeypatch.setenv("SSD_DEVICE", device)
    random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)
    yield
    trace = sys.modules.get("ssd_ascend.trace")
    if trace is not None:
        trace.disable()
        trace.reset()
