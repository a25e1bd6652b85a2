"""Single calls of fused operators, each against float32 on the host: forms we rely on, and two that are reported to be
silently wrong. For `doctor --probe`.

`run` is the whole of a child process: a call that breaks the device breaks nothing else, and without the task queue an
error is raised where it is made. Each answer is written as it is known.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import torch_npu

from ssd_ascend.errors import first_line

_BLOCK = 128
_HEADS, _KV_HEADS = 8, 2
_TOLERANCE = 2e-2


class Form(NamedTuple):
    """A call that gives (what came out, what should have). relied_on: we make such calls; the others we avoid."""

    ask: Callable[[torch.device], tuple[torch.Tensor, torch.Tensor]]
    relied_on: bool
    remedy: str


def _normal(device: torch.device, *shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16).to(device)


def _reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool) -> torch.Tensor:
    """q [n, Hq, D], k and v [L, Hkv, D] -> float32 [n, Hq, D], on the host."""
    wide = [x.float().cpu().transpose(0, 1) for x in (q, k, v)]
    group = wide[0].shape[0] // wide[1].shape[0]
    keys, values = (x.repeat_interleave(group, 0) for x in wide[1:])
    n, length = q.shape[0], k.shape[0]
    seen = torch.ones(n, length).tril(length - n).bool() if causal else None
    return F.scaled_dot_product_attention(wide[0], keys, values, attn_mask=seen).transpose(0, 1)


def _mask(device: torch.device) -> torch.Tensor:
    return torch.ones((2048, 2048), dtype=torch.int8, device=device).triu_(1)


def _paged(
    device: torch.device, width: int, rows: Sequence[tuple[int, int]], kv_heads: int = _KV_HEADS
) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed tokens over paged keys, causal: the one form that serves."""
    counts = [-(-length // _BLOCK) for _, length in rows]
    cache = [_normal(device, sum(counts), _BLOCK, kv_heads * width, seed=i) for i in (1, 2)]
    table = torch.zeros(len(rows), max(counts), dtype=torch.int32)
    parts, first, start = [], 0, 0
    q = _normal(device, sum(n for n, _ in rows), _HEADS, width, seed=3)
    ends: list[int] = []
    for row, ((n, length), count) in enumerate(zip(rows, counts, strict=True)):
        table[row, :count] = torch.arange(first, first + count)
        k, v = (x[first : first + count].reshape(-1, kv_heads, width)[:length] for x in cache)
        if n:
            parts.append(_reference(q[start : start + n], k, v, causal=True))
        first, start = first + count, start + n
        ends.append(start)
    out, _ = torch_npu.npu_fused_infer_attention_score(
        q, *cache, atten_mask=_mask(device), block_table=table.to(device), input_layout="TND", block_size=_BLOCK,
        actual_seq_lengths=ends, actual_seq_lengths_kv=[length for _, length in rows], num_heads=_HEADS,
        num_key_value_heads=kv_heads, scale=1 / math.sqrt(width), sparse_mode=3,
    )  # fmt: skip
    return out, torch.cat(parts)


def _dense_without_mask(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """vllm-ascend issue 13699: packed, dense, no mask; reported to return a plain average."""
    q = _normal(device, 40, _HEADS, 128, seed=1)
    k, v = (_normal(device, 40, _KV_HEADS, 128, seed=i) for i in (2, 3))
    out, _ = torch_npu.npu_fused_infer_attention_score(
        q, k, v, input_layout="TND", actual_seq_lengths=[40], actual_seq_lengths_kv=[40], num_heads=_HEADS,
        num_key_value_heads=_KV_HEADS, scale=128**-0.5, sparse_mode=0,
    )  # fmt: skip
    return out, _reference(q, k, v, causal=False)


def _masked_decode(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """vllm-ascend issue 15503: one query, paged, a full mask; reported to ignore the mask beyond 512 keys."""
    length, visible = 1024, 300
    q = _normal(device, 1, _HEADS, 128, seed=1)
    cache = [_normal(device, length // _BLOCK, _BLOCK, _KV_HEADS * 128, seed=i) for i in (2, 3)]
    mask = (torch.arange(length) >= visible).view(1, 1, 1, length).to(device)
    out, _ = torch_npu.npu_fused_infer_attention_score(
        q.view(1, _HEADS, 1, 128), *cache, atten_mask=mask, input_layout="BNSD", block_size=_BLOCK,
        block_table=torch.arange(length // _BLOCK, dtype=torch.int32)[None].to(device), actual_seq_lengths_kv=[length],
        num_heads=_HEADS, num_key_value_heads=_KV_HEADS, scale=128**-0.5, sparse_mode=0,
    )  # fmt: skip
    k, v = (x.reshape(-1, _KV_HEADS, 128)[:visible] for x in cache)
    return out.view(1, _HEADS, 128), _reference(q, k, v, causal=False)


def _wide_product(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """What the vocabulary head is made of."""
    a, b = _normal(device, 5, 256, seed=1), _normal(device, 512, 256, seed=2)
    return torch.mm(a, b.t(), out_dtype=torch.float32), a.float().cpu() @ b.float().cpu().t()


def _padding_slots(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens without a place, as padding of captured steps has them."""
    cache = torch.zeros(2, _BLOCK, 1, 16, dtype=torch.bfloat16, device=device)
    x = _normal(device, 4, 1, 16, seed=1)
    slots = torch.tensor([130, -1, 3, -1], dtype=torch.int64, device=device)
    torch_npu.npu_scatter_pa_kv_cache(x, x, cache, cache.clone(), slots, cache_mode="Norm")
    expected = torch.zeros(2 * _BLOCK, 1, 16)
    expected[[130, 3]] = x.float().cpu()[[0, 2]]
    return cache.view(-1, 1, 16), expected


_NARROW = "serve models whose heads are 128 wide: older documents allow only those in the packed layout"
_GRAPHS = "serve with --no-graphs: only captured steps do this"
_AVOIDED = "nothing: no step of ours makes this call"
FORMS: dict[str, Form] = {
    "heads of width 64, packed": Form(lambda d: _paged(d, 64, [(5, 200), (1, 513)]), True, _NARROW),
    "heads of width 96, packed": Form(lambda d: _paged(d, 96, [(5, 200), (1, 513)]), True, _NARROW),
    "heads of width 128, packed": Form(
        lambda d: _paged(d, 128, [(5, 200), (1, 2500)]), True, "do not serve on this device"
    ),
    "sixteen queries a row": Form(lambda d: _paged(d, 128, [(16, 700), (16, 16)]), True, "lower --lookahead"),
    "a long prompt in the packed form": Form(
        lambda d: _paged(d, 128, [(300, 300)]), True, "lower --max-batched-tokens"
    ),
    "rows without queries": Form(lambda d: _paged(d, 128, [(3, 50), (0, 7), (2, 90)]), False, _AVOIDED),
    "padding slots in the cache write": Form(_padding_slots, True, _GRAPHS),
    "bfloat16 products with float32 results": Form(
        _wide_product, True, "logits are rounded instead: more ties, nothing else"
    ),
    "dense keys without a mask (issue 13699)": Form(_dense_without_mask, False, _AVOIDED),
    "one query behind a full mask (issue 15503)": Form(_masked_decode, False, _AVOIDED),
}


def run(index: int, names: Sequence[str], file: str) -> None:
    """Ask these on the index-th device; one JSON line (name, kind of outcome, detail) each as it is known."""
    device = torch.device("npu", index)
    torch_npu.npu.set_device(device)
    with Path(file).open("a", encoding="utf-8") as out:
        for name in names:
            out.write(json.dumps({"begins": name}) + "\n")
            out.flush()
            kind, detail = _outcome(FORMS[name], device)
            out.write(json.dumps({"name": name, "kind": kind, "detail": detail}) + "\n")
            out.flush()


def _outcome(form: Form, device: torch.device) -> tuple[str, str]:
    try:
        found, expected = form.ask(device)
        actual = found.float().cpu()
    except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
        text = next((line for line in str(error).splitlines() if "emulated NPU" in line), first_line(error))
        return "refused", text.strip()
    error_: Any = (actual - expected).abs().max() / expected.abs().max()
    return ("right" if float(error_) <= _TOLERANCE else "wrong"), f"error {float(error_):.2g}"
