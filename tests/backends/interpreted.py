"""The GPU backend's kernels in Triton's interpreter, on the host: `python -m tests.backends.interpreted CASE`.

A process of its own for each case (`test_cuda_kernels.py`): Triton decides at import whether it interprets. What the
interpreter cannot show is bits: its products are the host's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
import triton
import triton.language as tl

from ssd_ascend.backends.base import AttentionSpec
from ssd_ascend.backends.cpu.ops import PlainOps
from ssd_ascend.backends.cuda.attention import PagedAttention
from ssd_ascend.backends.cuda.kernels import advance, choice, linear, small
from tests.backends.conformance import close, expected, make_case, run_case, spec_of, with_tree
from tests.backends.test_advance import check_all

CANNOT = 3
"""Exit status where this interpreter does not run what the kernels are made of."""
Rows = tuple[tuple[int, int], ...]
ROWS = ((1, 1), (1, 100), (7, 7), (6, 64), (17, 65), (1, 300), (6, 200), (70, 90))
"""(queries, keys): decode and verify rows at block and tile edges, and one that is prefilled."""
MASKED = ((6, 70), (1, 20), (17, 17), (5, 300))


class Host:
    """As much of a backend as `run_case` asks for. processors: how many rows keep the device busy."""

    def __init__(self, processors: int) -> None:
        self._processors = processors

    def device(self, index: int) -> torch.device:
        return torch.device("cpu")

    def attention(self, spec: AttentionSpec, device: torch.device) -> PagedAttention:
        return PagedAttention(spec, device, processors=self._processors, overlap=False)


def attention(processors: int, dtype: torch.dtype, rows: Rows = ROWS, masked_rows: Rows = MASKED) -> None:
    """One processor: a program goes over all tiles of a row; a thousand: a program a tile."""
    host, spec = Host(processors), spec_of(6, 2, 96, 64, dtype)
    case, masked = make_case(spec, rows), with_tree(make_case(spec, masked_rows))
    for one in (case, masked):
        close(run_case(host, one), expected(one), dtype)  # type: ignore[arg-type]


def matrices() -> None:
    """Every tile, through pointers and through descriptors, over edges in all three directions."""
    generator = torch.Generator().manual_seed(0)
    for bulk in (False, True):
        for rows in (1, 17, 33, 65, 129):
            x = torch.randn(rows, 72, generator=generator).half()
            weight = torch.randn(80, 72, generator=generator).half()
            bias = torch.randn(80, generator=generator).half()
            got = linear.linear(x, weight, bias, overlap=False, bulk=bulk)
            close(got, x.double() @ weight.double().T + bias.double(), torch.bfloat16)
            gated = linear.linear(x, weight, None, overlap=False, bulk=bulk, gated=True)
            gate, up = (x.double() @ weight.double().T).unflatten(1, (-1, 2)).unbind(-1)
            close(gated, torch.nn.functional.silu(gate) * up, torch.bfloat16)


def small_ones() -> None:
    """Norms, activation, rotation and the arg-max against the CPU's operators."""
    ops = PlainOps()
    x, residual, weight = torch.randn(5, 96), torch.randn(5, 96), torch.randn(96)
    normed, total = ops.add_rms_norm(x, residual.clone(), weight, 1e-5)
    close(small.rms_norm(x, residual, weight, 1e-5, overlap=False), normed, torch.float32)
    close(residual, total, torch.float32)
    close(small.silu_and_mul(x, overlap=False), ops.silu_and_mul(x), torch.float32)
    q, k, places = torch.randn(5, 4, 24), torch.randn(5, 2, 24), torch.arange(5) + 3
    cos_sin = torch.randn(16, 16)
    turned = ops.rotary(q.clone(), k.clone(), places, cos_sin)
    small.rotary(q, k, places, cos_sin, overlap=False)
    for got, wanted in zip((q, k), turned, strict=True):
        close(got, wanted, torch.float32)
    turned_and_stored()
    logits = torch.randn(3, 5000)
    logits[1, 4500] = logits[1, 70] = 9.0
    token, value = choice.top_tokens(logits, overlap=False)
    assert token.tolist() == [int(logits[0].argmax()), 70, int(logits[2].argmax())], "the first of equals"
    assert value.tolist() == logits.max(dim=1).values.tolist()


def turned_and_stored() -> None:
    """Few tokens, a head a program, and many, some heads together; heads that turn whole, and in part."""
    ops = PlainOps()
    for tokens, heads, kv_heads, width, half in ((1, 8, 8, 32, 16), (17, 16, 8, 32, 16), (17, 6, 3, 24, 8)):
        q, k, v = (torch.randn(tokens, count, width) for count in (heads, kv_heads, kv_heads))
        places, slots = torch.arange(tokens) + 3, torch.arange(tokens).flip(0)
        slots[tokens // 2] = -1 if tokens > 1 else 2
        cos_sin = torch.randn(32, 2 * half)
        turned_q, turned_k = ops.rotary(q.clone(), k.clone(), places, cos_sin)
        kv = torch.zeros(2, 5, 4, kv_heads, width)
        small.rotate_and_store(q, k, v, places, cos_sin, kv, slots, overlap=False)
        close(q, turned_q, torch.float32)
        wanted = torch.zeros_like(kv).view(2, 20, kv_heads, width)
        for token, slot in enumerate(slots.tolist()):
            if slot >= 0:
                wanted[0, slot], wanted[1, slot] = turned_k[token], v[token]
        close(kv.view_as(wanted), wanted, torch.float32)


def next_round() -> None:
    """Numbers of the next round from a verdict."""
    check_all(lambda to: advance.advance(to, overlap=False), torch.device("cpu"))


CASES: dict[str, Callable[[], None]] = {
    "attention-together": lambda: attention(1, torch.float16),
    "attention-by-tile": lambda: attention(1000, torch.float16, ((1, 150), (3, 3)), ((2, 140),)),
    "attention-float32": lambda: attention(1, torch.float32),
    "matrices": matrices,
    "small": small_ones,
    "next-round": next_round,
}


@triton.jit
def _probe(x: tl.tensor, count: tl.tensor, lanes: tl.constexpr) -> None:
    lane = tl.arange(0, lanes)
    for step in range(0, tl.load(count)):
        tl.store(x + lane, lane + step, mask=(lane < lanes) & (tl.load(count) > 0))


def works() -> bool:
    """Whether loops to a number on the device, and masks of vectors and numbers, are run (not so in some versions)."""
    x = torch.zeros(4, dtype=torch.int32)
    try:
        _probe[(1,)](x, torch.tensor([2]), lanes=4)
    except Exception:  # noqa: BLE001  whatever it is, it is the interpreter's
        return False
    return x.tolist() == [1, 2, 3, 4]


if __name__ == "__main__":
    if not works():
        sys.exit(CANNOT)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    CASES[sys.argv[1]]()
