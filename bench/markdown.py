"""Tables in plain Markdown, for whoever shows a result."""

from __future__ import annotations

from collections.abc import Sequence


def is_number(value: object) -> bool:
    """Whether a row's value can be computed with."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def markdown(headers: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A Markdown table whose columns line up in a terminal as well."""
    widths = [max(len(line[i]) for line in [headers, *lines]) for i in range(len(headers))]
    text = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |"
            for line in [headers, *lines]]  # fmt: skip
    text.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(text)
