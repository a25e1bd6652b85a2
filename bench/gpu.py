"""What one model costs on one device, step by step: plain decoding, verification, long contexts, prefill.

`python -m bench.gpu --shape llama-3.1-8b --out FILE.json`. Random weights made on the device; no speculator, no text:
the step loop of the engine without its scheduler. Times are wall clock of whole steps (inputs, forward, choice of the
token, copy back) and, beside them, of the bare forward by replaying it. With `--exact N` nothing of that is measured:
N greedy answers of every drafter are compared with plain decoding, token for token (`bench/exact.py`).
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # not this folder, where `bench` would mean bench.py

from bench import report
from bench.exact import Wish, compare
from bench.synthetic import SHAPES, build, shape
from ssd_ascend.backends.base import Backend
from ssd_ascend.backends.registry import load_backend
from ssd_ascend.config.model import ModelConfig
from ssd_ascend.core.batch import Mode
from ssd_ascend.flags import DRAFTERS
from ssd_ascend.runtime.inputs import Row, build_batch
from ssd_ascend.runtime.load import CacheSize
from ssd_ascend.runtime.model_runner import ModelRunner

Result = dict[str, Any]


class Bench:
    """One model on one device, and sequences in its cache."""

    def __init__(self, backend: Backend, device: torch.device, runner: ModelRunner, config: ModelConfig) -> None:
        self.backend, self.device, self.runner, self.config = backend, device, runner, config
        self.copy_rate = copy_rate(backend, device)
        self.weight_bytes = streamed_bytes(config)

    def tables(self, rows: int, length: int) -> list[list[int]]:
        """Blocks for `rows` sequences of up to `length` tokens, scattered as in a used cache."""
        per_row = -(-length // self.runner.block_size)
        order = torch.randperm(self.runner.kv.num_blocks, generator=torch.Generator().manual_seed(1)).tolist()
        assert rows * per_row <= len(order), f"{rows} sequences of {length} tokens do not fit"
        return [order[row * per_row : (row + 1) * per_row] for row in range(rows)]

    def prefill(self, tables: list[list[int]], length: int, chunk: int = 16384) -> float:
        """Seconds to compute `length` tokens of every row, `chunk` tokens a forward."""
        tokens = torch.randint(self.config.vocab_size, (length,), generator=torch.Generator().manual_seed(2)).tolist()
        self.backend.synchronize(self.device)
        began = time.perf_counter()
        per_forward = max(1, chunk // length)
        for first in range(0, len(tables), per_forward):
            for start in range(0, length, chunk):
                piece = tokens[start : start + chunk]
                rows = [Row(piece, start, table, 1) for table in tables[first : first + per_forward]]
                self.runner.forward(
                    build_batch(Mode.PREFILL, rows, block_size=self.runner.block_size, device=self.device)
                )
        self.backend.synchronize(self.device)
        return time.perf_counter() - began

    def step(self, tables: list[list[int]], start: int, tokens: list[list[int]], mode: Mode) -> tuple[list[int], float]:
        """One whole step; returns the greedy tokens and the seconds of host work before the device was waited for."""
        began = time.perf_counter()
        rows = [Row(row, start, table, len(row)) for row, table in zip(tokens, tables, strict=True)]
        size, device = self.runner.block_size, self.device
        batch = build_batch(mode, rows, block_size=size, device=device, staging=self.runner.graphs)
        output = self.runner.forward(batch)
        chosen = output.logits.argmax(dim=-1, keepdim=True) if output.greedy is None else output.greedy
        host = time.perf_counter() - began
        return [row[0] for row in self.backend.to_host([chosen])[0].tolist()], host

    def decode(self, rows: int, prompt: int, steps: int, per_row: int = 1) -> Result:
        """`steps` steps after prompts of `prompt` tokens; per_row > 1: each verifies that many tokens, keeping one."""
        tables = self.tables(rows, prompt + steps + per_row)
        self.prefill(tables, prompt)
        mode = Mode.DECODE if per_row == 1 else Mode.VERIFY
        tokens, walls, hosts = [[1] * per_row] * rows, [], []
        for index in range(steps):
            began = time.perf_counter()
            chosen, host = self.step(tables, prompt + index, tokens, mode)
            walls.append(time.perf_counter() - began)
            hosts.append(host)
            tokens = [[chosen[row * per_row]] * per_row for row in range(rows)]
        bare = self.bare(tables, prompt + steps // 2, tokens, mode)
        moved = self.weight_bytes + self.kv_bytes(rows, prompt + steps // 2)
        return {
            "mode": "plain" if per_row == 1 else f"verify-{per_row}",
            "batch": rows,
            "context": prompt,
            "ms_per_step": round(1e3 * statistics.mean(walls[steps // 8 :]), 4),
            "ms_forward": round(bare, 4),
            "ms_host": round(1e3 * statistics.median(hosts), 4),
            "tokens_per_s": round(rows / statistics.mean(walls[steps // 8 :]), 1),
            "floor_ms": round(1e3 * moved / self.copy_rate, 4),
            "share_of_floor": round(1e3 * moved / self.copy_rate / bare, 4),
        }

    def bare(self, tables: list[list[int]], start: int, tokens: list[list[int]], mode: Mode) -> float:
        """Milliseconds of one forward over inputs that are there already."""
        rows = [Row(row, start, table, len(row)) for row, table in zip(tokens, tables, strict=True)]
        size, device, graphs = self.runner.block_size, self.device, self.runner.graphs
        batch = build_batch(mode, rows, block_size=size, device=device, staging=graphs)
        if graphs is None:
            return timed(self.backend, device, lambda: self.runner.forward(batch))
        captured = graphs.captured(batch)
        return timed(
            self.backend, device, lambda: self.runner.forward(batch) if captured is None else captured.replay()
        )

    def kv_bytes(self, rows: int, context: int) -> int:
        """Bytes of keys and values a step reads."""
        config = self.config
        return 2 * config.num_layers * config.num_kv_heads * config.head_dim * 2 * rows * context

    def prefills(self, rows: int, length: int, matrix_rate: float) -> Result:
        """Prompts of `length` tokens, all in forwards of up to 16k tokens."""
        tables = self.tables(rows, length)
        self.prefill(tables, length)
        seconds = min(self.prefill(tables, length) for _ in range(2))
        inner = self.weight_bytes / 2 - self.config.vocab_size * self.config.hidden_size
        attention = 2 * self.config.num_layers * self.config.num_heads * self.config.head_dim * length**2 * rows
        rate = (2 * inner * rows * length + attention) / seconds
        return {
            "mode": "prefill",
            "batch": rows,
            "context": length,
            "ms_per_step": round(1e3 * seconds, 2),
            "tokens_per_s": round(rows * length / seconds, 1),
            "tflops": round(rate / 1e12, 1),
            "share_of_matrix_rate": round(rate / matrix_rate, 3),
        }


def streamed_bytes(config: ModelConfig) -> int:
    """Bytes of bfloat16 weights one step reads: every matrix once; of the embedding only a few rows."""
    attention = config.hidden_size * config.head_dim * (2 * config.num_heads + 2 * config.num_kv_heads)
    layer = attention + 3 * config.hidden_size * config.intermediate_size
    return 2 * (config.num_layers * layer + config.vocab_size * config.hidden_size)


def timed(backend: Backend, device: torch.device, work: Callable[[], object], repeats: int = 20) -> float:
    """Median milliseconds of `work`, each run waited for."""
    times = []
    for _ in range(repeats):
        start, end = (torch.Event(device=device, enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        backend.synchronize(device)
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def copy_rate(backend: Backend, device: torch.device) -> float:
    """Bytes a second, read and written, of a large copy on the device: the streaming ceiling."""
    source = torch.empty(2 << 30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / timed(backend, device, lambda: target.copy_(source)) * 1e3


def matrix_rate(backend: Backend, device: torch.device) -> float:
    """Operations a second of a large bfloat16 product by torch."""
    a, b = (torch.randn(8192, 8192, device=device).bfloat16() for _ in range(2))
    return 2 * 8192**3 / timed(backend, device, lambda: a @ b) * 1e3


def measure(arguments: argparse.Namespace) -> Result:
    """Everything, as the JSON that goes to a file."""
    backend = load_backend(arguments.device)
    device = backend.device(0)
    size = CacheSize(max_model_len=arguments.max_model_len, max_num_seqs=64, num_blocks=arguments.blocks)
    runner, config = build(shape(arguments.shape, layers=arguments.layers), backend, device, size=size)
    bench = Bench(backend, device, runner, config)
    began = time.perf_counter()
    if not arguments.no_graphs:
        runner.capture_graphs(
            backend, max_rows=max(arguments.batches), lookahead=arguments.lookahead, max_len=arguments.max_model_len
        )
    capture_s = time.perf_counter() - began
    rows: list[Result] = []

    def add(row: Result) -> None:
        rows.append({"shape": arguments.shape, **row})
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)

    for batch in arguments.batches:
        add(bench.decode(batch, 128, arguments.steps))
        if arguments.lookahead:
            add(bench.decode(batch, 128, max(16, arguments.steps // 4), arguments.lookahead + 1))
    if arguments.long:
        add(bench.decode(1, arguments.long, 32))
    if arguments.prefill:
        add(bench.prefills(8, arguments.prefill, matrix_rate(backend, device)))
    return _head(backend, device) | {
        "copy_bytes_per_s": bench.copy_rate,
        "weight_bytes": bench.weight_bytes,
        "capture_s": round(capture_s, 2),
        "rows": rows,
    }


def _head(backend: Backend, device: torch.device) -> Result:
    """What every result begins with."""
    return {
        "command": " ".join(["python -m bench.gpu", *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": f"{platform.machine()}, {platform.system()} {platform.release()}",
        "device": backend.describe(device),
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda},
    }


def exact(arguments: argparse.Namespace) -> Result:
    """The comparison with plain decoding; the file is written anew with every row."""
    wish = Wish(
        shape=arguments.shape, device=arguments.device, prompts=arguments.exact, tokens=arguments.steps,
        drafters=arguments.drafters, layers=arguments.layers,
    )  # fmt: skip
    backend = load_backend(arguments.device)
    result = _head(backend, backend.device(0)) | {"rows": []}
    for row in compare(wish):
        result["rows"].append({"shape": arguments.shape, **row})
        print(json.dumps(row), file=sys.stderr, flush=True)
        if arguments.out:
            report.write_json(arguments.out, result)
    return result


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama-3.1-8b")
    parser.add_argument("--layers", type=int, help="cut the model to this many layers")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--lookahead", type=int, default=6, help="drafts a verify step judges; 0 measures none")
    parser.add_argument("--steps", type=int, default=256)
    parser.add_argument("--long", type=int, default=16384, help="context of the long-context decode; 0 for none")
    parser.add_argument("--prefill", type=int, default=2048, help="tokens of each of 8 prompts; 0 for none")
    parser.add_argument("--max-model-len", type=int, default=20480)
    parser.add_argument("--blocks", type=int, default=1024, help="KV blocks")
    parser.add_argument("--no-graphs", action="store_true")
    parser.add_argument(
        "--exact", type=int, metavar="N", help="compare N answers of --steps tokens, and measure nothing"
    )
    parser.add_argument("--drafters", nargs="+", choices=DRAFTERS, default=DRAFTERS)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    result = exact(arguments) if arguments.exact else measure(arguments)
    if arguments.out:
        report.write_json(arguments.out, result)
    else:
        print(json.dumps(result, indent=1))
    if any(row.get("same_answers") != row.get("answers") for row in result["rows"]):
        sys.exit(1)


if __name__ == "__main__":
    main()
