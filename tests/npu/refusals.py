"""Run by `test_emulator_refusals`: each call is one that hardware or CANN refuses; prints what became of it as JSON.

A process of its own without the task queue: there an error is raised where it is made and breaks nothing after it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from ssd_ascend.backends.registry import load_backend

BACKEND = load_backend("npu")
DEVICE = "npu"  # the current one

import torch  # noqa: E402
import torch_npu  # noqa: E402


def attention(**changes: Any) -> Any:
    """A legal call of fused attention, 2 rows of 3 and 4 queries, but for what `changes` says."""
    dtype = changes.pop("dtype", torch.float16)
    block = changes.pop("block", 128)
    width = changes.pop("width", 64)
    q = torch.zeros(7, 4, width, dtype=dtype, device=DEVICE)
    kv = torch.zeros(6, block, 2 * width, dtype=dtype, device=DEVICE)
    legal = {
        "atten_mask": torch.ones(2048, 2048, dtype=torch.int8, device=DEVICE).triu_(1),
        "block_table": torch.zeros(2, 3, dtype=torch.int32, device=DEVICE),
        "input_layout": "TND",
        "block_size": block,
        "actual_seq_lengths": [3, 7],
        "actual_seq_lengths_kv": [200, 4],
        "num_heads": 4,
        "num_key_value_heads": 2,
        "scale": 0.125,
        "sparse_mode": 3,
    }
    out = torch_npu.npu_fused_infer_attention_score(changes.pop("q", q), kv, kv, **{**legal, **changes})
    torch.npu.synchronize()
    return out


def store(**changes: Any) -> None:
    """A legal cache write of 3 tokens, but for what `changes` says."""
    dtype = changes.pop("dtype", torch.float16)
    key = changes.pop("key", torch.zeros(3, 2, 16, dtype=dtype, device=DEVICE))
    cache = torch.zeros(2, 128, 2, 16, dtype=torch.float16, device=DEVICE)
    slots = torch.tensor(changes.pop("slots", [0, 130, -1]), device=DEVICE)
    mode = {"cache_mode": "Norm", **changes}
    torch_npu.npu_scatter_pa_kv_cache(key, key, cache, cache.clone(), slots, **{k: v for k, v in mode.items() if v})
    torch.npu.synchronize()


def captured(fn: Callable[[], None]) -> None:
    """Run `fn` inside a capture."""
    with torch.npu.graph(torch.npu.NPUGraph(), stream=torch.npu.Stream()):
        fn()


def many_graphs(number: int) -> None:
    """Graphs of one node each, all alive at once."""
    buffer, stream, pool = torch.zeros(1, device=DEVICE), torch.npu.Stream(), torch.npu.graph_pool_handle()
    kept = [torch.npu.NPUGraph() for _ in range(number)]
    with torch.npu.stream(stream):
        for graph in kept:
            graph.capture_begin(pool=pool)
            buffer.add_(1)
            graph.capture_end()


def on(size: int = 4) -> torch.Tensor:
    return torch.ones(size, device=DEVICE)


CALLS: dict[str, Callable[[], Any]] = {
    "legal attention": attention,
    "legal store": store,
    "a synchronisation in a capture": lambda: captured(lambda: torch.npu.current_stream().synchronize()),
    "a pageable copy in a capture": lambda: captured(lambda: on().copy_(torch.zeros(4), non_blocking=True)),
    "reading a value in a capture": lambda: captured(lambda: print(on().sum().item())),
    "random numbers in a capture": lambda: captured(lambda: on().uniform_()),
    "more graphs than streams": lambda: many_graphs(2000),
    "attention in float32": lambda: attention(dtype=torch.float32),
    "a block size of 64": lambda: attention(block=64),
    "a head width of 24": lambda: attention(width=24),
    "a head width of 512": lambda: attention(width=512),
    "query lengths that are not cumulative": lambda: attention(actual_seq_lengths=[4, 3]),
    "query lengths that leave tokens over": lambda: attention(actual_seq_lengths=[3, 6]),
    "cumulative key lengths": lambda: attention(actual_seq_lengths_kv=[200, 400]),
    "lists of another batch": lambda: attention(actual_seq_lengths=[3, 5, 7], actual_seq_lengths_kv=[3, 3, 3]),
    "a block table of another batch": lambda: attention(
        block_table=torch.zeros(3, 3, dtype=torch.int32, device=DEVICE)
    ),
    "a block table of int64": lambda: attention(block_table=torch.zeros(2, 3, dtype=torch.int64, device=DEVICE)),
    "a block beyond the cache": lambda: attention(block_table=torch.full((2, 3), 6, dtype=torch.int32, device=DEVICE)),
    "no mask": lambda: attention(atten_mask=None),
    "a full mask": lambda: attention(atten_mask=torch.zeros(7, 384, dtype=torch.bool, device=DEVICE)),
    "a mask upside down": lambda: attention(atten_mask=torch.ones(2048, 2048, dtype=torch.int8, device=DEVICE).tril_()),
    "a mask of floats": lambda: attention(atten_mask=torch.zeros(2048, 2048, device=DEVICE)),
    "sparse mode 0 with a mask": lambda: attention(sparse_mode=0),
    "another layout": lambda: attention(input_layout="BSH"),
    "the default number of key-value heads": lambda: attention(num_key_value_heads=0),
    "rows as inner_precise would fix them": lambda: attention(inner_precise=2),
    "the default cache mode": lambda: store(cache_mode=None),
    "a slot beyond the cache": lambda: store(slots=[0, 256, 1]),
    "two tokens for one slot": lambda: store(slots=[5, 5, 1]),
    "a cache of another dtype": lambda: store(dtype=torch.bfloat16),
    "an operator that is not emulated": lambda: torch.nn.functional.gelu(on()),
    "an operator that NPUs do not have": lambda: torch.special.i0(on()),
    "a product of whole numbers": lambda: torch.mm(on().int()[None], on().int()[:, None]).cpu(),
}


FOUND_BY_THE_DEVICE = (
    "a block beyond the cache",
    "a mask upside down",
    "a slot beyond the cache",
    "two tokens for one slot",
    "a product of whole numbers",
)
"""Found when it runs, not when it is launched: as on hardware the device is broken afterwards, so each has its own."""


def main() -> None:
    """One line: what each call raised, or that it passed."""
    said = {}
    for name, call in CALLS.items():
        BACKEND.device(1 + FOUND_BY_THE_DEVICE.index(name) if name in FOUND_BY_THE_DEVICE else 0)
        try:
            call()
            said[name] = "passed"
        except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
            said[name] = str(error)
    print(json.dumps(said))


if __name__ == "__main__":
    main()
