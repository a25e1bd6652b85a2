"""/v1/responses with the official client: whole and streamed, tools, thoughts, formats, what is refused."""

from __future__ import annotations

import json
import re
from typing import Any

import openai
import pytest
from openai.types.responses import response_create_params as params

from ssd_ascend.serve.responses.request import ResponsesRequest
from tests.serve.live import LiveServer

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
ADD: Any = {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {}}, "strict": False}


def say(script: str) -> str:
    return f"SAY[{script}]YAS"


def test_every_field_of_the_official_client_is_known() -> None:
    official = set(params.ResponseCreateParamsBase.__annotations__) | {"stream"}
    assert official <= set(ResponsesRequest.model_fields) | set(ResponsesRequest.NO_OP_ONLY)


def test_a_whole_response(client: openai.OpenAI) -> None:
    found = client.responses.create(model="parrot", input=say("hello"), instructions="be brief", max_output_tokens=50)
    assert found.output_text == "hello"
    assert found.status == "completed"
    assert found.usage is not None
    assert found.usage.output_tokens == 6
    assert found.instructions == "be brief"
    cut = client.responses.create(model="parrot", input="abc", max_output_tokens=3)
    assert cut.status == "incomplete"
    assert cut.incomplete_details is not None
    assert cut.incomplete_details.reason == "max_output_tokens"


def test_a_stream(client: openai.OpenAI) -> None:
    """The helper of the client checks the order of the events and puts the response together."""
    with client.responses.stream(model="parrot", input=say("one two three")) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert final.output_text == "one two three"
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "one two three"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events if "delta" not in event.type] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]


def test_calls(client: openai.OpenAI) -> None:
    first = client.responses.create(model="parrot", input=say("So. " + CALL), tools=[ADD])
    assert first.output_text == "So."
    call = first.output[1]
    assert call.type == "function_call"
    assert (call.name, json.loads(call.arguments)) == ("add", {"a": 1})
    turns: list[Any] = [{"role": "user", "content": "add"}, *[item.model_dump() for item in first.output]]
    turns.append({"type": "function_call_output", "call_id": call.call_id, "output": say("two")})
    assert client.responses.create(model="parrot", input=turns, tools=[ADD]).output_text == "two"
    with client.responses.stream(model="parrot", input=say(CALL), tools=[ADD]) as stream:
        pieces = [event.delta for event in stream if event.type == "response.function_call_arguments.delta"]
        (item,) = stream.get_final_response().output
    assert item.type == "function_call"
    assert "".join(pieces) == item.arguments == '{"a": 1}'


def test_thoughts(thinking: LiveServer) -> None:
    body = {"input": say("<think>\nlet me see\n</think>\nfour")}
    first, second = thinking.post("/v1/responses", body).json()["output"]
    assert first["type"] == "reasoning"
    assert first["content"] == [{"type": "reasoning_text", "text": "let me see"}]
    assert second["content"][0]["text"] == "four"


def test_a_schema(client: openai.OpenAI) -> None:
    format_: Any = {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}
    found = client.responses.create(model="parrot", input=say('{"n": 1}'), text={"format": format_})
    assert json.loads(found.output_text) == {"n": 1}


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"store": True}, "store"),
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 10**6}, "max_output_tokens"),
        ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text"),
        ({"text": {"format": {"type": "json_schema", "name": "a b", "schema": {}}}}, "text"),
        ({"reasoning": {"effort": "low"}}, "reasoning"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"temperature": -1}, "temperature"),
        ({"nonsense": 1}, "nonsense"),
    ],
)
def test_what_is_refused_is_named(server: LiveServer, change: dict[str, Any], param: str) -> None:
    refused = server.post("/v1/responses", {"input": "hi", **change})
    assert refused.status_code == 400, refused.text
    error = refused.json()["error"]
    assert error["param"] == param
    assert re.search(r"\b(max_tokens|max_completion_tokens|response_format)\b", error["message"]) is None
