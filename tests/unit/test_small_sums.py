"""Sums over ranks that a device does its own way: which ones, and who wakes whom when a rank is lost."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import distributed

from ssd_ascend.distributed.collectives import GroupCollectives, join_group


class Doubling:
    """Sums as two equal ranks would have them; up to four numbers."""

    def __init__(self) -> None:
        self.aborted = 0

    def fits(self, x: torch.Tensor) -> bool:
        return x.numel() <= 4

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x.mul_(2)

    def abort(self) -> None:
        self.aborted += 1


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[GroupCollectives]:
    """A group of one, in which the library's sums change nothing."""
    store = distributed.FileStore(str(tmp_path / "store"), 1)
    group = join_group("gloo", store, 0, 1, torch.device("cpu"))
    yield group
    group.close()


def test_small_sums_go_their_own_way_and_large_ones_through_the_library(alone: GroupCollectives) -> None:
    assert alone.all_reduce(torch.ones(3)).tolist() == [1.0] * 3
    alone.use(Doubling())
    assert alone.all_reduce(torch.ones(3)).tolist() == [2.0] * 3
    assert alone.all_reduce(torch.ones(6)[::2]).tolist() == [2.0] * 3, "contiguous by then"
    assert alone.all_reduce(torch.ones(5)).tolist() == [1.0] * 5
    alone.use(None)
    assert alone.all_reduce(torch.ones(3)).tolist() == [1.0] * 3


def test_who_waits_for_a_lost_rank_in_a_small_sum_is_woken(
    alone: GroupCollectives, monkeypatch: pytest.MonkeyPatch
) -> None:
    sums = Doubling()
    alone.use(sums)
    monkeypatch.setattr(distributed.distributed_c10d, "_abort_process_group", lambda group: None)
    GroupCollectives.abort()
    assert sums.aborted == 1


def test_a_closed_group_wakes_nobody(tmp_path: Path) -> None:
    sums = Doubling()
    group = join_group("gloo", distributed.FileStore(str(tmp_path / "store"), 1), 0, 1, torch.device("cpu"))
    group.use(sums)
    group.close()
    GroupCollectives.abort()
    assert sums.aborted == 0


def test_a_group_whose_ranks_are_lost_is_gone_when_closed(tmp_path: Path) -> None:
    """Also where the loss was noticed before the group was there, so that nobody has aborted it."""
    group = join_group("gloo", distributed.FileStore(str(tmp_path / "store"), 1), 0, 1, torch.device("cpu"))
    group.close(lost=True)
    assert not distributed.is_initialized()
    group.close(lost=True)


def test_a_device_that_cannot_be_told_does_not_keep_the_group(tmp_path: Path) -> None:
    class Lost(Doubling):
        def abort(self) -> None:
            raise RuntimeError("the device is in error")

    group = join_group("gloo", distributed.FileStore(str(tmp_path / "store"), 1), 0, 1, torch.device("cpu"))
    group.use(Lost())
    GroupCollectives.abort()
    assert not distributed.is_initialized()
    group.close(lost=True)
