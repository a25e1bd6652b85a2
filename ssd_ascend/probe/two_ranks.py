"""The same work on two devices at once, each a rank of one group. `calibrate` measures by it what is between them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from ssd_ascend.backends.base import Backend
from ssd_ascend.distributed.collectives import GroupCollectives
from ssd_ascend.distributed.launch import Meeting, Place, call, lead, meet

Work = Callable[[Backend, torch.device, GroupCollectives], object]
"""What both ranks do, each on its device."""


@contextlib.contextmanager
def first_of_two(backend: Backend, *, entry: str) -> Iterator[GroupCollectives]:
    """The group of this process, on the first device, and of one in which `entry` does the same work meanwhile.

    entry: "module:function", a function that calls `second_of_two`. Raises what `lead` does.
    """
    config = {"device": backend.name}
    ranks = lead(backend.collective, backend.device(0), 2, entry=entry, config=config, place=None)
    try:
        yield ranks.collectives
    finally:
        ranks.close()


def second_of_two(spec: Mapping[str, Any], backend: Backend, work: Work) -> None:
    """The other rank: does its work, and leaves with the first one."""
    place = Place(*spec["place"])
    store, line = call(place, Meeting(*spec["meeting"]))
    with line.telling("the second rank"):
        device = backend.device(place.local_rank)
        group = meet(backend.collective, store, line, place, device)
        work(backend, device, group)
        line.receive()
        group.close()
