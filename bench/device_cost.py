"""What a decode step costs its device: the least time its bytes need, and how many pieces of work it is handed.

The floor is weights, keys and values once over the rate of a large copy, measured here and now. Launches are counted by
torch's profiler in a short run of their own. Used by `bench/offline.py`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import torch

from bench.cases import Case
from bench.modes import OwnEngine
from bench.samples import Sample
from bench.summary import Row
from ssd_ascend import catalogue
from ssd_ascend.backends.base import Backend
from ssd_ascend.backends.registry import load_backend
from ssd_ascend.config.model import ModelConfig
from ssd_ascend.core.sampling import SamplingParams
from ssd_ascend.planner.shapes import distinct_experts
from ssd_ascend.weights.loader import read_config

_COPY_BYTES = {"cpu": 128 << 20}
_LARGE = 1 << 30
_COPIES = 8
_PROFILED_TOKENS = 16


def copy_rate(backend: Backend, device: torch.device) -> float:
    """Bytes a second, read and written, of a large copy on the device."""
    source = torch.empty(_COPY_BYTES.get(device.type, _LARGE), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    best = 0.0
    for _ in range(3):
        target.copy_(source)
        backend.synchronize(device)
        began = time.perf_counter()
        for _ in range(_COPIES):
            target.copy_(source)
        backend.synchronize(device)
        best = max(best, 2 * _COPIES * source.numel() / (time.perf_counter() - began))
    return best


def step_bytes(config: ModelConfig, *, dtype_bytes: int, rows: int, context: int, devices: int = 1) -> float:
    """Bytes a step of the target reads on each of its devices: every matrix once, keys and values of its rows.

    Of experts those that `rows` tokens take, were they taken at random.
    """
    attention = config.hidden_size * config.head_dim * 2 * (config.num_heads + config.num_kv_heads)
    experts = config.experts
    sparse = config.num_layers - len(experts.dense_layers) if experts else 0
    inner = (config.num_layers - sparse) * float(config.intermediate_size)
    if experts:
        taken = distinct_experts(experts.count, experts.per_token, rows)
        inner += sparse * (taken * experts.intermediate_size + experts.count / 3)  # a router is one matrix, not three
    weights = config.num_layers * attention + config.hidden_size * (3 * inner + config.vocab_size)
    cached = 2 * config.num_layers * config.num_kv_heads * config.head_dim * rows * context
    return dtype_bytes * (weights + cached) / devices


def put_floor(row: Row, engine: OwnEngine, samples: Sequence[Sample], rate: float) -> None:
    """Add the floor of the target's step, its share of the whole one, and the host's time before it waits."""
    config = read_config(catalogue.resolve_model(engine.config.model))
    size = torch.finfo(getattr(torch, engine.engine.info.dtype)).bits // 8
    outputs = [len(output) for sample in samples for output in sample.outputs]
    rows = int(row["batch"] or 1)
    prompts = sum(sample.prompt_tokens for sample in samples) / max(1, len(outputs))
    context = int(prompts + sum(outputs) / max(1, len(outputs)) / 2)
    moved = step_bytes(config, dtype_bytes=size, rows=rows, context=context, devices=engine.config.tensor_parallel)
    floor = 1e3 * moved / rate
    row |= {"floor_ms": round(floor, 4), "share_of_floor": round(floor / float(row["ms_per_step"] or 1), 4)}
    if (
        "verify_ms" in row and engine.engine.info.device.partition(":")[0] != "cpu"
    ):  # its copy is where the host waits for the device
        waited = float(row["verify_ms"] or 0) + float(row.get("wait_ms") or 0)
        row["host_ms"] = round(float(row["ms_per_step"] or 0) - waited, 4)


def put_launches(row: Row, engine: OwnEngine, cases: Sequence[Case], sampling: SamplingParams) -> None:
    """Add how many kernels, graphs and copies this process hands to the device in a step. Nothing on a CPU."""
    device = load_backend(engine.config.device).device(0)
    if device.type == "cpu":
        return
    prefill, prefill_steps = _handed_over(engine, cases, replace(sampling, max_tokens=1))
    calls, steps = _handed_over(engine, cases, replace(sampling, max_tokens=_PROFILED_TOKENS))
    if steps > prefill_steps:  # what reads a prompt is the same in both runs, and launched piece by piece
        row["launches_per_step"] = round((calls - prefill) / (steps - prefill_steps), 1)


def _handed_over(engine: OwnEngine, cases: Sequence[Case], sampling: SamplingParams) -> tuple[int, int]:
    """Pieces of work handed to the device by this process, and steps, of a whole run."""
    with torch.profiler.profile(record_shapes=False) as profile:
        sample = engine.run(cases, sampling)
    handed = ("Launch", "MemcpyAsync", "MemsetAsync")
    calls = sum(event.count for event in profile.key_averages() if any(word in event.key for word in handed))
    return calls, len(sample.steps)
