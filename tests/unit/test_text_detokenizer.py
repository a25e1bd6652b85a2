"""Streams of text: stable pieces only, equal to decoding at once, for every way to cut the tokens into runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ssd_ascend.errors import ConfigError
from ssd_ascend.text import IncrementalDetokenizer, Tokenizer
from tests.unit.text_toys import SPECIAL, TEXTS, byte_fallback_backend, byte_level_backend, load, runs_of

BACKENDS = {
    "byte_level": byte_level_backend(),
    "byte_fallback": byte_fallback_backend(),
    "byte_fallback_keeping_spaces": byte_fallback_backend(strip=False),
}


@pytest.fixture(scope="module", params=sorted(BACKENDS))
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load(tmp_path_factory.mktemp(request.param), BACKENDS[request.param])


def streamed(tokenizer: Tokenizer, runs: list[list[int]], *, skip_special_tokens: bool, continuation: bool) -> str:
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip_special_tokens, continuation=continuation)
    return "".join([detokenizer.feed(run) for run in runs]) + detokenizer.flush()


@settings(max_examples=150, deadline=None)
@given(text=TEXTS, skip=st.booleans())
def test_text_survives_encoding_and_every_grouping(tokenizer: Tokenizer, text: str, skip: bool) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    decoded = tokenizer.decode(ids, skip_special_tokens=skip)
    assert decoded == tokenizer._backend.decode(ids, skip_special_tokens=skip)
    if "▁" not in text or tokenizer._codec.byte_level:  # sentencepiece cannot tell it from a space
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
    for size in range(1, 7):
        assert streamed(tokenizer, runs_of(ids, size), skip_special_tokens=skip, continuation=False) == decoded


@settings(max_examples=150, deadline=None)
@given(data=st.data(), skip=st.booleans(), continuation=st.booleans())
def test_any_ids_stream_as_they_decode(
    tokenizer: Tokenizer, data: st.DataObject, skip: bool, continuation: bool
) -> None:
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=30))
    decoded = tokenizer.decode(ids, skip_special_tokens=skip, continuation=continuation)
    for size in range(1, 7):
        assert streamed(tokenizer, runs_of(ids, size), skip_special_tokens=skip, continuation=continuation) == decoded
    if tokenizer._codec.byte_level and not continuation:  # the library's decoder reads bytes as we do, sound or not
        assert decoded == tokenizer._backend.decode(ids, skip_special_tokens=skip)


@settings(max_examples=100, deadline=None)
@given(text=st.text(alphabet="😀你é שa", min_size=1, max_size=20))
def test_no_piece_holds_a_part_of_a_character(tokenizer: Tokenizer, text: str) -> None:
    detokenizer = IncrementalDetokenizer(tokenizer)
    pieces = [detokenizer.feed_one(i) for i in tokenizer.encode(text, add_special_tokens=False)]
    assert not any("�" in piece for piece in pieces)
    assert "".join(pieces) == text
    assert detokenizer.flush() == ""
    starts = [sum(map(len, pieces[:index])) for index in range(len(pieces))]
    assert detokenizer.offsets == starts


def test_unfinished_character_shows_at_the_end_only(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a😀", add_special_tokens=False)[:-1]
    detokenizer = IncrementalDetokenizer(tokenizer)
    assert detokenizer.feed(ids) == "a"
    assert detokenizer.flush() == "�"
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a�"


def test_character_broken_off_by_another_token_is_one_mark_and_what_follows_is_sound(tokenizer: Tokenizer) -> None:
    head = tokenizer.encode("😀", add_special_tokens=False)[:-1]
    letter = tokenizer.encode("xa", add_special_tokens=False)[-1]
    detokenizer = IncrementalDetokenizer(tokenizer, continuation=True)
    pieces = [detokenizer.feed_one(i) for i in [*head, letter]]
    assert pieces[:-1] == [" " if "▁" in tokenizer.token_text(i) else p for i, p in zip(head, pieces, strict=False)]
    assert "".join(pieces).strip() == "�a"


class CountingTokenizer:
    """Counts how often bytes are asked for, to tell linear work from quadratic without a clock."""

    strip_spaces = 0

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.asked = 0
        self._tokenizer = tokenizer

    def token_bytes(self, token_id: int) -> bytes:
        self.asked += 1
        return self._tokenizer.token_bytes(token_id)

    def is_special(self, token_id: int) -> bool:
        return self._tokenizer.is_special(token_id)


def test_thousands_of_byte_tokens_are_neither_silent_nor_read_twice(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, byte_fallback_backend())
    lone = tokenizer._backend.token_to_id("<0xF0>")
    counting = CountingTokenizer(tokenizer)
    detokenizer = IncrementalDetokenizer(counting)
    pieces = [detokenizer.feed([lone] * 5) for _ in range(1000)]
    assert counting.asked == 5000
    assert all("�" in piece for piece in pieces)
    assert "".join(pieces) + detokenizer.flush() == "�" * 5000


def test_valid_characters_survive_in_a_malformed_run(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, byte_fallback_backend())
    ids = [tokenizer._backend.token_to_id(f"<0x{byte:02X}>") for byte in "世".encode() + b"\xff"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "世�"
    assert tokenizer._backend.decode(ids) == "����"  # the library cannot say so: it would have to take text back


def test_special_tokens_hide_inside_a_character(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("😀", add_special_tokens=False)
    special = tokenizer._backend.token_to_id(SPECIAL[2])
    cut = [*ids[:-1], special, ids[-1]]
    assert tokenizer.decode(cut, skip_special_tokens=True) == "😀"
    assert streamed(tokenizer, runs_of(cut, 2), skip_special_tokens=True, continuation=False) == "😀"


def test_leading_space_is_dropped_at_the_start_but_kept_in_a_continuation(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, byte_fallback_backend())
    ids = tokenizer.encode("the end", add_special_tokens=False)
    assert tokenizer.token_text(ids[0]) == " the"
    assert tokenizer.decode(ids, skip_special_tokens=True) == "the end"
    assert tokenizer.decode(ids, skip_special_tokens=True, continuation=True) == " the end"


def test_token_bytes_are_exact(tokenizer: Tokenizer) -> None:
    for text in ("the 你é", "😀\n\t", "\x00\x7f\x80"):
        ids = tokenizer.encode(text, add_special_tokens=False)
        joined = b"".join(tokenizer.token_bytes(i) for i in ids)
        assert joined.removeprefix(b" " * tokenizer.strip_spaces) == text.encode("utf-8")
    assert tokenizer.token_bytes(tokenizer._backend.token_to_id("<plain token>")) == b"<plain token>"
    assert tokenizer.token_bytes(tokenizer.vocab_size + 100) == b""


def test_decoders_that_are_not_bytewise_are_refused_by_name(tmp_path: Path) -> None:
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models

    backend = Backend(models.WordPiece({"a": 0, "[UNK]": 1}))
    backend.decoder = decoders.WordPiece()
    with pytest.raises(ConfigError, match="WordPiece"):
        load(tmp_path, backend)
    backend.decoder = None
    with pytest.raises(ConfigError, match="none"):
        load(tmp_path, backend)
