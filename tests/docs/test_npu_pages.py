"""The NPU pages name the settings that the backend makes, and quote sentences that it says, in both languages."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ssd_ascend.backends.npu.environment import FORBIDDEN, SETTINGS
from tests.docs.pages import ROOT, tables

PAGES = [ROOT / "docs" / name for name in ("npu.md", "npu.zh-CN.md")]
SOURCES = "\n".join(
    path.read_text(encoding="utf-8")
    for path in sorted((ROOT / "ssd_ascend").glob("**/*.py"))
    if "npu/src" not in str(path)
)


def table_whose_first_cell(page: Path, pattern: str) -> list[list[str]]:
    """The rows of the one table whose every first cell is like that, without their headings."""
    found = [rows[1:] for rows in tables(page.read_text(encoding="utf-8"))]
    (rows,) = [rows for rows in found if all(re.fullmatch(pattern, row[0]) for row in rows)]
    return rows


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_settings_are_those_the_backend_makes(page: Path) -> None:
    made = {setting.name: setting.value for setting in SETTINGS} | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    told = {row[0].strip("`"): row[1] for row in table_whose_first_cell(page, r"`[A-Z_]+`")}
    assert told == made
    assert all(f"`{name}={value}`" in page.read_text(encoding="utf-8") for name, (value, _) in FORBIDDEN.items())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_quoted_sentences_are_said_somewhere(page: Path) -> None:
    quoted = [row[0].strip("`") for row in table_whose_first_cell(page, r"`[a-z][^`]* [^`]*`")]
    assert len(quoted) > 5
    assert [sentence for sentence in quoted if sentence not in SOURCES] == []
