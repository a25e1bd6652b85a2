"""The two-card benchmark, rehearsed on the CPU: what is set in the weights is what the engines find, end to end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from bench import pair_report, two_gpus
from bench.agreement import Agreement, successor
from bench.checkpoints import hooked, install, lay_out_head, lay_out_model
from bench.links import round_trips
from bench.pairs import Job, Settings, run_job
from bench.rounds import put_round
from bench.samples import Sample, Step
from bench.shapes import shape
from bench.summary import Row
from ssd_ascend.config.model import model_config_from_hf
from ssd_ascend.errors import ConfigError
from ssd_ascend.weights.eagle3 import read_eagle3_config
from ssd_ascend.weights.loader import read_config
from ssd_ascend.weights.safetensors import SafetensorsSource

VOCAB, CORE = 384, 256
MS = 1_000_000


# -- how well a draft guesses -----------------------------------------------------------------------------


def test_the_chain_stays_in_the_core() -> None:
    follows = successor(VOCAB, CORE)
    assert sorted(follows.tolist()) == list(range(VOCAB))
    assert follows[:CORE].max() < CORE


@pytest.mark.parametrize(("accepted", "foreseen"), [(0.0, 0.5), (0.8, 0.85), (1.0, 0.0)])
def test_choices_agree_as_often_as_asked(accepted: float, foreseen: float) -> None:
    vocab = 20_000
    follows = successor(vocab)
    first, second = Agreement(accepted=accepted, foreseen=foreseen).choices(vocab)
    kept = first == follows
    assert kept.float().mean().item() == pytest.approx(accepted, abs=0.02)
    if accepted < 1.0:
        assert (second == follows)[~kept].float().mean().item() == pytest.approx(foreseen, abs=0.02)
    assert not (first == second).any()


def test_shares_are_shares() -> None:
    with pytest.raises(ConfigError, match=r"foreseen is 1\.5"):
        Agreement(accepted=0.5, foreseen=1.5)


# -- checkpoints without numbers --------------------------------------------------------------------------


def test_laid_out_checkpoints_take_no_space_and_pass_the_loaders_checks(tmp_path: Path) -> None:
    target = lay_out_model(tmp_path / "t", shape("llama-3.1-8b"), device_type="cpu", seed=1, noise=0.3)
    head = lay_out_head(tmp_path / "h", target, agreement=Agreement(accepted=0.5, foreseen=0.5), noise=0.3)
    file = target / "model.safetensors"
    assert file.stat().st_size > 16e9
    assert file.stat().st_blocks * 512 < 1e6
    assert read_config(target).num_layers == 32
    found = read_eagle3_config(head, model_config_from_hf(shape("llama-3.1-8b"), where="test"))
    assert (found.draft_vocab_size, found.own_embedding, found.own_lm_head) == (32000, False, True)


def test_the_hook_reaches_every_process(tmp_path: Path) -> None:
    environment = hooked(tmp_path)
    assert environment["PYTHONPATH"].split(":")[0] == str(tmp_path)
    assert "install()" in (tmp_path / "sitecustomize.py").read_text()


def test_a_folder_that_is_used_again_brings_no_rows_of_another_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(two_gpus, "schedule", lambda *_, **__: [])
    (tmp_path / "rows.jsonl").write_text('{"pair": "tiny", "mode": "sd", "tokens_per_s": 1.0, "batch": 1}\n')
    flags = ["--json", str(tmp_path / "o.json"), "--device", "cpu", "--tp", "1", "--links", ""]
    args = two_gpus.build_parser().parse_args(flags)
    assert two_gpus.measure(args, tmp_path)["rows"] == []


# -- what a round is made of ------------------------------------------------------------------------------


def step(wall: float, hits: int = 0, idle: float = 0.0, **spans: float) -> Step:
    in_ns = {name: int(value * MS) for name, value in spans.items()}
    return Step(int(wall * MS), 1, 3, True, in_ns, hits=hits, idle_ns=int(idle * MS))


def test_a_round_is_split_without_rest() -> None:
    steps = [
        step(10, 1, 4, forward=1, verify=5, propose=2.5, wait=2, observe=0.5),
        step(12, 0, 2, forward=1, verify=5, propose=4.5, wait=4, observe=0.5),
    ]
    row: Row = {}
    put_round(row, [Sample(steps=steps, prompt_tokens=0, ttft_ns=[], outputs=[])])
    parts = {name: row[name] for name in ("round_verify_ms", "round_wait_ms", "round_message_ms", "round_host_ms")}
    assert parts == {"round_verify_ms": 6, "round_wait_ms": 3, "round_message_ms": 1, "round_host_ms": 1}
    assert row["round_ms"] == 11
    assert (row["worker_busy_ms"], row["ms_per_hit_step"], row["over_longest_ms"]) == (8, 10, 2)


def test_ratios_compare_like_with_like() -> None:
    def row(mode: str, speed: float, pair: str = "8b-1b", batch: int = 1, tp: int = 1) -> Row:
        return {"pair": pair, "mode": mode, "batch": batch, "tp": tp, "tokens_per_s": speed}

    rows = pair_report.compared(
        [row("none", 200.0), row("ssd", 600.0), row("sd", 300.0), row("sd:3", 400.0), row("ssd", 500.0, "8b-eagle3"),
         row("none", 360.0, tp=2), row("none", 1.0, "32b-0.6b"), {"mode": "round trip", "skipped": "no line"}]
    )  # fmt: skip
    assert (rows[1]["speedup"], rows[1]["vs_sd"]) == (3.0, 1.5)
    assert rows[4]["speedup"] == 2.5, "plain decoding of the same target, measured with the other pair"
    assert "vs_sd" not in rows[4]
    assert rows[5]["vs_one_card"] == 1.8


def test_the_most_valuable_rows_come_first() -> None:
    args = two_gpus.build_parser().parse_args(["--json", "x"])
    groups = two_gpus.schedule(args)
    assert groups[0] == [Job(pair="8b-1b", speculator=mode) for mode in ("none", "ssd", "sd")] + [
        Job(pair="8b-1b", speculator=mode, lookahead=k) for mode in ("ssd", "sd") for k in (4, 3)
    ]
    assert [job.speculator for job in groups[1]] == ["ssd", "sd"], "its target's plain decoding is known by then"
    assert groups[3] == [Job(pair="32b-0.6b", speculator="none", tp=2)]


# -- end to end -------------------------------------------------------------------------------------------


def test_messages_come_back_over_gloo() -> None:
    (bare, with_features) = round_trips(["gloo"], torch.device("cpu"), feature_width=24, batches=(2,), repeats=5)
    assert float(bare["round_trip_us"] or 0) > 0
    assert with_features["feature_bytes"] == 2 * 7 * 24 * 2


@pytest.mark.parametrize("pair", ["tiny", "tiny-eagle3"])
def test_engines_find_what_was_set(pair: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the worker in this process, so that it is never late: drafts are kept, and outcomes foreseen, as asked."""
    monkeypatch.setattr(SafetensorsSource, "read", SafetensorsSource.read)  # put back what `install` replaces
    install()
    settings = Settings(
        folder=str(tmp_path), device="cpu", worker_device=None, batches=(2,), prompt_len=8, output_len=48,
        accepted=0.8, foreseen=1.0, fan_out=2, noise=0.05, speculation={"worker": "inprocess"},
    )  # fmt: skip
    found = {}
    for mode in ("none", "sd", "ssd"):
        found[mode] = next(iter(run_job(Job(pair=pair, speculator=mode), settings)))
    for mode in ("sd", "ssd"):
        assert found[mode]["same_answers"] == found[mode]["answers"] == 6
        assert 2.0 < float(found[mode]["acceptance_length"] or 0) < 3.4, "2.95 for endless text: (1 - 0.8**4) / 0.2"
    assert float(found["ssd"]["hit_rate"] or 0) > 0.9


def test_a_rehearsal_on_the_cpu(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Target and worker in two processes, weights made as they are read in both, answers those of plain decoding."""
    out = tmp_path / "out.json"
    line = "--device cpu --tiny --pairs tiny-eagle3 --tp 1 --batches 2 --prompt-len 8 --output-len 24 --links"
    status = two_gpus.main([*line.split(), "", "--json", str(out), "--folder", str(tmp_path / "work")])
    outcome = json.loads(out.read_text())
    rows = {row["mode"]: row for row in outcome["rows"]}
    shown = capfd.readouterr()
    assert status == 0, shown.err
    assert set(rows) == {"none", "ssd", "sd"}
    for mode in ("sd", "ssd"):
        assert rows[mode]["same_answers"] == rows[mode]["answers"] == 6
    assert {"round_wait_ms", "round_message_ms", "worker_busy_ms", "tokens_per_s_per_device"} <= set(rows["ssd"])
    assert set(outcome["timelines"]) == {f"tiny-eagle3 {mode}, batch 2" for mode in rows}
    assert "| tiny-eagle3 | ssd " in shown.out
