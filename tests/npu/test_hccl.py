"""HCCL between processes on emulated devices, through torch.distributed: what ranks and models exchange."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ssd_ascend.backends.base import Backend
from ssd_ascend.backends.registry import load_backend

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.int64)


def collectives(rank: int, size: int, device: torch.device) -> None:
    """Every rank gets the same bits; a message may be larger than the ring it goes through."""
    for dtype in DTYPES:
        x = (torch.arange(6) + rank).to(dtype).to(device)
        dist.all_reduce(x)
        assert x.tolist() == [size * i + sum(range(size)) for i in range(6)]
    large = torch.full((600_000,), float(rank + 1), device=device)
    dist.all_reduce(large)
    assert (large == sum(range(1, size + 1))).all()
    most = torch.tensor([float(rank)], device=device)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    assert most.item() == size - 1
    y = torch.tensor([rank] * 3, device=device)
    dist.broadcast(y, 1)
    assert y.tolist() == [1] * 3
    gathered = torch.zeros(2 * size, device=device)
    dist.all_gather_into_tensor(gathered, torch.full((2,), float(rank), device=device))
    assert gathered.tolist() == [float(i // 2) for i in range(2 * size)]
    dist.barrier()


def messages(rank: int, size: int, device: torch.device) -> None:
    """Two models: bytes each way, in order, and both ways at once."""
    if rank == 0:
        for length in (4, 3_000_000, 1):
            dist.send(torch.arange(length, dtype=torch.int32).to(torch.uint8).to(device), 1)
    if rank == 1:
        for length in (4, 3_000_000, 1):
            got = torch.zeros(length, dtype=torch.uint8, device=device)
            dist.recv(got, 0)
            assert torch.equal(got.cpu(), torch.arange(length, dtype=torch.int32).to(torch.uint8))
    other = rank ^ 1
    got = torch.zeros(3, device=device)
    own = torch.full((3,), float(rank), device=device)
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, own, other), dist.P2POp(dist.irecv, got, other)]):
        work.wait()
    assert got.tolist() == [float(other)] * 3


def captured(rank: int, size: int, device: torch.device) -> None:
    """A collective inside a graph, replayed with other numbers."""
    x = torch.zeros(4, device=device)
    dist.all_reduce(x)  # the communicator is there before the capture
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph, stream=torch.npu.Stream()):
        y = x * 2
        dist.all_reduce(y)
        z = y + 1
    for start in (1.0, 5.0):
        x.fill_(start + rank)
        graph.replay()
        assert z.tolist() == [2 * (size * start + sum(range(size))) + 1] * 4


def rank_main(rank: int, size: int, store: str) -> None:
    """One process."""
    device = load_backend("npu").device(rank)
    dist.init_process_group("hccl", init_method=f"file://{store}", rank=rank, world_size=size)
    for part in (collectives, messages, captured):
        part(rank, size, device)
    torch.npu.synchronize()
    dist.destroy_process_group()


def test_two_ranks(backend: Backend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSD_NPU_EMULATOR", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    ranks = torch.multiprocessing.spawn(rank_main, (2, str(tmp_path / "store")), nprocs=2, join=False)
    pids = ranks.pids()
    while not ranks.join():
        pass
    # of these ranks: others may run beside us, or have been killed before
    assert [path for pid in pids for path in Path("/dev/shm").glob(f"ssd_hccl_{pid}_*")] == []
