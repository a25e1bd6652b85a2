"""Engines that run to the end over the same prompts, greedily: tokens, how close each choice was, how drafts fared.

Plain decoding, and both speculators with each drafter there are weights for. The draft worker lives in the engine's
process, where a run is the same every time. Called by `recording`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ssd_ascend.config.engine import EngineConfig
from ssd_ascend.config.speculation import SpeculationConfig
from ssd_ascend.core.request import EngineRequest, TokenDelta
from ssd_ascend.core.sampling import SamplingParams
from ssd_ascend.engine.builder import build_engine
from ssd_ascend.engine.engine import Engine

SPECULATORS = ("sd", "ssd")
_TOKENS = 48
_LOOKAHEAD = 4


@dataclass(slots=True)
class Trace:
    """One answer. rivals: per token the best other token and by how many nats it lost (0 is a tie).

    steps: per step after the prompt (drafts offered, drafts accepted, cache hits).
    """

    tokens: list[int] = field(default_factory=list)
    rivals: list[tuple[int, float]] = field(default_factory=list)
    steps: list[tuple[int, int, int]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Pair:
    """A target and its drafts: drafter name -> weights, None for a drafter without any."""

    target: str
    drafts: dict[str, str | None]


def run_all(pair: Pair, prompts: Sequence[list[int]], device: str, dtype: str) -> Iterator[tuple[str, list[Trace]]]:
    """Every way of decoding: its name and an answer for each prompt."""
    yield "plain", _run(pair, device, dtype, SpeculationConfig(), prompts)
    for speculator in SPECULATORS:
        for drafter, draft in pair.drafts.items():
            config = SpeculationConfig(
                speculator=speculator,
                drafter=drafter,
                draft=draft,
                lookahead=_LOOKAHEAD,
                fan_out=2,
                on_miss="draft",  # the one rule that asks no clock
                worker="inprocess",
                worker_timeout_s=600.0,
            )
            yield f"{speculator} {drafter}", _run(pair, device, dtype, config, prompts)


def _run(
    pair: Pair, device: str, dtype: str, speculation: SpeculationConfig, prompts: Sequence[list[int]]
) -> list[Trace]:
    engine = build_engine(
        EngineConfig(
            model=pair.target,
            device=device,
            dtype=dtype,
            max_model_len=256,
            max_num_seqs=4,
            max_batched_tokens=256,
            speculation=speculation,
        )
    )
    try:
        return _drive(engine, prompts)
    finally:
        engine.close()


def _drive(engine: Engine, prompts: Sequence[list[int]]) -> list[Trace]:
    sampling = SamplingParams(temperature=0.0, max_tokens=_TOKENS, ignore_eos=True, logprobs=2, seed=0)
    for i, prompt in enumerate(prompts):
        engine.submit(EngineRequest(id=i, prompt_token_ids=prompt, sampling=sampling))
    traces = [Trace() for _ in prompts]
    before: dict[int, TokenDelta] = {}
    while engine.has_work:
        for delta in engine.step():
            _add(traces[delta.seq_id], delta, before.get(delta.seq_id))
            before[delta.seq_id] = delta
    return traces


def _add(trace: Trace, delta: TokenDelta, before: TokenDelta | None) -> None:
    trace.tokens += delta.token_ids
    for entry in delta.logprobs or ():
        rival, logprob = next(pair for pair in entry.top if pair[0] != entry.token)
        trace.rivals.append((rival, round(entry.logprob - logprob, 5)))
    if before is not None and before.stats is not None and delta.stats is not None:
        new, old = delta.stats, before.stats
        trace.steps.append((new.drafted - old.drafted, new.accepted - old.accepted, new.hits - old.hits))


def pair_of(folder: Path) -> Pair:
    """The three checkpoints of this room."""
    drafts: dict[str, str | None] = {"model": str(folder / "model"), "eagle3": str(folder / "eagle3"), "ngram": None}
    return Pair(str(folder / "target"), drafts)
