"""The comparison of every drafter with plain decoding, over a tiny target; and that it would notice a difference."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from bench import exact
from bench.cases import Case
from bench.modes import OwnEngine
from bench.samples import Sample
from ssd_ascend.core.sampling import SamplingParams


def wish(*drafters: str) -> exact.Wish:
    return exact.Wish(shape="tiny", device="cpu", prompts=3, tokens=24, prompt_len=16, drafters=drafters)


def test_all_that_draft_say_what_plain_decoding_says(tmp_path: Path) -> None:
    """Through the command, with the worker of `ssd` in a process of its own that makes the same weights."""
    out = tmp_path / "exact.json"
    command = [sys.executable, "-m", "bench.gpu", "--exact", "3", "--shape", "tiny", "--device", "cpu", "--steps", "60"]
    subprocess.run([*command, "--drafters", "eagle3", "ngram", "--out", str(out)], check=True, capture_output=True)
    rows = json.loads(out.read_text())["rows"]
    assert [row["mode"] for row in rows] == ["none", "sd:eagle3", "ssd:eagle3", "none", "sd:ngram", "ssd:ngram"]
    assert all(row["same_answers"] == row["answers"] == 3 for row in rows)
    assert all(row["accepted"] > 0 for row in rows if row["mode"] != "none")
    assert min(row["distinct_tokens"] for row in rows if row["mode"] == "none") > 20


def test_a_different_token_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    own = OwnEngine.run

    def run(self: OwnEngine, cases: Sequence[Case], sampling: SamplingParams) -> Sample:
        sample = own(self, cases, sampling)
        if self.name == "sd:model":
            sample.outputs[1][7] += 1
        return sample

    monkeypatch.setattr(OwnEngine, "run", run)
    rows: dict[str, dict[str, Any]] = {}
    for row in exact.compare(wish("model")):
        rows[row["mode"]] = row
        if row["mode"] == "sd:model":
            break
    assert rows["sd:model"]["same_answers"] == 2
    assert rows["sd:model"]["first_difference_at"] == 7
