"""Constrained answers are what was asked for, and the same whoever drafts, alone or among free ones."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from ssd_ascend.core.grammar import Grammar
from ssd_ascend.core.sampling import SamplingParams
from ssd_ascend.core.speculation import Source
from ssd_ascend.errors import RequestError
from ssd_ascend.text import Tokenizer
from tests.engine.harness import Run, make_engine, prompts_of, run, speculation
from tests.structured.models import NO_END, NO_SPACES, write_bytes_pair
from tests.structured.schemas import SCHEMAS

pytest.importorskip("llguidance")

SPECULATED = [(when, what) for when in ("sd", "ssd") for what in ("model", "eagle3", "ngram")]
FEW = [*list(SCHEMAS)[:30:2], *list(SCHEMAS)[30::20]]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    return write_bytes_pair(tmp_path_factory.mktemp("bytes"))


@pytest.fixture(scope="module")
def tokenizer(pair: Path) -> Tokenizer:
    return Tokenizer.load(pair / "target")


def constrained(names: list[str], **more: Any) -> list[SamplingParams]:
    options: dict[str, Any] = {"temperature": 0.0, "max_tokens": 300, "logit_bias": NO_SPACES, **more}
    return [SamplingParams(**options, seed=i, grammar=Grammar.json_schema(SCHEMAS[n])) for i, n in enumerate(names)]


def answers(pair: Path, sampling: list[SamplingParams], when: str = "none", what: str = "model", **options: Any) -> Run:
    prompts = prompts_of([5 + i % 7 for i in range(len(sampling))], vocab=250)
    config = speculation(pair, when, what) if when != "none" else None
    return run(pair, prompts, sampling, config, **options)


def assert_valid(names: list[str], found: Run, tokenizer: Tokenizer) -> None:
    for name, tokens, last in zip(names, found.tokens, found.last, strict=True):
        assert last.finish_reason == "stop", (name, last)
        text = tokenizer.decode(tokens, skip_special_tokens=True)
        jsonschema.validate(json.loads(text), SCHEMAS[name], format_checker=jsonschema.FormatChecker())


@pytest.fixture(scope="module")
def plain(pair: Path) -> Run:
    return answers(pair, constrained(FEW))


def test_answers_validate(plain: Run, tokenizer: Tokenizer) -> None:
    assert_valid(FEW, plain, tokenizer)


@pytest.mark.parametrize(("when", "what"), SPECULATED)
def test_who_drafts_changes_nothing(pair: Path, plain: Run, when: str, what: str) -> None:
    found = answers(pair, constrained(FEW), when, what)
    assert found.tokens == plain.tokens
    if what == "model":
        assert any(len(delta.token_ids) > 2 for deltas in found.deltas for delta in deltas)


@pytest.mark.parametrize(("when", "what"), SPECULATED)
def test_seeded_samples_are_plain_decodings(pair: Path, tokenizer: Tokenizer, when: str, what: str) -> None:
    names = FEW[:12]
    sampling = constrained(names, temperature=1.3, top_p=0.95, reproducible=True)
    found = answers(pair, sampling, when, what)
    assert_valid(names, found, tokenizer)
    assert found.tokens == answers(pair, sampling).tokens


@pytest.mark.parametrize("when", ["sd", "ssd"])
def test_samples_validate(pair: Path, tokenizer: Tokenizer, when: str) -> None:
    """Free sampling goes through the ratio test, whose residual must keep to the grammar too."""
    names = FEW[:16]
    assert_valid(names, answers(pair, constrained(names, temperature=1.0), when), tokenizer)


@pytest.mark.slow
@pytest.mark.parametrize("when", ["none", "sd", "ssd"])
def test_two_hundred_schemas(pair: Path, tokenizer: Tokenizer, when: str) -> None:
    names = list(SCHEMAS)
    assert len(names) == 200
    greedy, seeded = constrained(names), constrained(names, temperature=1.0, reproducible=True)
    for sampling in (greedy, seeded):
        found = answers(pair, sampling, when)
        assert_valid(names, found, tokenizer)
        assert found.tokens == answers(pair, sampling).tokens


@pytest.mark.parametrize("when", ["none", "sd", "ssd"])
def test_free_neighbours_stay_free(pair: Path, when: str) -> None:
    """Every other row is constrained; the others answer as they do alone, penalties and all."""
    free = [
        SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True),
        SamplingParams(
            temperature=0.9, seed=5, max_tokens=20, ignore_eos=True, frequency_penalty=0.7, reproducible=True
        ),
    ]
    held = constrained(FEW[:2])
    mixed = [held[0], free[0], held[1], free[1]]
    prompts = prompts_of([6, 7, 8, 9], vocab=250)
    config = speculation(pair, when) if when != "none" else None
    together = run(pair, prompts, mixed, config)
    for prompt, params, tokens in zip(prompts, mixed, together.tokens, strict=True):
        assert run(pair, [prompt], params).tokens == [tokens]


@pytest.mark.parametrize("when", ["none", "sd", "ssd"])
def test_regex_and_lark(pair: Path, tokenizer: Tokenizer, when: str) -> None:
    pattern, calls = r"(cat|dog) [0-9]{2,4}!", 'start: "(" start? ")" | "x"'
    grammars = [Grammar.regex(pattern), Grammar.lark(calls)]
    sampling = [SamplingParams(temperature=1.0, seed=3, max_tokens=40, grammar=grammar) for grammar in grammars]
    word, nest = [tokenizer.decode(tokens, skip_special_tokens=True) for tokens in answers(pair, sampling, when).tokens]
    assert re.fullmatch(pattern, word)
    assert re.fullmatch(r"\(*x?\)*", nest)
    assert nest.count("(") == nest.count(")")


@pytest.mark.parametrize("when", ["none", "sd", "ssd"])
def test_masks_meet_preemption(pair: Path, tokenizer: Tokenizer, when: str) -> None:
    """A preempted sequence gets a fresh matcher, which reads what was already said."""
    grammar = Grammar.json_schema({"type": "array", "items": {"type": "integer"}, "minItems": 25, "maxItems": 30})
    sampling = [SamplingParams(temperature=0.0, max_tokens=100, grammar=grammar, logit_bias=NO_SPACES)] * 5
    found = answers(pair, sampling, when, num_kv_blocks=12)
    assert found.stats.preemptions > 0
    assert found.tokens == answers(pair, sampling).tokens
    for tokens in found.tokens:
        assert set(tokenizer.decode(tokens, skip_special_tokens=True)) <= set("[]-,0123456789")


def test_length_logprobs_and_stop_tokens(pair: Path, tokenizer: Tokenizer) -> None:
    """The other ways to end, and the model's own log-probabilities, are as for free answers."""
    grammar = Grammar.json_schema({"type": "string", "minLength": 50})
    (quote,) = tokenizer.encode('"', add_special_tokens=False)
    cut = SamplingParams(temperature=0.0, max_tokens=7, grammar=grammar, logprobs=2)
    stopped = SamplingParams(temperature=0.0, max_tokens=7, grammar=grammar, stop_token_ids=(quote,))
    found = answers(pair, [cut, stopped], "sd")
    assert [last.finish_reason for last in found.last] == ["length", "stop"]
    assert found.tokens[1] == [quote]
    entries = [entry for delta in found.deltas[0] for entry in delta.logprobs or []]
    assert [entry.token for entry in entries] == found.tokens[0]
    assert all(entry.logprob < 0 and entry.top[0][1] >= entry.logprob for entry in entries)


def test_drafts_know_the_grammar(pair: Path) -> None:
    """A draft model that is the target itself, under the same mask, is never wrong."""
    exact = write_bytes_pair(pair / "exact", noise=0.0)
    names = [name for name in FEW if name not in ("true", "one digit")]
    found = answers(exact, constrained(names), "sd")
    spoken = [delta for deltas in found.deltas for delta in deltas if delta.finish_reason is None]
    assert sum(1 for delta in spoken for source in delta.sources or [] if source == Source.MISS) > 100
    assert found.stats.speculation.accepted > 0.9 * found.stats.speculation.drafted - 4 * len(names)


UNSOUND = {
    "no pattern": Grammar.regex("("),
    "begins with itself": Grammar.lark("start: start"),
    "rules of each other": Grammar.lark("start: a\na: a"),
    "is its own part": Grammar.json_schema({"$ref": "#"}),
}


@pytest.mark.parametrize("what", UNSOUND)
def test_an_unsound_grammar_is_refused_and_the_engine_goes_on(pair: Path, what: str) -> None:
    """Also one that compiles, and cannot begin."""
    engine = make_engine(pair)
    try:
        from ssd_ascend.core.request import EngineRequest

        bad = SamplingParams(temperature=0.0, max_tokens=5, grammar=UNSOUND[what])
        with pytest.raises(
            RequestError, match=r"(regular expression|grammar|JSON schema) cannot be enforced"
        ) as refused:
            engine.submit(EngineRequest(id=0, prompt_token_ids=[5, 6], sampling=bad))
        assert refused.value.param == "grammar"
        assert not engine.has_work
    finally:
        engine.close()


@pytest.mark.parametrize("field", [{"min_tokens": 2}, {"ignore_eos": True}])
def test_what_would_forbid_the_end_is_refused(field: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as refused:
        SamplingParams(grammar=Grammar.json_object(), max_tokens=9, **field)
    assert refused.value.param in field


@pytest.mark.parametrize("when", ["none", "sd", "ssd"])
def test_a_grammar_that_explodes_ends_its_own_answer(pair: Path, when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a hostile grammar may cost per step is bounded; its answer ends with an error, its neighbour goes on."""
    from ssd_ascend.structured import compiler

    monkeypatch.setattr(compiler, "_LIMITS", {"step_max_items": 40})
    grammar = Grammar.lark('start: a\na: a a | "x" | "y"')
    hostile = SamplingParams(temperature=0.0, max_tokens=60, grammar=grammar, logit_bias=NO_END)
    free = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    config = speculation(pair, when) if when != "none" else None
    prompts = prompts_of([6, 7], vocab=250)
    found = run(pair, prompts, [hostile, free], config)
    assert found.last[0].finish_reason == "error"
    assert "grammar cannot be followed" in (found.last[0].error or "")
    assert found.last[0].refused
    assert not found.last[1].refused
    assert found.last[1].finish_reason == "length"
    assert found.tokens[1] == run(pair, [prompts[1]], free).tokens[0]
