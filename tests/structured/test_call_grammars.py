"""What forced calls, strict calls among prose and constrained answers behind thoughts let through, text by text."""

from __future__ import annotations

from pathlib import Path

import pytest

from ssd_ascend.core.grammar import Grammar
from ssd_ascend.serve.reasoning import Thinking, after_thoughts, thinking_after
from ssd_ascend.serve.tools.formats import FORMATS, HERMES, LLAMA3, ToolFormat, for_template
from ssd_ascend.serve.tools.offer import Function, ToolOffer
from ssd_ascend.structured.compiler import GrammarCompiler
from ssd_ascend.text import Tokenizer
from tests.unit.text_toys import byte_level_backend, load

pytest.importorskip("llguidance")

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTIONS = (Function(name="weather", parameters=CITY, strict=True), Function(name="now"))


class Judge:
    """Says whether a text is whole under a grammar."""

    def __init__(self, path: Path) -> None:
        self._tokenizer: Tokenizer = load(path, byte_level_backend(), eos_token="</s>")
        self._compiler = GrammarCompiler(
            lambda: self._tokenizer, vocab_size=self._tokenizer.vocab_size, eos_ids=self._tokenizer.eos_ids
        )

    def takes(self, grammar: Grammar | None, text: str) -> bool:
        assert grammar is not None
        matcher = self._compiler.matcher(grammar)
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Judge:
    return Judge(tmp_path_factory.mktemp("bytes"))


def written(format_: ToolFormat, name: str, arguments: str) -> str:
    return f'{format_.before}{{"name": "{name}", "{format_.arguments}": {arguments}}}{format_.after}'


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("parallel", [True, False])
def test_forced_calls(judge: Judge, name: str, parallel: bool) -> None:
    format_ = FORMATS[name]
    grammar = format_.grammar(ToolOffer(FUNCTIONS, must_call=True, parallel=parallel))
    weather, now = written(format_, "weather", '{"city": "Paris"}'), written(format_, "now", "{}")
    assert judge.takes(grammar, weather)
    assert judge.takes(grammar, now)
    assert judge.takes(grammar, weather + format_.between + now) is parallel
    for bad in ("", "hello", "hello " + weather, weather + " bye", written(format_, "later", "{}")):
        assert not judge.takes(grammar, bad)
    assert not judge.takes(grammar, written(format_, "weather", '{"town": "Paris"}'))
    assert not judge.takes(grammar, written(format_, "now", '{"city": "Paris"}'))


def test_strict_calls_among_prose(judge: Judge) -> None:
    grammar = HERMES.grammar(ToolOffer(FUNCTIONS))
    call = written(HERMES, "weather", '{"city": "Paris"}')
    for good in ("", "no call\nat <all>", call, "so: " + call, call + "\n" + call + " done"):
        assert judge.takes(grammar, good), good
    for bad in (written(HERMES, "weather", '{"town": 1}'), "so: <tool_call>\n{}", call + written(HERMES, "x", "{}")):
        assert not judge.takes(grammar, bad), bad


def test_free_calls_are_free() -> None:
    assert HERMES.grammar(ToolOffer(FUNCTIONS[1:])) is None
    assert LLAMA3.grammar(ToolOffer(FUNCTIONS)) is None


@pytest.mark.parametrize(
    ("template", "format_"),
    [
        ("... <tool_call>\n{'name'...,'parameters'} ...", HERMES),
        ('... {"name": function name, "parameters": ...} ...', LLAMA3),
        ("{{ messages }}", HERMES),
    ],
)
def test_formats_are_known_by_their_templates(template: str, format_: ToolFormat) -> None:
    assert for_template(lambda text: text in template) is format_


@pytest.mark.parametrize(
    ("end", "thinking"),
    [
        ("<|im_start|>assistant\n", Thinking.MAY),
        ("assistant\n<think>\n", Thinking.IS_OPEN),
        ("<think>\n\n</think>\n\n", Thinking.NO),
    ],
)
def test_prompts_tell_whether_thoughts_may_come(end: str, thinking: Thinking) -> None:
    assert thinking_after(end, model_thinks=True) is thinking
    assert thinking_after(end, model_thinks=False) is Thinking.NO


@pytest.mark.parametrize(
    ("grammar", "answer"),
    [(Grammar.json_schema(CITY), '{"city": "a"}'), (Grammar.regex(r"a/b[0-9]"), "a/b7")],
)
def test_constraints_hold_behind_thoughts(judge: Judge, grammar: Grammar, answer: str) -> None:
    may = after_thoughts(grammar, Thinking.MAY)
    is_open = after_thoughts(grammar, Thinking.IS_OPEN)
    assert after_thoughts(grammar, Thinking.NO) == grammar
    assert judge.takes(may, answer)
    assert judge.takes(may, "<think>hm {\n</think>\n\n" + answer)
    assert judge.takes(is_open, "hm {\n</think>\n\n" + answer)
    assert not judge.takes(is_open, answer)
    assert not judge.takes(may, "<think>hm</think>so")
    whole = Grammar.lark('start: "a"')
    assert after_thoughts(whole, Thinking.MAY) is whole
