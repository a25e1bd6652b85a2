"""Every link of the documentation leads somewhere, every command is one, and both languages say the same."""

from __future__ import annotations

import argparse
import importlib.util
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.docs.pages import PAGES, ROOT, Command, anchor, commands, headings, links, name_of

COMMANDS = [command for page in PAGES for command in commands(page)]
QUICK = ("ssd_ascend.plan", "ssd_ascend.doctor")
"""What may run in every test run, in this process; the other commands run in `make slow`."""
# a module that an earlier test imported is started once more, which is what is wanted
pytestmark = pytest.mark.filterwarnings("ignore:.*found in sys.modules after import:RuntimeWarning")
NAMED = r"`((?:[\w.-]+/)+[\w.-]+\.(?:py|sh|toml|md|json|svg|yaml|yml|txt))`"
FOLDERS = ("ssd_ascend", "tests", "bench", "docs", "scripts")
FILES = [str(path) for folder in FOLDERS for path in (ROOT / folder).rglob("*.*")]
PATIENCE_S = 900


class Parsed(Exception):  # noqa: N818  no error: the command line was understood
    """Ends a command as soon as its flags are read."""


def unmarked() -> list[Command]:
    return [command for command in COMMANDS if command.needs is None and command.run_by is None]


def target_of(words: list[str]) -> tuple[str, list[str]]:
    """The module or script of a Python command line, and its arguments."""
    rest = words[1:]
    while rest and rest[0] in ("-O", "-u"):
        del rest[0]
    return (rest[1], rest[2:]) if rest[0] == "-m" else (rest[0], rest[1:])


def label(command: Command) -> str:
    return f"{command.page}: {command.text[:60]}"


# -- links ------------------------------------------------------------------------------------------------


def anchors(page: Path) -> set[str]:
    return {anchor(words) for _, words in headings(page.read_text(encoding="utf-8"))}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    lost = []
    for link in links(page.read_text(encoding="utf-8")):
        if re.match(r"https?://[^/]+", link):
            continue
        path, _, part = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (
            part and part not in map(anchor, (words for _, words in headings(target.read_text(encoding="utf-8"))))
        ):
            lost.append(link)
    assert lost == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_files_that_are_named_exist(page: Path) -> None:
    """Paths in backticks: from the root, or the end of a path in one of our folders."""
    named = re.findall(NAMED, page.read_text(encoding="utf-8"))
    # capitals and x stand for something of the reader's
    mine = [name for name in named if not re.search(r"\b([A-Z]+|x)\b(?!\.md)", name)]
    assert [
        name for name in mine if not (ROOT / name).exists() and not any(end.endswith(f"/{name}") for end in FILES)
    ] == []


# -- commands ---------------------------------------------------------------------------------------------


def test_marks_are_understood() -> None:
    for command in COMMANDS:
        if command.run_by is not None:
            assert (ROOT / command.run_by.partition("::")[0]).exists(), f"{label(command)}: {command.run_by} is no file"


@pytest.mark.parametrize("command", unmarked(), ids=label)
def test_every_command_can_be_run_or_says_what_it_needs(command: Command) -> None:
    """What is neither Python nor a script of ours cannot be run here: the page says what it needs, or who runs it."""
    first = command.words[0]
    ours = first in ("python", ".venv/bin/python") or (ROOT / first).is_file()
    assert ours, f"mark its block in {command.page} with a comment that tests/docs/pages.py explains"


@pytest.mark.parametrize("command", [c for c in COMMANDS if Path(c.words[0]).name == "python"], ids=label)
def test_flags_are_those_the_command_has(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command's own parser reads them, for those too that need what this machine has not."""
    target, arguments = target_of(command.words)
    if target in ("pytest", "-c", "pip", "venv"):
        return
    real = argparse.ArgumentParser.parse_args

    def parse(self: argparse.ArgumentParser, args: Any = None, namespace: Any = None) -> Any:
        real(self, args, namespace)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse)
    if not target.endswith(".py"):
        assert importlib.util.find_spec(target) is not None, f"there is no module {target}"
        if not has_parser(target):
            return
    with pytest.raises((Parsed, SystemExit)) as ended:  # --help ends by itself
        start(target, arguments, monkeypatch)
    assert ended.type is Parsed or not ended.value.code


def start(target: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """As the interpreter would, in this process."""
    monkeypatch.setattr(sys, "argv", [target, *arguments])
    monkeypatch.setattr(sys, "path", list(sys.path))
    if target.endswith(".py"):
        script = target if (ROOT / target).is_file() else f"bench/{target}"  # the reference's lines, run from bench/
        runpy.run_path(str(ROOT / script), run_name="__main__")
    else:
        runpy.run_module(target, run_name="__main__")


def has_parser(module: str) -> bool:
    """Whether the module's command line is argparse's."""
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    folder = Path(spec.origin).parent
    files = [Path(spec.origin)] if not spec.origin.endswith("__init__.py") else list(folder.glob("*.py"))
    return any("argparse" in file.read_text(encoding="utf-8") for file in files)


@pytest.mark.parametrize("command", [c for c in unmarked() if any(q in c.text for q in QUICK)], ids=label)
def test_quick_commands_run(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        start(*target_of(command.words), monkeypatch)
    assert not ended.value.code


@pytest.mark.slow
@pytest.mark.parametrize("command", [c for c in unmarked() if not any(q in c.text for q in QUICK)], ids=label)
def test_commands_run(command: Command, tmp_path: Path) -> None:
    """As written, in a folder where relative paths of ours are found."""
    words = [sys.executable if Path(word).name == "python" else word for word in command.words]
    for place in ("bench", "scripts", "tests", "models", "topology", "ssd_ascend", "examples", "pyproject.toml"):
        (tmp_path / place).symlink_to(ROOT / place)
    at = tmp_path / "bench" if "bench.py" in words else ROOT if "pytest" in words else tmp_path
    done = subprocess.run(words, cwd=at, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
