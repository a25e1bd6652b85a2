"""Every emulated operator through the real torch_npu against torch on the CPU, views and casts among the arguments."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ssd_ascend.backends.base import Backend
from ssd_ascend.backends.npu import emulator

Case = Callable[["Inputs"], Tensor | tuple[Tensor, ...]]
SOURCES = Path(emulator.__file__).parent / "src" / "opapi"


class Inputs:
    """The same numbers on any device: a, b [3, 8] floats, a transposed view, whole numbers, flags, indices."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        g = torch.Generator().manual_seed(3)
        self.device, self.dtype = device, dtype
        self.a, self.b = (torch.randn(3, 8, generator=g).to(dtype).to(device) for _ in range(2))
        self.view = torch.randn(8, 3, generator=g).to(dtype).to(device).t()
        self.positive = self.a.abs() + 0.5
        self.row = self.b[:1]
        self.ints = torch.randint(1, 9, (3, 8), generator=g).to(device)
        self.flags = (torch.rand(3, 8, generator=g) < 0.5).to(device)
        self.more_flags = (torch.rand(3, 8, generator=g) < 0.5).to(device)
        self.ids = torch.tensor([2, 0]).to(device)
        self.places = torch.tensor([[1, 0, 7], [2, 2, 3], [0, 4, 5]]).to(device)

    def number(self, value: float) -> Tensor:
        """A tensor of no dimensions on the device."""
        return torch.tensor(value, dtype=self.dtype).to(self.device)


def inplace(name: str, *arguments: object) -> Case:
    """A method with an underscore, on a copy of `a`; strings name inputs."""

    def run(t: Inputs) -> Tensor:
        values = [getattr(t, x) if isinstance(x, str) else x for x in arguments]
        result: Tensor = getattr(t.a.clone(), name)(*values)
        return result

    return run


def assigned(t: Inputs) -> Tensor:
    x = t.a.clone()
    x[t.ids, t.ids] = t.b[0, :2]
    return x


NUMBER_BY_NUMBER: dict[str, Case] = {
    "add": lambda t: t.a + t.view,
    "add broadcast": lambda t: t.a + t.row,
    "add alpha": lambda t: torch.add(t.a, t.b, alpha=2),
    "add number": lambda t: t.a + 1.5,
    "number minus": lambda t: 2.0 - t.a,
    "add_": inplace("add_", "b"),
    "add_ number": inplace("add_", 2.0),
    "sub": lambda t: t.a - t.b,
    "sub number": lambda t: t.a - 0.5,
    "sub_": inplace("sub_", "view"),
    "sub_ number": inplace("sub_", 1.0),
    "mul": lambda t: t.a * t.view,
    "mul number": lambda t: t.a * 3,
    "mul_": inplace("mul_", "b"),
    "mul_ number": inplace("mul_", 0.5),
    "div": lambda t: t.a / t.positive,
    "div number": lambda t: t.a / 4,
    "div_": inplace("div_", "positive"),
    "div_ number": inplace("div_", 3.0),
    "floor divide": lambda t: (t.ints * 5) // t.ints.flip(0),
    "floor divide number": lambda t: t.ints // 3,
    "remainder": lambda t: (t.ints * 5) % t.ints.flip(0),
    "remainder number": lambda t: t.ints % 3,
    "abs": lambda t: t.a.abs(),
    "neg": lambda t: -t.view,
    "floor": lambda t: t.a.floor(),
    "ceil": lambda t: t.a.ceil(),
    "round": lambda t: t.a.round(),
    "trunc": lambda t: t.a.trunc(),
    "exp": lambda t: t.a.exp(),
    "exp_": inplace("exp_"),
    "log": lambda t: t.positive.log(),
    "log_": lambda t: t.positive.clone().log_(),
    "sqrt": lambda t: t.positive.sqrt(),
    "rsqrt": lambda t: t.positive.rsqrt(),
    "reciprocal": lambda t: t.positive.reciprocal(),
    "sin": lambda t: t.a.sin(),
    "cos": lambda t: t.a.cos(),
    "tanh": lambda t: t.a.tanh(),
    "sigmoid": lambda t: t.a.sigmoid(),
    "silu": lambda t: F.silu(t.a),
    "square": lambda t: t.a.square(),
    "pow_": inplace("pow_", 2),
    "maximum": lambda t: torch.maximum(t.a, t.b),
    "minimum": lambda t: torch.minimum(t.a, t.b),
    "clamp": lambda t: t.a.clamp(-0.5, 0.5),
    "clamp low": lambda t: t.a.clamp_min(0.0),
    "clamp high": lambda t: t.a.clamp_max(0.0),
    "clamp_ high": lambda t: t.a.clone().clamp_max_(0.1),
    "clamp of whole numbers": lambda t: t.ints.clamp(0, 4),
    "compare": lambda t: torch.stack([t.a == t.b, t.a != t.b, t.a < t.b, t.a <= t.b, t.a > t.b, t.a >= t.b]),
    "compare number": lambda t: torch.stack([t.a == 0, t.a != 0, t.a < 0, t.a <= 0, t.a > 0, t.a >= 0]),
    "logic": lambda t: torch.logical_xor(torch.logical_and(t.flags, t.a > 0), torch.logical_or(t.flags, t.a < -1)),
    "logic_": lambda t: t.flags.clone().logical_and_(t.more_flags).logical_or_(t.a > 1),
    "not": lambda t: torch.logical_not(t.a > 0),
    "bits": lambda t: (t.ints & (t.ints + 1)) | (t.ints ^ 5),
    "bits of two": lambda t: (t.ints | t.ints.flip(0)) ^ (t.ints & 3),
    "bits number": lambda t: t.ints | 1,
    "bit not": lambda t: ~t.flags,
    "finite": lambda t: torch.isfinite(t.a / (t.ints - 3).to(t.dtype)),
    "where": lambda t: torch.where(t.flags, t.a, t.view),
    "masked_fill_": inplace("masked_fill_", "flags", -7.0),
    "masked_fill_ tensor": lambda t: t.a.clone().masked_fill_(t.flags, t.number(3.0)),
    "cast": lambda t: t.a.to(torch.float32),
    "cast of whole numbers": lambda t: t.ints.to(torch.int32),
    "copy of a view": lambda t: t.view.contiguous(),
    "copy_ with cast": lambda t: torch.zeros_like(t.a, dtype=torch.float32).copy_(t.view),
    "fill": lambda t: torch.stack([torch.full_like(t.a, 3.5), torch.ones_like(t.a), torch.zeros_like(t.a)]),
    "ones": lambda t: torch.ones(3, 2, device=t.device),
    "sent and cast": lambda t: torch.arange(5).to(t.device, torch.float32, non_blocking=True),
    "fill tensor": lambda t: t.a.clone().fill_(t.number(2.0)),
    "arange": lambda t: torch.arange(3, 20, 4, device=t.device),
}
ALONG_A_DIMENSION: dict[str, Case] = {
    "sum": lambda t: t.view.sum(-1, keepdim=True),
    "sum of flags": lambda t: t.flags.sum(0),
    "sum of all": lambda t: t.ints.sum(),
    "mean": lambda t: t.a.mean(-1),
    "amax": lambda t: t.view.amax(-1, keepdim=True),
    "amin": lambda t: t.a.amin(0),
    "max of all": lambda t: t.a.max(),
    "min of all": lambda t: t.a.min(),
    "max": lambda t: tuple(t.view.max(-1)),
    "min": lambda t: tuple(t.a.min(0)),
    "argmax": lambda t: t.view.argmax(-1),
    "argmin": lambda t: t.a.argmin(-1),
    "any, all": lambda t: torch.stack([t.flags.any(-1), t.flags.all(-1)]),
    "any, all of all": lambda t: torch.stack([t.flags.any(), t.flags.all()]),
    "logsumexp": lambda t: t.a.float().logsumexp(-1),
    "softmax": lambda t: t.view.softmax(-1),
    "log_softmax": lambda t: t.a.log_softmax(-1),
    "cumsum": lambda t: t.a.float().cumsum(-1),
    "cumprod": lambda t: t.ints.cumprod(-1),
    "topk": lambda t: tuple(t.view.topk(2, -1)),
    "sort": lambda t: tuple(t.a.sort(-1, descending=True)),
}
THAT_MOVE: dict[str, Case] = {
    "cat": lambda t: torch.cat((t.a, t.view), -1),
    "stack": lambda t: torch.stack((t.a, t.b), 1),
    "repeat": lambda t: t.a.repeat(2, 1),
    "repeat_interleave": lambda t: t.a.repeat_interleave(2, 0),
    "flip": lambda t: t.a.flip(-1),
    "tril, triu": lambda t: t.a.tril() + t.a.triu(1) * 2,
    "triu_": lambda t: t.a.clone().triu_(1) + t.b.clone().tril_(-1),
    "pad": lambda t: F.pad(t.a, (1, 2), value=5.0),
    "pad rows of whole numbers": lambda t: F.pad(t.ints.int(), (0, 0, 0, 1)),
    "index": lambda t: t.a[t.ids],
    "index two": lambda t: t.a[t.ids, t.ids],
    "index behind": lambda t: t.a[:, t.ids],
    "index flags": lambda t: t.a[t.flags],
    "assign": assigned,
    "index_put accumulate": lambda t: t.a.clone().index_put_((t.ids, t.ids), t.b[0, :2], accumulate=True),
    "index_select": lambda t: t.view.index_select(0, t.ids),
    "index_add_": lambda t: t.a.clone().index_add_(0, t.ids, t.b[:2]),
    "index_copy_": lambda t: t.a.clone().index_copy_(0, t.ids, t.b[:2]),
    "index_copy_ of a view": lambda t: t.a.t().clone().t().index_copy_(1, t.ids, t.b[:, :2]),
    "index_fill_": lambda t: t.a.clone().index_fill_(1, t.ids, 9.0),
    "gather": lambda t: t.a.gather(1, t.places),
    "scatter": lambda t: t.a.scatter(1, t.places[:, :1], t.b[:, :1]),
    "scatter_": lambda t: t.a.clone().scatter_(1, t.places[:, :1], t.b[:, :1]),
    "scatter number": lambda t: t.a.scatter(1, t.places, 4.0),
    "scatter_ number": lambda t: t.a.clone().scatter_(1, t.places, 4.0),
    "scatter_add": lambda t: t.a.scatter_add(1, t.places, t.b[:, :3]),
    "embedding": lambda t: F.embedding(t.ids, t.a),
    "nonzero": lambda t: t.flags.nonzero(),
    "masked_select": lambda t: t.a.masked_select(t.flags),
    "mm": lambda t: torch.mm(t.a, t.b.t()),
    "matmul": lambda t: F.linear(t.a[None].repeat(2, 1, 1), t.b),
    "bmm": lambda t: torch.bmm(t.a[None], t.view.t()[None]),
    "linear with bias": lambda t: F.linear(t.a, t.b, t.a[0, :3]),
}
ALL = {**NUMBER_BY_NUMBER, **ALONG_A_DIMENSION, **THAT_MOVE}
ELSEWHERE = {
    "Equal": "torch.equal below",
    **dict.fromkeys(("InplaceUniform", "InplaceNormal", "InplaceRandom", "Multinomial"), "test_emulator_device.py"),
    "AddV3": "torch_npu takes it for a number plus a tensor on newer chips only",
    "Nonzero": "older chips; where NonzeroV2 exists it is taken",
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize("name", list(ALL))
def test_operator(backend: Backend, name: str, dtype: torch.dtype) -> None:
    on_npu, on_cpu = (ALL[name](Inputs(device, dtype)) for device in (backend.device(0), torch.device("cpu")))
    pairs = zip(on_npu, on_cpu, strict=True) if isinstance(on_npu, tuple) else [(on_npu, on_cpu)]
    for got, wanted in pairs:
        assert got.device.type == "npu"
        assert got.dtype == wanted.dtype
        tolerance = 0.0 if not wanted.dtype.is_floating_point else {2: 1e-2, 4: 1e-6}[wanted.dtype.itemsize]
        torch.testing.assert_close(got.cpu(), wanted, rtol=tolerance, atol=tolerance)


def test_equal(backend: Backend) -> None:
    x = torch.arange(4).to(backend.device(0))
    assert torch.equal(x, x.clone())
    assert not torch.equal(x, x + 1)


def test_every_emulated_operator_was_called(backend: Backend) -> None:
    """An operator nobody calls is an operator nobody checks; runs last in this file."""
    text = "".join(path.read_text() for path in SOURCES.glob("*.cpp") if path.name != "attention.cpp")
    named = set(re.findall(r"^ACLNN(?:_EXPORT)?\((\w+)[,)]", text, re.M))
    compared = re.findall(r"^COMPARISON\((\w+),", text, re.M)
    named |= {name + kind for name in compared for kind in ("Tensor", "Scalar")}
    fused = {"RmsNorm", "AddRmsNorm", "SwiGlu", "RotaryPositionEmbedding", "ScatterPaKvCache"}  # tests/backends
    unused = {name for name in named - fused - set(ELSEWHERE) if emulator.count(f"aclnn{name}") == 0}
    assert len(named) > 100
    assert unused == set()
