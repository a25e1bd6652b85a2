"""No grammar ends, freezes or fills the front end: those that try end a process of its own, and are told so."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from ssd_ascend.core.grammar import Grammar
from ssd_ascend.errors import ConfigError, RequestError
from ssd_ascend.serve.reasoning import Thinking, after_thoughts
from ssd_ascend.serve.tools.formats import HERMES, LLAMA3, ToolFormat
from ssd_ascend.serve.tools.offer import Function, ToolOffer
from ssd_ascend.structured import checker as module
from ssd_ascend.structured.checker import CheckerBusyError, CheckerError, CheckLimits, GrammarChecker
from ssd_ascend.structured.compiler import GrammarCompiler
from ssd_ascend.structured.reasons import SIMPLIFY, refusal
from ssd_ascend.text import Tokenizer
from tests.unit.text_toys import byte_level_backend, load, write_directory

pytest.importorskip("llguidance")

FINE = Grammar.json_schema({"type": "object", "properties": {"a": {"type": "integer"}}})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checked")
    write_directory(path, byte_level_backend(), eos_token="</s>")
    return path


def with_checker(model: Path, use: Callable[[GrammarChecker], Awaitable[None]], **limits: Any) -> None:
    async def work() -> None:
        checker = GrammarChecker(lambda: model, CheckLimits(**limits))
        try:
            await use(checker)
        finally:
            await checker.close()

    asyncio.run(work())


async def refused(checker: GrammarChecker, grammar: Grammar, param: str = "regex") -> str:
    with pytest.raises(RequestError) as error:
        await checker.check(grammar, param=param)
    assert error.value.param == param
    return str(error.value)


def references(length: int) -> Grammar:
    links: dict[str, Any] = {
        f"a{i}": {"type": "array", "prefixItems": [{"$ref": f"#/$defs/a{i + 1}"}]} for i in range(length)
    }
    return Grammar.json_schema({"$ref": "#/$defs/a0", "$defs": {**links, f"a{length}": {"type": "string"}}})


def rules(length: int, letter: str) -> Grammar:
    links = "\n".join(f'{letter}{i}: "x" {letter}{i + 1}' for i in range(length))
    return Grammar.lark(f'start: {letter}0\n{links}\n{letter}{length}: "z"')


CHAINS = {"references": references(3000), "rules": rules(6000, "a"), "terminals": rules(6000, "A")}


def test_chains_end_the_checker_and_nobody_else(model: Path) -> None:
    async def use(checker: GrammarChecker) -> None:
        for what, grammar in CHAINS.items():
            await checker.check(FINE, param="regex")
            assert "too long a chain" in await refused(checker, grammar, "response_format"), what
            assert checker.pid is None
        await checker.check(Grammar.json_object(), param="regex")
        before = checker.pid
        assert before is not None
        for grammar in CHAINS.values():  # remembered
            await refused(checker, grammar, "tools")
        assert checker.pid == before
        await checker.check(references(50), param="regex")

    with_checker(model, use)


def test_time_and_memory_are_bounded(model: Path) -> None:
    divisor = Grammar.json_schema({"type": "integer", "multipleOf": 10_000_019})

    async def in_time(checker: GrammarChecker) -> None:
        assert "is too much work: it takes over 0.3 s" in await refused(checker, divisor, "response_format")
        assert checker.pid is None

    async def in_memory(checker: GrammarChecker) -> None:
        assert "is too much work: it takes over 24 MB" in await refused(checker, Grammar.regex("a" * 1_000_000))
        await checker.check(FINE, param="regex")

    with_checker(model, in_time, cpu_s=0.3, memory_bytes=1 << 30)
    with_checker(model, in_memory, memory_bytes=24 << 20)


HEAVY = {
    "a long repeat": Grammar.regex("a{1000000}"),
    "nested repeats": Grammar.regex("((((a{100}){100}){100}){100}){100}"),
    "a long literal": Grammar.regex("a" * 1_000_000),
    "many alternatives": Grammar.lark("start: " + " | ".join(f'"w{i}"' for i in range(90_000))),
}


@pytest.mark.parametrize("what", HEAVY)
def test_heavy_ones_are_too_much_work(model: Path, what: str) -> None:
    async def use(checker: GrammarChecker) -> None:
        said = await refused(checker, HEAVY[what])
        assert "is too much work" in said
        assert "make it smaller" in said
        assert "panic" not in said

    with_checker(model, use, cpu_s=0.5)


NOTHING = {
    "a class of none": Grammar.regex(r"[^\s\S]"),
    "rules of each other": Grammar.lark("start: a\na: b\nb: a"),
    "is its own part": Grammar.json_schema({"$ref": "#"}),
}


def test_what_nothing_can_match_is_told_so(model: Path) -> None:
    async def use(checker: GrammarChecker) -> None:
        for what, grammar in NOTHING.items():
            said = await refused(checker, grammar)
            assert "no text at all matches it" in said, what
            assert "NoExtension" not in said
            assert "verbose" not in said
        assert (await refused(checker, Grammar.regex("("))).startswith(
            "the regular expression cannot be enforced: regex parse error: unclosed group"
        )
        assert "start:" not in await refused(checker, Grammar.regex("a(?=b)"))
        named = Grammar.lark("start: fuel_limit_exceeded")
        assert (await refused(checker, named)).startswith("the grammar cannot be enforced: at 1(8): unknown name")
        deep = '{"items":' * 5000 + "{}" + "}" * 5000
        await refused(checker, Grammar(FINE.kind, deep))
        await refused(checker, Grammar.regex("\ud800"))
        await refused(checker, Grammar.regex("a" * (1 << 20) + "a"))

    with_checker(model, use)


def test_a_panic_is_not_shown() -> None:
    """Only one that takes longer than the checker allows was ever seen; such a message is a page of another's code."""
    said = refusal(
        Grammar.lark("start: a"), "panic: index out of bounds\n   0: backtrace::symbolize\n   1: derivre::ast"
    )
    assert str(said) == f"the grammar is too much work ({SIMPLIFY})"
    assert "unknown name" in str(refusal(Grammar.lark("start: panic"), 'at 1(8): unknown name: "panic"'))


def of_tools(format_: ToolFormat, *functions: Function) -> Grammar:
    grammar = format_.grammar(ToolOffer(functions, must_call=True))
    assert grammar is not None
    return grammar


def test_our_own_grammar_is_not_shown(model: Path) -> None:
    """It names the tool, or what the client sent, instead."""
    good, bad = Function(name="now"), Function(name="find.it", parameters={"type": "foo"}, strict=True)

    async def use(checker: GrammarChecker) -> None:
        for format_ in (HERMES, LLAMA3):
            said = await refused(checker, of_tools(format_, good, bad), "tools")
            assert said == "the schema of the parameters of the tool 'find.it' cannot be enforced: Invalid type: foo"
        schema = after_thoughts(Grammar.json_schema({"type": "foo"}), Thinking.MAY)
        assert await refused(checker, schema) == "the JSON schema cannot be enforced: Invalid type: foo"
        regex = after_thoughts(Grammar.regex("a(?=b)"), Thinking.MAY)
        assert (await refused(checker, regex)).startswith(
            "the regular expression cannot be enforced: regex parse error"
        )

    with_checker(model, use)


def test_one_that_died_between_two_grammars_is_replaced(model: Path) -> None:
    async def use(checker: GrammarChecker) -> None:
        await checker.check(FINE, param="regex")
        before = checker.pid
        assert before is not None
        os.kill(before, signal.SIGKILL)
        await checker.check(Grammar.json_object(), param="regex")
        assert checker.pid not in (None, before)

    with_checker(model, use)


def test_another_is_started_before_anybody_asks(model: Path) -> None:
    async def use(checker: GrammarChecker) -> None:
        await refused(checker, CHAINS["rules"])
        async with asyncio.timeout(60):
            while checker.pid is None:
                await asyncio.sleep(0.01)
        replacement = checker.pid
        await checker.check(FINE, param="regex")
        assert checker.pid == replacement

    async def leave(checker: GrammarChecker) -> None:
        """In the middle of that."""
        await refused(checker, CHAINS["rules"])
        await asyncio.sleep(0.05)
        await checker.close()
        assert checker.pid is None

    with_checker(model, use)
    with_checker(model, leave)


def test_the_groups_signals_do_not_reach_it(model: Path) -> None:
    async def use(checker: GrammarChecker) -> None:
        await checker.check(FINE, param="regex")
        before = checker.pid
        assert before is not None
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(before, number)
        await checker.check(Grammar.json_object(), param="regex")
        assert checker.pid == before

    with_checker(model, use)


def test_many_at_once_wait_for_their_turn_and_not_for_ever(model: Path) -> None:
    grammars = [Grammar.regex(f"a{{{i}}}") for i in range(1, 6)]

    async def use(checker: GrammarChecker) -> None:
        await asyncio.gather(*(checker.check(grammar, param="regex") for grammar in grammars * 3))

    async def crowd(checker: GrammarChecker) -> None:
        found = await asyncio.gather(
            *(checker.check(grammar, param="regex") for grammar in grammars), return_exceptions=True
        )
        assert found[0] is None
        assert all(isinstance(each, CheckerBusyError) for each in found[1:])
        await checker.check(grammars[1], param="regex")  # nothing about it was remembered

    with_checker(model, use)
    with_checker(model, crowd, patience_s=0.0)


def test_who_leaves_does_not_spoil_the_next_verdict(model: Path) -> None:
    async def use(checker: GrammarChecker) -> None:
        leaving = asyncio.create_task(checker.check(Grammar.regex("("), param="regex"))
        await asyncio.sleep(0)
        leaving.cancel()
        await checker.check(FINE, param="regex")
        assert "unclosed group" in await refused(checker, Grammar.regex("("))

    with_checker(model, use)


def test_where_there_can_be_no_checker_that_is_told(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone() -> Path:
        raise ConfigError("the model has gone")

    async def lost() -> None:
        with pytest.raises(CheckerError, match="the model has gone"):
            await GrammarChecker(gone).check(FINE, param="regex")
        with pytest.raises(CheckerError, match="cannot start: no tokenizer at"):
            await GrammarChecker(lambda: model / "nowhere").check(FINE, param="regex")
        monkeypatch.setattr(module, "CHECKER_COMMAND", ("/nowhere/python",))
        with pytest.raises(CheckerError, match="no process to check grammars can be started"):
            await GrammarChecker(lambda: model).check(FINE, param="regex")
        monkeypatch.setattr(module, "CHECKER_COMMAND", ("false",))
        with pytest.raises(CheckerError, match="exited with status 1"):
            await GrammarChecker(lambda: model).check(FINE, param="regex")

    asyncio.run(lost())


class _Counting(GrammarCompiler):
    """Counts compilations."""

    count = 0

    def _compile(self, grammar: Grammar) -> Any:
        self.count += 1
        return super()._compile(grammar)


def compiler_of(path: Path) -> _Counting:
    tokenizer: Tokenizer = load(path, byte_level_backend(), eos_token="</s>")
    return _Counting(lambda: tokenizer, vocab_size=tokenizer.vocab_size, eos_ids=tokenizer.eos_ids)


def test_an_engine_keeps_what_was_asked_for_last_within_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = compiler_of(tmp_path)
    for _ in range(2):
        compiler.matcher(FINE)
    assert compiler.count == 1
    with pytest.raises(RequestError):
        compiler.matcher(Grammar.regex("("))
    monkeypatch.setattr("ssd_ascend.structured.compiler._KEPT_S", 0.0)
    compiler.matcher(Grammar.regex("b"))  # FINE is dropped, being dearer than nothing
    compiler.matcher(Grammar.regex("b"))
    assert compiler.count == 3
    compiler.matcher(FINE)
    assert compiler.count == 4


def test_what_is_not_ready_is_compiled_meanwhile(tmp_path: Path) -> None:
    compiler, may_go = compiler_of(tmp_path), threading.Event()
    compile_now = compiler._compile

    def slowly(grammar: Grammar) -> Any:
        assert may_go.wait(30)
        return compile_now(grammar)

    compiler._compile = slowly  # type: ignore[method-assign]
    assert not compiler.is_ready(FINE, patience_s=0)
    may_go.set()
    assert compiler.is_ready(FINE, patience_s=30)
    with pytest.raises(RequestError, match="unclosed group"):
        compiler.is_ready(Grammar.regex("("), patience_s=30)
