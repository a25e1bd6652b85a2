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


@pytest.fixture(autouse=True)
def _same_start(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fixed seeds, no SSD_* variables; torch is seeded only where a test uses it, so that the others stay quick."""
    for name in [name for name in os.environ if name.startswith("SSD_")]:
        monkeypatch.delenv(name)
    random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)
    yield
    trace = sys.modules.get("ssd_ascend.trace")
    if trace is not None:
        trace.disable()
        trace.reset()
