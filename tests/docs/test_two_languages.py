"""The README says the same in both languages: as many headings, the same code, commands, links and table rows."""

from __future__ import annotations

import re
from pathlib import Path

from tests.docs.pages import ROOT, commands, headings, links, tables

ENGLISH, CHINESE = ROOT / "README.md", ROOT / "README.zh-CN.md"
VERDICTS = {"run": "已运行", "emulated": "仿真", "not yet": "尚未"}


def text(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def codes(cell: str) -> list[str]:
    """What is in backticks, which is never translated."""
    return re.findall(r"`([^`]+)`", cell)


def test_headings_have_the_same_order_and_depth() -> None:
    assert [depth for depth, _ in headings(text(ENGLISH))] == [depth for depth, _ in headings(text(CHINESE))]


def test_commands_are_the_same() -> None:
    ours, theirs = ([(c.text, c.needs, c.run_by) for c in commands(page)] for page in (ENGLISH, CHINESE))
    assert ours == theirs


def test_code_is_the_same() -> None:
    ours, theirs = (re.findall(r"(?s)```python\n(.*?)```", text(page)) for page in (ENGLISH, CHINESE))
    assert ours == theirs


def test_links_lead_to_the_same_places() -> None:
    """But for the link to the other language, and pages that exist in both."""
    ours, theirs = ([link.replace(".zh-CN", "") for link in links(text(page))] for page in (ENGLISH, CHINESE))
    assert ours == theirs


def test_tables_have_the_same_rows() -> None:
    ours, theirs = tables(text(ENGLISH)), tables(text(CHINESE))
    assert [[len(row) for row in table] for table in ours] == [[len(row) for row in table] for table in theirs]
    for table, other in zip(ours, theirs, strict=True):
        for row, its in zip(table[1:], other[1:], strict=True):
            assert [codes(cell) for cell in row] == [codes(cell) for cell in its]


def test_the_status_of_every_device_is_the_same() -> None:
    """Cell by cell: nothing is run in one language that is not yet in the other."""
    status, its = tables(text(ENGLISH))[0], tables(text(CHINESE))[0]
    judged = 0
    for row, other in zip(status[1:], its[1:], strict=True):
        for cell, theirs in zip(row[1:], other[1:], strict=True):
            for word, translated in VERDICTS.items():
                if re.match(rf"{word}\b", cell):
                    assert theirs.startswith(translated), f"{row[0]}: {cell} / {theirs}"
                    judged += 1
    assert judged > 20


def test_numbers_are_the_same() -> None:
    """Figures that were measured again must be changed in both."""
    numbers = [re.findall(r"\d+\.\d+", re.sub(r"(?s)```.*?```", "", text(page))) for page in (ENGLISH, CHINESE)]
    assert sorted(numbers[0]) == sorted(numbers[1])
