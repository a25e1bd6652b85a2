"""Tool calls, thoughts and token sources over HTTP, with the official client where it has a word for them."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from tests.serve.live import LiveServer

CHAT = "/v1/chat/completions"
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        "strict": True,
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich"}}\n</tool_call>'
TWO = CALL + '\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


def says(script: str, **more: Any) -> dict[str, Any]:
    """A request that the parrot answers with `script`."""
    return {
        "model": "parrot",
        "messages": [{"role": "user", "content": f"SAY[{script}]YAS"}],
        "max_tokens": 250,
        **more,
    }


def test_calls_of_a_whole_answer(client: openai.OpenAI) -> None:
    found = client.chat.completions.create(**says("Well. " + TWO, tools=[WEATHER, NOW]))
    (choice,) = found.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Well."
    calls = choice.message.tool_calls
    assert calls is not None
    assert [(c.type, c.function.name, json.loads(c.function.arguments)) for c in calls] == [  # type: ignore[union-attr]
        ("function", "get_weather", {"city": "Zürich"}),
        ("function", "now", {}),
    ]
    assert len({call.id for call in calls}) == 2


def test_calls_of_a_stream(client: openai.OpenAI) -> None:
    """Arguments come in pieces, as they are drawn; the client's own helper puts them together."""
    with client.chat.completions.stream(**says("Well. " + TWO, tools=[WEATHER, NOW])) as stream:
        pieces = [event.arguments_delta for event in stream if event.type == "tool_calls.function.arguments.delta"]
        final = stream.get_final_completion().choices[0]
    assert len(pieces) > 3
    assert final.finish_reason == "tool_calls"
    assert final.message.content == "Well."
    assert final.message.tool_calls is not None
    assert [call.function.name for call in final.message.tool_calls] == ["get_weather", "now"]
    assert json.loads(final.message.tool_calls[0].function.arguments) == {"city": "Zürich"}


def test_only_calls_have_null_content(server: LiveServer) -> None:
    message = server.post(CHAT, says(CALL, tools=[WEATHER])).json()["choices"][0]["message"]
    assert message["content"] is None
    assert message["tool_calls"][0]["id"].startswith("call_")


def test_a_call_that_length_cut_off_shows_no_markup(server: LiveServer) -> None:
    """A whole call came with `"content": "<tool_call>{\\"name\\":"` behind it."""
    room = len((CALL + '\n<tool_call>\n{"name":').encode())  # the parrot says byte by byte
    body = says(TWO, tools=[WEATHER, NOW], max_tokens=room)
    choice = server.post(CHAT, body).json()["choices"][0]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("length", None)
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["get_weather"]
    events = [event for event in server.events(CHAT, {**body, "stream": True}) if event != "[DONE]"]
    assert "".join(event["choices"][0]["delta"].get("content") or "" for event in events) == ""
    assert events[-1]["choices"][0]["finish_reason"] == "length"


def test_parallel_calls_can_be_ruled_out(server: LiveServer) -> None:
    body = says(TWO, tools=[WEATHER, NOW], parallel_tool_calls=False)
    assert len(server.post(CHAT, body).json()["choices"][0]["message"]["tool_calls"]) == 1


def test_tool_choice_none_leaves_the_text_alone(server: LiveServer) -> None:
    choice = server.post(CHAT, says(CALL, tools=[WEATHER], tool_choice="none")).json()["choices"][0]
    assert choice["message"]["content"] == CALL
    assert choice["finish_reason"] == "stop"


def test_a_whole_round(client: openai.OpenAI) -> None:
    """What came back goes into the next request as it is."""
    tools: list[Any] = [WEATHER]
    first = client.chat.completions.create(**says(CALL, tools=tools))
    message = first.choices[0].message
    assert message.tool_calls is not None
    turns: list[Any] = [
        {"role": "user", "content": "how is the weather?"},
        message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "SAY[rain]YAS"},
    ]
    second = client.chat.completions.create(model="parrot", messages=turns, tools=tools, max_tokens=50)
    assert second.choices[0].message.content == "rain"


def test_a_template_without_tools_is_helped(server: LiveServer) -> None:
    """The parrot's template knows no tools: they are described in the system message."""
    answer = server.post(CHAT, {"messages": [{"role": "user", "content": "hi"}], "tools": [NOW], "max_tokens": 120})
    said = answer.json()["choices"][0]["message"]["content"]
    assert said.startswith("system\nYou can call functions.")


@pytest.mark.parametrize("is_streamed", [False, True])
def test_thoughts(thinking: LiveServer, is_streamed: bool) -> None:
    body = says("<think>\nlet me see\n</think>\n\nfour")
    if is_streamed:
        deltas = [event["choices"][0]["delta"] for event in thinking.events(CHAT, body) if event != "[DONE]"]
        content = "".join(delta.get("content", "") for delta in deltas)
        reasoning = "".join(delta.get("reasoning_content", "") for delta in deltas)
    else:
        message = thinking.post(CHAT, body).json()["choices"][0]["message"]
        content, reasoning = message["content"], message["reasoning_content"]
    assert (reasoning, content) == ("let me see", "four")


@pytest.mark.parametrize("is_streamed", [False, True])
def test_token_sources(server: LiveServer, is_streamed: bool) -> None:
    """The pieces are the text, and say which tokens were drafted: the parrot's first is its own, three in four are
    hits."""
    body = says("ab ab ab 世界世界世界 ab", return_token_sources=True)
    if is_streamed:
        choices = [event["choices"][0] for event in server.events(CHAT, body) if event != "[DONE]"]
        text = "".join(choice["delta"].get("content", "") for choice in choices)
    else:
        choices = server.post(CHAT, body).json()["choices"]
        text = choices[0]["message"]["content"]
    pieces = [piece for choice in choices for piece in choice.get("tokens", [])]
    assert text == "ab ab ab 世界世界世界 ab" == "".join(piece["text"] for piece in pieces)
    assert [piece["source"] for piece in pieces[:6]] == ["recovery", "hit", "hit", "hit", "recovery", "hit"]
    assert choices[-1]["speculation"]["cache_hits"] > 0


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools"),
        ({"tools": [NOW, NOW]}, "tools"),
        ({"tools": [{**NOW, "extra": 1}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [NOW], "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [NOW], "tool_choice": {"type": "function", "function": {"name": "later"}}}, "tool_choice"),
        ({"tools": [NOW], "response_format": {"type": "json_object"}}, "response_format"),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
        ({"reasoning_effort": "extreme"}, "reasoning_effort"),
        (
            {
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "odd"}}}],
                "tool_choice": "required",
            },
            "tools",
        ),
    ],
)
def test_bad_requests(server: LiveServer, change: dict[str, Any], param: str) -> None:
    refused = server.post(CHAT, says("hi", **change))
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == param
