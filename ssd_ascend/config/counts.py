"""Numbers of things that an engine is given, and what this machine can do of them. Torch-free."""

from __future__ import annotations

import os
from typing import Final

from ssd_ascend.errors import ConfigError

_MOST_A_CORE: Final = 4
_ALWAYS_FINE: Final = 64


def check_count(name: str, value: int | None) -> None:
    """ConfigError unless `value` is None or at least 1."""
    if value is not None and value < 1:
        raise ConfigError(f"{name} is {value}: it must be at least 1", remedy=f"raise {name}, or leave it out")


def check_threads(name: str, value: int | None) -> None:
    """ConfigError for more threads than a machine survives: each takes memory and a place in the kernel's table, and a
    million of them leave no room for any other process."""
    check_count(name, value)
    cores = os.cpu_count() or 1
    if value is not None and value > max(_ALWAYS_FINE, _MOST_A_CORE * cores):
        raise ConfigError(
            f"{name} is {value}, and this machine has {cores} cores", remedy=f"give at most {cores}, or leave it out"
        )
