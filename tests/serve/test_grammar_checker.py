"""Grammars at the door: refused by name of the field, tried out in a process that goes when the server does."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.serve.live import LiveServer, eventually

pytest.importorskip("llguidance")

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
CHAIN = "start: a0\n" + "\n".join(f'a{i}: "x" a{i + 1}' for i in range(6000)) + '\na6000: "z"'
SCHEMA = {"$ref": "#"}


def format_(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


REFUSED = {
    "response_format": (CHAT, {"messages": MESSAGES, "response_format": format_(SCHEMA)}, "no text at all matches it"),
    "regex": (COMPLETIONS, {"prompt": "hi", "regex": "a{1000000}"}, "too much work"),
    "grammar": (COMPLETIONS, {"prompt": "hi", "grammar": CHAIN}, "too long a chain"),
    "tools": (
        CHAT,
        {
            "messages": MESSAGES,
            "tools": [{"type": "function", "function": {"name": "seek", "parameters": {"type": "foo"}}}],
            "tool_choice": "required",
        },
        "the tool 'seek' cannot be enforced: Invalid type: foo",
    ),
}


@pytest.mark.parametrize("param", REFUSED)
def test_what_cannot_be_enforced_is_a_400_that_names_the_field(server: LiveServer, param: str) -> None:
    path, body, said = REFUSED[param]
    for streamed in (False, True):
        response = server.post(path, {**body, "stream": streamed, "max_tokens": 4})
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        assert (error["param"], error["type"]) == (param, "invalid_request_error")
        assert said in error["message"]
    assert server.post(COMPLETIONS, {"prompt": "hi", "regex": "(hi)+", "max_tokens": 4}).status_code == 200
    assert server.get("/health").status_code == 200


def test_the_checker_lives_from_the_first_grammar_to_the_servers_end(parrot: Path) -> None:
    asked = {"prompt": "hi", "max_tokens": 4}
    with LiveServer("--model", str(parrot), "--served-model-name", "parrot") as live:
        live.wait_until_ready()
        assert live.post(COMPLETIONS, asked).status_code == 200
        assert live.checker_pid() is None
        assert live.post(COMPLETIONS, {**asked, "regex": "a+"}).status_code == 200
        first = live.checker_pid()
        assert first is not None
        os.kill(first, signal.SIGKILL)
        assert live.post(COMPLETIONS, {**asked, "regex": "b+"}).status_code == 200
        second = live.checker_pid()
        assert second not in (None, first)
        assert live.stop() == 0
    assert not Path(f"/proc/{second}").exists()


def test_it_goes_with_a_server_that_is_killed(parrot: Path) -> None:
    with LiveServer("--model", str(parrot), "--served-model-name", "parrot") as live:
        live.wait_until_ready()
        assert live.post(COMPLETIONS, {"prompt": "hi", "max_tokens": 4, "regex": "a+"}).status_code == 200
        pid = live.checker_pid()
        assert pid is not None
        live.process.kill()
        live.wait()
        eventually(lambda: not _is_running(pid), "the checker has gone")


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except FileNotFoundError:
        return False


def test_without_a_checker_only_grammars_fail(parrot: Path, tmp_path: Path) -> None:
    """The tokenizer that it would read has gone since the server began."""
    model = tmp_path / "going"
    model.mkdir()
    for file in parrot.iterdir():
        (model / file.name).write_bytes(file.read_bytes())
    with LiveServer("--model", str(model), "--served-model-name", "parrot") as live:
        live.wait_until_ready()
        (model / "tokenizer.json").unlink()
        asked = {"prompt": "hi", "max_tokens": 4}
        response = live.post(COMPLETIONS, {**asked, "regex": "a+"})
        assert response.status_code == 500, response.text
        assert response.json()["error"]["code"] == "grammar_checker_unavailable"
        assert live.post(COMPLETIONS, asked).status_code == 200


def test_a_grammar_that_cannot_be_followed_is_the_requests_fault(server: LiveServer) -> None:
    """400 where the answer has not begun; behind its beginning, an event that says the same."""
    asked = {"prompt": "BALK", "regex": "a+", "max_tokens": 40}
    for streamed in (False, True):
        response = server.post(COMPLETIONS, {**asked, "stream": streamed})
        assert response.status_code == 400, response.text
        assert response.json()["error"]["param"] == "regex"
        assert "the grammar cannot be followed: it balks" in response.json()["error"]["message"]
    *said, last = server.events(COMPLETIONS, {**asked, "prompt": "SLOW BALK LATE"})
    assert said
    assert (last["error"]["type"], last["error"]["param"]) == ("invalid_request_error", "regex")
