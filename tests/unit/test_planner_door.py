"""`python -m ssd_ascend.plan`: what it prints and writes, and how it fails. Also the picture."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from ssd_ascend import catalogue, cli
from ssd_ascend.config.plan import Wish
from ssd_ascend.errors import ConfigError
from ssd_ascend.plan import main
from ssd_ascend.planner import make_plan
from ssd_ascend.planner.explain import ranges
from ssd_ascend.planner.svg import MAX_NODES, picture
from ssd_ascend.planner.table import update

SVG = "{http://www.w3.org/2000/svg}"


def test_text_for_a_reader(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ascend-a3-16", "qwen3-32b-eagle3"]) == 0
    out = capsys.readouterr().out
    assert "qwen3-32b-eagle3 on ascend-a3-16: ssd, TP 8 + 1 speculator over node" in out
    assert "replica 0: target 0-7; speculators 8; spare 9" in out
    assert "-> ssd" in out
    assert "\nwhy\n" in out
    assert "would lose" in out


def test_json_holds_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["nvidia-h200-8", "llama-3.1-8b-eagle3", "--replicas", "2", "--tp", "2", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["mode"], plan["tp"], len(plan["replicas"])) == ("ssd", 2, 2)
    assert plan["replicas"][1]["target"] == [3, 4]
    assert plan["replicas"][1]["speculators"] == [5]
    assert {speed["mode"] for speed in plan["speeds"]} == {"none", "sd", "ssd"}
    assert plan["calibrated"] is True


def test_an_impossible_wish_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ascend-a3-16", "qwen3-32b-eagle3", "--tp", "3"]) == 2
    assert capsys.readouterr().err == (
        "error: Qwen3-32B: TP 3 does not divide the 64 heads (8 for keys and values) (nearest possible: TP 2 or 4)\n"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give a TOPOLOGY and a PRESET (topologies: ascend-350-16"),
        (["ascend-a3-16"], "give a TOPOLOGY and a PRESET"),
        (["ascend-a3", "qwen3-32b-eagle3"], "did you mean 'ascend-a3-16'?"),
        (["ascend-a3-16", "qwen3-32b"], "unknown preset 'qwen3-32b'"),
        ([__file__, "qwen3-32b-eagle3"], "is no topology: it is a file, and those end in .toml (give a name in"),
        ([str(Path(__file__).parent), "qwen3-32b-eagle3"], "is no topology: it is a directory"),
        (["ascend-a3-16", __file__], "is no preset: it is a file"),
        (["ascend-a3-16", "qwen3-8b-eagle3", "--svg", "/nowhere/at/all.svg"], "cannot write /nowhere/at/all.svg"),
        (["ascend-a2-8", "qwen3-8b-eagle3", "--inventory", "f"], "--inventory given, but no rank table is written"),
        (["ascend-a2-8", "qwen3-8b-eagle3", "--rank-table-version", "1.0"], "--rank-table-version given, but no rank"),
        (["--table", "x.md", "--batch", "2"], "--batch given, but --table only rewrites a file (leave it out)"),
        (["laptop-cpu", "p", "--calibrate", "f", "--json"], "PRESET, --json given, but --calibrate only measures"),
    ],
)
def test_mistakes(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


def test_a_rank_table_for_every_replica(tmp_path: Path) -> None:
    file = tmp_path / "ranks.json"
    arguments = ["ascend-a2-8", "qwen3-8b-eagle3", "--tp", "2", "--replicas", "2", "--rank-table", str(file)]
    assert main(arguments) == 0
    first, second = json.loads(file.read_text()), json.loads((tmp_path / "ranks-1.json").read_text())
    assert (first["version"], second["version"]) == ("1.0", "1.0")
    ids = [[device["device_id"] for device in table["server_list"][0]["device"]] for table in (first, second)]
    assert ids == [["0", "1", "2"], ["3", "4", "5"]]


def test_a_rank_table_says_which_addresses_it_lacks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["ascend-a3-16", "qwen3-8b-eagle3", "--rank-table", str(tmp_path / "ranks.json")]
    assert main(arguments) == 2
    assert "rank 0 has no super_device_id (give --inventory FILE" in capsys.readouterr().err
    assert main([*arguments, "--rank-table-version", "1.0"]) == 0


def test_the_command_line_of_the_house_has_this_door() -> None:
    assert cli.available()["plan"]
    command = [sys.executable, "-m", "ssd_ascend", "plan", "ascend-a2-8", "qwen3-8b-eagle3"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2], check=True)
    assert done.stdout.startswith("qwen3-8b-eagle3 on ascend-a2-8: ssd")


def test_a_reader_that_stops_early_is_no_error() -> None:
    command = f"{sys.executable} -m ssd_ascend.plan ascend-a2-8 qwen3-8b-eagle3 --json | head -c 1"
    done = subprocess.run(
        command, shell=True, capture_output=True, text=True, cwd=Path(__file__).parents[2], check=True
    )
    assert (done.stdout, done.stderr) == ("{", "")


def test_a_table_needs_its_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "x.md"
    file.write_text("nothing")
    with pytest.raises(ConfigError, match="has no place for the table"):
        update(file)
    assert file.read_text() == "nothing"


def words(svg: str) -> list[str]:
    """The texts of a picture, which must be well-formed."""
    return [element.text or "" for element in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def drawn(topology: str, preset: str, **wishes: int) -> tuple[str, list[str]]:
    cluster = catalogue.find_topology(topology)
    plan = make_plan(cluster, catalogue.find_preset(preset), Wish(**wishes), preset_name=preset)
    svg = picture(plan, cluster)
    return svg, words(svg)


def test_the_picture_shows_every_role_once() -> None:
    _, texts = drawn("ascend-a3-16", "qwen3-32b-eagle3")
    assert [text for text in texts if text in {f"T{rank}" for rank in range(1, 8)}] == [f"T{r}" for r in range(1, 8)]
    assert texts.count("T0") == texts.count("S0") == texts.count("–") == 2  # one of them in the legend
    assert [text for text in texts if text.isdigit()] == [str(device) for device in range(16)]
    assert "Atlas 800T A3: one server, 8 packages of 2 dies" in texts
    assert {"plain", "sd", "ssd"} <= set(texts)


def test_nothing_is_drawn_outside_the_picture() -> None:
    svg, _ = drawn("nvidia-gb200-nvl72", "llama-3.3-70b-eagle3", replicas=4)
    root = ElementTree.fromstring(svg)
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    for box in root.findall(f"{SVG}rect"):
        assert 0 <= float(box.get("x", 0)) <= float(box.get("x", 0)) + float(box.attrib["width"]) <= width
        assert 0 <= float(box.get("y", 0)) <= float(box.get("y", 0)) + float(box.attrib["height"]) <= height


def test_a_large_cluster_is_drawn_in_part() -> None:
    svg, texts = drawn("ascend-950-superpod", "llama-3.3-70b-eagle3", replicas=40)
    assert sum("node " in text and "rack" in text for text in texts) == MAX_NODES
    assert any(text.startswith(f"and {1024 - MAX_NODES} more nodes, ") for text in texts)
    assert len(svg) < 200_000


def test_names_from_files_cannot_break_the_picture(tmp_path: Path) -> None:
    text = (catalogue.folder("topology") / "ascend-a2-8.toml").read_text()
    file = tmp_path / "ascend-a2-8.toml"
    file.write_text(text.replace('title = "Atlas', 'title = "<b>&Atlas'))
    cluster = catalogue.find_topology(str(file))
    plan = make_plan(cluster, catalogue.find_preset("qwen3-8b-eagle3"), Wish(), preset_name="a<b")
    assert any(found.startswith("<b>&Atlas") for found in words(picture(plan, cluster)))


@pytest.mark.parametrize(("devices", "text"), [((), ""), ((3,), "3"), ((0, 1, 2, 5, 7, 8), "0-2, 5, 7-8")])
def test_runs_of_devices_are_written_short(devices: tuple[int, ...], text: str) -> None:
    assert ranges(devices) == text
