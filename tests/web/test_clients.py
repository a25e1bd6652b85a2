"""The clients people have, unmodified: a scripted session each of chat, stream, tools, JSON schema, log-probabilities
and errors, against the real front end. (More of the official Python client is in `tests/serve/test_openai_client.py`.)
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.serve.live import LiveServer

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
NODE_FOLDER = Path(os.environ.get("NODE_FOLDER", HERE.parents[1] / ".venv-web" / "node"))
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
PERSON = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "title": "person"}


def say(script: str) -> str:
    return f"SAY[{script}]YAS"


def test_openai_for_node(server: LiveServer) -> None:
    node = shutil.which("node")
    if node is None or not (NODE_FOLDER / "node_modules" / "openai").is_dir():
        pytest.skip(f"no Node.js, or no openai package in {NODE_FOLDER}")
    ran = subprocess.run(
        [node, str(HERE / "session.mjs"), server.url, str(NODE_FOLDER)], capture_output=True, text=True, timeout=120
    )
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout) == {
        "models": ["parrot"],
        "chat": "hello",
        "stream": "one two",
        "call": ["tool_calls", {"name": "add", "arguments": '{"a": 1}'}],
        "streamed_call": '{"a": 1}',
        "schema": {"n": 1},
        "logprobs": [["a", 2], ["b", 2], ["</s>", 2]],
        "completion": "hihi",
        "error": ["BadRequestError", 400, "temperature"],
    }


def test_openai_for_python(server: LiveServer) -> None:
    """The same session as for Node.js, and the helpers that only this client has."""
    openai, pydantic = pytest.importorskip("openai"), pytest.importorskip("pydantic")
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)

    def asked(script: str, **more: Any) -> dict[str, Any]:
        return {"model": "parrot", "max_tokens": 250, "messages": [{"role": "user", "content": say(script)}], **more}

    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
    person = pydantic.create_model("Person", n=(int, ...))
    chat = client.chat.completions
    assert [model.id for model in client.models.list()] == ["parrot"]
    assert chat.create(**asked("hello")).choices[0].message.content == "hello"
    pieces = [chunk.choices[0].delta.content or "" for chunk in chat.create(**asked("one two", stream=True))]
    assert "".join(pieces) == "one two"
    called = chat.create(**asked(CALL, tools=tools)).choices[0]
    assert called.finish_reason == "tool_calls"
    assert json.loads(called.message.tool_calls[0].function.arguments) == {"a": 1}
    with chat.stream(**asked(CALL, tools=tools)) as stream:
        assert stream.get_final_completion().choices[0].message.tool_calls[0].function.name == "add"
    assert chat.parse(**asked('{"n": 7}', response_format=person)).choices[0].message.parsed == person(n=7)
    scored = chat.create(**asked("ab", logprobs=True, top_logprobs=2)).choices[0].logprobs.content
    assert [(entry.token, len(entry.top_logprobs)) for entry in scored] == [("a", 2), ("b", 2), ("</s>", 2)]
    assert client.completions.create(model="parrot", prompt="hi", max_tokens=4).choices[0].text == "hihi"
    with pytest.raises(openai.BadRequestError) as refused:
        chat.create(**asked("x", temperature=9000))
    assert (refused.value.status_code, refused.value.param) == (400, "temperature")


@pytest.fixture
def langchain(server: LiveServer) -> Any:
    module = pytest.importorskip("langchain_openai")
    return module.ChatOpenAI(base_url=f"{server.url}/v1", api_key="none", model="parrot", max_tokens=250, max_retries=0)


def test_langchain(langchain: Any) -> None:
    assert langchain.invoke(say("hello")).content == "hello"
    assert "".join(chunk.content for chunk in langchain.stream(say("one two"))) == "one two"
    usage = langchain.invoke(say("hello")).usage_metadata
    assert usage["output_tokens"] == 6

    def add(a: int) -> int:
        """Add."""
        return a

    bound = langchain.bind_tools([add])
    answer = bound.invoke(say(CALL))
    assert [(call["name"], call["args"]) for call in answer.tool_calls] == [("add", {"a": 1})]
    whole = None
    for chunk in bound.stream(say(CALL)):
        whole = chunk if whole is None else whole + chunk
    assert whole is not None
    assert [(call["name"], call["args"]) for call in whole.tool_calls] == [("add", {"a": 1})]


def test_langchain_structured_output_and_errors(langchain: Any) -> None:
    import openai

    structured = langchain.with_structured_output(PERSON, method="json_schema")
    assert structured.invoke(say('{"n": 7}')) == {"n": 7}
    scored = langchain.bind(logprobs=True, top_logprobs=1).invoke(say("ab"))
    assert [entry["token"] for entry in scored.response_metadata["logprobs"]["content"]] == ["a", "b", "</s>"]
    with pytest.raises(openai.BadRequestError) as refused:
        langchain.bind(top_p=7).invoke("x")
    assert refused.value.param == "top_p"


def test_litellm(server: LiveServer) -> None:
    litellm = pytest.importorskip("litellm")
    common: dict[str, Any] = {
        "model": "openai/parrot",
        "api_base": f"{server.url}/v1",
        "api_key": "none",
        "max_tokens": 250,
        "num_retries": 0,
    }

    def ask(script: str, **more: Any) -> Any:
        return litellm.completion(messages=[{"role": "user", "content": say(script)}], **common, **more)

    assert ask("hello").choices[0].message.content == "hello"
    pieces = [chunk.choices[0].delta.content or "" for chunk in ask("one two", stream=True)]
    assert "".join(pieces) == "one two"
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
    (call,) = ask(CALL, tools=tools).choices[0].message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 1})
    format_ = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
    assert json.loads(ask('{"n": 7}', response_format=format_).choices[0].message.content) == {"n": 7}
    scored = ask("ab", logprobs=True, top_logprobs=1)
    assert [entry.token for entry in scored.choices[0].logprobs.content] == ["a", "b", "</s>"]
    with pytest.raises(litellm.BadRequestError):
        ask("x", temperature=9000)
