"""Reads our Markdown: headings, links, tables, and the commands of shell blocks with what is said of them.

A block of commands may be marked on the line before it, in a comment that readers do not see:
`<!-- needs: GPU -->` it cannot run on every machine; `<!-- run by: FILE -->` that file runs it. A page of
`docs/deploy/` is about the machine it is named after, and needs it throughout.
"""

from __future__ import annotations

import itertools
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "README.zh-CN.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").glob("**/*.md")),
]
_MARK = re.compile(r"<!-- (needs|run by): (.+?) -->")
_ENDS = ("|", "||", "&&", "&", ";", ">", "2>")
_SHELLS = ("bash", "sh")


@dataclass(frozen=True, slots=True)
class Command:
    """One command, comments and line breaks gone. needs, run_by: what its block is marked with."""

    page: str
    text: str
    needs: str | None = None
    run_by: str | None = None

    @property
    def words(self) -> list[str]:
        """Up to a pipe or the like, without assignments in front."""
        words = list(itertools.takewhile(lambda word: word not in _ENDS, shlex.split(self.text)))
        while words and re.fullmatch(r"[A-Z_0-9]+=\S*", words[0]):
            del words[0]
        return words


def name_of(page: Path) -> str:
    """A page as people write it."""
    return str(page.relative_to(ROOT))


def prose(text: str) -> str:
    """The page without its code blocks."""
    return re.sub(r"(?ms)^(```|~~~).*?^\1", "", text)


def headings(text: str) -> list[tuple[int, str]]:
    """(depth, words) of every heading."""
    return [(len(m[1]), m[2].strip()) for m in re.finditer(r"(?m)^(#+) (.+)$", prose(text))]


def anchor(heading: str) -> str:
    """What GitHub makes of a heading in a link."""
    words = re.sub(r"[`*]|\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
    return re.sub(r"[^\w\- ]", "", words).replace(" ", "-")


def links(text: str) -> list[str]:
    """Targets of links and pictures."""
    return re.findall(r"\]\(([^)\s]+)\)", prose(text))


def commands(page: Path) -> list[Command]:
    """Every command of the page's shell blocks."""
    found: list[Command] = []
    lines = page.read_text(encoding="utf-8").splitlines()
    usual = {"needs": page.stem} if page.parent.name == "deploy" else {}
    mark: dict[str, str] = {}
    block: list[str] | None = None
    for line in lines:
        if block is None:
            opened = re.match(r"\s*```(\w*)", line)
            if opened and opened[1] in _SHELLS:
                block = []
            elif line.strip():
                mark = dict(_MARK.findall(line))
        elif line.strip() == "```":
            mark = mark or usual
            found += [Command(name_of(page), words, mark.get("needs"), mark.get("run by")) for words in _split(block)]
            block, mark = None, {}
        else:
            block.append(line)
    return found


def _split(block: list[str]) -> list[str]:
    joined = re.sub(r"\\\n\s*", " ", "\n".join(block))
    bare = (_without_comment(line).strip() for line in joined.splitlines())
    return [line for line in bare if line]


def _without_comment(line: str) -> str:
    """Up to a # that begins a word outside quotes."""
    quote = ""
    for at, sign in enumerate(line):
        if quote:
            quote = "" if sign == quote else quote
        elif sign in "'\"":
            quote = sign
        elif sign == "#" and (at == 0 or line[at - 1].isspace()):
            return line[:at]
    return line


def tables(text: str) -> list[list[list[str]]]:
    """Every table as rows of cells, its rule left out."""
    found: list[list[list[str]]] = []
    rows: list[list[str]] = []
    for line in [*prose(text).splitlines(), ""]:
        if line.startswith("|"):
            cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip().strip("|"))]
            if not all(set(cell) <= set("-: ") for cell in cells):
                rows.append(cells)
        elif rows:
            found.append(rows)
            rows = []
    return found
