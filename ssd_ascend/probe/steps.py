"""Steps of a small model, launch by launch and captured: do they agree, whatever the lengths, and what do they cost?

Called by `report`.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from ssd_ascend.backends.base import Backend, Finding
from ssd_ascend.core.batch import Mode
from ssd_ascend.distributed.collectives import SingleRank
from ssd_ascend.errors import first_line
from ssd_ascend.parity.checkpoints import LAYERS, write_checkpoints
from ssd_ascend.parity.numbers import integers
from ssd_ascend.probe.rates import timed
from ssd_ascend.runtime.inputs import Row, Staging, build_batch
from ssd_ascend.runtime.load import CacheSize, choose_block_size, load_runner
from ssd_ascend.runtime.model_runner import ModelRunner

_ROWS, _LOOKAHEAD, _LENGTH, _REPLAYS = 4, 4, 384, 60
_OFF = "serve with --no-graphs: every step then runs launch by launch"


def examine(backend: Backend, device: torch.device) -> Iterator[Finding]:
    """Eager steps, captures, replays that must equal eager steps, and the times of all three."""
    try:
        with tempfile.TemporaryDirectory(prefix="ssd-probe-") as scratch, torch.inference_mode():
            yield from _examine(backend, device, _load(backend, device, Path(scratch)))
    except (RuntimeError, ValueError) as error:
        yield Finding("captured steps", "failed", first_line(error), _OFF)


def _load(backend: Backend, device: torch.device, scratch: Path) -> ModelRunner:
    write_checkpoints(scratch)
    size = choose_block_size(None, backend.capabilities)
    return load_runner(
        scratch / "target",
        backend,
        device,
        SingleRank(),
        dtype=backend.capabilities.dtypes[0],
        block_size=size,
        size=CacheSize(max_model_len=_LENGTH, max_num_seqs=_ROWS, num_blocks=_ROWS * -(-_LENGTH // size)),
    ).runner


def _examine(backend: Backend, device: torch.device, runner: ModelRunner) -> Iterator[Finding]:
    shape = f"{_ROWS} rows of {_LOOKAHEAD + 1} tokens, {LAYERS} layers"
    eager = timed(backend, device, lambda: _step(runner, 0, None))
    yield Finding("eager verify step", "measured", f"{eager * 1e3:.2f} ms ({shape})")
    if not backend.capabilities.graphs:
        yield Finding("captured steps", "skipped", "this device has no graphs")
        return
    began = time.perf_counter()
    runner.capture_graphs(backend, max_rows=_ROWS, lookahead=_LOOKAHEAD, max_len=_LENGTH)
    graphs = runner.graphs
    seconds = time.perf_counter() - began
    if graphs is None:
        yield Finding("captures", "failed", "no graph was captured", _OFF)
        return
    yield Finding("captures", "ok", f"{len(graphs.buckets)} graphs in {seconds:.1f} s")
    wrong = [turn for turn in range(_REPLAYS) if not _agree(runner, turn, graphs)]
    detail = f"{_REPLAYS} replays, each with other lengths"
    yield Finding(
        "replays equal eager steps",
        "failed" if wrong else "ok",
        f"{len(wrong)} of {detail} differ, the first is {wrong[0]}" if wrong else detail,
        _OFF if wrong else "",
    )
    captured = timed(backend, device, lambda: _step(runner, 0, graphs))
    yield Finding("captured verify step", "measured", f"{captured * 1e3:.2f} ms ({shape})")
    yield Finding("host's part of it", "measured", f"{_host_seconds(backend, device, runner, graphs) * 1e3:.2f} ms")


def _step(runner: ModelRunner, turn: int, staging: Staging | None) -> torch.Tensor:
    """A verify step whose lengths depend on `turn`."""
    blocks = runner.kv.num_blocks // _ROWS
    starts = integers(f"starts {turn}", _ROWS, low=1, high=_LENGTH - _LOOKAHEAD - 1).tolist()
    rows = [
        Row(
            integers(f"tokens {turn} {i}", _LOOKAHEAD + 1, low=0, high=32).tolist(),
            start,
            list(range(i * blocks, (i + 1) * blocks)),
            _LOOKAHEAD + 1,
        )
        for i, start in enumerate(starts)
    ]
    batch = build_batch(Mode.VERIFY, rows, block_size=runner.block_size, device=runner.device, staging=staging)
    return runner.forward(batch).logits


def _agree(runner: ModelRunner, turn: int, graphs: Staging) -> bool:
    """Whether replay and eager step say the same over the cache that is there, within a rounding."""
    captured = _step(runner, turn, graphs).float().cpu().clone()
    eager = _step(runner, turn, None).float().cpu()
    return bool(torch.allclose(captured, eager, rtol=0.0, atol=0.02 * float(eager.abs().max())))


def _host_seconds(backend: Backend, device: torch.device, runner: ModelRunner, graphs: Staging) -> float:
    """Median seconds until the host is free again; the device goes on."""
    taken = []
    for _ in range(11):
        backend.synchronize(device)
        began = time.perf_counter()
        _step(runner, 0, graphs)
        taken.append(time.perf_counter() - began)
    backend.synchronize(device)
    return sorted(taken)[5]
