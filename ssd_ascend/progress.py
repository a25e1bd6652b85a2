"""Progress bars of the doors, on standard error; nothing is drawn where `rich` is missing or nobody is watching."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Advance = Callable[[int, int], None]


@contextmanager
def bar(title: str, *, unit: str = "") -> Iterator[Advance]:
    """A bar for the block; call what it yields with (done, total)."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
    except ImportError:
        yield _ignore
        return
    if not sys.stderr.isatty():
        yield _ignore
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}% {task.fields[unit]}"),
    )
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(title, total=None, unit=unit)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def _ignore(done: int, total: int) -> None:
    """Draws nothing."""
