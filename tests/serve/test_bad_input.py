"""Whatever a client sends, the answer is a 400 in OpenAI's shape that names the field, and the next request works."""

from __future__ import annotations

import gzip
import json
from typing import Any

import httpx
import pytest

from tests.serve.fake_engine import MAX_MODEL_LEN
from tests.serve.live import PATIENCE_S, LiveServer

ODD_KEYS = ["", " 5 ", "5_0", "05", "+5", "-1", "\u0665", "5.0", "0x5", "5\n", "9" * 5000]
HI: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
TEXT: dict[str, Any] = {"prompt": "hi", "max_tokens": 4}
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def error_of(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    return dict(body["error"])


@pytest.fixture(autouse=True)
def _next_request_works(server: LiveServer) -> Any:
    yield
    assert server.post(COMPLETIONS, TEXT).json()["choices"][0]["text"] == "hihi"


@pytest.mark.parametrize(
    ("path", "change", "param"),
    [
        (CHAT, {"temperature": "warm"}, "temperature"),
        (CHAT, {"temperature": -0.1}, "temperature"),
        (CHAT, {"top_p": 0}, "top_p"),
        (CHAT, {"top_p": 1.5}, "top_p"),
        (CHAT, {"top_k": -2}, "top_k"),
        (CHAT, {"min_p": 2}, "min_p"),
        (CHAT, {"n": 0}, "n"),
        (CHAT, {"n": 10**9}, "n"),
        (CHAT, {"n": True}, "n"),
        (CHAT, {"n": 1.5}, "n"),
        (CHAT, {"presence_penalty": 3}, "presence_penalty"),
        (CHAT, {"frequency_penalty": -3}, "frequency_penalty"),
        (CHAT, {"repetition_penalty": 0}, "repetition_penalty"),
        (CHAT, {"seed": 1 << 70}, "seed"),
        (CHAT, {"stop": 3}, "stop"),
        (CHAT, {"stop": ""}, "stop"),
        (CHAT, {"stop": ["a"] * 17}, "stop"),
        (CHAT, {"stop": ["a", "b" * 1025]}, "stop"),
        (COMPLETIONS, {"stop": "b" * 1_000_000}, "stop"),
        (CHAT, {"stop_token_ids": [10**6]}, "stop_token_ids"),
        (CHAT, {"stop_token_ids": [-1]}, "stop_token_ids"),
        (CHAT, {"logit_bias": {"x": 1}}, "logit_bias"),
        (CHAT, {"logit_bias": {"99999": 1}}, "logit_bias"),
        *((CHAT, {"logit_bias": {key: 1}}, "logit_bias") for key in ODD_KEYS),
        (CHAT, {"logit_bias": {"3": 1000}}, "logit_bias"),
        (CHAT, {"stop_token_ids": [3] * 1025}, "stop_token_ids"),
        (CHAT, {"max_tokens": 0}, "max_tokens"),
        (CHAT, {"max_tokens": 10**6}, "max_tokens"),
        (CHAT, {"max_completion_tokens": -1}, "max_completion_tokens"),
        (CHAT, {"max_completion_tokens": 10**6}, "max_completion_tokens"),
        (CHAT, {"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
        (CHAT, {"min_tokens": 9, "max_tokens": 3}, "min_tokens"),
        (CHAT, {"logprobs": 3}, "logprobs"),
        (CHAT, {"top_logprobs": 3}, "top_logprobs"),
        (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (CHAT, {"stream": "yes"}, "stream"),
        (CHAT, {"stream_options": {"include_usage": True}}, "stream_options"),
        (CHAT, {"stream": True, "stream_options": {"colour": 1}}, "stream_options"),
        (CHAT, {"temprature": 1}, "temprature"),
        (CHAT, {"tools": [{"type": "function"}]}, "tools"),
        (CHAT, {"response_format": {"type": "xml"}}, "response_format"),
        (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"name": "x y"}}}, "response_format"),
        (CHAT, {"response_format": {"type": "json_object"}, "regex": "a"}, "regex"),
        (CHAT, {"response_format": {"type": "json_object"}, "min_tokens": 3}, "min_tokens"),
        (CHAT, {"response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos"),
        (COMPLETIONS, {"regex": "(unclosed"}, "regex"),
        (COMPLETIONS, {"regex": "(?=look)ahead"}, "regex"),
        (COMPLETIONS, {"grammar": "start: nowhere"}, "grammar"),
        (CHAT, {"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        (CHAT, {"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": "hi"}, "messages"),
        (CHAT, {"messages": None}, "messages"),
        (CHAT, {"messages": [{"role": "wizard", "content": "hi"}]}, "messages"),
        (CHAT, {"messages": [{"role": "user"}]}, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": 3}]}, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": "x" * MAX_MODEL_LEN}]}, "messages"),
        (COMPLETIONS, {"prompt": ""}, "prompt"),
        (COMPLETIONS, {"prompt": []}, "prompt"),
        (COMPLETIONS, {"prompt": [""]}, "prompt"),
        (COMPLETIONS, {"prompt": ["hi", ""]}, "prompt"),
        (COMPLETIONS, {"prompt": [[]]}, "prompt"),
        (COMPLETIONS, {"prompt": None}, "prompt"),
        (COMPLETIONS, {"prompt": {"a": 1}}, "prompt"),
        (COMPLETIONS, {"prompt": ["a", 1]}, "prompt"),
        (COMPLETIONS, {"prompt": [10**6]}, "prompt"),
        (COMPLETIONS, {"prompt": [-1]}, "prompt"),
        (COMPLETIONS, {"prompt": [1 << 80]}, "prompt"),
        (COMPLETIONS, {"prompt": "x" * MAX_MODEL_LEN}, "prompt"),
        (COMPLETIONS, {"prompt": "x" * (MAX_MODEL_LEN + 1)}, "prompt"),
        (COMPLETIONS, {"prompt": ["x"] * 2049}, "prompt"),
        (COMPLETIONS, {"max_tokens": MAX_MODEL_LEN}, "max_tokens"),
        (COMPLETIONS, {"logprobs": -1}, "logprobs"),
        (COMPLETIONS, {"echo": True, "logprobs": 1}, "echo"),
        (COMPLETIONS, {"suffix": "end"}, "suffix"),
        (COMPLETIONS, {"best_of": 3}, "best_of"),
        ("/tokenize", {"prompt": 3}, "prompt"),
        ("/tokenize", {}, "prompt"),
        ("/detokenize", {"tokens": [10**9]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
    ],
)
def test_the_field_is_named(server: LiveServer, path: str, change: dict[str, Any], param: str) -> None:
    base = {CHAT: HI, COMPLETIONS: TEXT}.get(path, {})
    error = error_of(server.post(path, {**base, **change}))
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"hi"',
        b"[" * 100_000,
        b'{"messages": [{"role": "user", "content": "\xff\xfe"}]}',
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"messages": [{"role": "user", "content": "hi"}], "temperature": NaN}',
        b'{"messages": [{"role": "user", "content": "hi"}], "temperature": Infinity}',
        b'{"messages": [{"role": "user", "content": "hi"}], "temperature": 1e999}',
        b'{"messages": [{"role": "user", "content": "hi"}], "seed": 1' + b"0" * 5000 + b"}",
        b"messages=hi",
    ],
)
def test_bodies_that_are_no_request(server: LiveServer, body: bytes) -> None:
    error = error_of(server.post(CHAT, body))
    if b"temperature" in body:
        assert error["param"] == "temperature"


@pytest.mark.parametrize("key", ODD_KEYS)
def test_a_bias_of_no_token_is_told_as_its_key(server: LiveServer, key: str) -> None:
    message = error_of(server.post(COMPLETIONS, {**TEXT, "logit_bias": {"5": 1, key: 1}}))["message"]
    assert message.startswith("logit_bias has the key ")
    assert len(message) < 200


def test_a_packed_body_is_a_415(server: LiveServer) -> None:
    for body in (gzip.compress(json.dumps(TEXT).encode()), json.dumps(TEXT).encode()):
        refused = server.post(COMPLETIONS, body, headers={"Content-Encoding": "gzip"})
        error = error_of(refused, 415)
        assert "'gzip'" in error["message"]
        assert error["code"] == "unsupported_encoding"
        assert refused.headers["accept-encoding"] == "identity"
    assert server.post(COMPLETIONS, TEXT, headers={"Content-Encoding": "identity"}).status_code == 200


def test_biases_are_bounded_by_the_answers_that_they_are_for(server: LiveServer) -> None:
    """Each is sent for each answer: 49152 to 2048 prompts held everybody up for minutes."""
    biases = {str(token): -1 for token in range(250)}  # the parrot's vocabulary has 257
    assert server.post(COMPLETIONS, {"prompt": ["hi"] * 300, "max_tokens": 1, "logit_bias": biases}).status_code == 200
    for more in ({"prompt": ["hi"] * 1049}, {"prompt": ["hi"] * 525, "n": 2}):
        error = error_of(server.post(COMPLETIONS, {"max_tokens": 1, "logit_bias": biases, **more}))
        assert error["param"] == "logit_bias"
        assert "at most 262144 in all" in error["message"]


def test_limits_are_named(server: LiveServer) -> None:
    message = error_of(server.post(COMPLETIONS, {**TEXT, "max_tokens": MAX_MODEL_LEN}))["message"]
    assert str(MAX_MODEL_LEN) in message
    assert f"at most {MAX_MODEL_LEN - 2}" in message
    assert server.post(COMPLETIONS, {**TEXT, "max_tokens": MAX_MODEL_LEN - 2}).status_code == 200


def test_without_max_tokens_the_answer_takes_what_fits(server: LiveServer) -> None:
    body = server.post(COMPLETIONS, {"prompt": "x" * (MAX_MODEL_LEN - 5)}).json()
    assert (body["choices"][0]["finish_reason"], body["usage"]["completion_tokens"]) == ("length", 5)


def test_a_misspelt_field_is_recognised(server: LiveServer) -> None:
    assert "did you mean 'temperature'?" in error_of(server.post(CHAT, {**HI, "temprature": 1}))["message"]


def test_no_op_values_are_taken(server: LiveServer) -> None:
    idle = {
        "tools": [],
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "store": False,
        "service_tier": "auto",
        "user": "me",
        "metadata": {"a": "b"},
        "max_tokens": 3,
        "stop": None,
        "temperature": None,
        "stream_options": None,
    }
    assert server.post(CHAT, {**HI, **idle}).status_code == 200


def test_an_answer_can_be_sent_back(server: LiveServer) -> None:
    message = server.post(CHAT, HI).json()["choices"][0]["message"]
    body = {"messages": [*HI["messages"], message, {"role": "developer", "content": [{"type": "text", "text": "x"}]}]}
    assert server.post(CHAT, body).status_code == 200


def test_paths_and_methods(server: LiveServer) -> None:
    assert error_of(server.get("/v2/nothing"), 404)["type"] == "not_found_error"
    error_of(server.get(CHAT), 405)
    refused = server.post("/health", {})
    error_of(refused, 405)
    assert refused.headers["allow"] == "GET, HEAD"
    error_of(server.post("/v1/chat/completions", b" " * (9 << 20)), 413)


@pytest.mark.parametrize("path", ["/health", "/metrics", "/v1/models", "/v1/models/nobody", "/openapi.json", "/", CHAT])
def test_head_is_get_without_a_body(server: LiveServer, path: str) -> None:
    asked, got = (httpx.request(method, server.url + path, timeout=PATIENCE_S) for method in ("HEAD", "GET"))
    assert (asked.status_code, asked.content) == (got.status_code, b"")
    own = {"date", "x-request-id"} | ({"content-length"} if path in ("/health", "/metrics", CHAT) else set())  # vary
    heads = [{name: value for name, value in found.headers.items() if name not in own} for found in (asked, got)]
    assert heads[0] == heads[1]
    assert int(asked.headers["content-length"]) > 0


def test_tokenize_and_back(server: LiveServer) -> None:
    text = "naïve 你好 🙂"
    found = server.post("/tokenize", {"prompt": text}).json()
    assert found["count"] == len(found["tokens"])
    assert found["max_model_len"] == MAX_MODEL_LEN
    assert server.post("/detokenize", {"tokens": found["tokens"]}).json() == {"prompt": text}
    chat = server.post("/tokenize", HI).json()
    assert chat["count"] == server.post(CHAT, HI).json()["usage"]["prompt_tokens"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (COMPLETIONS, {"prompt": "REFUSE", "regex": "a"}, "regex"),
        (CHAT, {"messages": [{"role": "user", "content": "REFUSE"}], "grammar": 'start: "a"'}, "grammar"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": "REFUSE"}], "response_format": {"type": "json_object"}},
            "response_format",
        ),
        ("/v1/responses", {"input": "REFUSE", "text": {"format": {"type": "json_object"}}}, "text"),
    ],
)
def test_what_only_the_engine_can_refuse_is_a_400_too(
    server: LiveServer, path: str, body: dict[str, Any], param: str, stream: bool
) -> None:
    answer = server.post(path, {**body, "stream": stream})
    assert answer.status_code == 400
    assert answer.json()["error"] == {
        "message": "the parrot will not say that (say please)",
        "type": "invalid_request_error",
        "param": param,
        "code": "unspeakable",
    }
    server.wait_until_idle()


def test_one_prompt_refused_refuses_them_all(server: LiveServer) -> None:
    answer = server.post(COMPLETIONS, {"prompt": ["SLOW one", "REFUSE"], "n": 2, "max_tokens": 400})
    assert error_of(answer)["param"] == "grammar"
    server.wait_until_idle()
