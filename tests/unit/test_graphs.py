"""Captured steps without a device that captures: a graph here is the function itself, run again over its buffers.

So padding, staging and bucket choice are tested on any machine; real graphs are tested in tests/backends.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from bench.synthetic import build
from ssd_ascend.backends.base import Backend
from ssd_ascend.backends.registry import load_backend
from ssd_ascend.core.batch import Mode
from ssd_ascend.runtime import static
from ssd_ascend.runtime.graphs import Bucket, make_buckets
from ssd_ascend.runtime.inputs import Row, build_batch
from ssd_ascend.runtime.load import CacheSize
from ssd_ascend.runtime.model_runner import ModelRunner

SHAPE = {
    "model_type": "llama",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 97,
    "max_position_embeddings": 256,
}
BLOCK = 16


class Again:
    """A graph that runs its function."""

    def __init__(self, run: Callable[[], None]) -> None:
        self.replay = run


class Captures:
    """A CPU backend that claims to capture, but for its first attempts, which fail for these reasons."""

    def __init__(self, inner: Backend, failures: Sequence[str] = (), *, padded: bool = True) -> None:
        self._inner, self._failures = inner, list(failures)
        self.captured = 0
        self.capabilities = replace(inner.capabilities, graphs=True, padded_graphs=padded)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def graphs(self, device: torch.device) -> Captures:
        return self

    def capture(self, run: Callable[[], None]) -> Again:
        run()
        self.captured += 1
        if self._failures:
            raise RuntimeError(self._failures.pop(0))
        return Again(run)


class Compiles(Captures):
    """One whose kernels are compiled beforehand."""

    @contextmanager
    def compiling(self) -> Iterator[None]:
        before = self.captured
        yield
        assert self.captured == before, "nothing is captured where nothing is computed"


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> ModelRunner:
    monkeypatch.setenv("SSD_CPU_KERNELS", "0")
    backend = load_backend("cpu")
    size = CacheSize(max_model_len=128, max_num_seqs=8, num_blocks=80)
    return build(SHAPE, backend, backend.device(0), size=size, dtype=torch.float32, block_size=BLOCK)[0]


def random_rows(rng: random.Random, count: int, longest: int) -> list[Row]:
    """Rows over their own blocks, somewhere in their sequences."""
    order = rng.sample(range(80), 80)
    rows = []
    for i in range(count):
        length, start = rng.randint(1, longest), rng.randint(0, 100)
        rows.append(Row([rng.randrange(97) for _ in range(length)], start, order[8 * i : 8 * i + 8], length))
    return rows


def test_replayed_steps_answer_as_eager_ones(runner: ModelRunner) -> None:
    backend = Captures(load_backend("cpu"))
    runner.capture_graphs(backend, max_rows=6, lookahead=3, max_len=128)  # type: ignore[arg-type]
    graphs, rng = runner.graphs, random.Random(0)
    assert graphs is not None
    for _ in range(40):
        mode, longest = rng.choice([(Mode.DECODE, 1), (Mode.VERIFY, 4)])
        rows = random_rows(rng, rng.randint(1, 6), longest)
        kept = runner.kv.tensor.clone()
        staged = build_batch(mode, rows, block_size=BLOCK, device=runner.device, staging=graphs)
        assert graphs.captured(staged) is not None
        replayed, cache = runner.forward(staged), runner.kv.tensor.clone()
        runner.kv.tensor.copy_(kept)
        eager = runner.forward(build_batch(mode, rows, block_size=BLOCK, device=runner.device))
        torch.testing.assert_close(replayed.logits, eager.logits)
        torch.testing.assert_close(cache, runner.kv.tensor)


def test_a_replay_hands_over_the_rows_that_were_asked_for_and_judges_them(runner: ModelRunner) -> None:
    runner.capture_graphs(Captures(load_backend("cpu")), max_rows=4, lookahead=3, max_len=128)  # type: ignore[arg-type]
    rows = [row._replace(num_logits=min(wanted, len(row.tokens)))
            for row, wanted in zip(random_rows(random.Random(2), 4, 4), (1, 4, 2, 1), strict=True)]  # fmt: skip
    kept = runner.kv.tensor.clone()
    staged = build_batch(Mode.GLUE, rows, block_size=BLOCK, device=runner.device, staging=runner.graphs)
    replayed = runner.forward(staged)
    runner.kv.tensor.copy_(kept)
    eager = runner.forward(build_batch(Mode.GLUE, rows, block_size=BLOCK, device=runner.device))
    torch.testing.assert_close(replayed.logits, eager.logits)
    assert replayed.greedy is not None
    fed = [token for row in rows for token in row.tokens[-row.num_logits :]]
    assert replayed.greedy.tolist() == [list(pair) for pair in zip(eager.logits.argmax(-1).tolist(), fed, strict=True)]


@pytest.mark.parametrize("num_logits", [0, 1])
def test_a_prompt_that_comes_alone_is_replayed(runner: ModelRunner, num_logits: int) -> None:
    """In a graph that it fills by more than half. Short ones only where a step of as many tokens is captured anyway."""
    backend = Captures(load_backend("cpu"))
    runner.capture_graphs(backend, max_rows=6, lookahead=3, max_len=128, longest_prompt=128)  # type: ignore[arg-type]
    graphs, rng = runner.graphs, random.Random(4)
    assert graphs is not None
    assert [bucket.per_row for bucket in graphs.buckets if bucket.is_prompt] == [16, 128]
    assert not any(batch.mode is Mode.PREFILL for batch in graphs.inputs(16).batches)
    for length in (1, 8, 9, 16, 17, 64, 65, 100, 128):
        (row,) = random_rows(rng, 1, 1)
        start = rng.randint(0, 128 - length)
        row = Row([rng.randrange(97) for _ in range(length)], start, row.block_table, num_logits)
        runner.kv.tensor.normal_()
        kept = runner.kv.tensor.clone()
        staged = build_batch(Mode.PREFILL, [row], block_size=BLOCK, device=runner.device, staging=graphs)
        assert (graphs.captured(staged) is not None) == (length in (9, 16, 65, 100, 128))
        replayed, cache = runner.forward(staged), runner.kv.tensor.clone()
        runner.kv.tensor.copy_(kept)
        eager = runner.forward(build_batch(Mode.PREFILL, [row], block_size=BLOCK, device=runner.device))
        torch.testing.assert_close(replayed.logits, eager.logits)
        torch.testing.assert_close(cache, runner.kv.tensor)
        if replayed.greedy is not None:
            best = eager.logits.argmax(-1).tolist()
            assert replayed.greedy.tolist() == [[token, row.tokens[-1]] for token in best]
    for rows in (random_rows(rng, 2, 16), [row._replace(num_logits=2)]):
        assert graphs.stage(Mode.PREFILL, rows) is None


def test_a_step_that_was_prepared_is_the_one_that_is_staged(runner: ModelRunner) -> None:
    """Whatever its rows turn out to be, and whether it is taken or another one comes instead."""
    runner.capture_graphs(Captures(load_backend("cpu")), max_rows=6, lookahead=3, max_len=128)  # type: ignore[arg-type]
    graphs, rng, taken = runner.graphs, random.Random(7), 0
    assert graphs is not None
    for _ in range(60):
        rows = random_rows(rng, rng.randint(1, 6), 4)
        tables, starts = [row.block_table for row in rows], [max(0, row.start - rng.randint(0, 3)) for row in rows]
        prepared = graphs.prepare(tables, starts, longest=4, span=7)
        assert prepared is not None
        if rng.random() < 0.3:
            rows = random_rows(rng, rng.randint(1, 6), 4)
            staged = graphs.stage(Mode.VERIFY, rows)
        else:
            staged, taken = graphs.stage_prepared(prepared, rows), taken + 1
        assert staged is not None
        kept = runner.kv.tensor.clone()
        replayed, cache = runner.forward(staged), runner.kv.tensor.clone()
        runner.kv.tensor.copy_(kept)
        eager = runner.forward(build_batch(Mode.VERIFY, rows, block_size=BLOCK, device=runner.device))
        assert staged.attention.query_lens_host == [len(row.tokens) for row in rows]
        assert staged.attention.kv_lens_host == [row.start + len(row.tokens) for row in rows]
        torch.testing.assert_close(replayed.logits, eager.logits)
        torch.testing.assert_close(cache, runner.kv.tensor)
    assert 30 < taken < 60


def test_a_row_beyond_its_blocks_is_not_staged(runner: ModelRunner) -> None:
    """What was prepared ends where the sequence has no blocks, and where nobody expected a row."""
    runner.capture_graphs(Captures(load_backend("cpu")), max_rows=6, lookahead=3, max_len=128)  # type: ignore[arg-type]
    graphs = runner.graphs
    assert graphs is not None
    short, long = Row([1, 2, 3, 4], BLOCK - 3, [5], 4), Row([1, 2, 3, 4], BLOCK - 3, [5, 6], 4)
    for row, span, fits in ((short, 9, False), (long, 9, True), (long, 7, True), (long, 6, False)):
        prepared = graphs.prepare([row.block_table], [row.start - 3], longest=4, span=span)
        assert prepared is not None
        assert (graphs.stage_prepared(prepared, [row]) is not None) is fits
    assert graphs.prepare([[0]] * 7, [0] * 7, longest=4, span=7) is None
    assert graphs.prepare([[0]], [0], longest=5, span=7) is None
    assert graphs.prepare([[0] * 9], [0], longest=4, span=7) is None


def test_few_tokens_are_counted_as_many_are_computed() -> None:
    """Positions, slots and lengths of the same rows, by lists and by arrays."""
    rng = random.Random(11)
    for count in (1, 2, 5, 8):
        for longest in (1, 4, 2 * BLOCK):
            rows = random_rows(rng, count, longest)
            lengths = [len(row.tokens) for row in rows]
            table = np.array([row.block_table for row in rows], np.int32)
            computed = static._computed(rows, lengths, BLOCK, table)
            for ours, theirs in zip(static._counted(rows, lengths, BLOCK), computed, strict=True):
                assert list(ours) == list(theirs)


def test_without_padding_each_number_of_tokens_is_captured_once(runner: ModelRunner) -> None:
    backend = Captures(load_backend("cpu"), padded=False)
    runner.capture_graphs(backend, max_rows=6, lookahead=3, max_len=128)  # type: ignore[arg-type]
    graphs, rng, sizes = runner.graphs, random.Random(3), set()
    assert graphs is not None
    assert not graphs.buckets
    for _ in range(40):
        mode, longest = rng.choice([(Mode.DECODE, 1), (Mode.VERIFY, 4)])
        rows = random_rows(rng, rng.randint(1, 6), longest)
        sizes.add(sum(len(row.tokens) for row in rows))
        kept = runner.kv.tensor.clone()
        staged = build_batch(mode, rows, block_size=BLOCK, device=runner.device, staging=graphs)
        assert graphs.captured(staged) is not None
        runner.kv.tensor.copy_(kept)  # a capture runs the step before there is one, over nothing
        replayed, cache = runner.forward(staged), runner.kv.tensor.clone()
        runner.kv.tensor.copy_(kept)
        eager = runner.forward(build_batch(mode, rows, block_size=BLOCK, device=runner.device))
        torch.testing.assert_close(replayed.logits, eager.logits)
        torch.testing.assert_close(cache, runner.kv.tensor)
    assert {bucket.tokens for bucket in graphs.buckets} == sizes
    assert backend.captured == len(sizes)


def test_without_padding_a_failed_capture_is_the_last(runner: ModelRunner, caplog: pytest.LogCaptureFixture) -> None:
    backend = Captures(load_backend("cpu"), ["out of memory"], padded=False)
    runner.capture_graphs(backend, max_rows=6, lookahead=3, max_len=128)  # type: ignore[arg-type]
    assert runner.graphs is not None
    with caplog.at_level("WARNING"):
        for tokens in ([1], [1, 2]):
            assert runner.graphs.stage(Mode.VERIFY, [Row(tokens, 0, [0], len(tokens))]) is None
    assert backend.captured == 1
    assert sum("no graph for" in record.getMessage() for record in caplog.records) == 1


def test_what_fits_no_bucket_runs_eagerly(runner: ModelRunner) -> None:
    backend = Captures(load_backend("cpu"))
    runner.capture_graphs(backend, max_rows=3, lookahead=2, max_len=64)  # type: ignore[arg-type]
    assert runner.graphs is not None
    rng = random.Random(1)
    too_many, too_long = random_rows(rng, 4, 1), [Row([1, 2, 3, 4], 0, [0, 1], 4)]
    deep = [Row([1], 70, [0, 1, 2, 3, 4], 1)]
    for mode, rows in [
        (Mode.DECODE, too_many),
        (Mode.VERIFY, too_long),
        (Mode.DECODE, deep),
        (Mode.PREFILL, [Row([1], 0, [0], 1)]),
    ]:
        assert runner.graphs.stage(mode, rows) is None


def test_sizes_that_cannot_be_captured_are_told_and_run_eagerly(
    runner: ModelRunner, caplog: pytest.LogCaptureFixture
) -> None:
    amounts = ["2.00 GiB", "990.5 MiB"]
    refused = [f"out of memory: no {each} of 141.2 GiB\nand a page of advice" for each in amounts]
    backend = Captures(load_backend("cpu"), [refused[0], "no such kernel", refused[1]])
    with caplog.at_level("WARNING"):
        runner.capture_graphs(backend, max_rows=8, lookahead=3, max_len=64)  # type: ignore[arg-type]
    assert runner.graphs is not None
    assert len(runner.graphs.buckets) == len(make_buckets(8, 3)) - 3
    assert [record.getMessage() for record in caplog.records if "no graph for" in record.getMessage()] == [
        f"no graph for steps of rows x tokens {sizes} ({reason}): they run in a larger graph, or eagerly, "
        "which is slower"
        for sizes, reason in (("8x4, 2x4", "out of memory: no 2.00 GiB of 141.2 GiB"), ("4x4", "no such kernel"))
    ]


def test_buckets_cover_every_number_of_rows() -> None:
    buckets = make_buckets(37, 5)
    assert {bucket.mode for bucket in buckets} == {Mode.DECODE, Mode.VERIFY}
    assert max(bucket.rows for bucket in buckets) == 37
    assert [bucket.tokens for bucket in buckets] == sorted((bucket.tokens for bucket in buckets), reverse=True)
    assert {bucket.per_row for bucket in buckets if bucket.mode is Mode.VERIFY} == {6}
    assert all(bucket.mode is Mode.DECODE for bucket in make_buckets(4, 0))
    assert {bucket for bucket in make_buckets(64, 5, 300) if bucket.is_prompt} == {
        Bucket(Mode.PREFILL, 1, size) for size in (16, 32, 64, 128, 256)
    }


def test_kernels_are_met_before_serving_and_leave_no_trace(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = runner.kv.tensor.normal_().clone()
    sizes, own = [], runner.run
    monkeypatch.setattr(runner, "run", lambda batch: sizes.append(batch.num_tokens) or own(batch))
    runner.capture_graphs(Compiles(load_backend("cpu")), max_rows=2, lookahead=0, max_len=128)  # type: ignore[arg-type]
    assert {16, 32, 64, 128, 601} <= set(sizes), "prompts, those beyond the longest in parts"
    assert sizes.count(1) == sizes.count(2) == 2, "every bucket is met twice: to compile, and to capture"
    torch.testing.assert_close(runner.kv.tensor, kept, rtol=0, atol=0)
