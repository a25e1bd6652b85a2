"""Logging for every room: `get_logger(__name__)`, one set-up, standard error only (standard output is for answers).

Pass numbers as `fields(...)`, so that a log line reads `loaded weights seconds=1.4 tensors=272` and can be parsed. With
SSD_LOG_FORMAT=json each line is an object, fields among its members. Both carry the id of the request being served.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable
from contextvars import ContextVar
from typing import TextIO

from ssd_ascend import env
from ssd_ascend.errors import ConfigError

_ROOT = "ssd_ascend"
_FORMAT = "%(asctime)s %(levelname).1s %(name)s: %(message)s"

request_id: ContextVar[str | None] = ContextVar("request_id", default=None)
"""The request that this task serves; set by the HTTP front end."""


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

    @property
    def values(self) -> dict[str, object]:
        """The pairs."""
        return self._values

    def __str__(self) -> str:
        return " ".join(f"{key}={_render(value)}" for key, value in self._values.items())


_QUOTED = frozenset(" =\"'")


def _render(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    text = str(value)
    return text if text.isprintable() and text and not _QUOTED & set(text) else repr(text)


class _LineFormatter(logging.Formatter):
    """For people."""

    def __init__(self) -> None:
        super().__init__(_FORMAT, datefmt="%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        line, own_id = super().format(record), request_id.get()
        return line if own_id is None else f"{line} request_id={own_id}"


class _JsonFormatter(logging.Formatter):
    """For machines: one object a line."""

    def format(self, record: logging.LogRecord) -> str:
        arguments = record.args if isinstance(record.args, tuple) else ()
        entry: dict[str, object] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if (own_id := request_id.get()) is not None:
            entry["request_id"] = own_id
        for argument in arguments:
            if isinstance(argument, fields):
                entry |= {name: value for name, value in argument.values.items() if name not in entry}
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False, default=str)


def get_logger(name: str) -> logging.Logger:
    """The logger of a module; the first call sets the project's logging up.

    When the host application (or pytest) has configured the root logger already, it owns the output and we add none.
    """
    root = logging.getLogger(_ROOT)
    if root.level == logging.NOTSET:
        wrong: list[ConfigError] = []  # told as a line of the log: no door can catch what comes of an import
        root.setLevel(_setting(env.log_level, "INFO", wrong))
        if not logging.getLogger().handlers:
            root.addHandler(_StderrHandler())
            use_format(_setting(env.log_format, "text", wrong))
            root.propagate = False
        for error in wrong:
            root.warning("%s", error)
    return logging.getLogger(name if name == _ROOT or name.startswith(f"{_ROOT}.") else f"{_ROOT}.{name}")


def _setting(read: Callable[[], str], default: str, wrong: list[ConfigError]) -> str:
    """What the environment says; what is wrong there is left at its default, and put down in `wrong`."""
    try:
        return read()
    except ConfigError as error:
        wrong.append(error)
        return default


def adopt(*names: str, level: int) -> None:
    """Write what libraries log under `names`, from `level` on, as our own lines are written."""
    own = logging.getLogger(_ROOT)
    for name in names:
        logger = logging.getLogger(name)
        logger.setLevel(level)
        if own.handlers and not logger.handlers:
            logger.handlers, logger.propagate = own.handlers, False


def use_format(name: str) -> None:
    """Write lines as "text" or as "json" from now on."""
    for handler in logging.getLogger(_ROOT).handlers:
        handler.setFormatter(_JsonFormatter() if name == "json" else _LineFormatter())


def set_level(level: str) -> None:
    """Set the level of every logger of the project; for a --log-level flag."""
    get_logger(_ROOT).setLevel(level.upper())
