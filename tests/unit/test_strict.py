"""Our own files are read strictly: every mistake is an error that names file, line, key and what was expected."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from ssd_ascend.config.strict import from_dict, load_toml
from ssd_ascend.errors import ConfigError


@dataclass(frozen=True)
class Link:
    kind: Literal["pcie", "hccs"]
    gb_per_s: float
    lanes: int | None = None


@dataclass(frozen=True)
class Box:
    name: str
    links: tuple[Link, ...] = ()
    fan_out: int | tuple[int, ...] | Literal["auto"] = 3
    pair: tuple[int, str] = (0, "")
    spare: Link | None = None
    weights: Path | None = None
    fast: bool = False
    extra: dict[str, int] | None = None

    def __post_init__(self) -> None:
        if self.name == "":
            raise ConfigError("name is empty", remedy="give one")


def box(**values: Any) -> Box:
    return from_dict({"name": "b", **values}, Box, where="box")


def test_a_whole_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "box.toml"
    path.write_text(
        'name = "b"\nfan_out = [3, 2]\npair = [1, "x"]\nweights = "w"\nfast = true\nextra = {a = 1}\n'
        '[spare]\nkind = "pcie"\ngb_per_s = 64\n[[links]]\nkind = "hccs"\ngb_per_s = 392.0\nlanes = 7\n'
    )
    assert load_toml(path, Box) == Box(
        name="b",
        links=(Link("hccs", 392.0, 7),),
        fan_out=(3, 2),
        pair=(1, "x"),
        spare=Link("pcie", 64.0),
        weights=Path("w"),
        fast=True,
        extra={"a": 1},
    )


@pytest.mark.parametrize(("fan_out", "read"), [(2, 2), ([1, 2], (1, 2)), ("auto", "auto")])
def test_a_union_takes_each_of_its_members(fan_out: object, read: object) -> None:
    assert box(fan_out=fan_out).fan_out == read


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"fats": True}, r"box: fats: unknown key; known: extra, fan_out, fast.*did you mean 'fast'"),
        ({"name": 3}, r"box: name: 3 is an int, expected a string"),
        ({"fast": 1}, r"box: fast: 1 is an int, expected true or false"),
        ({"fan_out": True}, r"fan_out: true is a bool, expected an integer or a list of an integer or one of 'auto'"),
        ({"fan_out": ["a"]}, r"fan_out: \['a'\] is a list"),
        ({"pair": [1]}, r"pair: \[1\] is a list, expected a list of 2 values"),
        ({"spare": {"kind": "pci", "gb_per_s": 1}}, r"spare.kind: 'pci' is a str.*did you mean 'pcie'"),
        ({"spare": {"kind": "pcie"}}, r"spare: missing gb_per_s"),
        ({"spare": 4}, r"spare: 4 is an int, expected a table"),
        ({"links": [{"kind": "pcie", "gb_per_s": "x"}]}, r"links.gb_per_s: 'x' is a str, expected a number"),
        ({"extra": {"a": "b"}}, r"extra: .* is a dict, expected a table"),
        ({"name": ""}, r"box: name is empty \(give one\)"),
    ],
)
def test_a_mistake_is_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        box(**values)


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ('name = "b"\n\nfast = 3\n', "box.toml:3: fast:"),
        ('name = "b"\n[spare]\nkind = "pcie"\ngb_per_s = "x"\n', "box.toml:4: spare.gb_per_s:"),
        ('name = "b"\n[spare]\nkind = "pcie"\n', "box.toml:2: spare: missing gb_per_s"),
        ('name = "b"\nspare.kind = "x"\nspare.gb_per_s = 1\n', "box.toml:2: spare.kind:"),
        ('name = "b"\n[spar]\n', "box.toml:2: spar: unknown key"),
        ("fast = true\n", "box.toml: missing name"),
        ("name = \n", "is not valid TOML"),
    ],
)
def test_the_line_is_named(text: str, place: str, tmp_path: Path) -> None:
    path = tmp_path / "box.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_toml(path, Box)
    assert place in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*none.toml: No such file"):
        load_toml(tmp_path / "none.toml", Box)
