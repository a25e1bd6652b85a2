"""Reads tables we did not write (`config.json`, gguf metadata): unknown keys are ignored, used ones are checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ssd_ascend.errors import ConfigError


class ForeignConfig:
    """A foreign table with its file name, so that every complaint names the file and the key."""

    def __init__(self, data: Mapping[str, Any], where: str) -> None:
        self.data = data
        self.where = where

    def integer(self, key: str, default: int | None = None, *, at_least: int = 1) -> int:
        """An integer of at least `at_least`; ConfigError when absent without a default, or something else."""
        value = self.data.get(key)
        if value is None and default is not None:
            return default
        if value is None:
            raise ConfigError(f"{self.where} has no {key!r}", remedy="use the config.json the model came with")
        whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        if isinstance(value, bool) or not whole or value < at_least:
            raise ConfigError(f"{self.where}: {key!r} is {value!r}, expected an integer of at least {at_least}")
        return int(value)

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number; ConfigError when absent without a default, or something else."""
        value = self.data.get(key)
        if value is None and default is not None:
            return default
        if value is None:
            raise ConfigError(f"{self.where} has no {key!r}")
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < float("inf"):
            raise ConfigError(f"{self.where}: {key!r} is {value!r}, expected a number")
        return float(value)

    def optional_number(self, key: str) -> float | None:
        """A number, or None when absent or null."""
        return None if self.data.get(key) is None else self.number(key)

    def flag(self, key: str, *, default: bool) -> bool:
        """True or false; ConfigError when it is something else."""
        value = self.data.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise ConfigError(f"{self.where}: {key!r} is {value!r}, expected true or false")
        return value

    def table(self, key: str) -> dict[str, Any]:
        """A nested table; empty when absent or null."""
        value = self.data.get(key)
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            raise ConfigError(f"{self.where}: {key!r} is {value!r}, expected a table")
        return dict(value)
