"""Tells a model about tools whose chat template cannot: in its system message, in the Hermes manner."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from ssd_ascend.serve.tools.parsers import HERMES_CLOSE, HERMES_OPEN

_HOW = (
    "You can call functions. Each line between <tools> and </tools> describes one:\n<tools>\n{tools}\n</tools>\n"
    "To call one, write its name and its arguments as JSON, like this:\n"
    + HERMES_OPEN
    + '\n{{"name": "the name", "arguments": {{"an argument": "its value"}}}}\n'
    + HERMES_CLOSE
)


def with_tools(turns: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The conversation with a system message that describes `tools`, and earlier calls written out in it."""
    described = _HOW.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    plain = [_spelt_out(turn) for turn in turns]
    if plain and plain[0]["role"] == "system":
        first = {**plain[0], "content": f"{plain[0]['content']}\n\n{described}"}
        return [first, *plain[1:]]
    return [{"role": "system", "content": described}, *plain]


def _spelt_out(turn: dict[str, Any]) -> dict[str, Any]:
    calls = turn.get("tool_calls")
    if not calls:
        return turn
    written = [f"{HERMES_OPEN}\n{_call(call)}\n{HERMES_CLOSE}" for call in calls]
    content = turn.get("content") or ""
    return {**turn, "content": "\n".join([content, *written] if content else written), "tool_calls": None}


def _call(call: dict[str, Any]) -> str:
    function = call.get("function") or {}
    arguments = function.get("arguments", "{}")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return f'{{"name": {json.dumps(function.get("name"))}, "arguments": {text}}}'
