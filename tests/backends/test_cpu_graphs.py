"""The CPU's captures: what is replayed computes anew over the same addresses, and what cannot be is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from ssd_ascend.backends.base import AttentionSpec
from ssd_ascend.backends.cpu.graphs import CpuGraphs
from ssd_ascend.backends.cpu.native import Library, load
from ssd_ascend.backends.cpu.native.attention import NativeAttention
from ssd_ascend.backends.cpu.native.ops import NativeOps
from ssd_ascend.core.attention import AttentionMetadata


@pytest.fixture
def library() -> Library:
    found = load()
    if found is None:
        pytest.skip("no compiled kernels on this machine")
    return found


def replays(
    library: Library, run: Callable[[], list[torch.Tensor]], inputs: list[torch.Tensor], rounds: int = 3
) -> None:
    """`run` reads `inputs`; captured once, its replay must give, bit for bit, what `run` gives for other contents."""
    outputs: list[torch.Tensor] = []

    def step() -> None:
        outputs[:] = run()

    graph = CpuGraphs(library).capture(step)
    captured = list(outputs)
    for _ in range(rounds):
        for tensor in inputs:
            tensor.copy_(
                torch.randint(0, 7, tensor.shape) if tensor.dtype == torch.int64 else torch.randn(tensor.shape)
            )
        graph.replay()
        got = [tensor.clone() for tensor in captured]
        for expected, value in zip(run(), got, strict=True):
            assert torch.equal(value, expected)


def test_kernels_and_torch_operators_replay_in_order(library: Library) -> None:
    torch.manual_seed(0)
    ops = NativeOps(library)
    first, second = (ops.linear(torch.randn(64, 64), None) for _ in range(2))
    weight, table, ids, x = torch.ones(64), torch.randn(7, 64), torch.zeros(3, dtype=torch.int64), torch.randn(3, 64)

    def run() -> list[torch.Tensor]:
        hidden = ops.rms_norm(first(x + ops.embedding(table, ids)), weight, 1e-5)
        hidden, residual = ops.add_rms_norm(second(hidden), hidden.clone(), weight, 1e-5)
        hidden[:, 0].fill_(2.0)
        best = hidden.topk(3, dim=-1)
        return [torch.cat((hidden, residual), dim=-1), hidden.argmax(-1), best.values, best.indices, x.t()[1]]

    replays(library, run, [x, ids])


@pytest.mark.parametrize("inference", [False, True])
def test_a_cast_is_made_anew(library: Library, inference: bool) -> None:
    """Its schema says that the result may be the argument itself; in inference mode that is all a capture sees."""
    narrow, wide = torch.randn(3, 8).bfloat16(), torch.randn(3, 8)

    def run() -> list[torch.Tensor]:
        cast = narrow.to(torch.float32)
        return [cast.add_(1.0), wide.to(torch.float32)]

    with torch.inference_mode(inference):
        replays(library, run, [narrow, wide])


def test_attention_reads_the_lengths_of_the_replay(library: Library) -> None:
    torch.manual_seed(1)
    spec = AttentionSpec(1, 4, 2, 16, 16, torch.float32, 0.25)
    attention = NativeAttention(library, spec)
    q, k, v = torch.randn(2, 4, 16), torch.randn(2, 2, 16), torch.randn(2, 2, 16)
    kv_lens, slots = torch.tensor([3, 5], dtype=torch.int32), torch.tensor([2, 16 + 4])
    meta = AttentionMetadata([1, 1], [0, 0], torch.tensor([0, 1, 2], dtype=torch.int32), kv_lens,
                             torch.tensor([[0], [1]], dtype=torch.int32), slots)  # fmt: skip
    outputs: list[torch.Tensor] = []
    kv = torch.randn(attention.kv_shape(2))

    def step() -> None:
        attention.plan(meta)
        outputs[:] = [attention.forward(q, k, v, kv, meta, 0)]

    graph = CpuGraphs(library).capture(step)
    (captured,) = outputs
    kv_lens.copy_(torch.tensor([9, 12]))
    slots.copy_(torch.tensor([8, 16 + 11]))
    before = kv.clone()
    graph.replay()
    got, cache = captured.clone(), kv.clone()
    kv.copy_(before)
    step()
    assert torch.equal(got, outputs[0])
    assert torch.equal(cache, kv)


def test_memory_of_a_capture_lives_as_long_as_it(library: Library) -> None:
    ops, x = NativeOps(library), torch.randn(1, 256)
    project = ops.linear(torch.randn(256, 256), None)
    outputs: list[torch.Tensor] = []

    def step() -> None:
        hidden = x
        for _ in range(20):
            hidden = project(hidden) * 0.1
        outputs[:] = [hidden]

    graph = CpuGraphs(library).capture(step)
    expected = outputs[0].clone()
    scribbles = [torch.full((1, 256), float("nan")) for _ in range(200)]  # would land in freed intermediates
    graph.replay()
    assert torch.equal(outputs[0], expected)
    assert len(scribbles) == 200


@pytest.mark.parametrize("run", [lambda x: x.sum().item(), lambda x: x.nonzero(), lambda x: x[x > 0]])
def test_what_depends_on_values_is_refused(library: Library, run: Callable[[torch.Tensor], object]) -> None:
    x = torch.randn(8)
    with pytest.raises(RuntimeError, match="cannot be captured"):
        CpuGraphs(library).capture(lambda: run(x) and None)
    # and the thread does not go on recording
    graph = CpuGraphs(library).capture(lambda: None)
    graph.replay()


def test_captures_stop_where_their_memory_ends(library: Library) -> None:
    graphs, x = CpuGraphs(library, most_bytes=10_000), torch.randn(1000)
    outputs: list[torch.Tensor] = []
    fits = graphs.capture(lambda: outputs.append(x + 1))
    with pytest.raises(RuntimeError, match="intermediate results"):
        graphs.capture(lambda: outputs.append((x + 1) * 2))
    assert fits.size == 4000
    fits.replay()
