"""Ranks that do not make it into the group, as `distributed.launch` starts them: `test_gathering.py`."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Mapping
from typing import Any, NoReturn

from ssd_ascend.distributed.launch import Meeting, Place, call


def without_a_device(spec: Mapping[str, Any]) -> None:
    """The last rank finds no device; the others wait for the group as long as they are let."""
    place = Place(*spec["place"])
    _, line = call(place, Meeting(*spec["meeting"]))
    with contextlib.closing(line):
        if place.rank == place.size - 1:
            line.fail(f"there is no device {place.rank}")
            raise SystemExit(1)
        line.ready()
        time.sleep(300.0)


def killed_while_joining(spec: Mapping[str, Any]) -> None:
    """It says that it is ready, and is killed where the library waits."""
    _, line = call(Place(*spec["place"]), Meeting(*spec["meeting"]))
    line.ready()
    time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)


def with_a_mistake(spec: Mapping[str, Any]) -> None:
    """A rank of ours in which something goes wrong that nobody thought of."""

    from ssd_ascend.config.engine import EngineConfig  # here: the others above start quicker without
    from ssd_ascend.engine import rank
    from ssd_ascend.engine.gather import to_plain

    def open_backend(config: EngineConfig) -> NoReturn:
        raise TypeError(f"{config.model!r} was not\nmeant")

    rank.open_backend = open_backend
    rank.main({**spec, "config": to_plain(EngineConfig(model="this", tensor_parallel=2))})
