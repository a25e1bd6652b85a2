"""Our own engine in one mode (none, sd, ssd, each with a drafter), driven step by step under a clock."""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import torch

from bench.cases import Case
from bench.samples import Answer, Drafting, Sample, Step
from ssd_ascend import trace
from ssd_ascend.backends.registry import load_backend
from ssd_ascend.config.engine import EngineConfig
from ssd_ascend.core.request import EngineRequest, TokenDelta
from ssd_ascend.core.sampling import SamplingParams
from ssd_ascend.core.stats import SpeculationStats
from ssd_ascend.engine.builder import build_engine
from ssd_ascend.errors import ConfigError, SsdError
from ssd_ascend.flags import DRAFTERS, SPECULATORS, engine_config
from ssd_ascend.runtime.load import choose_block_size

_SLACK_TOKENS = 64
"""Room in the cache beyond prompt, answer and drafts, so that admission never waits for blocks."""


@dataclass(frozen=True, slots=True)
class Mode:
    """A name for tables, and the engine behind it."""

    name: str
    config: EngineConfig


def base_config(args: argparse.Namespace) -> EngineConfig:
    """The engine that the flags ask for, whatever modes are measured of it."""
    return engine_config(args, is_final=False)


def parse_modes(names: str, base: EngineConfig) -> list[Mode]:
    """`none,sd,ssd`, each optionally `speculator:drafter` or `speculator:drafter:K`, as variations of `base`."""
    modes = [_mode(name.strip(), base) for name in names.split(",") if name.strip()]
    if not modes:
        raise ConfigError("no mode is named", remedy="give for example --modes none,sd,ssd")
    if len({mode.name for mode in modes}) < len(modes):
        raise ConfigError(f"a mode is named twice in {names!r}")
    return modes


def _mode(name: str, base: EngineConfig) -> Mode:
    speculator, *rest = name.split(":")
    drafter = rest[0] if rest else base.speculation.drafter
    if speculator not in SPECULATORS or drafter not in DRAFTERS or len(rest) > 2:
        raise ConfigError(
            f"no mode {name!r}",
            remedy=f"give SPECULATOR[:DRAFTER[:K]] of {', '.join(SPECULATORS)} and {', '.join(DRAFTERS)}",
        )
    lookahead = base.speculation.lookahead
    if len(rest) == 2:
        if not rest[1].isdigit():
            raise ConfigError(f"mode {name!r} has lookahead {rest[1]!r}", remedy="give a whole number")
        lookahead = int(rest[1])
    speculation = replace(base.speculation, speculator=speculator, drafter=drafter, lookahead=lookahead)
    return Mode(name, replace(base, speculation=speculation))


def fit_cache(config: EngineConfig, *, batch: int, tokens: int) -> EngineConfig:
    """`config` for `batch` sequences of at most `tokens` tokens; sizes that were asked for stay.

    The cache is sized by what the run needs, not by free memory, because several engines live side by side.
    """
    rows = batch * (config.speculation.max_lookahead + 1)
    config = replace(config, max_num_seqs=batch, max_batched_tokens=max(config.max_batched_tokens, rows))
    if config.num_kv_blocks is not None or config.kv_cache_gb is not None:
        return config
    block_size = choose_block_size(config.block_size, load_backend(config.device).capabilities)
    per_sequence = -(-(tokens + config.speculation.max_lookahead + _SLACK_TOKENS) // block_size)
    return replace(config, num_kv_blocks=batch * per_sequence + 1)


@dataclass(slots=True)
class _Run:
    """A batch under way."""

    began_ns: int
    ends: dict[int, int] = field(default_factory=dict)
    first_ns: dict[int, int] = field(default_factory=dict)
    outputs: dict[int, list[int]] = field(default_factory=dict)
    answers: dict[int, Answer] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)

    def take(self, deltas: Sequence[TokenDelta], now: int) -> bool:
        """Note what a step gave; True when none of it was a first token."""
        no_first = True
        for delta in deltas:
            if delta.error is not None:
                raise SsdError(f"a sequence failed: {delta.error}")
            if delta.seq_id in self.first_ns:
                answer = self.answers[delta.seq_id]
                answer.tokens += len(delta.token_ids)
                answer.steps += 1
                answer.decode_ns = now - self.began_ns - self.first_ns[delta.seq_id]
            elif delta.token_ids:
                self.first_ns[delta.seq_id] = now - self.began_ns
                no_first = False
            self.outputs[delta.seq_id] += delta.token_ids
        return no_first


class OwnEngine:
    """One engine of ours; a context manager. `run` serves a batch of prompts and says what every step took."""

    def __init__(self, mode: Mode) -> None:
        self.name = mode.name
        self.config = mode.config
        self.engine = build_engine(mode.config)
        self._next_id = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.close()

    @property
    def num_devices(self) -> int:
        """Devices in use: the target's ranks, and the worker's where it has an accelerator of its own."""
        speculation = self.config.speculation
        own = speculation.speculator == "ssd" and speculation.draft_device not in (None, "cpu")
        return self.config.tensor_parallel + own

    def run(self, cases: Sequence[Case], sampling: SamplingParams) -> Sample:
        """Serve `cases` together until all have ended; request i draws from seed i where anything is drawn."""
        trace.enable()
        before = self.engine.stats().speculation
        run = _Run(began_ns=time.perf_counter_ns())
        for index, case in enumerate(cases):
            run.outputs[self._next_id], run.answers[self._next_id] = [], Answer()
            params = replace(sampling, seed=sampling.seed if sampling.seed is None else sampling.seed + index)
            self.engine.submit(EngineRequest(id=self._next_id, prompt_token_ids=list(case.token_ids), sampling=params))
            self._next_id += 1
        self._drive(run)
        trace.disable()
        return Sample(
            steps=run.steps,
            prompt_tokens=sum(len(case.token_ids) for case in cases),
            ttft_ns=list(run.first_ns.values()),
            outputs=list(run.outputs.values()),
            drafting=_difference(before, self.engine.stats().speculation),
            answers=list(run.answers.values()),
        )

    def top_logprobs(self, token_ids: Sequence[int]) -> dict[int, float]:
        """Log-probabilities of the likeliest next tokens after `token_ids`."""
        sampling = SamplingParams(temperature=0.0, max_tokens=1, logprobs=20, ignore_eos=True)
        self.engine.submit(EngineRequest(id=self._next_id, prompt_token_ids=list(token_ids), sampling=sampling))
        self._next_id += 1
        law: dict[int, float] = {}
        while self.engine.has_work:
            for delta in self.engine.step():
                for entry in delta.logprobs or ():
                    law |= {**dict(entry.top), entry.token: entry.logprob}
        return law

    def _drive(self, run: _Run) -> None:
        last, commit_ns = run.began_ns, 0
        before = self.engine.stats().speculation
        while self.engine.has_work:
            trace.reset()
            deltas = self.engine.step()
            now = time.perf_counter_ns()
            no_first = run.take(deltas, now)
            stats = self.engine.stats()
            ended = sum(delta.finish_reason is not None for delta in deltas)
            spans = {name: span.total_ns for name, span in trace.summary().items()}
            run.steps.append(
                Step(
                    wall_ns=now - last,
                    num_rows=len(deltas),
                    num_tokens=sum(len(delta.token_ids) for delta in deltas),
                    is_decode=no_first and len(deltas) == stats.running + ended,
                    spans_ns=spans,
                    lookups=stats.speculation.lookups - before.lookups,
                    hits=stats.speculation.hits - before.hits,
                    idle_ns=min(now - last, int((stats.speculation.draft_idle_s - before.draft_idle_s) * 1e9)),
                    rounds_ns=commit_ns + spans.get("schedule", 0) + spans.get("propose", 0),
                )
            )
            last, before, commit_ns = now, stats.speculation, spans.get("commit", 0)


def _difference(before: SpeculationStats, after: SpeculationStats) -> Drafting:
    def positions(name: str) -> list[int]:
        old, new = getattr(before, name), getattr(after, name)
        return [value - (old[i] if i < len(old) else 0) for i, value in enumerate(new)]

    return Drafting(
        drafted=after.drafted - before.drafted,
        accepted=after.accepted - before.accepted,
        drafted_per_position=positions("drafted_per_position"),
        accepted_per_position=positions("accepted_per_position"),
        lookups=after.lookups - before.lookups,
        hits=after.hits - before.hits,
        hit_rows_tokens=after.hit_tokens - before.hit_tokens,
        miss_rows=after.miss_rows - before.miss_rows,
        miss_rows_tokens=after.miss_tokens - before.miss_tokens,
        wasted=after.wasted - before.wasted,
        cache_bytes=after.cache_bytes,
    )


def forget_engine() -> None:
    """Give the memory of an engine that is closed back before the next one asks for it."""
    gc.collect()
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()
