"""Leaves the folder out, saying why, where torch_npu is not installed; otherwise everything runs on the emulator."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from ssd_ascend.backends.base import Backend

if find_spec("torch_npu") is None:
    collect_ignore_glob = ["test_*.py"]


def pytest_report_header() -> str | None:
    return (
        "tests/npu is left out: torch_npu is not installed (see scripts/npu_lane.sh)"
        if not find_spec("torch_npu")
        else None
    )


@pytest.fixture(autouse=True)
def _a_busy_machine_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A target goes on without a draft worker that is late; these tests are about what it says, however late."""
    for name in ("_PATIENCE_MOST_S", "_PATIENCE_LEAST_S"):
        monkeypatch.setattr(f"ssd_ascend.speculation.worker_client.{name}", 60.0)


@pytest.fixture(scope="session")
def backend() -> Iterator[Backend]:
    """The NPU backend, emulated; a process stays on the emulator once it is loaded."""
    from ssd_ascend.backends.registry import load_backend

    os.environ["SSD_NPU_EMULATOR"] = "1"
    try:
        yield load_backend("npu")
    finally:
        os.environ.pop("SSD_NPU_EMULATOR", None)
