"""Do `sd` and `ssd` with every drafter say what plain decoding says? `python -m bench.gpu --exact 64`.

The text is one that a rounding error would change: a chain of tokens that the layers' noise often breaks, so that many
a token is a near-tie. How many, and how near, is told beside the verdict. Every row is printed as soon as it is known.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.agreement import CORE, Agreement, successor
from bench.cases import Case
from bench.checkpoints import environment, hooked, install, lay_out_draft, lay_out_model
from bench.equality import differences, put_equality
from bench.modes import Mode, OwnEngine, fit_cache, forget_engine
from bench.samples import Sample
from bench.shapes import shape
from ssd_ascend.config.engine import EngineConfig
from ssd_ascend.config.speculation import SpeculationConfig
from ssd_ascend.core.request import EngineRequest
from ssd_ascend.core.sampling import SamplingParams
from ssd_ascend.errors import SsdError
from ssd_ascend.flags import DRAFTERS

DRAFTS = {"llama-3.1-8b": "llama-3.2-1b", "qwen3-32b": "qwen3-0.6b", "qwen3-8b": "qwen3-0.6b", "tiny": "tiny-draft"}
"""The shape of the draft model for each target."""
_NOISE = 0.28
"""Of the target's layers: about one token in ten is theirs and not the chain's."""
_CYCLES, _FEW = 0.1, 48
"""Noise and tokens of a chain that comes round, for who can only draft what was said before."""
_AGREEMENT = Agreement(accepted=0.8, foreseen=0.85)
_NEAR = 0.05
"""Nats between the first and the second choice that count as a near-tie."""
Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What is to be compared: `prompts` answers of `tokens` tokens, all at once."""

    shape: str
    device: str
    prompts: int
    tokens: int
    prompt_len: int = 128
    drafters: Sequence[str] = DRAFTERS
    layers: int | None = None


def compare(wish: Wish) -> Iterator[Row]:
    """A row for plain decoding of each text, and one for `sd` and `ssd` with each drafter."""
    install()
    with tempfile.TemporaryDirectory() as name, environment(hooked(Path(name) / "hook")):
        folder = Path(name)
        for drafters in (["eagle3", "model"], ["ngram"]):
            wanted = [drafter for drafter in drafters if drafter in wish.drafters]
            if wanted:
                yield from _of_one_target(wish, folder, wanted)


def _of_one_target(wish: Wish, folder: Path, drafters: Sequence[str]) -> Iterator[Row]:
    cycles = drafters == ["ngram"]
    vocab = shape(wish.shape)["vocab_size"]
    core = min(_FEW if cycles else CORE, vocab * 2 // 3)
    target = lay_out_model(
        folder / f"target-{core}", shape(wish.shape, layers=wish.layers), device_type=wish.device, seed=1,
        noise=_CYCLES if cycles else _NOISE, core=core,
    )  # fmt: skip
    cases = [Case("chain", "", text) for text in _texts(wish, vocab, core, walk=cycles)]
    plain, row = _plain(_mode(wish, target, SpeculationConfig(), "none"), cases, wish)
    yield row | {"text": "cycles" if cycles else "chain"}
    for drafter in drafters:
        draft = _lay_out_draft(wish, folder, target, drafter, core)
        for speculator in ("sd", "ssd"):
            config = SpeculationConfig(
                speculator=speculator, drafter=drafter, draft=draft, lookahead=5 if drafter == "model" else 6, fan_out=3
            )
            yield _speculating(_mode(wish, target, config, f"{speculator}:{drafter}"), cases, wish, plain)


def _texts(wish: Wish, vocab: int, core: int, *, walk: bool) -> list[tuple[int, ...]]:
    """Prompts of random tokens of the core; or a walk along the chain, which has come round by its end."""
    draw, follows = random.Random(5), successor(vocab, core).tolist()
    texts = []
    for _ in range(wish.prompts):
        text = [draw.randrange(core)]
        while len(text) < wish.prompt_len:
            text.append(follows[text[-1]] if walk else draw.randrange(core))
        texts.append(tuple(text))
    return texts


def _lay_out_draft(wish: Wish, folder: Path, target: Path, drafter: str, core: int) -> str | None:
    if drafter == "ngram":
        return None
    data = None if drafter == "eagle3" else shape(DRAFTS[wish.shape])
    agreement = replace(_AGREEMENT, core=core)
    place = folder / ("head" if data is None else "draft")
    return str(lay_out_draft(place, target, data, device_type=wish.device, agreement=agreement, noise=0.1))


def _mode(wish: Wish, target: Path, speculation: SpeculationConfig, name: str) -> Mode:
    longest = wish.prompt_len + wish.tokens
    config = EngineConfig(
        model=str(target), device=wish.device, max_model_len=longest + 16, prefix_cache=False, speculation=speculation
    )
    return Mode(name, fit_cache(config, batch=wish.prompts, tokens=longest))


def _plain(mode: Mode, cases: Sequence[Case], wish: Wish) -> tuple[Sample, Row]:
    """The answers; the same again, asked with log-probabilities, which goes another way and says how near ties were."""
    began = time.perf_counter()
    with OwnEngine(mode) as engine:
        sample = engine.run(cases, _sampling(wish))
        again, gaps = _with_gaps(engine, cases, wish)
    forget_engine()
    distinct = len({token for answer in sample.outputs for token in answer})
    if distinct < 4:
        raise SsdError(f"the answers consist of {distinct} tokens: these are no proper weights")
    return sample, _row(mode, sample, began) | {
        "answers": len(cases),
        "same_answers": sum(map(list.__eq__, sample.outputs, again)),
        "distinct_tokens": distinct,
        "near_ties": sum(gap < _NEAR for gap in gaps),
        "smallest_gap_nats": round(min(gaps), 6),
        "of_tokens": len(gaps),
    }


def _with_gaps(engine: OwnEngine, cases: Sequence[Case], wish: Wish) -> tuple[list[list[int]], list[float]]:
    sampling = replace(_sampling(wish), logprobs=2)
    first = 1 << 20
    for index, case in enumerate(cases):
        request = EngineRequest(id=first + index, prompt_token_ids=list(case.token_ids), sampling=sampling)
        engine.engine.submit(request)
    answers: list[list[int]] = [[] for _ in cases]
    gaps: list[float] = []
    while engine.engine.has_work:
        for delta in engine.engine.step():
            answers[delta.seq_id - first] += delta.token_ids
            gaps += [entry.top[0][1] - entry.top[1][1] for entry in delta.logprobs or ()]
    return answers, gaps


def _speculating(mode: Mode, cases: Sequence[Case], wish: Wish, plain: Sample) -> Row:
    began = time.perf_counter()
    with OwnEngine(mode) as engine:
        sample = engine.run(cases, _sampling(wish))
        sick = engine.engine.health()
    forget_engine()
    if sick is not None:
        raise SsdError(f"{mode.name}: {sick}")
    row = _row(mode, sample, began)
    put_equality(row, len(cases), differences([cases], [plain], [sample]), None)
    return row


def _row(mode: Mode, sample: Sample, began: float) -> Row:
    drafting = sample.drafting
    return {
        "mode": mode.name,
        "batch": len(sample.outputs),
        "ms_per_step": round(sample.ms_per_step, 4),
        "tokens_per_s": round(sample.decode_tokens_per_s, 1),
        "acceptance_length": round(sample.acceptance_length, 3),
        "drafted": drafting.drafted,
        "accepted": drafting.accepted,
        **({"hit_rate": round(drafting.hits / drafting.lookups, 3)} if drafting.lookups else {}),
        "seconds": round(time.perf_counter() - began, 1),
    }


def _sampling(wish: Wish) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=wish.tokens, ignore_eos=True, seed=0, reproducible=False)
