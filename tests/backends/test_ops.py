"""Every operator of every backend against its definition in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ssd_ascend.backends.base import AttentionSpec, Backend, ChoosingOps, Ops
from tests.backends.conformance import close

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 17, 33, 64)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))


def normal(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.fixture(autouse=True)
def _only_served_dtypes(request: pytest.FixtureRequest, backend: Backend) -> None:
    callspec = getattr(request.node, "callspec", None)
    dtype = callspec.params.get("dtype") if callspec else None
    if dtype is not None and dtype not in backend.capabilities.dtypes:
        pytest.skip(f"{backend.name} does not serve {dtype}")


def test_keeps_the_protocols(backend: Backend, device: torch.device) -> None:
    assert isinstance(backend.ops, Ops)
    capabilities = backend.capabilities
    assert capabilities.block_sizes
    assert capabilities.dtypes
    spec = AttentionSpec(2, 4, 2, 64, capabilities.block_sizes[0], capabilities.dtypes[0], 0.125)
    attention = backend.attention(spec, device)
    kv = torch.empty(attention.kv_shape(3), device="meta")
    assert kv.numel() == 2 * 3 * spec.block_size * spec.num_kv_heads * spec.head_dim
    assert (backend.graphs(device) is not None) == capabilities.graphs
    assert backend.describe(device)
    with backend.stream():
        backend.synchronize(device)


def test_memory_is_what_the_process_may_use(backend: Backend, device: torch.device) -> None:
    free, total = backend.memory(device)
    assert 0 < free <= total


def test_to_host_brings_all_tensors(backend: Backend, device: torch.device) -> None:
    tensors = [torch.arange(5), torch.randn(2, 3)]
    for got, sent in zip(backend.to_host([t.to(device) for t in tensors]), tensors, strict=True):
        assert got.device.type == "cpu"
        assert torch.equal(got, sent)


@dtypes
@pytest.mark.parametrize(("outputs", "inputs"), [(960, 576), (64, 1536), (50, 33), (7, 3), (1, 1), (129, 257)])
@pytest.mark.parametrize("biased", [True, False])
def test_linear(
    backend: Backend, device: torch.device, dtype: torch.dtype, outputs: int, inputs: int, biased: bool
) -> None:
    weight = normal(outputs, inputs, dtype=dtype) / inputs**0.5
    bias = normal(outputs, dtype=dtype, seed=1) if biased else None
    apply = backend.ops.linear(weight.to(device), None if bias is None else bias.to(device))
    for rows in (1, 5, 6, 17, 70):
        x = normal(rows, inputs, dtype=dtype, seed=rows)
        got = apply(x.to(device))
        assert got.dtype == dtype
        close(
            got, torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double()), dtype
        )


@dtypes
def test_linear_of_a_view(backend: Backend, device: torch.device, dtype: torch.dtype) -> None:
    weight, x = normal(24, 40, dtype=dtype) / 6, normal(6, 80, dtype=dtype, seed=1)
    got = backend.ops.linear(weight.to(device), None)(x.to(device)[::2, 40:])
    close(got, x[::2, 40:].double() @ weight.double().T, dtype)


@dtypes
def test_embedding(backend: Backend, device: torch.device, dtype: torch.dtype) -> None:
    weight, ids = normal(50, 24, dtype=dtype), torch.tensor([0, 49, 7, 7])
    assert torch.equal(backend.ops.embedding(weight.to(device), ids.to(device)).cpu(), weight[ids])


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@dtypes
@pytest.mark.parametrize("size", [576, 64, 33, 8, 3])
def test_rms_norm(backend: Backend, device: torch.device, dtype: torch.dtype, size: int) -> None:
    weight = normal(size, dtype=dtype)
    for rows in (1, 3, 17):
        x = normal(rows, size, dtype=dtype, seed=rows) * 3
        close(backend.ops.rms_norm(x.to(device), weight.to(device), 1e-5), rms_norm(x, weight, 1e-5), dtype)


@dtypes
def test_rms_norm_per_head_of_a_packed_projection(backend: Backend, device: torch.device, dtype: torch.dtype) -> None:
    packed, weight = normal(5, 12, 64, dtype=dtype), normal(64, dtype=dtype, seed=1)
    got = backend.ops.rms_norm(packed.to(device)[:, 4:8], weight.to(device), 1e-6)
    close(got, rms_norm(packed[:, 4:8], weight, 1e-6), dtype)


@dtypes
@pytest.mark.parametrize("size", [576, 33])
def test_add_rms_norm(backend: Backend, device: torch.device, dtype: torch.dtype, size: int) -> None:
    x, residual = (normal(7, size, dtype=dtype, seed=s) for s in (0, 1))
    weight = normal(size, dtype=dtype, seed=2)
    total = x + residual  # before the call: it may overwrite the residual
    got, new_residual = backend.ops.add_rms_norm(x.to(device), residual.to(device), weight.to(device), 1e-5)
    assert torch.equal(new_residual.cpu(), total)
    close(got, rms_norm(total, weight, 1e-5), dtype)


@dtypes
@pytest.mark.parametrize("size", [1536, 16, 13, 1])
def test_silu_and_mul(backend: Backend, device: torch.device, dtype: torch.dtype, size: int) -> None:
    x = normal(5, 2 * size, dtype=dtype) * 4
    gate, up = x.double().chunk(2, -1)
    close(backend.ops.silu_and_mul(x.to(device)), gate / (1 + (-gate).exp()) * up, dtype)


def test_silu_of_extreme_gates(backend: Backend, device: torch.device) -> None:
    gates = torch.tensor([[-1e30, -1e4, -88.5, -20.0, 0.0, 20.0, 88.5, 1e4, 1e30]])
    got = backend.ops.silu_and_mul(torch.cat((gates, torch.ones_like(gates)), -1).to(device)).cpu()
    torch.testing.assert_close(got, torch.nn.functional.silu(gates), rtol=1e-5, atol=1e-30)


@dtypes
@pytest.mark.parametrize(("dim", "rotary_dim"), [(64, 64), (128, 128), (96, 48), (20, 12), (8, 8)])
def test_rotary(backend: Backend, device: torch.device, dtype: torch.dtype, dim: int, rotary_dim: int) -> None:
    packed = normal(6, 8, dim, dtype=dtype)
    angles = torch.rand(40, rotary_dim // 2, generator=torch.Generator().manual_seed(1)) * 6
    positions = torch.tensor([0, 1, 39, 5, 5, 17])

    def rotated(x: Tensor) -> Tensor:
        turn = torch.polar(torch.ones_like(angles), angles).to(torch.complex128)[positions].unsqueeze(1)
        half = rotary_dim // 2
        pairs = torch.complex(x[..., :half].double(), x[..., half:rotary_dim].double()) * turn
        return torch.cat((pairs.real, pairs.imag, x[..., rotary_dim:].double()), -1)

    table = torch.cat((angles.cos(), angles.sin()), -1)
    on_device = packed.to(device, copy=True)
    q, k = backend.ops.rotary(on_device[:, :5], on_device[:, 5:7], positions.to(device), table.to(device))
    close(q, rotated(packed[:, :5]), dtype)
    close(k, rotated(packed[:, 5:7]), dtype)
    assert torch.equal(on_device[:, 7].cpu(), packed[:, 7])  # the values beside them are untouched


@dtypes
def test_operators_do_not_see_neighbours(backend: Backend, device: torch.device, dtype: torch.dtype) -> None:
    """Row invariance: a row's bits are the same in any company."""
    if not backend.capabilities.row_invariant:
        pytest.skip(f"{backend.name} does not promise row invariance")
    ops = backend.ops
    big, small = (ops.linear((normal(n, k, dtype=dtype) / k**0.5).to(device), None) for n, k in ((700, 576), (37, 51)))
    x, y = normal(64, 576, dtype=dtype).to(device), normal(64, 51, dtype=dtype).to(device)
    weight = normal(576, dtype=dtype).to(device)
    functions = {
        "linear": (big, x),
        "odd linear": (small, y),
        "norm": (lambda part: ops.rms_norm(part, weight, 1e-5), x),
        "add and norm": (lambda part: ops.add_rms_norm(part, part.clone(), weight, 1e-5)[0], x),
        "activation": (ops.silu_and_mul, x),
    }
    for name, (function, rows) in functions.items():
        whole = function(rows)
        for count in ROWS:
            assert torch.equal(function(rows[:count]), whole[:count]), (name, count)
            assert torch.equal(function(rows[64 - count :]), whole[64 - count :]), (name, count)


@pytest.mark.parametrize("vocab", [1, 7, 512, 1000, 4099, 49152])
def test_top_tokens(backend: Backend, device: torch.device, vocab: int) -> None:
    """The first of equals; a NaN before all; minus infinity everywhere is the first token."""
    if not isinstance(backend.ops, ChoosingOps):
        pytest.skip(f"{backend.name} has no arg-max of its own")
    generator = torch.Generator().manual_seed(vocab)
    logits = (torch.randn(9, vocab, generator=generator) * 3).round()
    logits[5] = float("-inf")
    logits[6] = -logits[6].abs() - 1e30
    token, value = backend.ops.top_tokens(logits.to(device))
    assert token.tolist() == [row.index(max(row)) for row in logits.tolist()]
    assert torch.equal(value.cpu(), logits.amax(-1))
    logits[3, vocab // 2] = float("nan")
    token, value = backend.ops.top_tokens(logits.to(device))
    assert not value[3].isfinite()
    assert 0 <= int(token[3]) < vocab
    assert torch.equal(value.cpu()[[0, 1, 2, 8]], logits.amax(-1)[[0, 1, 2, 8]])
