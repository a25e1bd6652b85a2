"""Calls and thoughts are found in the text of an answer, however it is cut into pieces."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssd_ascend.serve.parts import CallArguments, CallStart, Part, Pipeline, Reasoning, Stage, Text
from ssd_ascend.serve.reasoning import ReasoningStage
from ssd_ascend.serve.tools.parsers import HermesParser, Llama3Parser

Read = tuple[str, str, list[tuple[str, str]]]


def put_together(parts: list[Part]) -> Read:
    """Prose, thoughts, and the calls with their arguments."""
    prose = "".join(part.text for part in parts if isinstance(part, Text))
    thoughts = "".join(part.text for part in parts if isinstance(part, Reasoning))
    starts = [part for part in parts if isinstance(part, CallStart)]
    assert [start.number for start in starts] == list(range(len(starts)))
    calls = [
        (start.name, "".join(p.text for p in parts if isinstance(p, CallArguments) and p.number == start.number))
        for start in starts
    ]
    return prose, thoughts, calls


def read(text: str, stages: list[Stage], cuts: list[int] | None = None, ends: str = "stop") -> Read:
    pipeline = Pipeline(stages)
    edges = [0, *sorted(cut % (len(text) + 1) for cut in cuts or []), len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(edges)]
    parts = [part for piece in pieces for part in pipeline.feed(piece, ends=None)]
    return put_together(parts + pipeline.feed("", ends=ends))


WEATHER = '{"city": "Paris", "days": [1, {"to": "}"}], "q": "a\\\\\\"b</tool_call>"}'


def hermes_call(name: str = "weather", arguments: str = WEATHER) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


HERMES_CASES: dict[str, tuple[str, Read]] = {
    "prose": ("Just < words <tool_cal", ("Just < words <tool_cal", "", [])),
    "one": (hermes_call(), ("", "", [("weather", WEATHER)])),
    "prose before": ("Let me see.\n\n" + hermes_call(), ("Let me see.", "", [("weather", WEATHER)])),
    "prose after": (hermes_call() + "\nDone", ("Done", "", [("weather", WEATHER)])),
    "two": (
        hermes_call() + "\n" + hermes_call("now", "{}"),
        ("", "", [("weather", WEATHER), ("now", "{}")]),
    ),
    "one line": ('<tool_call>{"name": "f", "arguments": {}}</tool_call>', ("", "", [("f", "{}")])),
    "arguments first": (
        '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>',
        ("", "", [("f", '{"a": 1}')]),
    ),
    "arguments as text": (
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>',
        ("", "", [("f", '{"a": 1}')]),
    ),
    "no close": ('<tool_call>\n{"name": "f", "arguments": {"a": 1}}', ("", "", [("f", '{"a": 1}')])),
    "cut off": ('<tool_call>\n{"name": "f", "arguments": {"a": [1, ', ("", "", [("f", '{"a": [1, ')])),
    "cut off early": ('<tool_call>\n{"name": "f', ('<tool_call>{"name": "f', "", [])),
    "no object": ("<tool_call>f(x)</tool_call>", ("<tool_call>f(x)</tool_call>", "", [])),
    "no name": ('<tool_call>{"a": 1}</tool_call>', ('<tool_call>{"a": 1}</tool_call>', "", [])),
    "no json": ("<tool_call>{name: f}</tool_call>", ("<tool_call>{name: f}</tool_call>", "", [])),
    "thoughts first": (
        "<think>\nhm <tool_call>\n</think>\n\n" + hermes_call(),
        ("", "hm <tool_call>", [("weather", WEATHER)]),
    ),
}


def hermes() -> list[Stage]:
    return [ReasoningStage(is_open=False), HermesParser()]


@pytest.mark.parametrize("name", HERMES_CASES)
def test_hermes(name: str) -> None:
    text, wanted = HERMES_CASES[name]
    assert read(text, hermes()) == wanted
    assert read(text, hermes(), list(range(len(text)))) == wanted  # one character at a time


def test_what_is_found_is_json() -> None:
    assert json.loads(WEATHER)["q"].endswith("</tool_call>")


def llama(**more: Any) -> list[Stage]:
    return [Llama3Parser({"weather", "now"}, **more)]


LLAMA_CALL = f'{{"name": "weather", "parameters": {WEATHER}}}'
LLAMA_CASES: dict[str, tuple[str, Read]] = {
    "prose": ("Hello; {there}", ("Hello; {there}", "", [])),
    "one": (LLAMA_CALL, ("", "", [("weather", WEATHER)])),
    "tagged": ("<|python_tag|>" + LLAMA_CALL, ("", "", [("weather", WEATHER)])),
    "two": (LLAMA_CALL + '; {"name": "now", "parameters": {}}', ("", "", [("weather", WEATHER), ("now", "{}")])),
    "typed": ('{"type": "function", "name": "now", "parameters": {}}', ("", "", [("now", "{}")])),
    "unknown": ('{"name": "me", "parameters": {}}', ('{"name": "me", "parameters": {}}', "", [])),
    "json": ('{"answer": [1, 2]} or so', ('{"answer": [1, 2]} or so', "", [])),
    "unfinished": ('{"na', ('{"na', "", [])),
}


@pytest.mark.parametrize("name", LLAMA_CASES)
def test_llama3(name: str) -> None:
    text, wanted = LLAMA_CASES[name]
    assert read(text, llama()) == wanted
    assert read(text, llama(), list(range(len(text)))) == wanted


@pytest.mark.parametrize(
    ("make", "text", "wanted"),
    [
        (hermes, hermes_call() + '\n<tool_call>{"name":', ("", "", [("weather", WEATHER)])),
        (hermes, hermes_call() + "\n<tool_call>", ("", "", [("weather", WEATHER)])),
        (hermes, "Let me see.\n\n<tool_call>\n", ("Let me see.", "", [])),
        (hermes, '<tool_call>\n{"name": "wea', ("", "", [])),
        (hermes, "Well.\n<tool_c", ("Well.", "", [])),
        (hermes, "a <", ("a <", "", [])),
        (hermes, "a <to", ("a <to", "", [])),
        (hermes, '<tool_call>{"name": "f", "arguments": {"a": [1, ', ("", "", [("f", '{"a": [1, ')])),
        (llama, LLAMA_CALL + '; {"na', ("", "", [("weather", WEATHER)])),
        (llama, LLAMA_CALL + "; {", ("", "", [("weather", WEATHER)])),
        (llama, '{"name" : "wea', ("", "", [])),
        (llama, '{"na', ("", "", [])),
        (llama, '{ "', ('{ "', "", [])),
        (llama, '{"answer": [1, ', ('{"answer": [1, ', "", [])),
    ],
)
def test_markup_that_length_cut_off_is_not_shown(make: Callable[[], list[Stage]], text: str, wanted: Read) -> None:
    """`finish_reason` says that the answer is cut; a client would print what is left of a mark as prose."""
    assert read(text, make(), ends="length") == wanted
    assert read(text, make(), list(range(len(text))), ends="length") == wanted


@pytest.mark.parametrize("make", [lambda: [HermesParser(most=1)], lambda: llama(most=1)])
def test_no_more_than_one(make: Callable[[], list[Stage]]) -> None:
    text = hermes_call() + hermes_call("now", "{}") if isinstance(make()[0], HermesParser) else LLAMA_CALL + LLAMA_CALL
    assert read(text, make(), list(range(len(text)))) == ("", "", [("weather", WEATHER)])


PIECES = st.lists(
    st.sampled_from(
        [
            *("<think>", "</think>", "<tool_call>", "</tool_call>", "<", "tool", " ", "\n", "{", "}", '"', "\\", "a"),
            *(";", '{"name": "now", "arguments": {}}', '{"name": "now", "parameters": {"a": "}"}}', "words"),
            hermes_call("now", "{}"),
        ]
    ),
    max_size=14,
).map("".join)


@given(PIECES, st.lists(st.integers(0, 200), max_size=12))
def test_cuts_do_not_matter(text: str, cuts: list[int]) -> None:
    for make in (hermes, llama, lambda: [ReasoningStage(is_open=True), HermesParser(most=1)]):
        assert read(text, make(), cuts) == read(text, make())


@pytest.mark.parametrize(
    ("text", "is_open", "wanted"),
    [
        ("<think>\na b\n</think>\n\nc", False, ("c", "a b")),
        ("a b\n</think>\n\nc", True, ("c", "a b")),
        ("  <think></think>c", False, ("c", "")),
        ("<thin", False, ("<thin", "")),
        ("c <think>d</think>", False, ("c <think>d</think>", "")),
        ("a b", True, ("", "a b")),
        ("a </thi", True, ("", "a </thi")),
    ],
)
def test_thoughts(text: str, is_open: bool, wanted: tuple[str, str]) -> None:
    for cuts in ([], list(range(len(text)))):
        assert read(text, [ReasoningStage(is_open=is_open)], cuts)[:2] == wanted
