"""What was measured, beside what the cost model says: the data of test_planner_measured.py and of docs/topology.md.

`python -m tests.unit.planner_measured docs/topology.md` rewrites the table of errors there.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from ssd_ascend import catalogue
from ssd_ascend.config.plan import Wish
from ssd_ascend.planner import make_plan
from ssd_ascend.planner.cost import Cost, Forward, Load, draft_steps, forward, side_by_side_us
from ssd_ascend.planner.rates import Rates, rates_of
from ssd_ascend.planner.shapes import Shape, causal_shape, draft_shape

BEGIN = "<!-- errors: begin (written by `python -m tests.unit.planner_measured docs/topology.md`) -->"
END = "<!-- errors: end -->"


class Row(NamedTuple):
    """One comparison. `fitted` rows are where a rate of the topology file comes from; the others are predictions."""

    what: str
    predicted_ms: float
    measured_ms: float
    fitted: bool

    @property
    def error(self) -> float:
        """Relative error of the prediction."""
        return self.predicted_ms / self.measured_ms - 1.0


class Round(NamedTuple):
    """One pair on two cards: milliseconds of unfused graphs without attention and scheduler; `rows` branches a step."""

    preset: str
    lookahead: int
    rows: int
    verify: float
    draft: float
    wide: float
    ssd: float
    sd: float


# two NVIDIA H200 joined by NVLink, one packed message each way, torch 2.11.0+cu130, 2026-11-29
TWO_CARDS = (
    Round("llama-3.1-8b-draft-1b", 5, 18, 4.80, 5.29, 6.11, 6.29, 10.29),
    Round("llama-3.1-8b-eagle3", 6, 21, 4.81, 1.34, 1.42, 5.07, 6.31),
    Round("qwen3-32b-draft-0.6b", 6, 21, 17.50, 6.67, 7.45, 17.90, 24.44),
)
# the same on one card, two streams: preset, lookahead, rows, milliseconds of a round side by side
ONE_CARD = (
    ("llama-3.1-8b-eagle3", 6, 21, 5.84),
    ("llama-3.1-8b-draft-1b", 5, 18, 9.65),
    ("qwen3-32b-eagle3", 6, 21, 19.65),
    ("qwen3-32b-draft-0.6b", 6, 21, 21.48),
)
# vLLM 0.22.0 on one H200, Llama-3.1-8B, prompts of 128 tokens: batch, milliseconds of a plain step
OTHER_ENGINE = ((1, 4.913), (8, 5.014), (32, 5.508), (64, 6.073))
# SmolLM2-135M in bf16 on 2 cores with AVX512-BF16: rows, milliseconds of all linear layers, weights prepacked
CPU_LINEARS = ((1, 11.1), (6, 9.3), (8, 12.1))
# published: Qwen3-32B at TP 16 on Atlas A3 under vLLM 0.15 (topology/ascend-a3-16.toml, source "alignment")
A3_STEPS = ((1, 15.65), (4, 15.4), (16, 19.4), (32, 29.0))
# published: Llama 3.1 70B at TP 4 on H100, plain decoding (arXiv 2603.03251): 54.7 tokens/s
H100_STEP = 1e3 / 54.7
CPU_OTHER_ENGINE = 1e3 / 95.8  # llama.cpp, bf16, one sequence: a whole step


# our own engine on H200s, synthetic weights at true shapes: results of bench/two_gpus.py, whatever they hold today
RESULTS = Path(__file__).resolve().parents[2] / "bench" / "results"
TWO_CARD_RUN, ONE_CARD_RUN = RESULTS / "h200-two-cards.json", RESULTS / "h200-one-card.json"
PRESETS = {
    "8b-1b": "llama-3.1-8b-draft-1b",
    "8b-eagle3": "llama-3.1-8b-eagle3",
    "32b-0.6b": "qwen3-32b-draft-0.6b",
    "32b-eagle3": "qwen3-32b-eagle3",
}


def _pair(name: str) -> tuple[Shape, Shape]:
    preset = catalogue.find_preset(name)
    draft = draft_shape(preset)
    assert draft is not None
    return causal_shape(preset.target.dims), draft


def h200_rows() -> Iterator[Row]:
    """Everything measured on the H200."""
    topology = catalogue.find_topology("nvidia-h200-8")
    rates = rates_of(topology, "bfloat16")
    message_us = 2 * (rates.message_us + rates.links["node"].latency_us) + rates.round_us
    for one in TWO_CARDS:
        target, draft = _pair(one.preset)
        verify = forward(target, rates, rows=one.lookahead + 1, kv_bytes=0.0)
        narrow = draft_steps(draft, rates, steps=one.lookahead, rows=1)
        wide = draft_steps(draft, rates, steps=one.lookahead, rows=one.rows)
        ssd = max(verify.total_us, wide.total_us) + message_us
        sd = verify.total_us + narrow.total_us + message_us
        name = f"H200, raw graphs, {one.preset}, K {one.lookahead}"
        yield Row(f"{name}: verify", verify.total_us / 1e3, one.verify, fitted=False)
        yield Row(f"{name}: draft, 1 row", narrow.total_us / 1e3, one.draft, fitted=False)
        yield Row(f"{name}: draft, {one.rows} rows", wide.total_us / 1e3, one.wide, fitted=False)
        yield Row(f"{name}: SSD round, two cards", ssd / 1e3, one.ssd, fitted=False)
        yield Row(f"{name}: SD round, two cards", sd / 1e3, one.sd, fitted=False)
    yield from _one_card(rates)
    target, _ = _pair("llama-3.1-8b-eagle3")
    for batch, measured in OTHER_ENGINE:
        kv = batch * 192 * target.kv_bytes_per_token
        step = forward(target, rates, rows=batch, kv_bytes=kv)
        yield Row(
            f"H200, vLLM 0.22 on Llama 3.1 8B: plain step, batch {batch}", step.total_us / 1e3, measured, fitted=False
        )


def _one_card(rates: Rates) -> Iterator[Row]:
    for name, lookahead, rows, measured in ONE_CARD:
        target, draft = _pair(name)
        verify = forward(target, rates, rows=lookahead + 1, kv_bytes=0.0)
        wide = draft_steps(draft, rates, steps=lookahead, rows=rows)
        both = side_by_side_us(verify, wide) / 1e3
        yield Row(f"H200, raw graphs, {name}, K {lookahead}: SSD round, one card", both, measured, fitted=False)


def engine_rows(*files: Path) -> Iterator[Row]:
    """Rounds of our own engine, tensor parallelism and SSD included, as the files of results have them."""
    for file in files or (TWO_CARD_RUN, ONE_CARD_RUN):
        outcome = json.loads(file.read_text(encoding="utf-8"))
        context = outcome["prompt_len"] + outcome["output_len"] // 2
        sent = _modes_that_send(outcome["rows"])
        for row in outcome["rows"]:
            if row.get("pair") in PRESETS and "ms_per_step" in row:
                yield from _engine_row(row, context, one_card=file == ONE_CARD_RUN, sends=row["mode"] in sent)


def _modes_that_send(rows: list[dict[str, Any]]) -> set[str]:
    """Modes whose features go through sockets: "ssd" does where what stays on the devices has a mode of its own."""
    modes = {row["mode"] for row in rows}
    return {"ssd:socket"} if "ssd:socket" in modes else {"ssd"}


def _engine_row(row: dict[str, Any], context: int, *, one_card: bool, sends: bool) -> Iterator[Row]:
    mode, batch, preset = row["mode"].partition(":")[0], row["batch"], PRESETS[row["pair"]]
    name = f"our engine, {preset}, TP {row['tp']}"
    cost = _cost(preset, row, context, sends=sends)
    if mode == "none":
        fitted = row["pair"] == "8b-1b"  # layers, steps, sequences; with two ranks: collectives
        yield Row(f"{name}: plain round, batch {batch}", cost.plain().round_ms, row["ms_per_step"], fitted=fitted)
        return
    assert cost.draft is not None
    name += f", K {row['lookahead']}"
    if mode == "sd":
        ms = cost.in_turn(cost.draft).round_ms
        yield Row(f"{name}: SD round, batch {batch}", ms, row["ms_per_step"], fitted=False)
    elif not one_card and row.get("ms_per_hit_step"):  # a worker on the target's own card is not what is planned
        line = ""
        if cost.draft.feature_bytes:
            line = ", features sent" if sends else ", features in place"
        hit_us = cost.hit_us(cost.draft, 1, "node")
        fitted = row["pair"] == "8b-1b"  # the host's work for a branch
        if (
            row["hit_rate"] ** batch * row["decode_steps"] > 1.0
        ):  # else steps on hits are those of a few rows at the end
            yield Row(f"{name}: SSD hit{line}, batch {batch}", hit_us / 1e3, row["ms_per_hit_step"], fitted=fitted)
        mean = cost.ahead(cost.draft, 1, "node")
        yield Row(f"{name}: SSD round{line}, batch {batch}", mean.round_ms, row["ms_per_step"], fitted=False)


def _cost(preset: str, row: dict[str, Any], context: int, *, sends: bool) -> Cost:
    """What the planner computes with, for the branches that the worker really had."""
    found, batch, lookahead = catalogue.find_preset(preset), row["batch"], row["lookahead"] or 1
    width, hit_rate = 1, 1.0
    if row.get("lookups"):
        branches = (row["wasted"] + row["hits"] * lookahead) / lookahead
        width, hit_rate = max(1, round(branches / row["lookups"])), row["hit_rate"]
    rates = rates_of(catalogue.find_topology("nvidia-h200-8"), "bfloat16")
    return Cost(
        target=causal_shape(found.target.dims),
        draft=draft_shape(found),
        rates=replace(rates, peers=frozenset()) if sends else rates,
        load=Load(
            batch=batch, context=context, lookahead=lookahead, width=width, sampled=False, acceptance=0.8,
            hit_rate=hit_rate,
        ),
        tp=row["tp"],
        tp_level="node",
    )  # fmt: skip


def cpu_rows() -> Iterator[Row]:
    """Everything measured on the CPU."""
    rates = rates_of(catalogue.find_topology("laptop-cpu"), "bfloat16")
    shape = causal_shape(catalogue.find_preset("smollm2-135m").target.dims)
    for rows, measured in CPU_LINEARS:
        linears: Forward = forward(shape, rates, rows=rows, kv_bytes=0.0)
        yield Row(f"CPU, SmolLM2-135M: linear layers, {rows} row(s)", linears.busy_us / 1e3, measured, fitted=rows == 1)
    step = forward(shape, rates, rows=1, kv_bytes=164 * shape.kv_bytes_per_token)
    yield Row("CPU, SmolLM2-135M: plain step of llama.cpp in bf16", step.total_us / 1e3, CPU_OTHER_ENGINE, fitted=False)


def published_rows() -> Iterator[Row]:
    """What others published of machines we have not measured."""
    for batch, measured in A3_STEPS:
        predicted = _decode_ms("ascend-a3-16", "qwen3-32b-eagle3", tp=16, batch=batch)
        yield Row(f"A3, Qwen3 32B at TP 16: plain step, batch {batch}", predicted, measured, fitted=batch == 1)
    predicted = _decode_ms("nvidia-hopper-8", "llama-3.1-70b-draft-1b", tp=4, batch=1)
    yield Row("H100, Llama 3.1 70B at TP 4: plain step, batch 1", predicted, H100_STEP, fitted=False)


def _decode_ms(topology: str, preset: str, *, tp: int, batch: int) -> float:
    wish = Wish(tp=tp, batch=batch, speculator="none")
    plan = make_plan(catalogue.find_topology(topology), catalogue.find_preset(preset), wish, preset_name=preset)
    return plan.times.decode_ms


def table() -> str:
    """The comparison as a Markdown table."""
    lines = ["| what | predicted ms | measured ms | error | |", "|---|---|---|---|---|"]
    for row in (*h200_rows(), *engine_rows(), *cpu_rows(), *published_rows()):
        kind = "fitted" if row.fitted else "predicted"
        lines.append(f"| {row.what} | {row.predicted_ms:.2f} | {row.measured_ms:.2f} | {row.error:+.1%} | {kind} |")
    return "\n".join(lines)


def update(path: Path) -> None:
    """Rewrite the table between the two marks of a Markdown file."""
    before, _, rest = path.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    path.write_text(f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    update(Path(sys.argv[1]))
