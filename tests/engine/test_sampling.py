"""Temperature above 0, through whole engines: seeded answers repeat whoever drafts, unseeded ones keep their law."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ssd_ascend.core.sampling import SamplingParams
from ssd_ascend.speculation.registry import DRAFTERS, SPECULATORS
from ssd_ascend.weights.loader import load_model, read_config
from tests.engine.harness import prompts_of, run, speculation, write_pair
from tests.toys import build_context, prefill_batch
from tests.toys import run as forward

COMBINATIONS = [
    (speculator, drafter) for speculator in SPECULATORS.names() if speculator != "none" for drafter in DRAFTERS.names()
]
SHAPED: list[dict[str, Any]] = [
    {"temperature": 0.8},
    {"temperature": 1.3, "top_p": 0.9, "top_k": 12},
    {"temperature": 1.0, "min_p": 0.02, "frequency_penalty": 0.7, "presence_penalty": 0.3, "repetition_penalty": 1.2},
    {"temperature": 1.0, "logit_bias": {5: 4.0, 7: -100.0}, "min_tokens": 6, "ignore_eos": False},
]


def seeded(seed: int, **options: Any) -> SamplingParams:
    """A request that brought its seed."""
    return SamplingParams(**{"max_tokens": 24, "ignore_eos": True, "seed": seed, "reproducible": True, **options})


@pytest.mark.parametrize("options", SHAPED, ids=lambda o: ",".join(o))
@pytest.mark.parametrize(("speculator", "drafter"), COMBINATIONS)
def test_a_seeded_answer_is_that_of_plain_decoding(
    pair: Path, speculator: str, drafter: str, options: dict[str, Any]
) -> None:
    """Token for token, alone and in a crowd, whatever is drafted (B13)."""
    prompts = prompts_of([9, 20, 3, 31, 17])
    params = [seeded(seed, **options) for seed in range(5)]
    plain = run(pair, prompts, params)
    assert run(pair, prompts, params, speculation(pair, speculator, drafter)).tokens == plain.tokens
    alone = run(pair, prompts[:1], params[:1], speculation(pair, speculator, drafter))
    assert alone.tokens == plain.tokens[:1]
    other = run(pair, prompts[:1], [seeded(99, **options)])
    assert other.tokens != plain.tokens[:1]


def test_coupled_drafts_are_accepted_as_often_as_laws_agree(pair: Path) -> None:
    """The target as its own draft: every coupled draft stands, because both draw with one number."""
    config = speculation(pair, "sd", "model", draft=str(pair / "target"))
    stats = run(pair, prompts_of([9, 20]), [seeded(1), seeded(2)], config).stats.speculation
    assert stats.drafted == stats.accepted > 0


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pair over 6 tokens whose draft is far off: many rejections, many branches."""
    return write_pair(tmp_path_factory.mktemp("tiny"), "llama", vocab=6, noise=0.4)


LAWS: list[tuple[str, str, dict[str, Any]]] = [
    ("none", "model", {}),
    ("sd", "model", {}),
    ("sd", "eagle3", {}),
    ("sd", "ngram", {}),
    ("ssd", "model", {}),
    ("ssd", "model", {"on_miss": "decline", "fan_out": 1}),
    ("ssd", "model", {"cache_bias": 0.3, "on_miss": "draft"}),
    ("ssd", "model", {"draft_temperature": 0.4}),
    ("ssd", "model", {"fan_out": "auto", "on_miss": "ngram"}),
    ("ssd", "eagle3", {}),
    ("ssd", "ngram", {}),
]
SHORT = [("sd", "model", {}), ("ssd", "model", {}), ("ssd", "eagle3", {})]


@pytest.mark.parametrize(("speculator", "drafter", "options"), SHORT, ids=str)
def test_the_law_of_unseeded_answers(tiny: Path, speculator: str, drafter: str, options: dict[str, Any]) -> None:
    """4000 answers: the right law is off by about 0.04 (36 cells); one that kept its drafts regardless, by over 0.1."""
    assert _total_variation(tiny, speculator, drafter, options, count=4000) < 0.075


@pytest.mark.slow
@pytest.mark.parametrize(("speculator", "drafter", "options"), LAWS, ids=str)
def test_the_law_of_unseeded_answers_at_length(
    tiny: Path, speculator: str, drafter: str, options: dict[str, Any]
) -> None:
    """60 000 answers, for every way to draft: the right law is off by about 0.01."""
    assert _total_variation(tiny, speculator, drafter, options, count=60_000) < 0.02


def _total_variation(pair: Path, speculator: str, drafter: str, options: dict[str, Any], *, count: int) -> float:
    """Between the joint law of answers' tokens 3 and 4, which come from drafts, and the target's own by enumeration."""
    prompt, temperature, vocab = [3, 4, 3, 5, 4, 3, 4], 0.9, 6
    config = speculation(pair, speculator, drafter, **{"lookahead": 2, **options})
    params = [
        SamplingParams(temperature=temperature, max_tokens=6, ignore_eos=True, seed=1000 + i) for i in range(count)
    ]
    result = run(pair, [prompt] * count, params, config, max_num_seqs=250, max_batched_tokens=2500, num_kv_blocks=600)
    assert speculator == "none" or result.stats.speculation.drafted > 0
    observed = torch.zeros(vocab, vocab, dtype=torch.float64)
    for own in result.tokens:
        observed[own[2], own[3]] += 1.0 / count
    return 0.5 * float((observed - _third_and_fourth(pair, prompt, vocab, temperature)).abs().sum())


def _third_and_fourth(pair: Path, prompt: list[int], vocab: int, temperature: float) -> torch.Tensor:
    """P(third, fourth token) by the target alone: float64 [V, V]."""
    config = read_config(pair / "target")
    ctx = build_context(config)
    model, _ = load_model(pair / "target", ctx, max_positions=64)

    def law(tokens: list[int]) -> torch.Tensor:
        logits = forward(model, ctx, config.num_layers, prefill_batch(tokens)).logits[-1]
        return torch.softmax(logits.double() / temperature, -1)

    joint = torch.zeros(vocab, vocab, dtype=torch.float64)
    first = law(prompt)
    for a in range(vocab):
        second = law([*prompt, a])
        for b in range(vocab):
            third = law([*prompt, a, b])
            for c in range(vocab):
                joint[c] += first[a] * second[b] * third[c] * law([*prompt, a, b, c])
    return joint
