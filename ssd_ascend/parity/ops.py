"""The operators of a device on fixed inputs: what `recording` stores of each, and what `comparing` holds them to.

Attention is asked as an engine asks it: paged keys behind scattered blocks, prefill, chunk, decode and verify rows in
one ragged batch, lengths around the edges at which kernels change their ways (128, 512, 2048).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch

from ssd_ascend.backends.base import AttentionSpec, Backend
from ssd_ascend.core.attention import AttentionMetadata
from ssd_ascend.parity.numbers import integers, normal

Tensors = dict[str, torch.Tensor]
OPERATOR = "op "
"""How the sections of this file begin."""
_SAMPLED = 4096
"""Numbers kept of an output: evenly spread, so that a golden run stays small."""


class Bench(NamedTuple):
    """Where operators run. dtype: of weights; activations: of everything else."""

    backend: Backend
    device: torch.device
    dtype: torch.dtype
    activations: torch.dtype
    block_size: int

    def put(self, tensor: torch.Tensor, *, weight: bool = False) -> torch.Tensor:
        """A tensor of the host on the device, in the dtype it has there."""
        return tensor.to(self.dtype if weight else self.activations).to(self.device)


class Rows(NamedTuple):
    """Attention rows of (queries, keys in all), for heads of one shape."""

    name: str
    heads: int
    kv_heads: int
    width: int
    rows: tuple[tuple[int, int], ...]


ATTENTION = (
    Rows("prefill", 4, 2, 64, ((37, 37), (1, 1), (130, 130))),
    Rows("chunk", 4, 2, 64, ((20, 150), (64, 511), (3, 129))),
    Rows("decode", 8, 2, 128, ((1, 1), (1, 127), (1, 128), (1, 129), (1, 512), (1, 513), (1, 2049))),
    Rows("verify", 8, 2, 128, ((5, 132), (2, 513), (1, 40), (5, 2050))),
    Rows("verify 16", 9, 3, 64, ((16, 140), (16, 16), (7, 600))),
    Rows("width 96", 4, 4, 96, ((1, 300), (5, 260))),
    Rows("mixed", 4, 1, 64, ((1, 200), (5, 131), (33, 33), (40, 170))),
)


def cases() -> Iterator[tuple[str, Callable[[Bench], Tensors]]]:
    """Every operator: its name, and what to run for its outputs, thinned out, on the host."""
    runs = _SMALL | {f"attention {case.name}": partial(_attention, case=case) for case in ATTENTION}
    for name, run in runs.items():
        yield name, partial(_thinned, run)


def _thinned(run: Callable[[Bench], Tensors], bench: Bench) -> Tensors:
    return {key: thin(tensor) for key, tensor in run(bench).items()}


def thin(tensor: torch.Tensor) -> torch.Tensor:
    """At most `_SAMPLED` numbers of a tensor, on the host."""
    flat = tensor.reshape(-1)
    step = max(1, flat.numel() // _SAMPLED)
    return flat[::step][:_SAMPLED].cpu().clone()


def _linear(b: Bench) -> Tensors:
    apply = b.backend.ops.linear(b.put(normal("w", 192, 320, scale=0.06), weight=True), None)
    biased = b.backend.ops.linear(
        b.put(normal("w2", 33, 320, scale=0.06), weight=True), b.put(normal("bias", 33), weight=True)
    )
    x = b.put(normal("x", 17, 320))
    return {"y": apply(x), "one row": apply(x[:1]), "biased": biased(x)}


def _vocab_head(b: Bench) -> Tensors:
    return {
        "logits": b.backend.ops.vocab_head(b.put(normal("v", 1000, 320, scale=0.06), weight=True))(
            b.put(normal("xv", 6, 320))
        )
    }


def _embedding(b: Bench) -> Tensors:
    ids = integers("ids", 40, low=0, high=500).to(b.device)
    return {"rows": b.backend.ops.embedding(b.put(normal("e", 500, 96), weight=True), ids)}


def _rms_norm(b: Bench) -> Tensors:
    x, weight = b.put(normal("xn", 11, 320)), b.put(normal("wn", 320, scale=0.2, mean=1.0))
    per_head = b.put(normal("heads", 7, 4, 64))
    return {
        "y": b.backend.ops.rms_norm(x, weight, 1e-5),
        "per head": b.backend.ops.rms_norm(per_head, b.put(normal("wh", 64, scale=0.2, mean=1.0)), 1e-6),
    }


def _add_rms_norm(b: Bench) -> Tensors:
    x, residual, weight = b.put(normal("xa", 11, 320)), b.put(normal("ra", 11, 320)), b.put(normal("wa", 320))
    normed, total = b.backend.ops.add_rms_norm(x, residual, weight, 1e-5)
    return {"normed": normed, "sum": total}


def _silu_and_mul(b: Bench) -> Tensors:
    return {"y": b.backend.ops.silu_and_mul(b.put(normal("gate", 9, 2 * 384, scale=2.0)))}


def _rotary(b: Bench) -> Tensors:
    found: Tensors = {}
    for width in (64, 128):
        angles = torch.outer(torch.arange(2048.0), 10000.0 ** (-torch.arange(0, width, 2).double() / width).float())
        table = torch.cat((angles.cos(), angles.sin()), dim=-1).to(b.device)
        q, k = b.put(normal("rq", 12, 4, width)), b.put(normal("rk", 12, 2, width))
        positions = integers("positions", 12, low=0, high=2048).to(b.device)
        found[f"q {width}"], found[f"k {width}"] = b.backend.ops.rotary(q, k, positions, table)
    return found


_SMALL: dict[str, Callable[[Bench], Tensors]] = {
    "embedding": _embedding,
    "linear": _linear,
    "vocab head": _vocab_head,
    "rms norm": _rms_norm,
    "add rms norm": _add_rms_norm,
    "silu and mul": _silu_and_mul,
    "rotary": _rotary,
}


def _attention(b: Bench, case: Rows) -> Tensors:
    """One ragged batch: the attended values, and what the cache holds of the last block afterwards."""
    spec = AttentionSpec(1, case.heads, case.kv_heads, case.width, b.block_size, b.activations, case.width**-0.5)
    attention = b.backend.attention(spec, b.device)
    size = b.block_size
    counts = [-(-kv_len // size) for _, kv_len in case.rows]
    table = torch.zeros(len(case.rows), max(counts), dtype=torch.int32)
    last = sum(counts)
    for row, count in enumerate(counts):  # from the end of the cache, so that no row lies in order
        table[row, :count] = torch.arange(last, last - count, -1)
        last -= count
    tokens = sum(n for n, _ in case.rows)
    kv = torch.zeros(attention.kv_shape(sum(counts) + 1), dtype=b.activations, device=b.device)
    flat = kv.view(2, -1, case.kv_heads, case.width)
    slots: list[int] = []
    for row, (n, kv_len) in enumerate(case.rows):
        places = [int(table[row, p // size]) * size + p % size for p in range(kv_len)]
        slots += places[kv_len - n :]
        if before := places[: kv_len - n]:
            index = torch.tensor(before, device=b.device)
            for side, what in enumerate("kv"):
                flat[side, index] = b.put(normal(f"{case.name} {row} {what}", len(before), case.kv_heads, case.width))
    lengths = [kv_len for _, kv_len in case.rows]
    queries = [n for n, _ in case.rows]
    meta = AttentionMetadata(
        query_lens_host=queries,
        kv_lens_host=lengths,
        query_start=torch.tensor([0, *queries]).cumsum(0).int().to(b.device),
        kv_lens=torch.tensor(lengths, dtype=torch.int32, device=b.device),
        block_table=table.to(b.device),
        slot_mapping=torch.tensor(slots, dtype=torch.int64, device=b.device),
    )
    attention.plan(meta)
    q, k, v = (
        b.put(normal(f"{case.name} {what}", tokens, heads, case.width))
        for what, heads in (("q", case.heads), ("k new", case.kv_heads), ("v new", case.kv_heads))
    )
    out = attention.forward(q, k, v, kv, meta, 0)
    return {"out": out, "stored": flat[:, torch.tensor(slots, device=b.device)]}
