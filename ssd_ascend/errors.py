"""The errors users see. Every room raises these; the doors (serve, generate, ...) turn them into one clear sentence.

An error carries the offending value, the reason, and, where there is one, the remedy.
"""

from __future__ import annotations

import contextlib
import difflib
import re
import sys
from collections.abc import Iterable, Iterator

_LONG_WORD = re.compile(r"\S{241,}")
_LONG = 2400


class SsdError(Exception):
    """Base of every error this project raises on purpose; `remedy` says what the reader can do about it."""

    def __init__(self, message: str, *, remedy: str | None = None) -> None:
        super().__init__(message)  # only positional arguments: keeps the error picklable across processes
        self.remedy = remedy

    @property
    def message(self) -> str:
        """The reason without the remedy."""
        return str(self.args[0])

    def __str__(self) -> str:
        return one_line(f"{self.message} ({self.remedy})" if self.remedy else self.message)


class ConfigError(SsdError):
    """A setting, file or machine that cannot work; raised before any request is served."""


class RequestError(SsdError):
    """A request that cannot be served; the server answers 400 and names `param`, and the next request works."""

    def __init__(
        self, message: str, *, param: str | None = None, code: str | None = None, remedy: str | None = None
    ) -> None:
        super().__init__(message, remedy=remedy)
        self.param = param
        self.code = code


class WorkerError(SsdError):
    """Another process of ours failed or died: a rank of the target, or a draft worker."""


class TransportError(WorkerError):
    """The line between target and speculator broke or timed out; the target goes on without a speculator."""


@contextlib.contextmanager
def needs_packages(*, extra: str = "") -> Iterator[None]:
    """A package that is found missing within is a ConfigError that says how to get it; a module of ours is a fault.

    extra: the optional dependencies of ours that bring it, such as "[serve]".
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "ssd_ascend":
            raise
        raise ConfigError(
            f"{sys.executable} has no package {error.name!r}",
            remedy=f"in a clone: make setup, then . .venv/bin/activate; elsewhere: pip install 'ssd-ascend{extra}'",
        ) from error


def one_line(text: str) -> str:
    """What a reader of a terminal or a log can take in: on one line, and of a value that goes on and on its ends."""
    text = _LONG_WORD.sub(lambda found: f"{found[0][:120]}...{found[0][-40:]}", text)
    text = text if len(text) <= _LONG else f"{text[: _LONG - 500]} ... {text[-400:]}"
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)


def first_line(error: Exception) -> str:
    """The first line of an error that may hold a page; its kind where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def in_one_line(error: BaseException) -> str:
    """An error of ours in its own words; any other by its kind and the first line of what it says."""
    if isinstance(error, SsdError):
        return str(error)
    said = str(error).strip().splitlines()
    return f"{type(error).__name__}: {said[0]}" if said else type(error).__name__


def flag_names(fields: Iterable[str]) -> str:
    """Fields of a configuration as the flags that set them."""
    return ", ".join(sorted("--" + field.replace("_", "-") for field in fields))


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name a misspelt `name` most likely meant, or None when nothing is close."""
    matches = difflib.get_close_matches(name.lower(), list(known), n=1, cutoff=0.6)
    return matches[0] if matches else None


def unknown_name(kind: str, name: str, known: Iterable[str], *, where: str = "") -> ConfigError:
    """Build the error for a name outside `known`: it lists what is known and names the nearest."""
    names = sorted(known)
    guess = nearest(name, names)
    listed = ", ".join(names) if names else "none"
    place = f" in {where}" if where else ""
    return ConfigError(
        f"unknown {kind} {name!r}{place}; known: {listed}",
        remedy=f"did you mean {guess!r}?" if guess else None,
    )
