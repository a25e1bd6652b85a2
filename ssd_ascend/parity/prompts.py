"""What engines are asked in a golden run: numbers by a counter for the built-in models, questions for one that reads.

A real model answers random tokens with hardly a preference, so that two devices part at ties; to a question it has an
answer. The prompts travel with the golden run, so that whoever checks asks the same. Called by `recording`.
"""

from __future__ import annotations

from pathlib import Path

from ssd_ascend.errors import ConfigError, RequestError
from ssd_ascend.parity.numbers import integers
from ssd_ascend.text.tokenizer import Tokenizer

_LENGTHS = (1, 5, 17, 140)
_LONGEST = 200
"""Of the questions that are asked, in tokens."""
_QUESTIONS = (
    "What is the capital of France?",
    "Count from one to fifteen, in digits, with commas between them.",
    "Write a Python function that returns the sum of the squares of a list of numbers, and explain it in one sentence.",
    "Here are the opening hours of a library. Monday: 9 to 17. Tuesday: 9 to 17. Wednesday: closed. Thursday: 12 to "
    "20. Friday: 9 to 17. Saturday: 10 to 14. Sunday: closed. The reading room opens half an hour later than the "
    "library and closes half an hour earlier. Books may be returned at any time through the slot beside the entrance. "
    "List all days on which the library is open, one a line, with the hours of the reading room.",
)


def built_in(vocab_size: int) -> list[list[int]]:
    """Token ids by a counter, the same on every machine."""
    return [integers(f"prompt {n}", n, low=3, high=vocab_size).tolist() for n in _LENGTHS]


def questions(model: Path) -> list[list[int]] | None:
    """The same questions in this model's own format; None where it has no tokenizer, or none that can ask them."""
    try:
        tokenizer = Tokenizer.load(model)
        if not tokenizer.chat.available:
            asked = [tokenizer.encode(text, add_special_tokens=True) for text in _QUESTIONS]
        else:
            turns = ([{"role": "user", "content": text}] for text in _QUESTIONS)
            asked = [tokenizer.chat.render(messages, add_generation_prompt=True) for messages in turns]
    except (ConfigError, RequestError):
        return None
    return [prompt for prompt in asked if len(prompt) <= _LONGEST] or None
