"""What the GPU backend promises beyond the conformance suite: a token's bits depend on its sequence alone.

Skipped where there is no GPU. Each test compares bit for bit; none has a tolerance.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from bench.synthetic import build
from ssd_ascend.backends.base import Backend
from ssd_ascend.backends.registry import load_backend
from ssd_ascend.core.batch import Mode
from ssd_ascend.errors import ConfigError
from ssd_ascend.runtime.inputs import Row, build_batch
from ssd_ascend.runtime.load import CacheSize
from ssd_ascend.runtime.model_runner import ModelRunner

VOCAB = 503
SHAPE = {
    "model_type": "llama",
    "hidden_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 640,
    "vocab_size": VOCAB,
    "max_position_embeddings": 2048,
}
LENGTH = 300


@pytest.fixture(scope="module")
def gpu() -> Iterator[Backend]:
    """The GPU backend."""
    try:
        yield load_backend("cuda")
    except ConfigError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module", params=[(4, 2, 64), (8, 1, 128), (6, 6, 96)], ids=str)
def runner(request: pytest.FixtureRequest, gpu: Backend) -> ModelRunner:
    """A small model in bfloat16, several head shapes."""
    heads, kv_heads, head_dim = request.param
    data = {**SHAPE, "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim}
    size = CacheSize(max_model_len=512, max_num_seqs=16, num_blocks=256)
    return build(data, gpu, gpu.device(0), size=size, block_size=16)[0]


def tokens_of(seed: int, count: int = LENGTH) -> list[int]:
    """A sequence to compute."""
    return torch.randint(VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def table_of(row: int) -> list[int]:
    """Blocks of the row-th sequence, not in order."""
    return [row * 20 + 20 - i for i in range(20)]


def run(runner: ModelRunner, sequences: list[list[int]], sizes: list[int], mode: Mode = Mode.PREFILL) -> torch.Tensor:
    """Logits [rows, length, V] of sequences fed together, sizes[i] tokens at the i-th forward (the last repeats)."""
    pieces, start, turn = [], 0, 0
    while start < len(sequences[0]):
        count = min(sizes[min(turn, len(sizes) - 1)], len(sequences[0]) - start)
        rows = [Row(tokens[start : start + count], start, table_of(i), count) for i, tokens in enumerate(sequences)]
        batch = build_batch(mode, rows, block_size=runner.block_size, device=runner.device, staging=runner.graphs)
        pieces.append(runner.forward(batch).logits.view(len(sequences), count, -1).clone())
        start, turn = start + count, turn + 1
    return torch.cat(pieces, dim=1)


@pytest.mark.parametrize("sizes", [[1], [7], [64], [65], [128, 1], [100, 3, 97], [299, 1]], ids=str)
def test_any_cut_of_a_sequence_gives_the_same_bits(runner: ModelRunner, sizes: list[int]) -> None:
    sequence = tokens_of(1)
    assert torch.equal(run(runner, [sequence], sizes), run(runner, [sequence], [LENGTH]))


@pytest.mark.parametrize("neighbours", [1, 5, 11])
def test_neighbours_do_not_change_bits(runner: ModelRunner, neighbours: int) -> None:
    sequences = [tokens_of(seed, 40) for seed in range(neighbours + 1)]
    together = run(runner, sequences, [20, 1])
    for i in (0, neighbours):
        alone = run(runner, [sequences[i]], [20, 1])
        assert torch.equal(together[i], alone[0])


def test_decoding_rows_beside_a_prefill_keep_their_bits(runner: ModelRunner) -> None:
    first, second = tokens_of(3, 120), tokens_of(4, 200)
    expected = run(runner, [first], [119, 1])[0, -1]
    run(runner, [first[:119]], [119])
    rows = [Row(first[119:], 119, table_of(0), 1), Row(second, 0, table_of(1), 1)]
    mixed = runner.forward(build_batch(Mode.PREFILL, rows, block_size=runner.block_size, device=runner.device))
    assert torch.equal(mixed.logits[0], expected)


@pytest.fixture(scope="module")
def captured(runner: ModelRunner, gpu: Backend) -> Iterator[ModelRunner]:
    """The runner with graphs of up to 6 rows and 4 drafts, and of prompts."""
    runner.capture_graphs(gpu, max_rows=6, lookahead=4, max_len=512, longest_prompt=512)
    yield runner
    runner.graphs = None


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 6, 7])
@pytest.mark.parametrize(("mode", "size"), [(Mode.DECODE, 1), (Mode.VERIFY, 5), (Mode.VERIFY, 3)])
def test_graphs_answer_as_eager_steps_do(captured: ModelRunner, rows: int, mode: Mode, size: int) -> None:
    sequences = [tokens_of(10 + row, 60) for row in range(rows)]
    assert captured.graphs is not None
    assert max(bucket.rows for bucket in captured.graphs.buckets) == 6
    replayed = run(captured, sequences, [30, *[size] * 6], mode)
    graphs, captured.graphs = captured.graphs, None
    try:
        eager = run(captured, sequences, [30, *[size] * 6], mode)
    finally:
        captured.graphs = graphs
    assert torch.equal(replayed, eager)


@pytest.mark.parametrize("sizes", [[300], [200, 100], [128, 65, 107], [9, 30, 128, 65, 68], [256, 44]], ids=str)
def test_prompts_in_graphs_give_the_bits_of_those_without(captured: ModelRunner, sizes: list[int]) -> None:
    """In one part or several, each of which fills its graph more or less; the cache as well."""
    graphs, tokens = captured.graphs, tokens_of(3)
    found = []
    for staging in (graphs, None):
        captured.kv.tensor.zero_()
        start, logits, replayed = 0, [], 0
        for size in sizes:
            row = Row(tokens[start : start + size], start, table_of(0), 1)
            batch = build_batch(
                Mode.PREFILL, [row], block_size=captured.block_size, device=captured.device, staging=staging
            )
            replayed += graphs is not None and graphs.captured(batch) is not None
            logits.append(captured.forward(batch).logits.clone())
            start += size
        found.append((torch.cat(logits), captured.kv.tensor.clone()))
        assert replayed == (sum(size > 64 or 8 < size <= 16 for size in sizes) if staging is not None else 0)
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


def test_padding_writes_nothing(captured: ModelRunner) -> None:
    captured.kv.tensor.fill_(0.5)
    before = captured.kv.tensor.clone()
    rows = [Row([5], 0, table_of(2), 1), Row([6], 0, table_of(3), 1), Row([7], 0, table_of(4), 1)]
    batch = build_batch(
        Mode.DECODE, rows, block_size=captured.block_size, device=captured.device, staging=captured.graphs
    )
    assert batch.attention.slot_mapping.shape[0] > 3, "three rows should ride in a larger bucket"
    captured.forward(batch)
    changed = (captured.kv.tensor != before).flatten(4).any(-1).any(0).any(0).nonzero()
    assert sorted(changed.tolist()) == sorted([table_of(row)[0], 0] for row in (2, 3, 4))


def test_linear_is_the_same_for_any_number_of_rows(gpu: Backend) -> None:
    device = gpu.device(0)
    generator = torch.Generator(device).manual_seed(0)
    for columns, depth in ((4096, 4096), (1000, 576), (9000, 2048)):
        weight = torch.randn(columns, depth, device=device, generator=generator).bfloat16()
        x = torch.randn(700, depth, device=device, generator=generator).bfloat16()
        apply = gpu.ops.linear(weight, None)
        whole = apply(x)
        for rows in (1, 2, 7, 16, 17, 32, 33, 64, 65, 128, 129, 256, 300):
            assert torch.equal(apply(x[:rows]), whole[:rows]), (columns, depth, rows)


def test_a_tree_that_is_a_chain_gives_the_bits_of_a_chain(runner: ModelRunner) -> None:
    sequence = tokens_of(5, 40)
    run(runner, [sequence[:30]], [30])
    rows = [Row(sequence[30:], 30, table_of(0), 10)]
    plain = build_batch(Mode.VERIFY, rows, block_size=runner.block_size, device=runner.device)
    mask = torch.ones(10, 10, dtype=torch.bool, device=runner.device).tril()
    tree = replace(plain, attention=replace(plain.attention, tree_mask=mask))
    assert torch.equal(runner.forward(plain).logits, runner.forward(tree).logits)
