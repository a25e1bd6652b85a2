"""`bench.py --soak N`: N rounds of a drafting engine, with an eye on memory, which must stop growing."""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench import report
from bench.cases import random_cases
from bench.modes import Mode, OwnEngine, base_config, fit_cache, parse_modes
from bench.server import process_tree, resident_kb
from bench.summary import Row
from bench.tiny import POSITIONS, VOCAB, write_tiny
from ssd_ascend.core.sampling import SamplingParams
from ssd_ascend.errors import ConfigError

_MARKS = 10
_BATCH = 4
_PROMPT_TOKENS = 32
_ALLOWED_GROWTH_MB = 16.0
"""From half way to the end: allocators settle first, and captured forwards are added until every shape was met."""


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run the rounds and return the result as it is written to JSON; a leak is a failure."""
    if args.soak < _MARKS:
        raise ConfigError(f"--soak is {args.soak}", remedy=f"give at least {_MARKS} rounds")
    load = report.load_average()
    with tempfile.TemporaryDirectory() as folder:
        mode = _mode(args, Path(folder))
        with OwnEngine(mode) as engine:
            rows = list(_rounds(engine, args.soak))
            info = engine.engine.info
    growth = float(rows[-1]["memory_mb"] or 0) - float(rows[len(rows) // 2]["memory_mb"] or 0)
    failures = [f"memory grew by {growth:.1f} MB over {args.soak} rounds"] if growth > _ALLOWED_GROWTH_MB else []
    return report.result(
        rows, device=info.device, load=(load, report.load_average()), model=info.model, dtype=info.dtype,
        growth_mb=round(growth, 2), failures=failures,
    )  # fmt: skip


def _mode(args: argparse.Namespace, folder: Path) -> Mode:
    """The engine that was asked for; without a model, a tiny one that drafts for itself."""
    if not hasattr(args, "model"):
        args.model = str(write_tiny(folder / "tiny"))
        args.draft = args.model
    mode = parse_modes(getattr(args, "modes", "ssd:model:4"), base_config(args))[0]
    return Mode(mode.name, replace(fit_cache(mode.config, batch=_BATCH, tokens=POSITIONS), prefix_cache=True))


def _rounds(engine: OwnEngine, rounds: int) -> Iterator[Row]:
    """A row at every tenth of the way. Prompts and answers differ from batch to batch, and answers are sampled."""
    done = mark = batch = tokens = 0
    while done < rounds:
        cases = random_cases(_BATCH, _PROMPT_TOKENS + batch % 7, VOCAB, seed=batch)
        sampling = SamplingParams(temperature=0.8, max_tokens=200 + batch % 50, ignore_eos=True, seed=batch)
        sample = engine.run(cases, sampling)
        batch, done, tokens = batch + 1, done + len(sample.decode_steps), tokens + sample.num_tokens
        if done >= (mark + 1) * rounds // _MARKS:
            mark = done * _MARKS // rounds
            memory = sum(map(resident_kb, process_tree(os.getpid()))) / 1024
            yield {
                "mode": engine.name, "batch": _BATCH, "rounds": done, "tokens": tokens,
                "memory_mb": round(memory, 2), "cache_bytes": sample.drafting.cache_bytes,
                "hits": sample.drafting.hits, "ms_per_step": round(sample.ms_per_step, 3),
            }  # fmt: skip
