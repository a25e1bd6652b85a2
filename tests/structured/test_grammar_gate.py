"""While a large grammar is compiled everybody else's steps go on, and what grammars hold in an engine has bounds."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ssd_ascend.core.grammar import Grammar
from ssd_ascend.core.request import EngineRequest, TokenDelta
from ssd_ascend.core.sampling import SamplingParams
from ssd_ascend.engine.engine import Engine
from ssd_ascend.engine.grammar_gate import GrammarGate
from ssd_ascend.errors import RequestError
from ssd_ascend.runtime.row_context import RowContext
from ssd_ascend.runtime.token_masks import TokenMasks
from ssd_ascend.structured import compiler as module
from ssd_ascend.structured.compiler import GrammarCompiler
from tests.engine.harness import make_engine
from tests.structured.models import write_bytes_pair

pytest.importorskip("llguidance")

SLOW, BAD, QUICK = Grammar.regex("(ab)+"), Grammar.regex("("), Grammar.regex("[a-z]+")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bytes_pair(tmp_path_factory.mktemp("bytes"))


class Delayed:
    """Holds the compilation of `SLOW` and `BAD` up until it may go on."""

    def __init__(self, compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
        self.may_go = threading.Event()
        self.count = 0
        self._compile = compiler._compile
        monkeypatch.setattr(compiler, "_compile", self)

    def __call__(self, grammar: Grammar) -> Any:
        self.count += 1
        assert grammar is QUICK or self.may_go.wait(60)
        return self._compile(grammar)


@pytest.fixture
def engine(pair: Path) -> Iterator[Engine]:
    made = make_engine(pair)
    yield made
    made.close()


@pytest.fixture
def delayed(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Delayed]:
    assert engine.grammars is not None
    engine.grammars.warm()
    delay = Delayed(engine.grammars, monkeypatch)
    yield delay
    delay.may_go.set()


def request(seq_id: int, grammar: Grammar | None, max_tokens: int = 6) -> EngineRequest:
    free = grammar is None
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, grammar=grammar, ignore_eos=free)
    return EngineRequest(id=seq_id, prompt_token_ids=[5, 6, 7], sampling=sampling)


def run_until(engine: Engine, seq_id: int, most: int = 3000) -> list[TokenDelta]:
    """All deltas until a sequence ends."""
    deltas: list[TokenDelta] = []
    for _ in range(most):
        deltas += engine.step()
        if any(delta.seq_id == seq_id and delta.finish_reason for delta in deltas):
            return deltas
    raise AssertionError(f"sequence {seq_id} does not end")


def test_others_go_on_while_a_grammar_is_compiled(engine: Engine, delayed: Delayed) -> None:
    engine.submit(request(1, SLOW))
    engine.submit(request(2, None))
    assert engine.stats().waiting == 2
    assert {delta.seq_id for delta in run_until(engine, 2)} == {2}
    assert engine.has_work
    assert engine.step() == []
    delayed.may_go.set()
    assert sum(len(delta.token_ids) for delta in run_until(engine, 1)) > 0
    assert not engine.has_work
    assert engine.stats().waiting == 0


def test_one_that_turns_out_unsound_is_refused_late(engine: Engine, delayed: Delayed) -> None:
    engine.submit(request(1, BAD))
    delayed.may_go.set()
    (last,) = run_until(engine, 1)
    assert last.refused
    assert "unclosed group" in (last.error or "")
    with pytest.raises(RequestError, match="unclosed group"):  # known by now
        engine.submit(request(2, BAD))
    assert not engine.has_work


def test_who_waits_for_a_grammar_can_leave(engine: Engine, delayed: Delayed) -> None:
    engine.submit(request(1, SLOW))
    engine.abort([1, 77])
    (last,) = engine.step()
    assert (last.seq_id, last.finish_reason, last.refused) == (1, "abort", False)
    assert not engine.has_work
    delayed.may_go.set()
    engine.submit(request(2, QUICK))
    run_until(engine, 2)


def test_a_grammar_is_held_until_its_sequence_ends(
    engine: Engine, delayed: Delayed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_KEPT", 0)
    delayed.may_go.set()
    for seq_id in (1, 2):
        engine.submit(request(seq_id, SLOW))
    engine.step()
    for i in range(3):
        with pytest.raises(RequestError):
            engine.submit(request(10 + i, Grammar.regex(f"({i}")))
    count = delayed.count
    engine.submit(request(3, SLOW))
    run_until(engine, 3)
    assert delayed.count == count
    assert engine.grammars is not None
    assert not engine.grammars._held


def compiler_for(pair: Path) -> GrammarCompiler:
    from ssd_ascend.text import Tokenizer

    tokenizer = Tokenizer.load(pair / "target")
    return GrammarCompiler(lambda: tokenizer, vocab_size=tokenizer.vocab_size, eos_ids=tokenizer.eos_ids)


def test_heavy_grammars_wait_for_room_and_light_ones_do_not(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = compiler_for(pair)
    heavy = [Grammar.regex("a{4000}b"), Grammar.regex("a{4000}c")]
    for grammar in (*heavy, QUICK):
        compiler.matcher(grammar)
    monkeypatch.setattr(module, "_LIGHT_S", (compiler.cost_s(QUICK) + min(map(compiler.cost_s, heavy))) / 2)
    monkeypatch.setattr(module, "_HELD_S", 0.0)
    gate = GrammarGate(compiler)
    assert gate.lets_in(request(1, heavy[0]))  # nobody holds anything
    assert gate.lets_in(request(2, heavy[0]))
    assert not gate.lets_in(request(3, heavy[1]))
    assert gate.lets_in(request(4, QUICK))
    gate.ended([1, 4])
    assert gate.take(is_idle=False) == ([], [])
    gate.ended([2])
    begin, refused = gate.take(is_idle=True)
    assert ([each.id for each in begin], refused, len(gate)) == ([3], [], 0)


def test_drafters_do_not_wait_for_a_grammar(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = compiler_for(pair)
    compiler.warm()
    delay = Delayed(compiler, monkeypatch)
    sampling = SamplingParams(temperature=0.0, max_tokens=6, grammar=SLOW)
    masks = TokenMasks(compiler, keeps_alive=True)
    row = RowContext(seq_id=1, token_ids=[5, 6], num_prompt_tokens=2, params=sampling, seed=0, position=2, drafts=())
    assert (masks.allowed([row]) == -1).all()
    delay.may_go.set()
    assert compiler.is_ready(SLOW, patience_s=60)
    assert not (masks.allowed([row]) == -1).all()
