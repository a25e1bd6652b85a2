"""One of two ranks on two GPUs, started by `test_cuda_sums.py`: sums by shared memory, beside the library's.

`python -m tests.backends.two_ranks RANK STORE`; rank 0 prints what it found as one JSON object.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time

import torch
from torch import distributed

from ssd_ascend.backends.cuda.graphs import CudaGraphs
from ssd_ascend.backends.cuda.sums import SharedMemorySums
from ssd_ascend.distributed.collectives import GroupCollectives, join_group

_SIZES = (2, 34, 4096, 5120 * 7, 131072)
_REPLAYS = 300


def main() -> None:
    """Compare, then see the other rank die."""
    rank, device = int(sys.argv[1]), torch.device("cuda", int(sys.argv[1]))
    torch.cuda.set_device(device)
    group = join_group("nccl", distributed.FileStore(sys.argv[2], 2), rank, 2, device)
    world = distributed.group.WORLD
    assert world is not None
    sums = SharedMemorySums(world, device, overlap=torch.cuda.get_device_capability() >= (9, 0))
    draw = torch.Generator().manual_seed(10 + rank)
    found: dict[str, object] = {"different": _differences(sums, group, draw, device)}
    found["replays_differ"] = _replays_differ(sums, group, draw, device)
    group.barrier()
    torch.cuda.synchronize()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.5)
    lonely = torch.ones(32768, dtype=torch.bfloat16, device=device)
    began = time.monotonic()
    threading.Timer(1.0, sums.abort).start()
    sums.all_reduce(lonely)
    torch.cuda.synchronize()
    found |= {"woken_after_s": time.monotonic() - began, "is_nan": bool(lonely.isnan().all())}
    print(json.dumps(found), flush=True)
    os._exit(0)  # a group that lost a rank cannot be taken apart


def _differences(
    sums: SharedMemorySums, group: GroupCollectives, draw: torch.Generator, device: torch.device
) -> list[str]:
    """Kinds and sizes whose sums are not the library's, bit for bit."""
    different = []
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for size in _SIZES:
            x = torch.randn(size, generator=draw).to(dtype).to(device)
            if not sums.fits(x) or not torch.equal(sums.all_reduce(x.clone()), group.all_reduce(x.clone())):
                different.append(f"{size} x {dtype}")
    return different


def _replays_differ(
    sums: SharedMemorySums, group: GroupCollectives, draw: torch.Generator, device: torch.device
) -> bool:
    """Sums of several sizes in one graph, replayed: turns must stay in step."""
    xs = [torch.randn(size, generator=draw).to(torch.bfloat16).to(device) for size in (4096, 57344, 5120, 35840, 4096)]
    results = [x.clone() for x in xs]

    def all_of_them() -> None:
        for x, result in zip(xs, results, strict=True):
            sums.all_reduce(result.copy_(x))

    graph = CudaGraphs(device).capture(all_of_them)
    for _ in range(_REPLAYS):
        graph.replay()
    return not all(torch.equal(r, group.all_reduce(x.clone())) for x, r in zip(xs, results, strict=True))


if __name__ == "__main__":
    main()
