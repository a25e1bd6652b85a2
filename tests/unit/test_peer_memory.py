"""Who can share memory between devices: all ranks say the same, before any of them waits for another."""

from __future__ import annotations

import socket
from typing import Any

import pytest
from torch import distributed

from ssd_ascend.backends.cuda.peer_memory import _must_be_alike
from ssd_ascend.errors import TransportError


class Pair:
    """A group of two."""

    def size(self) -> int:
        return 2


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ((socket.gethostname(), 1), None),
        (("elsewhere", 1), "devices of 2 hosts share no memory"),
        ((socket.gethostname(), 0), "shared memory 0 and 1 times before"),
    ],
    ids=["alike", "elsewhere", "new"],
)
def test_ranks_that_would_not_find_each_other_do_not_meet(
    monkeypatch: pytest.MonkeyPatch, other: tuple[str, int], why: str | None
) -> None:
    def gather(found: list[Any], own: tuple[str, int], *, group: Pair) -> None:
        found[:] = [own, other]

    monkeypatch.setattr(distributed, "all_gather_object", gather)
    pair: Any = Pair()
    if why is None:
        _must_be_alike(pair, 1)
        return
    with pytest.raises(TransportError, match=why):
        _must_be_alike(pair, 1)
