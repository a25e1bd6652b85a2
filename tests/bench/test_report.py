"""Results that lie there: several of them as one, and what their tables leave out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench import compare, report
from bench.join import join

COMMON = {"machine": "m", "device": "cpu", "load_before": 0.1, "load_after": 0.2, "continuous": True}


def result(mode: str, **more: Any) -> dict[str, Any]:
    numbers = {"tokens_per_s": 10.0, "ms_per_step": 5.0, "ttft_ms": 900.0, "end_to_end_tokens_per_s": 4.0}
    spreads = {f"{name}_{end}": value for name, value in numbers.items() for end in ("lo", "hi")}
    row = {"mode": mode, "batch": 1, "runs": 1, "tokens": 8, **numbers, **spreads}
    return {**COMMON, "rows": [row], "timelines": {f"{mode}, batch 1": []}, "command": f"bench {mode}", **more}


def test_what_holds_for_all_is_said_once_and_what_does_not_goes_to_the_rows() -> None:
    joined = join([result("none", model="a"), result("sd", model="b", load_before=3.0, notice="set")], ["x", "y"])
    assert [(row["mode"], row["model"]) for row in joined["rows"]] == [("none", "a"), ("sd", "b")]
    assert "model" not in joined
    assert (joined["device"], joined["load_before"], joined["notice"]) == ("cpu", 3.0, "set")
    assert joined["commands"] == ["bench none", "bench sd"]
    assert list(joined["timelines"]) == ["none, batch 1", "sd, batch 1"]


def test_rows_of_one_mode_are_told_apart_by_the_names_of_their_results() -> None:
    joined = join([result("sd"), result("sd"), result("none")], ["eagle-sd", "before", "plain"])
    assert [row["mode"] for row in joined["rows"]] == ["eagle-sd", "sd (before)", "none"]
    assert list(joined["timelines"]) == ["sd, batch 1 (eagle-sd)", "sd, batch 1 (before)", "none, batch 1"]


def test_one_result_stays_as_it_is() -> None:
    one = result("sd", model="a")
    assert join([one], ["x"]) == one


def test_tables_of_results_that_lie_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = []
    for mode in ("none", "sd"):
        paths.append(tmp_path / f"{mode}.json")
        paths[-1].write_text(json.dumps(result(mode, model=f"model-of-{mode}")))
    assert report.main([*map(str, paths), "--json", str(tmp_path / "all.json")]) == 0
    out = capsys.readouterr().out
    assert "Model: model-of-none, Mode: none, Total: 8tok, Time: 2.00s, Total Throughput: 4.00tok/s" in out
    assert "first token" not in out, "prompts that wait for their turn say nothing about the engine"
    assert "10.0 (" not in out, "one run has no spread"
    assert len(json.loads((tmp_path / "all.json").read_text())["rows"]) == 2


def test_a_file_that_is_no_result_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.json").write_text("[]")
    assert report.main([str(tmp_path / "x.json")]) == 2
    assert "is no result of a benchmark" in capsys.readouterr().err


def test_the_hosts_spans_are_not_summed_up_where_a_device_works_behind_them() -> None:
    row = {"mode": "sd", "batch": 1, "own_ms": 7.0, "forward_ms": 1.0}
    assert "| own " in report.breakdown_table([row])
    assert "| own " not in report.breakdown_table([row | {"host_ms": 1.0}])


@pytest.mark.parametrize("file", sorted(Path("bench/results").glob("*.json")), ids=lambda file: str(file.stem))
def test_every_result_here_can_be_shown(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report.main([str(file)]) == 0
    assert "|" in capsys.readouterr().out


@pytest.mark.parametrize("rows", ["[1, 2]", '[{"mode": "x", "tokens_per_s": "y"}, null]', "[" * 100_000])
def test_what_is_no_result_is_one_sentence(rows: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.json").write_text(f'{{"rows": {rows}}}')
    for main, files in ((report.main, ["x.json"]), (compare.main, ["x.json", "x.json"])):
        assert main([str(tmp_path / file) for file in files]) == 2
        assert capsys.readouterr().err.startswith("error: ")


def test_numbers_that_are_missing_or_none_are_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    odd: dict[str, Any] = {"mode": "x", "batch": 1, "tokens_per_s": 3.0, "speedup": "y", "speedup_lo": None, "runs": 2}
    (tmp_path / "x.json").write_text(json.dumps({"rows": [odd]}))
    assert report.main([str(tmp_path / "x.json")]) == 0
    assert "3.0" in capsys.readouterr().out
    assert compare.compare({"rows": [odd]}, {"rows": [odd]})[0].metric == "tokens_per_s"
