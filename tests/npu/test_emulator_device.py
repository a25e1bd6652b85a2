"""What the emulated device does beside computing: random numbers, scratch memory, both kinds of task queue, budgets."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ssd_ascend.backends.base import Backend, StoppingBackend
from ssd_ascend.backends.npu import emulator
from ssd_ascend.backends.registry import load_backend

ROOT = Path(__file__).resolve().parents[2]


def test_random_numbers_repeat_with_their_seed(backend: Backend) -> None:
    device = backend.device(0)

    def drawn() -> list[torch.Tensor]:
        return [
            torch.empty(4000, device=device).uniform_(2.0, 3.0).cpu(),
            torch.randn(4000, dtype=torch.bfloat16, device=device).float().cpu(),
            torch.randint(3, 9, (4000,), device=device).cpu(),
            torch.multinomial(torch.tensor([0.1, 0.6, 0.0, 0.3], device=device), 4000, replacement=True).cpu(),
            torch.empty(4000, device=device).exponential_().cpu(),
        ]

    torch.manual_seed(5)
    first, second = drawn(), drawn()
    torch.manual_seed(5)
    again = drawn()
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    uniform, normal, whole, picked, waits = first
    assert 2.0 <= float(uniform.min()) < 2.01 < 2.99 < float(uniform.max()) <= 3.0
    assert (abs(float(normal.mean())) < 0.1, 0.9 < float(normal.std()) < 1.1) == (True, True)
    assert whole.unique().tolist() == [3, 4, 5, 6, 7, 8]
    assert [round(float((picked == i).float().mean()), 1) for i in range(4)] == [0.1, 0.6, 0.0, 0.3]
    assert 0.9 < float(waits.mean()) < 1.1


def test_counts_are_those_of_count(backend: Backend) -> None:
    x = torch.ones(3, device=backend.device(0))
    before = emulator.counts()
    (x + x).tolist()
    after = emulator.counts()
    assert after["aclnnAdd"] == before.get("aclnnAdd", 0) + 1 == emulator.count("aclnnAdd")
    assert copies(after) > copies(before)


def test_a_pageable_copy_is_counted(backend: Backend) -> None:
    """torch_npu waits for it whatever `non_blocking` says, so none belongs into a step."""
    device = backend.device(0)
    x = torch.zeros(8, device=device)
    before = emulator.counts()
    x.copy_(torch.ones(8), non_blocking=True)
    middle = emulator.counts()
    x.copy_(torch.ones(8).pin_memory(), non_blocking=True)
    after = emulator.counts()
    assert waits(middle) > waits(before)
    assert waits(after) == waits(middle)


def copies(counts: dict[str, int]) -> int:
    return counts.get("copy", 0) + counts.get("synchronous copy", 0)


def waits(counts: dict[str, int]) -> int:
    """Copies that the host waits for."""
    return counts.get("pageable copy", 0) + counts.get("synchronous copy", 0)


ENGINE = """
import sys
from pathlib import Path
from ssd_ascend.backends.registry import load_backend
load_backend("npu")
from tests.engine.harness import greedy, prompts_of, run, speculation
pair = Path(sys.argv[1])
options = {"device": "npu", "dtype": "float16", "num_kv_blocks": 32, "max_num_seqs": 2}
for config in (None, speculation(pair, "ssd", "model")):
    print("tokens", run(pair, prompts_of([5, 140]), greedy(12), config, **options).tokens)
"""


def test_both_kinds_of_task_queue(backend: Backend, tmp_path: Path) -> None:
    """With torch_npu's queue (hardware's default) and without it: captured, replayed, updated, the same tokens."""
    from tests.engine.harness import write_pair

    pair = write_pair(tmp_path, "llama")
    said = []
    for queue in ("0", "1"):
        environment = {**os.environ, "SSD_NPU_EMULATOR": "1", "TASK_QUEUE_ENABLE": queue, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-c", ENGINE, str(pair)]
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False
        )
        said.append([line for line in done.stdout.splitlines() if line.startswith("tokens")])
        assert len(said[-1]) == 2, done.stderr[-2000:]
    assert said[0] == said[1]
    assert said[0][0] == said[0][1]


def test_a_device_that_waits_is_stopped_and_goes_on(backend: Backend) -> None:
    """As it is when a rank is lost: here a graph waits for an event that nobody records."""
    assert isinstance(backend, StoppingBackend)
    device = backend.device(2)
    try:
        stream, event, x = torch.npu.Stream(device), torch.npu.ExternalEvent(), torch.ones(4, device=device)
        graph = torch.npu.NPUGraph()
        with torch.npu.graph(graph, stream=stream):
            event.wait(torch.npu.current_stream())
            y = x + 1
        graph.replay()
        done = threading.Event()

        def stop() -> None:  # again and again: the first time may come before the wait
            while not done.wait(0.1):
                backend.stop(device)

        stopper = threading.Thread(target=stop)
        stopper.start()
        try:
            with pytest.raises(RuntimeError, match="FORCE STOP"):
                torch.npu.synchronize(device)
        finally:
            done.set()
            stopper.join()
        spoiled = emulator.count("graph destroyed while it ran")
        del graph, y
        assert emulator.count("graph destroyed while it ran") == spoiled
        assert (x + 2).tolist() == [3.0] * 4
    finally:
        backend.device(0)


GIVEN_UP = """
import os, sys
import torch
import torch.distributed as dist
from tests.npu.test_emulator_device import join
x = torch.ones(4, device=join(0, 2, sys.argv[1]))
dist.all_reduce(x)  # the other rank never comes
try:
    torch.npu.synchronize()
except RuntimeError as error:
    print(error, flush=True)
os._exit(0)
"""


def test_a_collective_is_given_up(backend: Backend, tmp_path: Path) -> None:
    """After HCCL_EXEC_TIMEOUT, the last resort."""
    done = subprocess.run(
        [sys.executable, "-c", GIVEN_UP, str(tmp_path / "store")],
        cwd=ROOT, env={**os.environ, "SSD_NPU_EMULATOR": "1", "HCCL_EXEC_TIMEOUT": "1"},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert "HcclAllReduce waited 1 s" in done.stderr
    assert "its stream is broken: 507046" in done.stderr  # that of the program, which waits for the one of HCCL
    assert "NPU function error" in done.stdout


def test_messages_need_an_expansion_that_has_them(
    backend: Backend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And graphs with collectives are few: the backend stops before the device does."""
    monkeypatch.setenv("SSD_NPU_EMULATOR", "1")
    torch.multiprocessing.spawn(budget, (2, str(tmp_path / "store")), nprocs=2)
    monkeypatch.setenv("HCCL_OP_EXPANSION_MODE", "AIV")
    monkeypatch.setenv("TASK_QUEUE_ENABLE", "0")  # a queue that fails may lose what is launched in that moment
    torch.multiprocessing.spawn(no_messages, (2, str(tmp_path / "store2")), nprocs=2)


def join(rank: int, size: int, store: str) -> torch.device:
    device = load_backend("npu").device(rank)
    dist.init_process_group("hccl", init_method=f"file://{store}", rank=rank, world_size=size)
    return device


def budget(rank: int, size: int, store: str) -> None:
    device = join(rank, size, store)
    graphs = load_backend("npu").graphs(device)
    assert graphs is not None
    assert [slots.limit for slots in graphs._slots] == [6]  # type: ignore[attr-defined]
    x = torch.ones(4, device=device)
    dist.all_reduce(x)
    kept, stream = [], torch.npu.Stream()

    def capture() -> None:
        graph = torch.npu.NPUGraph()
        with torch.npu.graph(graph, stream=stream):
            dist.all_reduce(x)
        kept.append(graph)

    for _ in range(6):
        capture()
    with pytest.raises(RuntimeError, match="at most 6 graphs with collectives"):
        capture()
    torch.npu.synchronize()
    dist.barrier()


def no_messages(rank: int, size: int, store: str) -> None:
    device = join(rank, size, store)
    x = torch.ones(4, device=device)
    dist.all_reduce(x)
    assert x.tolist() == [2.0] * 4
    with pytest.raises(RuntimeError, match="no send and receive"):
        dist.send(x, 1 - rank) if rank == 0 else dist.recv(x, 1 - rank)
    os._exit(0)  # the device is lost, and the group would wait for it
