"""The benchmark over real (tiny) engines and over a scripted server: what it counts is what happened."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import compare
from bench.cases import Case, random_cases
from bench.command import main
from bench.device_cost import step_bytes
from bench.equality import differences, put_equality
from bench.modes import OwnEngine, fit_cache, parse_modes
from bench.rival import TransformersRival
from bench.samples import Sample, Step
from bench.soak import measure as soak
from bench.summary import Row, own_ms, spread, summarise
from bench.tiny import VOCAB, write_tiny
from ssd_ascend.config.engine import EngineConfig
from ssd_ascend.config.model import ExpertsConfig, ModelConfig
from ssd_ascend.config.speculation import SpeculationConfig
from ssd_ascend.core.sampling import SamplingParams
from ssd_ascend.errors import ConfigError

GREEDY = SamplingParams(temperature=0.0, max_tokens=13, ignore_eos=True, seed=0)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny(tmp_path_factory.mktemp("bench") / "tiny"))


@pytest.fixture(scope="module")
def prompts() -> list[Case]:
    return random_cases(3, 9, VOCAB)


def base(tiny: str) -> EngineConfig:
    speculation = SpeculationConfig(draft=tiny, worker="inprocess")
    config = EngineConfig(model=tiny, device="cpu", dtype="float32", prefix_cache=False, threads=1)
    return fit_cache(replace(config, speculation=speculation), batch=3, tokens=64)


def sample(tiny: str, mode: str, prompts: list[Case]) -> Sample:
    with OwnEngine(parse_modes(mode, base(tiny))[0]) as engine:
        return engine.run(prompts, GREEDY)


# -- our engines ----------------------------------------------------------------------------------------


def test_plain_decoding_is_one_token_a_row_and_step(tiny: str, prompts: list[Case]) -> None:
    plain = sample(tiny, "none", prompts)
    assert [len(output) for output in plain.outputs] == [13, 13, 13]
    assert [(step.num_rows, step.num_tokens) for step in plain.decode_steps] == [(3, 3)] * 12
    assert plain.acceptance_length == 1.0
    assert len(plain.ttft_ns) == 3
    assert plain.prompt_tokens == 27
    assert plain.wall_s >= plain.decode_s > 0
    assert 0 < own_ms(plain) < plain.span_ms("step") <= plain.ms_per_step


def test_a_target_that_drafts_for_itself_accepts_everything(tiny: str, prompts: list[Case]) -> None:
    drafted = sample(tiny, "sd:model:3", prompts)
    assert drafted.outputs == sample(tiny, "none", prompts).outputs
    assert len(drafted.decode_steps) == 3  # 12 tokens after the first, 4 a step
    assert drafted.acceptance_length == 4.0
    assert drafted.drafting.drafted_per_position == drafted.drafting.accepted_per_position == [9, 9, 9]
    row = summarise("sd:model:3", 3, [drafted])
    assert row["accepted_at_3"] == 1.0
    assert row["draft_ms"] is not None


def test_counters_start_anew_with_every_run(tiny: str, prompts: list[Case]) -> None:
    with OwnEngine(parse_modes("sd:model:3", base(tiny))[0]) as engine:
        first, second = engine.run(prompts, GREEDY), engine.run(prompts, GREEDY)
    assert first.drafting == second.drafting
    assert first.outputs == second.outputs


def test_hits_are_counted_by_step(tiny: str, prompts: list[Case]) -> None:
    cached = sample(tiny, "ssd:model:3", prompts)
    assert cached.drafting.hits == sum(step.hits for step in cached.steps) > 0
    assert cached.drafting.lookups >= cached.drafting.hits
    row = summarise("ssd", 3, [cached])
    assert 0 < float(row["hit_rate"] or 0) <= 1
    assert float(row["hit_answer_ms"] or 0) > 0


def test_transformers_says_the_same_and_ignores_the_end_as_asked(tiny: str, prompts: list[Case]) -> None:
    rival = TransformersRival(tiny, dtype="float32", device=torch.device("cpu"), batch=2)
    theirs = rival.run(prompts, GREEDY)
    assert theirs.outputs == sample(tiny, "none", prompts).outputs
    assert [len(output) for output in theirs.outputs] == [13, 13, 13]
    assert len(theirs.decode_steps) == 24  # two batches: of two prompts, and of one


def test_transformers_goes_past_the_end_of_sequence_token_only_when_told_to(
    tiny: str, tmp_path: Path, prompts: list[Case]
) -> None:
    answers = sample(tiny, "none", prompts).outputs
    folder = write_tiny(tmp_path / "ends")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": answers[0][4]}))
    rival = TransformersRival(str(folder), dtype="float32", device=torch.device("cpu"), batch=1)
    assert rival.run(prompts[:1], GREEDY).outputs == answers[:1]
    ended = answers[0][: answers[0].index(answers[0][4]) + 1]
    assert rival.run(prompts[:1], replace(GREEDY, ignore_eos=False)).outputs == [ended]


def test_where_answers_part_and_how_close_it_was(tiny: str, prompts: list[Case]) -> None:
    one = sample(tiny, "none", prompts)
    other = Sample(one.steps, one.prompt_tokens, one.ttft_ns, [list(answer) for answer in one.outputs])
    assert differences([prompts], [one], [other]) == []
    other.outputs[1][5] = (one.outputs[1][5] + 1) % VOCAB
    other.outputs[2].pop()
    found = differences([prompts], [one], [other])
    assert [(d.case, d.at, d.tokens[1]) for d in found] == [
        (prompts[1], 5, other.outputs[1][5]),
        (prompts[2], 12, None),
    ]
    row: Row = {}
    put_equality(row, 3, found, None)
    assert (row["same_answers"], row["answers"], row["first_difference_at"]) == (1, 3, 5)


@pytest.mark.parametrize("name", ["fast", "sd:magic", "sd:ngram:many", "sd:ngram:3:4", "", "sd,sd"])
def test_a_mode_that_is_none_is_named(tiny: str, name: str) -> None:
    with pytest.raises(ConfigError):
        parse_modes(name, base(tiny))


def test_a_whole_run_writes_its_result(tiny: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "out" / "result.json"
    flags = ["--model", tiny, "--draft", tiny, "--modes", "none,sd:model:2", "--random", "--input-len", "6"]
    flags += ["--prompts", "2", "--output-len", "8", "--batch", "1,2", "--repeat", "2", "--against", "transformers"]
    assert main([*flags, "--dtype", "float32", "--threads", "1", "--tune", "1,2", "--json", str(file)]) == 0
    result = json.loads(file.read_text())
    assert {"command", "date", "machine", "device", "versions", "rows"} <= result.keys()
    rows = result["rows"]
    assert [(row["mode"], row["batch"]) for row in rows] == [
        (mode, batch) for batch in (1, 2) for mode in ("none", "sd:model:2", "transformers")
    ]
    assert all(row["same_answers"] == row["answers"] == 4 for row in rows if row["mode"] != "none")
    assert all(row["tokens_per_s_lo"] <= row["tokens_per_s"] <= row["tokens_per_s_hi"] for row in rows)
    assert all(not isinstance(value, (list, dict)) for row in rows for value in row.values())
    assert "sd:model:2" in capsys.readouterr().out
    assert compare.main([str(file), str(file)]) == 0
    assert "within noise" in capsys.readouterr().out


def test_a_soak_reports_memory_on_the_way(tiny: str) -> None:
    from bench.command import build_parser

    flags = ["--soak", "300", "--model", tiny, "--draft", tiny, "--modes", "sd:model:3", "--threads", "1"]
    result = soak(build_parser().parse_args(flags))
    assert result["rows"][-1]["rounds"] >= 300
    assert all(row["memory_mb"] > 0 for row in result["rows"])


# -- numbers --------------------------------------------------------------------------------------------


def test_a_step_that_reads_a_prompt_is_no_decode_step() -> None:
    steps = [Step(4_000_000, 1, 1, is_decode=False), Step(2_000_000, 1, 1, is_decode=True)]
    run = Sample(steps, prompt_tokens=8, ttft_ns=[4_000_000], outputs=[[1, 2]])
    assert run.decode_tokens_per_s == pytest.approx(500)
    assert run.prefill_tokens_per_s == pytest.approx(2000)
    assert run.ms_per_step == pytest.approx(2)


def test_spread_is_extremes_for_few_and_quartiles_for_many() -> None:
    assert spread([3.0, 1.0]) == (2.0, 1.0, 3.0)
    assert spread([1.0, 2.0, 3.0, 4.0, 100.0]) == (3.0, 2.0, 4.0)


def _result(value: float, low: float, high: float) -> dict[str, Any]:
    names = {"tokens_per_s": value, "tokens_per_s_lo": low, "tokens_per_s_hi": high}
    return {"rows": [{"mode": "none", "batch": 1, **names, "ms_per_step": 1000 / value,
                      "ms_per_step_lo": 1000 / high, "ms_per_step_hi": 1000 / low}]}  # fmt: skip


def test_only_what_leaves_the_noise_band_is_a_change() -> None:
    before = _result(100, 95, 105)
    assert [c.verdict for c in compare.compare(before, _result(104, 99, 109))] == ["within noise"] * 2
    assert [c.verdict for c in compare.compare(before, _result(120, 115, 125))] == ["better"] * 2
    assert [c.verdict for c in compare.compare(before, _result(80, 75, 85))] == ["worse"] * 2


def test_a_single_run_proves_nothing() -> None:
    before, after = _result(100, 100, 100), _result(150, 150, 150)
    before["rows"][0]["runs"] = 1
    assert [c.verdict for c in compare.compare(before, after)] == ["no band"] * 2


def test_pairs_and_cards_are_kept_apart() -> None:
    one, other = _result(100, 95, 105)["rows"][0], _result(50, 45, 55)["rows"][0]
    rows = [one | {"pair": "small"}, other | {"pair": "large"}, other | {"pair": "small", "tp": 2}]
    found = compare.compare({"rows": rows}, {"rows": rows})
    assert [c.ratio for c in found] == [1.0] * 6
    assert [c.row for c in found[::2]] == ["small, none, batch 1", "large, none, batch 1", "small, none, batch 1, tp 2"]


def test_what_clients_saw_is_told_but_not_judged() -> None:
    before = {"mode": "server", "batch": 4, "tokens_per_s": 50.0, "ttft_ms_p50": 10.0, "itl_ms_p50": None}
    after = {"mode": "server", "batch": 4, "tokens_per_s": 100.0, "ttft_ms_p50": 5.0, "itl_ms_p50": 2.0}
    found = compare.compare({"rows": [before]}, {"rows": [after]})
    assert [(c.metric, c.ratio, c.verdict) for c in found] == [
        ("tokens_per_s", 2.0, "no band"),
        ("ttft_ms_p50", 0.5, "no band"),
    ]


# -- a server -------------------------------------------------------------------------------------------


class _Api(http.server.BaseHTTPRequestHandler):
    """Streams three pieces an answer; refuses `ignore_eos`; fails prompts that mention maths."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._send(200, json.dumps({"data": [{"id": "scripted"}]}).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if "ignore_eos" in body:
            return self._send(400, b'{"error": "unknown field ignore_eos"}')
        if body["prompt"].startswith("fail") and body["max_tokens"] > 1:
            return self._send(500, b"no")
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        if body["prompt"].startswith("silent"):
            self._chunk({"choices": [{"text": "", "finish_reason": "stop"}]})
            self.wfile.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
            return None
        for piece in ("a", "b\u00e9", "c"):
            self._chunk({"choices": [{"text": piece}]})
        self._chunk({"choices": [], "usage": {"completion_tokens": 6, "prompt_tokens": 2}})
        self.wfile.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
        return None

    def _chunk(self, event: dict[str, Any]) -> None:
        data = f"data: {json.dumps(event, ensure_ascii=False)}\n\n".encode()
        half = len(data) // 2  # events do not respect the borders of chunks
        for part in (data[:half], data[half:]):
            self.wfile.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")

    def _send(self, status: int, data: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Silent."""


@pytest.fixture
def api() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Api) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def test_a_server_is_measured_by_what_its_clients_see(api: str, tmp_path: Path) -> None:
    file = tmp_path / "r.json"
    flags = ["--openai-url", api, "--clients", "1,4", "--kinds", "chat", "--repeat", "2", "--json", str(file)]
    assert main(flags) == 0
    result = json.loads(file.read_text())
    assert result["model"] == "scripted"
    assert [(row["clients"], row["requests"], row["failed"], row["tokens"]) for row in result["rows"]] == [
        (1, 2, 0, 12),
        (4, 8, 0, 48),
    ]
    assert all(row["ttft_ms_p50"] <= row["ttft_ms_p99"] <= row["ttft_ms_max"] for row in result["rows"])


def test_requests_that_fail_are_counted_and_fail_the_run(
    api: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "p.jsonl").write_text('{"text": "go"}\n{"text": "fail"}\n')
    flags = ["--openai-url", api, "--clients", "2", "--prompt-file", str(tmp_path / "p.jsonl")]
    assert main(flags) == 1
    assert "1 of 2 requests failed" in capsys.readouterr().out


def test_an_answer_without_a_word_is_no_failure(api: str, tmp_path: Path) -> None:
    """Servers that know no `ignore_eos` may end before they began."""
    (tmp_path / "p.jsonl").write_text('{"text": "go"}\n{"text": "silent"}\n')
    file = tmp_path / "r.json"
    flags = ["--openai-url", api, "--clients", "2", "--prompt-file", str(tmp_path / "p.jsonl"), "--json", str(file)]
    assert main(flags) == 0
    (row,) = json.loads(file.read_text())["rows"]
    assert (row["requests"], row["failed"], row["empty"], row["tokens"]) == (2, 0, 1, 6)


# -- shapes without weights -------------------------------------------------------------------------------

TINY_PRESET = """
[target]
name = "Tiny-1M"
family = "llama"
source.path = "nowhere"
[target.dims]
hidden_size = 128
num_layers = 2
num_heads = 4
num_kv_heads = 2
head_dim = 32
intermediate_size = 96
vocab_size = 300
tie_embeddings = true
max_model_len = 256
[draft]
name = "Head"
family = "llama"
source.path = "nowhere"
[draft.dims]
hidden_size = 128
num_layers = 1
num_heads = 4
num_kv_heads = 2
head_dim = 32
intermediate_size = 96
vocab_size = 300
tie_embeddings = true
[speculation]
speculator = "sd"
drafter = "model"
lookahead = 3
"""


def test_synthetic_stands_in_for_weights_that_cannot_be_had(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    preset, file = tmp_path / "tiny.toml", tmp_path / "r.json"
    preset.write_text(TINY_PRESET)
    asked = "--modes none,sd --synthetic --accepted 1 --prompts 2 --input-len 8 --output-len 13 --repeat 1 --threads 1"
    assert main(["--model", str(preset), *asked.split(), "--device", "cpu", "--json", str(file)]) == 0
    assert "100% of drafts kept" in capsys.readouterr().out
    plain, drafted = json.loads(file.read_text())["rows"]
    assert drafted["same_answers"] == drafted["answers"]
    assert drafted["acceptance_length"] > 3, "of at most 4: three steps for twelve tokens, were no draft ever wrong"
    assert 0 < plain["share_of_floor"] < 1
    assert plain["floor_ms"] > 0


def test_a_line_of_the_reference_says_what_each_data_set_saw(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    preset, file = tmp_path / "tiny-1.5.toml", tmp_path / "r.json"
    preset.write_text(TINY_PRESET)
    line = "--spec --k 2 --b 1 --numseqs 2 --output_len 9 --gsm8k --alpaca --synthetic --accepted 1 --threads 1"
    assert main(["--model", str(preset), *line.split(), "--device", "cpu", "--json", str(file)]) == 0
    result = json.loads(file.read_text())
    (row,) = result["rows"]
    assert (result["model"], result["prompts"]) == ("tiny-1.5", 4)
    for name in ("alpaca", "gsm8k"):
        assert row[f"tokens_per_s_{name}"] > 0
        assert 2 < row[f"acceptance_length_{name}"] <= 3
    assert "Model: tiny-1.5, Mode: sd, Total: 36tok" in capsys.readouterr().out


def test_the_floor_of_a_sparse_model_grows_with_the_experts_its_rows_take() -> None:
    dense = ModelConfig(family="llama", hidden_size=8, num_layers=3, num_heads=2, num_kv_heads=1, head_dim=4,
                        intermediate_size=20, vocab_size=16)  # fmt: skip
    attention = 3 * (8 * 4 * 2 * 3)
    assert step_bytes(dense, dtype_bytes=2, rows=1, context=0) == 2 * (attention + 3 * 3 * 8 * 20 + 16 * 8)
    experts = ExpertsConfig(count=4, per_token=1, intermediate_size=10, normalised=True, dense_layers=frozenset({0}))
    sparse = replace(dense, experts=experts)

    def expected(taken: float) -> float:
        return 2 * (attention + 3 * 8 * 20 + 2 * (taken * 3 * 8 * 10 + 4 * 8) + 16 * 8)

    assert step_bytes(sparse, dtype_bytes=2, rows=1, context=0) == pytest.approx(expected(1.0))
    assert step_bytes(sparse, dtype_bytes=2, rows=2, context=0) == pytest.approx(expected(1.75))


def test_synthetic_needs_a_preset(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", "/nowhere", "--synthetic"]) == 2
    assert "--synthetic needs a preset, not '/nowhere'" in capsys.readouterr().err
