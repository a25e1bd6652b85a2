"""Captures that a device refuses: many sizes, few reasons. Used wherever graphs of several sizes are captured."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

from ssd_ascend.errors import first_line
from ssd_ascend.log import get_logger

_log = get_logger(__name__)
_AMOUNT = re.compile(r"\d[\d.]*( [KMGT]iB)?")
"""Of memory, say: it differs from one size to the next where the reason does not."""
_rehearsing: ContextVar[bool] = ContextVar("rehearsing", default=False)
T = TypeVar("T")


@contextmanager
def rehearsing() -> Iterator[None]:
    """Inside nothing is told: what is captured for good afterwards is refused again."""
    before = _rehearsing.set(True)
    try:
        yield
    finally:
        _rehearsing.reset(before)


class Refusals:
    """What was refused, by reason."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[str, list[str]]] = {}

    def attempt(self, size: str, capture: Callable[[], T]) -> T | None:
        """What `capture` gives; None where the device refuses."""
        try:
            return capture()
        except RuntimeError as error:
            reason = first_line(error)
            self._found.setdefault(_AMOUNT.sub("#", reason), (reason, []))[1].append(size)
            return None

    def tell(self, what: str, instead: str) -> None:
        """A line for each reason. what: to be read before the sizes; instead: what becomes of them."""
        if _rehearsing.get():
            return
        for reason, sizes in self._found.values():
            _log.warning("no graph for %s %s (%s): they %s, which is slower", what, ", ".join(sizes), reason, instead)
