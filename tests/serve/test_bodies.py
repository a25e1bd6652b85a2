"""Bodies of requests are read once, beside the loop where they are large, and mean what they say or are refused."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request

from ssd_ascend.errors import RequestError
from ssd_ascend.serve import admin, strict
from ssd_ascend.serve import state as serve_state
from ssd_ascend.serve.config import ServerConfig
from ssd_ascend.serve.errors import renamed
from ssd_ascend.serve.protocol import ChatRequest, CompletionRequest, TokenizeRequest
from ssd_ascend.serve.responses.request import ResponsesRequest
from ssd_ascend.serve.state import ServerState
from ssd_ascend.serve.strict import Strict, parse


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"prompt":[' + b"[]," * 65_600 + b"[]]}", "65536 lists and objects"),
        (b'{"metadata":{' + b'"":"",' * 131_100 + b'"":""}}', "131072 members of objects"),
        (b'{"prompt":[' + b"5," * (1 << 20) + b"5]}", "1048576 values"),
        (b'{"prompt":"\\",",' + b"[" * 65_600, "65536 lists and objects"),
    ],
)
def test_a_wide_body_is_refused_unread(body: bytes, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read is read in one go: eight million empty lists froze every stream for fifteen seconds."""
    monkeypatch.setattr(CompletionRequest, "model_validate_json", None)
    with pytest.raises(RequestError, match=words):
        parse(CompletionRequest, body)


@given(st.lists(st.sampled_from(['"', "\\", "[", "{", ":", ",", "a"]), max_size=60).map("".join))
def test_signs_are_counted_outside_of_strings_whatever_the_stretch(text: str) -> None:
    """Bytes that are no JSON, too: counting comes before."""
    bare, is_inside, is_escaped = "", False, False
    for character in text:
        if is_inside:
            is_escaped, is_inside = (character == "\\" and not is_escaped), (character != '"' or is_escaped)
        else:
            bare += character
            is_inside = character == '"'
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(strict, "_STRETCH", re.compile(strict._STRETCH.pattern.replace(b"4096", b"2"), re.DOTALL))
        for sign in "[{:,":
            for most, fails in ((bare.count(sign) + 1, False), (bare.count(sign), True)):
                patch.setattr(strict, "_WIDEST", (((sign.encode(),), most, "signs"),))
                if fails and most:
                    with pytest.raises(RequestError, match="signs"):
                        strict._check_width(text.encode())
                elif not fails:
                    strict._check_width(text.encode())


def test_a_text_may_hold_as_many_signs_as_it_likes() -> None:
    text = '[{",": "\\"}' * 200_000
    assert parse(CompletionRequest, json.dumps({"prompt": text}).encode()).prompt == text


def test_a_large_body_is_read_beside_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[bool] = []

    def noting(schema: type[Strict], body: bytes) -> Strict:
        threads.append(threading.current_thread() is threading.main_thread())
        return parse(schema, body)

    async def read(prompt: str) -> Any:
        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": json.dumps({"prompt": prompt}).encode()}

        request = Request({"type": "http", "method": "POST", "headers": []}, receive)
        state = SimpleNamespace(config=ServerConfig(), off_loop=ServerState.off_loop)
        return await ServerState.read(cast(ServerState, state), TokenizeRequest, request)

    monkeypatch.setattr(serve_state, "parse", noting)
    for size in (100, 70_000):
        assert asyncio.run(read("a" * size)).prompt == "a" * size
    assert threads == [True, False]


@pytest.mark.parametrize(
    ("body", "where", "param"),
    [
        (b'{"prompt":"a","prompt":"b"}', "prompt", "prompt"),
        (b'{"prompt":"a","logit_bias":{"5":1,"6":1,"5":2}}', "logit_bias.5", "logit_bias"),
        (b'{"prompt":"a","stream":true,"stream_options":{"include_usage":true,"include_usage":false}}',
         "stream_options.include_usage", "stream_options"),
        (b'{"prompt":"a","response_format":{"type":"json_schema","json_schema":{"name":"x","schema":'
         b'{"anyOf":[{},{"type":"object","type":"string"}]}}}}',
         "response_format.json_schema.schema.anyOf[1].type", "response_format"),
        (b'{"prompt":"a","\\u0070rompt":"b"}', "prompt", "prompt"),
    ],
)  # fmt: skip
def test_a_key_that_is_there_twice_is_named(body: bytes, where: str, param: str) -> None:
    """Readers of JSON keep the last and say nothing."""
    with pytest.raises(RequestError, match=f"^{re.escape(where)} is in the body twice") as refused:
        parse(CompletionRequest, body)
    assert refused.value.param == param


def test_a_text_may_look_like_twins() -> None:
    body = {"prompt": '{"a":1,"a":2}', "seed": -(1 << 63), "temperature": 1e-300, "logit_bias": {"1": 1, "10": 1}}
    assert parse(CompletionRequest, json.dumps(body).encode()).seed == -(1 << 63)


CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize(
    ("schema", "body", "words"),
    [
        (ChatRequest, {"response_format": {"type": "json_schema", "json_schema": {}}},
         "response_format.json_schema.name is wrong: Field required"),
        (ChatRequest, {"response_format": {"type": "json_schema"}},
         "response_format.json_schema is wrong: Field required"),
        (ChatRequest, {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": True}}},
         "response_format.json_schema.schema is wrong: Input should be an object"),
        (ChatRequest, {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schma": {}}}},
         "unknown field 'response_format.json_schema.schma'"),
        (ChatRequest, {"tool_choice": {"type": "function"}}, "tool_choice.function is wrong: Field required"),
        (ChatRequest, {"stop": ["a", 1]}, "stop[1] is wrong: Input should be a valid string"),
        (ChatRequest, {"stop": 1}, "stop is wrong: Input should be a valid string; or Input should be a valid array"),
        (ChatRequest, {"logit_bias": {"9" * 500: "x"}}, f"logit_bias.{'9' * 64} is wrong"),
        (CompletionRequest, {"prompt": [[1], [2, "a"]]}, "prompt[1][1] is wrong: Input should be a valid integer"),
        (ResponsesRequest, {"input": [{"type": "function_call", "call_id": "1", "name": "f"}]},
         "input[0].arguments is wrong: Field required"),
        (ResponsesRequest, {"input": "a", "text": {"format": {"type": "json_schema", "schema": True}}},
         "text.format.schema is wrong: Input should be an object"),
    ],
)  # fmt: skip
def test_a_mistake_is_named_where_it_is(schema: type[Strict], body: dict[str, Any], words: str) -> None:
    whole = {**CHAT, **body} if schema is ChatRequest else body
    with pytest.raises(RequestError) as refused:
        parse(schema, json.dumps(whole).encode())
    assert refused.value.message.startswith(words)
    assert refused.value.param == list(body)[-1]


@pytest.mark.parametrize(
    ("change", "param"),
    [({"lookahead": 99}, "lookahead"), ({"enabled": True}, "enabled"), ({"fan_out": [1]}, "fan_out"), ({}, None)],
)
def test_a_server_without_a_speculator_names_what_was_asked_of_it(change: dict[str, Any], param: str | None) -> None:
    config = SimpleNamespace(speculation=SimpleNamespace(fan_out=1))
    state = SimpleNamespace(engine=SimpleNamespace(info=None, tuned=None, config=config))
    with pytest.raises(RequestError, match="without a speculator") as refused:
        admin._change(cast(ServerState, state), admin.SpeculationChange(**change))
    assert refused.value.param == param


def test_an_error_calls_a_field_as_its_endpoint_does() -> None:
    error = RequestError("5 and max_tokens 9 are too many", param="max_tokens", remedy="leave max_tokens out")
    told = renamed(error, {"max_tokens": "max_output_tokens"})
    assert (str(told), told.param) == (
        "5 and max_output_tokens 9 are too many (leave max_output_tokens out)",
        "max_output_tokens",
    )
    kept = renamed(RequestError("the prompt is long", param="prompt"), {"prompt": "messages"})
    assert (str(kept), kept.param) == ("the prompt is long", "messages")
