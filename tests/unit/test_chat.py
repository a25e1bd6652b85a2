"""The terminal chat with a model that says what it is told to."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from typing import Any

from ssd_ascend.chat import Conversation, stats_line, talk
from ssd_ascend.core.sampling import SamplingParams
from ssd_ascend.engine.answers import AnswerDelta, AnswerStats
from ssd_ascend.errors import RequestError

STATS = AnswerStats(
    prompt_tokens=3,
    cached_tokens=0,
    completion_tokens=5,
    steps=2,
    drafted=6,
    accepted=2,
    cache_lookups=4,
    cache_hits=3,
    preemptions=0,
    ttft_s=0.25,
    decode_s=2.0,
)


class Template:
    def render(self, turns: Sequence[dict[str, str]], *, add_generation_prompt: bool) -> list[int]:
        assert add_generation_prompt
        if len(turns) > 6:
            raise RequestError("too long", param="messages")
        return [len(turns)]


class Model:
    """Answers "word-by-word, N", where N is the number of turns it was given; counts requests that were left early."""

    def __init__(self, *, press_after: int | None = None) -> None:
        self.tokenizer = self
        self.chat = Template()
        self.left_early = 0
        self._press_after = press_after

    def stream(self, prompt: list[int], sampling: SamplingParams, *, continuation: bool) -> Iterator[AnswerDelta]:
        assert not continuation
        words = ["word-", "by-", "word, ", str(prompt[0])]
        try:
            for index, word in enumerate(words):
                if index == self._press_after:
                    os.kill(os.getpid(), signal.SIGINT)
                last: dict[str, Any] = {"finish_reason": "stop", "stats": STATS} if index == 3 else {}
                yield AnswerDelta(request_id=0, index=0, text=word, token_ids=[1], offsets=[0], **last)
        except GeneratorExit:
            self.left_early += 1


def session(model: Model, *lines: str, show_stats: bool = False, system: str | None = None) -> tuple[str, Conversation]:
    """What is on the terminal after `lines` were typed."""
    typed = iter(lines)
    shown: list[str] = []

    def read() -> str:
        for line in typed:
            return line
        raise EOFError

    conversation = Conversation(model, SamplingParams(), system=system)  # type: ignore[arg-type]
    talk(conversation, read, shown.append, show_stats=show_stats)
    return "".join(shown), conversation


def test_turns_add_up_and_reset_forgets() -> None:
    shown, conversation = session(Model(), "hi", "", "again", "/reset", "hi", system="be brief")
    assert shown == "word-by-word, 2\nword-by-word, 4\n(forgotten)\nword-by-word, 2\n\n"
    assert [turn["role"] for turn in conversation.turns] == ["system", "user", "assistant"]


def test_statistics_on_request() -> None:
    line = (
        "[5 tokens, first after 0.25 s, then 2.0 tokens/s, 2.00 tokens a step, 2 of 6 drafts accepted, 75% cache hits]"
    )
    assert stats_line(STATS) == line
    shown, _ = session(Model(), "a", "/stats", "b")
    assert shown.count(line) == 1
    assert session(Model(), "a", "/stats", "b", show_stats=True)[0].count(line) == 1


def test_commands() -> None:
    shown, _ = session(Model(), "/help", "/dance", "/exit", "never read")
    assert shown.count("/reset") == 2
    assert "unknown command /dance" in shown
    assert "word" not in shown


def test_ctrl_c_stops_the_answer_between_steps() -> None:
    model = Model(press_after=2)
    before = signal.getsignal(signal.SIGINT)
    shown, conversation = session(model, "hi")
    assert shown == "word-by-word,  (stopped)\n\n"
    assert conversation.turns[-1] == {"role": "assistant", "content": "word-by-word, "}
    assert model.left_early == 1
    assert signal.getsignal(signal.SIGINT) is before


def test_a_conversation_that_does_not_fit_says_so_and_goes_on() -> None:
    shown, conversation = session(Model(), "1", "2", "3", "4", "/reset", "5")
    assert "error: too long\n" in shown
    assert len(conversation.turns) == 2
