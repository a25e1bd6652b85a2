"""Logging for every room: `get_logger(__name__)`, one set-up, standard error only (standard output is for answers).

Pass numbers as `fields(...)`, so that a log line reads `loaded weights seconds=1.4 tensors=272` and can be parsed.
"""

from __future__ import annotations

import logging
import sys
from typing import TextIO

from ssd_ascend import env

_ROOT = "ssd_ascend"
_FORMAT = "%(asctime)s %(levelname).1s %(name)s: %(message)s"


class _StderrHandler(logging.StreamHandler[TextIO]):
    """Writes to whatever sys.stderr is now, so that redirection after import still works."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr


class fields:  # noqa: N801  reads as a function at the call site: log.info("loaded %s", fields(seconds=1.4))
    """Key=value pairs, rendered only if the line is written."""

    __slots__ = ("_values",)

    def __init__(self, **values: object) -> None:
        self._values = values

    def __str__(self) -> str:
        return " ".join(f"{key}={_render(value)}" for key, value in self._values.items())


def _render(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    text = str(value)
    return repr(text) if not text or any(c.isspace() or c in "=\"'" for c in text) else text


def get_logger(name: str) -> logging.Logger:
    """The logger of a module; the first call sets the project's logging up.

    When the host application (or pytest) has configured the root logger already, it owns the output and we add none.
    """
    root = logging.getLogger(_ROOT)
    if root.level == logging.NOTSET:
        root.setLevel(env.log_level())
        if not logging.getLogger().handlers:
            root.addHandler(_StderrHandler())
            root.handlers[-1].setFormatter(logging.Formatter(_FORMAT, datefmt="%H:%M:%S"))
            root.propagate = False
    return logging.getLogger(name if name == _ROOT or name.startswith(f"{_ROOT}.") else f"{_ROOT}.{name}")


def set_level(level: str) -> None:
    """Set the level of every logger of the project; for a --log-level flag."""
    get_logger(_ROOT).setLevel(level.upper())
