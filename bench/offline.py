"""Engines in this process, measured in turns: every wave of prompts goes through all of them before the next one."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from bench import cases, report
from bench.cases import Case, Texts
from bench.device_cost import copy_rate, put_floor, put_launches
from bench.equality import differences, put_equality
from bench.modes import Mode, OwnEngine, base_config, fit_cache, parse_modes
from bench.samples import Sample
from bench.summary import Row, put_ratio, summarise
from bench.timeline import Bar, rounds
from ssd_ascend import catalogue
from ssd_ascend.backends.registry import load_backend
from ssd_ascend.core.sampling import SamplingParams
from ssd_ascend.errors import ConfigError
from ssd_ascend.flags import positive_list
from ssd_ascend.progress import bar
from ssd_ascend.text import Tokenizer
from ssd_ascend.weights.loader import read_config

_WARM_UP_TOKENS = 24
_EXAMPLE_PROMPTS = 8


class Contender(Protocol):
    """Whatever serves a batch under a clock."""

    name: str

    @property
    def num_devices(self) -> int:
        """Devices in use."""
        ...

    def run(self, cases: Sequence[Case], sampling: SamplingParams) -> Sample:
        """Serve the batch to its end."""
        ...


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured, settled before anything is loaded."""

    modes: list[Mode]
    batches: list[int]
    cases: list[Case]
    sampling: SamplingParams
    repeat: int
    continuous: bool
    against: str | None

    def waves(self, batch: int) -> list[list[Case]]:
        """The batches of prompts; all prompts at once where the engine itself is to keep `batch` of them running."""
        return [list(self.cases)] * self.repeat if self.continuous else cases.waves(self.cases, batch, self.repeat)


def make_plan(args: argparse.Namespace) -> Plan:
    """Read flags; ConfigError for what cannot be measured."""
    given = vars(args)
    batches = positive_list(given.get("batch", "1"), "--batch")
    continuous = bool(given.get("continuous"))
    output_len, repeat = given.get("output_len", 128), given.get("repeat", 1 if continuous else 3)
    for flag, value in (("--output-len", output_len), ("--repeat", repeat), ("--prompts", given.get("prompts", 1))):
        if value < 1:
            raise ConfigError(f"{flag} is {value}", remedy="give at least 1")
    if continuous and len(batches) > 1:
        raise ConfigError("a line of the reference has one batch size", remedy="leave --batch out, or its flags")
    base = base_config(args)
    base = replace(base, prefix_cache=bool(given.get("keep_prefix_cache")))
    prompts = load_cases(args, base.model, base.chat_template)
    longest = max(len(case.token_ids) for case in prompts) + output_len
    limit = read_config(catalogue.resolve_model(base.model)).max_position_embeddings
    if longest > limit:
        raise ConfigError(
            f"the longest prompt and its answer have {longest} tokens, the model was made for {limit}",
            remedy="lower --output-len",
        )
    modes = parse_modes(given.get("modes", "none"), base)
    fitted = [Mode(mode.name, fit_cache(mode.config, batch=max(batches), tokens=longest)) for mode in modes]
    temperature = given.get("temperature", 0.0)
    sampling = SamplingParams(
        temperature=temperature,
        max_tokens=output_len,
        ignore_eos=not given.get("respect_eos", False),
        seed=0,
        reproducible=False,
    )
    return Plan(fitted, batches, prompts, sampling, repeat, continuous, given.get("against"))


def load_cases(args: argparse.Namespace, model: str, chat_template: str | None = None) -> list[Case]:
    """The prompts that were asked for, tokenized for `model`; says on standard error where they are not quite those."""
    given = vars(args)
    path = catalogue.resolve_model(model)
    if given.get("random"):
        vocab_size = read_config(path).vocab_size
        if given.get("data_sets") and "input_len" not in given:
            return cases.random_like(load_texts(args), vocab_size)
        return cases.random_cases(given.get("prompts", 8), given.get("input_len", 128), vocab_size)
    tokenizer = Tokenizer.load(path, chat_template=chat_template)
    groups = load_texts(args)
    return cases.encode(groups, tokenizer, chat=bool(given.get("chat") or given.get("example")))


def load_texts(args: argparse.Namespace) -> list[Texts]:
    """The same as texts."""
    given = vars(args)
    count = given.get("prompts", 2)
    if given.get("example"):
        groups = [cases.built_in("chat", min(count, _EXAMPLE_PROMPTS))]
    elif path := given.get("prompt_file"):
        groups = [Texts("own", cases.read_texts(Path(path), given.get("prompts")))]
    elif names := given.get("data_sets"):
        groups = [cases.data_set(name, count) for name in names]
    else:
        kinds = given.get("kinds", ",".join(cases.KINDS)).split(",")
        groups = [cases.built_in(kind.strip(), count) for kind in kinds]
    for group in groups:
        if group.notice:
            print(f"note: {group.notice}", file=sys.stderr)
    return groups


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run everything and return the result as it is written to JSON."""
    plan = make_plan(args)
    if tune := getattr(args, "tune", None):
        plan = replace(plan, modes=_tuned(plan, tune))
    load = report.load_average()
    rows: list[Row] = []
    texts: list[list[int]] = []
    timelines: dict[str, list[Bar]] = {}
    with contextlib.ExitStack() as stack:
        own = [stack.enter_context(OwnEngine(mode)) for mode in plan.modes]
        info = own[0].engine.info
        backend = load_backend(plan.modes[0].config.device)
        rate = copy_rate(backend, backend.device(0))
        for batch in plan.batches:
            contenders: list[Contender] = [*own, *_rivals(plan, batch, own[0])]
            samples = _take_turns(plan, contenders, batch)
            rows += _rows(plan, contenders, samples, batch, judge=own[0])
            for engine, row in zip(own, rows[-len(contenders) :], strict=False):
                put_floor(row, engine, samples[engine.name], rate)
                timelines[f"{engine.name}, batch {batch}"] = rounds(samples[engine.name])
            texts = samples[own[0].name][0].outputs
        _count_launches(plan, own, rows)
    if getattr(args, "example", False):
        _print_answers(plan, own[0].config.model, texts)
    return report.result(
        rows, device=info.device, load=(load, report.load_average()), model=info.model, dtype=info.dtype,
        threads=torch.get_num_threads(), prompts=len(plan.cases), output_len=plan.sampling.max_tokens,
        temperature=plan.sampling.temperature, continuous=plan.continuous, timelines=timelines,
        copy_bytes_per_s=round(rate),
    )  # fmt: skip


def _count_launches(plan: Plan, own: Sequence[OwnEngine], rows: Sequence[Row]) -> None:
    """When all times are taken: a profiler may slow down what comes after it."""
    engines = {engine.name: engine for engine in own}
    for row in rows:
        if (engine := engines.get(str(row["mode"]))) is not None:
            batch = int(row["batch"] or 1)
            put_launches(row, engine, plan.waves(batch)[0][:batch], plan.sampling)


def _rivals(plan: Plan, batch: int, first: OwnEngine) -> list[Contender]:
    if plan.against is None:
        return []
    from bench.rival import TransformersRival

    device = load_backend(first.config.device).device(0)
    return [TransformersRival(first.config.model, dtype=first.engine.info.dtype, device=device, batch=batch)]


def _take_turns(plan: Plan, contenders: Sequence[Contender], batch: int) -> dict[str, list[Sample]]:
    """Warm everyone up, then let every wave go through all of them; who begins changes from wave to wave."""
    waves = plan.waves(batch)
    short = replace(plan.sampling, max_tokens=min(_WARM_UP_TOKENS, plan.sampling.max_tokens or _WARM_UP_TOKENS))
    samples: dict[str, list[Sample]] = {contender.name: [] for contender in contenders}
    total = len(contenders) * (len(waves) + 1)
    with bar(f"batch {batch}", unit="of the runs") as advance:
        for done, contender in enumerate(contenders, 1):
            contender.run(waves[0][:batch], short)
            advance(done, total)
        for number, wave in enumerate(waves):
            turn = number % len(contenders)
            for done, contender in enumerate([*contenders[turn:], *contenders[:turn]], 1):
                samples[contender.name].append(contender.run(wave, plan.sampling))
                advance((number + 1) * len(contenders) + done, total)
    return samples


def _rows(
    plan: Plan, contenders: Sequence[Contender], samples: dict[str, list[Sample]], batch: int, *, judge: OwnEngine
) -> list[Row]:
    first = contenders[0].name
    rows = []
    for contender in contenders:
        mine = samples[contender.name]
        row = summarise(contender.name, batch, mine, num_devices=contender.num_devices)
        if len(contenders) > 1:
            put_ratio(row, "speedup" if first == "none" else f"vs_{first}", mine, samples[first])
        if plan.against and contender.name != plan.against:
            put_ratio(row, "vs_transformers", mine, samples[plan.against])
        if plan.sampling.greedy and contender.name != first:
            waves = plan.waves(batch)
            found = differences(waves, samples[first], mine)
            put_equality(row, sum(map(len, waves)), found, judge)
        rows.append(row | (_by_kind_together(plan, mine) if plan.continuous else _by_kind(plan, batch, mine)))
    return rows


def _by_kind(plan: Plan, batch: int, samples: Sequence[Sample]) -> Row:
    """At batch 1, tokens/s and acceptance length of each kind of prompt."""
    if batch != 1:
        return {}
    row: Row = {}
    waves = plan.waves(batch)
    for kind in dict.fromkeys(case.kind for case in plan.cases):
        mine = [sample for wave, sample in zip(waves, samples, strict=True) if wave[0].kind == kind]
        part = summarise(kind, batch, mine)
        row |= {f"{name}_{kind}": part[name] for name in ("tokens_per_s", "acceptance_length")}
    return row


def _by_kind_together(plan: Plan, samples: Sequence[Sample]) -> Row:
    """Of prompts that ran in one stream: what the sequences of each kind saw, one by one, from their first token on."""
    row: Row = {}
    for kind in dict.fromkeys(case.kind for case in plan.cases):
        answers = [answer for sample in samples for case, answer in zip(plan.cases, sample.answers, strict=False)
                   if case.kind == kind]  # fmt: skip
        seconds, steps = sum(answer.decode_ns for answer in answers) / 1e9, sum(answer.steps for answer in answers)
        tokens = sum(answer.tokens for answer in answers)
        if seconds:
            row[f"tokens_per_s_{kind}"] = round(tokens / seconds, 3)
            row[f"acceptance_length_{kind}"] = round(tokens / steps, 3)
    return row


def _tuned(plan: Plan, lookaheads: str) -> list[Mode]:
    """Each drafting mode with the lookahead that was fastest on one wave at the first batch size."""
    candidates = positive_list(lookaheads, "--tune")
    batch = plan.batches[0]
    wave = plan.waves(batch)[0]
    chosen = []
    for mode in plan.modes:
        if not mode.config.speculation.enabled:
            chosen.append(mode)
            continue
        tried: list[tuple[float, Mode]] = []
        for lookahead in candidates:
            speculation = replace(mode.config.speculation, lookahead=lookahead)
            variant = Mode(mode.name, replace(mode.config, speculation=speculation))
            with OwnEngine(variant) as engine:
                engine.run(wave[:batch], replace(plan.sampling, max_tokens=_WARM_UP_TOKENS))
                tried.append((engine.run(wave, plan.sampling).decode_tokens_per_s, variant))
        speed, best = max(tried, key=lambda pair: pair[0])
        kept = best.config.speculation.lookahead
        print(f"note: {mode.name}: lookahead {kept} of {lookaheads} ({speed:.1f} tokens/s)", file=sys.stderr)
        chosen.append(best)
    return chosen


def _print_answers(plan: Plan, model: str, answers: Sequence[Sequence[int]]) -> None:
    tokenizer = Tokenizer.load(catalogue.resolve_model(model))
    for case, answer in zip(plan.cases, answers, strict=False):
        print(f"Prompt: {case.text!r}\nGeneration: {tokenizer.decode(answer, skip_special_tokens=True)!r}\n")
