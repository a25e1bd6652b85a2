"""The emulated NPU answers what other devices answered: the CPU of this machine, and the recorded ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from ssd_ascend.backends.base import Backend
from ssd_ascend.parity.comparing import compare, passed
from ssd_ascend.parity.golden import Golden, load_golden
from ssd_ascend.parity.recording import Options, record

GOLDENS = [
    path
    for path in sorted((Path(__file__).parents[1] / "parity" / "goldens").glob("*/golden.json"))
    if load_golden(path.parent).model.source is None
]
"""Of the built-in models; the table for a real one is in docs/parity.md."""


@pytest.fixture(scope="module")
def here(backend: Backend) -> Golden:
    return record(Options(device="npu"), lambda _: None)


def check(golden: Golden, here: Golden) -> None:
    rows = compare(golden, here)
    assert passed(rows), "\n".join(map(str, rows))


def test_as_the_cpu(here: Golden) -> None:
    assert "(emulated)" in here.about["device"]
    check(record(Options(device="cpu"), lambda _: None), here)


@pytest.mark.parametrize("path", GOLDENS, ids=lambda path: path.parent.name)
def test_as_recorded(path: Path, here: Golden) -> None:
    check(load_golden(path.parent), here)
