"""What only an NPU is asked by `doctor --probe`: forms of fused attention, and what updates of a graph cost.

Forms run in child processes (`forms.py`): one that breaks the device is an answer, and the others are still asked.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch_npu

from ssd_ascend import env
from ssd_ascend.backends.base import AttentionSpec, Finding, GraphCapture
from ssd_ascend.backends.npu import emulator
from ssd_ascend.backends.npu.attention import BLOCK_SIZE, NpuAttention
from ssd_ascend.backends.npu.forms import FORMS
from ssd_ascend.core.attention import AttentionMetadata
from ssd_ascend.errors import first_line

_TIMEOUT_S = 300
_CALLS = 32
_CHILD = (
    "import sys; from ssd_ascend.backends.registry import load_backend; load_backend('npu'); "
    "from ssd_ascend.backends.npu.forms import run; run(int(sys.argv[1]), sys.argv[3:], sys.argv[2])"
)


def examine(device: torch.device, graphs: GraphCapture, attention: NpuAttention) -> Iterator[Finding]:
    """Everything, in an order from harmless to risky. `attention` is of one layer, built for `SPEC`."""
    yield from _updates(device, graphs, attention)
    yield from _forms(device.index or 0)


SPEC = AttentionSpec(_CALLS, 8, 2, 128, BLOCK_SIZE, torch.bfloat16, 128**-0.5)
"""The attention whose updates are timed."""


def _updates(device: torch.device, graphs: GraphCapture, attention: NpuAttention) -> Iterator[Finding]:
    """A graph of many attention calls: what the host pays for re-issuing them, and what a replay takes in all."""
    rows, length = 4, 200
    meta = AttentionMetadata(
        query_lens_host=[1] * rows,
        kv_lens_host=[length] * rows,
        query_start=torch.arange(rows + 1, dtype=torch.int32, device=device),
        kv_lens=torch.full((rows,), length, dtype=torch.int32, device=device),
        block_table=torch.arange(2 * rows, dtype=torch.int32, device=device).view(rows, 2),
        slot_mapping=torch.arange(rows, device=device) * 2 * BLOCK_SIZE,
    )
    q = torch.zeros(rows, SPEC.num_heads, SPEC.head_dim, dtype=SPEC.dtype, device=device)
    k = torch.zeros(rows, SPEC.num_kv_heads, SPEC.head_dim, dtype=SPEC.dtype, device=device)
    kv = torch.zeros(attention.kv_shape(2 * rows), dtype=SPEC.dtype, device=device)

    def layers() -> None:
        attention.plan(meta)
        for layer in range(_CALLS):
            attention.forward(q, k, k, kv, meta, layer)

    try:
        graph = graphs.capture(layers)
        host, whole = [], []
        for _ in range(11):
            torch_npu.npu.synchronize(device)
            began = time.perf_counter()
            attention.replan(meta, rows)
            graph.replay()
            host.append(time.perf_counter() - began)
            torch_npu.npu.synchronize(device)
            whole.append(time.perf_counter() - began)
    except RuntimeError as error:
        yield Finding("updates of a graph", "failed", first_line(error), "serve with --no-graphs")
        return
    each = sorted(host)[5] / _CALLS * 1e6
    yield Finding("update of one attention call", "measured", f"{each:.0f} us of the host ({_CALLS} in a graph)")
    yield Finding(
        "replay with its updates", "measured", f"{sorted(whole)[5] * 1e3:.2f} ms for {_CALLS} attention calls"
    )


def _forms(index: int) -> Iterator[Finding]:
    with tempfile.TemporaryDirectory(prefix="ssd-forms-") as folder:
        file = Path(folder) / "answers"
        left = list(FORMS)
        while left:
            file.write_text("", encoding="utf-8")
            ended = _child(index, left, file)
            lines: list[dict[str, Any]] = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
            for line in lines:
                if "name" in line:
                    left.remove(line["name"])
                    yield _finding(line["name"], line["kind"], line["detail"])
            if left:  # the child died of the one it had begun
                begun = next((line["begins"] for line in reversed(lines) if "begins" in line), left[0])
                name = begun if begun in left else left[0]
                left.remove(name)
                yield _finding(name, "refused", ended)


def _child(index: int, names: Sequence[str], file: Path) -> str:
    """How the child ended, in words."""
    command = [sys.executable, "-c", _CHILD, str(index), str(file), *names]
    environment = env.child({"TASK_QUEUE_ENABLE": "0"})
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return f"no answer within {_TIMEOUT_S} s"
    last = (done.stderr.strip().splitlines() or [""])[-1]
    return f"its process ended with status {done.returncode}: {last}"


def _finding(name: str, kind: str, detail: str) -> Finding:
    form = FORMS[name]
    if kind == "right":
        return Finding(name, "ok", detail)
    if not form.relied_on:  # to know, not to fear
        return Finding(name, "skipped" if kind == "refused" and emulator.is_loaded() else "measured",
                       f"{kind}: {detail}; {form.remedy}")  # fmt: skip
    return Finding(name, "failed", f"{kind}: {detail}", form.remedy)
