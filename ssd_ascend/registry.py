"""A lazy registry: name -> "module:attribute", imported on first use. Rooms with choices (backends, models) hold one.

Nothing is imported until it is asked for, so listing the names of a registry needs neither torch nor any driver.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Generic, TypeVar, cast

from ssd_ascend.errors import ConfigError, unknown_name

T = TypeVar("T")
_PACKAGE = __name__.partition(".")[0]


class Registry(Generic[T]):
    """Read-only names of one kind of thing; `kind` is the word used in messages ("backend", "drafter")."""

    __slots__ = ("_entries", "kind")

    def __init__(self, kind: str, entries: Mapping[str, str]) -> None:
        self.kind = kind
        self._entries = MappingProxyType(dict(entries))

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def names(self) -> tuple[str, ...]:
        """The registered names, in the order they were written."""
        return tuple(self._entries)

    def get(self, name: str) -> T:
        """Import and return the entry `name`, or what a name of the form "module:attribute" stands for: one's own.

        ConfigError names the known ones, or what is missing.
        """
        place = self._entries.get(name, name)
        module_name, colon, attribute = place.partition(":")
        if not colon:
            raise unknown_name(self.kind, name, self._entries)
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name is None or error.name.partition(".")[0] == _PACKAGE:
                raise  # a typing error in our own table, not something the user can install
            raise ConfigError(
                f"{self.kind} {name!r} needs the Python package {error.name!r}, which is not installed",
                remedy="`python -m ssd_ascend.doctor` prints the command that installs it",
            ) from error
        if not hasattr(module, attribute):
            raise ConfigError(f"{self.kind} {name!r}: there is no {attribute!r} in {module_name}")
        return cast(T, getattr(module, attribute))
