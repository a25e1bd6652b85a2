"""How many threads the host's operators get."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from ssd_ascend.backends.registry import load_backend
from ssd_ascend.runtime.threads import settle_threads


@pytest.fixture(autouse=True)
def three() -> Iterator[None]:
    """Three threads, and what there were afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def test_one_thread_where_the_device_works_and_nobody_asked() -> None:
    host = load_backend("cpu").capabilities
    settle_threads(host, None)
    assert torch.get_num_threads() == 3
    settle_threads(replace(host, host_memory=False), 5)
    assert torch.get_num_threads() == 3
    settle_threads(replace(host, host_memory=False), None)
    assert torch.get_num_threads() == 1
