"""`python -m bench.http_layer --json FILE`: what HTTP costs, at 64 streams, of the tokens/s an engine gives alone.

The same engine runs in this process without a server, and behind one with 64 clients, in turns. It has one thread and a
core of its own both times; front end and clients share the other core, as they would have others on a real machine.
Besides the plain ratio there is one of processor time, which neighbours disturb less: what a token costs the engine's
process with and without a front end to talk to, and what it costs the front end.

`--stand-in MS` puts a metronome (`bench/metronome.py`) in place of the engine, which beats every MS milliseconds: what
its process uses is then the line to the front end and hardly anything else, on a machine however busy.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import shlex
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from bench import report
from bench.cases import random_cases
from bench.server import OwnServer, process_tree
from bench.summary import Row
from ssd_ascend.core.request import EngineRequest
from ssd_ascend.core.sampling import SamplingParams
from ssd_ascend.engine.builder import build_engine
from ssd_ascend.engine.engine import Engine
from ssd_ascend.errors import SsdError
from ssd_ascend.flags import add_engine_arguments, engine_config
from ssd_ascend.trace import cpu_seconds

_PROMPT_TOKENS = 16
_ENGINE_CORE, _OTHER_CORE = 0, 1


@dataclass(frozen=True, slots=True)
class Run:
    """Tokens of all streams, and what they took: seconds by the clock, and of processor time."""

    tokens: int
    wall_s: float
    engine_s: float
    front_end_s: float = 0.0


def alone(engine: Engine, prompts: Sequence[list[int]], length: int) -> Run:
    """All prompts through an engine in this process."""
    sampling = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
    began, used = time.perf_counter(), time.process_time()
    for number, prompt in enumerate(prompts):
        engine.submit(EngineRequest(id=number, prompt_token_ids=prompt, sampling=sampling))
    tokens = 0
    while engine.has_work:
        tokens += sum(len(delta.token_ids) for delta in engine.step())
    return Run(tokens, time.perf_counter() - began, time.process_time() - used)


async def served(url: str, pids: tuple[int, int], prompts: Sequence[list[int]], length: int) -> Run:
    """All prompts as streams of a server whose front end and engine are `pids`."""
    began, front_end, engine = time.perf_counter(), _used_s(pids[0]), _used_s(pids[1])
    counts = await asyncio.gather(*(_stream(url, prompt, length) for prompt in prompts))
    wall_s = time.perf_counter() - began
    return Run(sum(counts), wall_s, _used_s(pids[1]) - engine, _used_s(pids[0]) - front_end)


async def _stream(url: str, prompt: list[int], length: int) -> int:
    """Read one stream to its end and hardly look at it; returns its tokens as the server counted them."""
    address = urlsplit(url)
    options = {"stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True, "temperature": 0}
    body = json.dumps({"prompt": prompt, "max_tokens": length, **options}).encode()
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    last = b""
    while part := await reader.read(1 << 16):
        last = last[-2000:] + part
    writer.close()
    found = re.search(rb'"completion_tokens":(\d+)', last)
    if found is None or b"[DONE]" not in last:
        raise RuntimeError(f"a stream did not end well: {last[-300:]!r}")
    return int(found[1])


def _used_s(pid: int) -> float:
    used = cpu_seconds(pid)
    if used is None:
        raise SsdError(f"process {pid} has ended, or this system has no /proc")
    return used


def pin(pid: int, core: int) -> None:
    """Keep a process, with the threads it has, on one core; nothing where there is only one."""
    if (os.cpu_count() or 1) > 1:
        for task in Path(f"/proc/{pid}/task").iterdir():
            os.sched_setaffinity(int(task.name), {core})


def row(mode: str, streams: int, runs: Sequence[Run]) -> Row:
    """The median of some runs."""
    return {
        "mode": mode, "batch": streams, "runs": len(runs), "tokens": runs[0].tokens,
        "tokens_per_s": round(statistics.median(run.tokens / run.wall_s for run in runs), 2),
        "engine_cpu_us_per_token": round(statistics.median(1e6 * run.engine_s / run.tokens for run in runs), 1),
        "front_end_cpu_us_per_token": round(statistics.median(1e6 * run.front_end_s / run.tokens for run in runs), 1),
    }  # fmt: skip


def measure_stand_in(args: argparse.Namespace, flags: Sequence[str]) -> dict[str, Any]:
    """The layer by itself, and how late a step of the metronome is on the average."""
    load = report.load_average()
    os.environ["METRONOME_MS"] = str(args.stand_in)
    prompts = [list(case.token_ids) for case in random_cases(args.streams, _PROMPT_TOKENS, 1000)]
    runs = []
    with OwnServer(*flags, "--max-num-seqs", str(args.streams), module="bench.metronome_server") as server:
        front_end, behind = process_tree(server.pid)[:2]
        for number in range(args.repeat + 1):
            run = asyncio.run(served(server.url, (front_end, behind), prompts, args.output_len))
            runs += [run] if number else []
    found = row(f"metronome, {args.stand_in:g} ms a step", args.streams, runs)
    return report.result(
        [found], device="metronome", load=(load, report.load_average()), output_len=args.output_len,
        layer_us_per_step_in_engine=round(float(found["engine_cpu_us_per_token"] or 0) * args.streams, 1),
        layer_us_per_step_in_front_end=round(float(found["front_end_cpu_us_per_token"] or 0) * args.streams, 1),
    )  # fmt: skip


def measure(args: argparse.Namespace, flags: Sequence[str]) -> dict[str, Any]:
    """Both in turns; the result as it is written to JSON."""
    load, me = report.load_average(), os.getpid()
    prompts = [list(case.token_ids) for case in random_cases(args.streams, _PROMPT_TOKENS, 1000)]
    blocks = args.streams * (-(-(_PROMPT_TOKENS + args.output_len) // 16) + 1)
    given = [*flags, "--threads", "1", "--max-num-seqs", str(args.streams), "--num-kv-blocks", str(blocks)]
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_engine_arguments(parser)
    engine = build_engine(replace(engine_config(parser.parse_args(given)), prefix_cache=False))
    with OwnServer(*given, "--no-prefix-cache") as server:
        front_end, behind = process_tree(server.pid)[:2]
        pin(front_end, _OTHER_CORE)
        pin(behind, _ENGINE_CORE)
        runs: dict[str, list[Run]] = {"engine alone": [], "server": []}
        for number in range(args.repeat + 1):
            pin(me, _ENGINE_CORE)
            first = alone(engine, prompts, args.output_len)
            pin(me, _OTHER_CORE)
            second = asyncio.run(served(server.url, (front_end, behind), prompts, args.output_len))
            if number:  # the first is a warm-up
                runs["engine alone"].append(first)
                runs["server"].append(second)
    engine.close()
    rows = [row(mode, args.streams, found) for mode, found in runs.items()]
    plain, http = rows
    by_clock = [1 - (h.tokens / h.wall_s) / (a.tokens / a.wall_s) for a, h in zip(*runs.values(), strict=True)]
    by_cpu = float(http["engine_cpu_us_per_token"] or 0) / float(plain["engine_cpu_us_per_token"] or 1) - 1
    return report.result(
        rows, device="cpu", load=(load, report.load_average()), model=engine.info.model, dtype=engine.info.dtype,
        output_len=args.output_len, overhead_percent=round(100 * statistics.median(by_clock), 2),
        overhead_percent_of_each=[round(100 * share, 2) for share in by_clock],
        engine_overhead_percent_by_cpu_time=round(100 * by_cpu, 2),
    )  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.http_layer", description=(__doc__ or "").splitlines()[0], allow_abbrev=False
    )
    parser.add_argument("--streams", type=int, default=64, help="clients at once (default: %(default)s)")
    parser.add_argument("--output-len", type=int, default=48, help="tokens of each answer (default: %(default)s)")
    parser.add_argument("--repeat", type=int, default=3, help="runs that count, of each (default: %(default)s)")
    parser.add_argument("--stand-in", type=float, metavar="MS", help="a metronome in place of the engine")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the result goes")
    args, flags = parser.parse_known_args(argv)
    how = measure if args.stand_in is None else measure_stand_in
    given = list(sys.argv[1:] if argv is None else argv)
    result = how(args, flags or ["--model", "smollm2-135m", "--device", "cpu"])
    result["command"] = shlex.join(["python", "-m", "bench.http_layer", *given])
    if args.json is not None:
        report.write_json(args.json, result)
    print(
        json.dumps(
            {name: value for name, value in result.items() if "over" in name or "layer" in name or name == "rows"},
            indent=1,
        )
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
