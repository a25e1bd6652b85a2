"""Sequences that a worker has yet to read, with features that no one message holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ssd_ascend.speculation import news
from ssd_ascend.transport.messages import Message, Request
from tests.engine.harness import greedy, prompts_of, run, speculation
from tests.engine.lines import through

PROMPTS = prompts_of([12, 19, 26, 33])


class Heard:
    """A line that keeps what is sent."""

    requests: list[Request]

    def __init__(self, line: Any) -> None:
        self._line, Heard.requests = line, []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._line, name)

    def send(self, message: Message) -> None:
        if isinstance(message, Request):
            Heard.requests.append(message)
        self._line.send(message)


def bytes_of(request: Request) -> list[int]:
    return [attach.features.nbytes for attach in request.attaches if attach.features is not None]


def test_they_come_in_turns(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that comes new while many run, or speculation that is switched on again: all at once are too many."""
    plain = run(pair, PROMPTS, greedy(30))
    through(monkeypatch, Heard)
    whole = run(pair, PROMPTS, greedy(30), speculation(pair, "ssd", "eagle3"))
    sizes = [size for request in Heard.requests for size in bytes_of(request)]
    assert max(len(request.attaches) for request in Heard.requests) > 1
    monkeypatch.setattr(news, "NEW_BYTES", sizes[-1] + 1)
    other = run(pair, PROMPTS, greedy(30), speculation(pair, "ssd", "eagle3"))
    assert other.tokens == whole.tokens == plain.tokens
    assert other.stats.speculation.worker_restarts == 0
    assert {attach.seq_id for request in Heard.requests for attach in request.attaches} == {0, 1, 2, 3}
    for request in Heard.requests:
        assert len(bytes_of(request)) == 1 or sum(bytes_of(request)) <= sizes[-1] + 1


def test_one_that_is_too_long_by_itself_is_decoded_plainly(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = run(pair, PROMPTS, greedy(30))
    through(monkeypatch, Heard)
    run(pair, PROMPTS[:1], greedy(2), speculation(pair, "ssd", "eagle3"))
    ((token_bytes,),) = ([size // len(PROMPTS[0]) for size in bytes_of(request)] for request in Heard.requests[:1])
    monkeypatch.setattr(news, "NEW_BYTES", 31 * token_bytes)
    monkeypatch.setattr(news, "LONGEST_BYTES", 31 * token_bytes)
    other = run(pair, PROMPTS, greedy(30), speculation(pair, "ssd", "eagle3"))
    assert other.tokens == plain.tokens
    assert other.stats.speculation.worker_alive
    assert {attach.seq_id for request in Heard.requests for attach in request.attaches} == {0, 1, 2}
