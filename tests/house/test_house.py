"""The house keeps its rules: `rules.py` over every module there is; rooms that do not exist yet are no failure."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.house import rules
from tests.house.rules import Module

ROOT = Path(__file__).resolve().parents[2]


@cache
def house() -> tuple[Module, ...]:
    """Every module of the package."""
    base = ROOT / rules.PACKAGE
    return tuple(
        Module(".".join(path.relative_to(base).with_suffix("").parts), path.read_text(encoding="utf-8"))
        for path in sorted(base.rglob("*.py"))
    )


def must_be_empty(problems: list[str]) -> None:
    """Fail with one complaint a line."""
    assert not problems, "\n" + "\n".join(problems)


def test_the_house_is_found() -> None:
    assert {"errors", "config.strict", "catalogue"} <= {module.name for module in house()}


def test_imports_point_down() -> None:
    must_be_empty(rules.layer_order(house()))


def test_there_is_no_ring() -> None:
    must_be_empty(rules.rings(house()))


@pytest.mark.parametrize("rule", rules.PER_MODULE, ids=lambda rule: rule.__name__)
def test_every_module_keeps(rule: Callable[[Module], list[str]]) -> None:
    must_be_empty([problem for module in house() for problem in rule(module)])


def test_no_command_takes_shortened_flags() -> None:
    """Not the package's alone: what measures and what checks is typed by people, too."""
    beside = [
        Module(str(path.relative_to(ROOT)), path.read_text(encoding="utf-8"))
        for room in ("bench", "examples", "scripts", "tests")
        for path in sorted((ROOT / room).rglob("*.py"))
    ]
    assert "bench/command.py" in {module.name for module in beside}
    parsing = [module for module in (*house(), *beside) if "argparse" in module.text]
    must_be_empty([problem for module in parsing for problem in rules.full_flags(module)])


@pytest.mark.parametrize("table", ["DEVICE_WORDS_ALLOWED", "LONG_FILES"])
def test_no_exception_outlives_its_need(table: str, monkeypatch: pytest.MonkeyPatch) -> None:
    exceptions = getattr(rules, table)
    monkeypatch.setattr(rules, table, {})
    rule = rules.device_words if table == "DEVICE_WORDS_ALLOWED" else rules.short
    needed = {module.name for module in house() if rule(module)}
    assert set(exceptions) - needed == set()


def torch_free(modules: tuple[Module, ...]) -> list[str]:
    """Dotted names of the modules that must import without torch."""
    wanted = [m.name for m in modules if any(m.name == r or m.name.startswith(f"{r}.") for r in rules.TORCH_FREE)]
    return [f"{rules.PACKAGE}.{name}".removesuffix(".__init__") for name in wanted]


BLOCKED = """
import importlib, sys
class Wall:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "torch_npu"):
            raise ImportError(f"{name} is blocked in this test")
sys.meta_path.insert(0, Wall())
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except ImportError as error:
        print(f"{name}: {error}")
"""


def import_without_torch(names: list[str]) -> str:
    """What fails to import, one line each, in a fresh interpreter where torch cannot be imported."""
    command = [sys.executable, "-c", BLOCKED, *names]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout


def test_the_torch_free_rooms_import_without_torch() -> None:
    assert import_without_torch(torch_free(house())) == ""


def test_the_wall_in_front_of_torch_holds() -> None:
    assert "torch is blocked" in import_without_torch(["torch"])
