"""What the pictures are drawn from: rounds as they happened, hit rates by depth; and the words where they cannot be."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from bench import plots
from bench.samples import Sample, Step
from bench.summary import summarise
from bench.timeline import rounds
from ssd_ascend.errors import ConfigError

MS = 1_000_000


def step(tokens: int, *, hit: bool | None, idle: float, **spans: float) -> Step:
    """10 ms long; `hit` None for a step without a look-up."""
    in_ns = {name: int(value * MS) for name, value in spans.items()}
    lookups = int(hit is not None)
    return Step(10 * MS, 1, tokens, True, in_ns, lookups=lookups, hits=int(bool(hit)), idle_ns=int(idle * MS))


def sample() -> Sample:
    steps = [
        step(3, hit=True, idle=0, wait=1, forward=2, verify=4, observe=1),
        step(1, hit=True, idle=0, wait=1, forward=2, verify=4, observe=1),
        step(3, hit=False, idle=6, wait=5, forward=2, verify=1, observe=1),
        step(2, hit=True, idle=2.5, wait=1, forward=2, verify=4, observe=1),
    ]
    return Sample(steps=steps, prompt_tokens=0, ttft_ns=[1], outputs=[[1] * 9])


def test_rounds_stand_where_they_happened() -> None:
    bars = rounds([sample()], most=2)
    target = [(bar["round"], bar["what"], bar["from_ms"], bar["ms"]) for bar in bars if bar["who"] == "target"]
    assert target == [
        *[(0, "wait", 0, 1), (0, "forward", 1, 2), (0, "verify", 3, 4), (0, "observe", 7, 1)],
        *[(1, "wait", 10, 1), (1, "forward", 11, 2), (1, "verify", 13, 4), (1, "observe", 17, 1)],
    ]
    verdicts = [(bar["tokens"], bar["hit"]) for bar in bars if "tokens" in bar]
    assert verdicts == [(3, True), (1, True)]


def test_the_worker_is_busy_from_a_request_until_it_idles() -> None:
    """Requests went out at 8 and 18 ms; before the second one it was idle for 6, which the third step is told."""
    worker = [bar for bar in rounds([sample()], most=2) if bar["who"] == "speculator"]
    assert [(bar["from_ms"], bar["ms"]) for bar in worker] == [(8, 4)]


def test_hit_rate_by_depth_counts_the_outcome_of_the_step_before() -> None:
    row = summarise("ssd", 1, [sample()])
    assert (row["hits_at_2"], row["lookups_at_2"]) == (1.0, 2)
    assert (row["hits_at_0"], row["lookups_at_0"]) == (0.0, 1)
    assert "hits_at_0" not in summarise("ssd", 2, [sample()])


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is not None, reason="matplotlib is here")
def test_without_matplotlib_it_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--plots needs matplotlib"):
        plots.draw_all({"rows": []}, tmp_path)


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not here")
def test_every_picture_is_drawn(tmp_path: Path) -> None:
    rows = [summarise(mode, batch, [sample(), sample()]) for mode in ("ssd", "sd") for batch in (1, 2)]
    for row in rows:
        row |= {"accepted_at_1": 0.9, "accepted_at_2": 0.7, "tokens_per_s_code": 9.0}
    outcome = {"rows": rows, "model": "m", "timelines": {"ssd, batch 1": rounds([sample()], most=2)}}
    names = [path.stem for path in plots.draw_all(outcome, tmp_path)]
    assert names == ["speed", "kinds", "acceptance", "hits", "frontier", "rounds-1"]
