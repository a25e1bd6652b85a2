"""Loading from directories and .gguf files: ids, end tokens, what is added around a text, and every way to fail."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFWriter
from tokenizers import Tokenizer as Backend

from ssd_ascend.errors import ConfigError, RequestError
from ssd_ascend.text import Tokenizer, read_gguf_metadata
from tests.unit.text_toys import byte_fallback_backend, byte_level_backend, load, putting_bos, write_directory

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6


def write_gguf(path: Path, kind: str, tokens: list[str], types: list[int], **more: Any) -> Path:
    """A .gguf without tensors, written by the format's own package; `more` are tokenizer.ggml.* values."""
    writer = GGUFWriter(str(path), "llama")
    writer.add_bool("general.flag", True)
    writer.add_array("general.languages", ["en", "zh"])
    writer.add_float64("general.number", 0.5)
    writer.add_tokenizer_model(kind)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    for name, value in more.items():
        key = f"tokenizer.ggml.{name}"
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, list):
            writer.add_array(key, value)
        else:
            writer.add_string(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def byte_level_gguf(path: Path, *, pre: str = "smollm", **more: Any) -> Path:
    from tokenizers import pre_tokenizers

    merges = ["t h", "th e", "Ġ the", "Ġ 1", "1 2", "Ġ Ġ"]
    words = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(merge.replace(" ", "") for merge in merges), "whole"]
    tokens = [*words, "<s>", "<|im_end|>", "</s>", "<plain token>"]
    types = [NORMAL] * len(words) + [CONTROL] * 3 + [USER_DEFINED]
    return write_gguf(path, "gpt2", tokens, types, pre=pre, merges=merges, **more)


def sentencepiece_gguf(path: Path, **more: Any) -> Path:
    pieces = {"▁": -9.0, "a": -8.0, "b": -8.5, "ab": -3.0, "ba": -2.0, "▁a": -4.0, "bab": -1.0}
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(pieces)]
    scores = [0.0] * 259 + list(pieces.values())
    ids = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    return write_gguf(path, "llama", tokens, types, scores=scores, **{**ids, **more})


def pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    return [tokenizer.token_text(i) for i in tokenizer.encode(text, add_special_tokens=False)]


# directories ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config",
    [
        {"bos_token": "<s>", "eos_token": "</s>"},
        {"bos_token": {"content": "<s>", "__type": "AddedToken"}, "eos_token": "</s>", "add_bos_token": True},
        {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": False, "add_eos_token": True},
    ],
)
@pytest.mark.parametrize("make", [byte_level_backend, byte_fallback_backend])
@pytest.mark.parametrize("adds_bos", [False, True])
def test_directory_encodes_as_transformers_does(
    tmp_path: Path, make: Callable[[], Backend], config: dict[str, Any], adds_bos: bool
) -> None:
    from transformers import AutoTokenizer

    backend = putting_bos(make()) if adds_bos else make()
    tokenizer = load(tmp_path, backend, tokenizer_class="PreTrainedTokenizerFast", **config)
    reference = AutoTokenizer.from_pretrained(str(tmp_path), trust_remote_code=False)
    for text in ("", "the end", " 😀 <|turn|>the", "<plain token> x"):
        for special in (True, False):
            ids = tokenizer.encode(text, add_special_tokens=special)
            assert ids == reference(text, add_special_tokens=special)["input_ids"]
    assert (tokenizer.encode("", add_special_tokens=True) == [tokenizer.bos_id]) == adds_bos
    assert (tokenizer.bos_id, tokenizer.vocab_size) == (reference.bos_token_id, len(reference))


def test_all_end_tokens_are_found_wherever_they_are_written(tmp_path: Path) -> None:
    """B08: chat models list their end tokens in generation_config.json, some of them only there."""
    directory = write_directory(tmp_path, byte_level_backend(), eos_token="</s>")
    eos = Tokenizer.load(directory).encode("</s>", add_special_tokens=False)[0]
    assert Tokenizer.load(directory).eos_ids == {eos}
    (directory / "config.json").write_text(json.dumps({"eos_token_id": 5}))
    assert Tokenizer.load(directory).eos_ids == {eos, 5}
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    assert Tokenizer.load(directory).eos_ids == {eos, 5, 7, 9}
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": "</s>"}))
    with pytest.raises(ConfigError, match=r"generation_config\.json: eos_token_id is '</s>'"):
        Tokenizer.load(directory)


def test_special_tokens_are_told_from_added_ones(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, byte_level_backend())
    turn, plain = (tokenizer.encode(t, add_special_tokens=False)[0] for t in ("<|turn|>", "<plain token>"))
    assert tokenizer.is_special(turn)
    assert not tokenizer.is_special(plain)
    assert tokenizer.decode([turn, plain], skip_special_tokens=True) == "<plain token>"
    assert tokenizer.decode([turn, plain], skip_special_tokens=False) == "<|turn|><plain token>"


def test_limits_of_the_training_run_do_not_cut_prompts(tmp_path: Path) -> None:
    backend = byte_level_backend()
    backend.enable_truncation(3)
    backend.enable_padding(length=5)
    tokenizer = load(tmp_path, backend)
    assert len(tokenizer.encode("abababab", add_special_tokens=False)) == 8
    assert len(tokenizer.encode("a", add_special_tokens=False)) == 1


def test_vocabulary_files_without_tokenizer_json_are_converted(tmp_path: Path) -> None:
    vocab = {word: i for i, word in enumerate(["a", "b", "Ġ", "ab", "<|endoftext|>"])}
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.encode("ab a", add_special_tokens=False) == [3, 2, 0]
    assert tokenizer.decode([3, 2, 0], skip_special_tokens=True) == "ab a"


def test_missing_tokenizer_names_the_path_and_the_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        Tokenizer.load(tmp_path)
    for part in (str(tmp_path), "tokenizer.json", "tokenizer.model", "vocab.json"):
        assert part in str(caught.value)
    with pytest.raises(ConfigError, match=r"nowhere.*neither a directory nor a \.gguf file"):
        Tokenizer.load(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("file", "text"), [("tokenizer.json", "{"), ("tokenizer_config.json", "{"), ("config.json", "[1]")]
)
def test_damaged_file_is_named(tmp_path: Path, file: str, text: str) -> None:
    directory = write_directory(tmp_path, byte_level_backend())
    (directory / file).write_text(text)
    with pytest.raises(ConfigError, match=file):
        Tokenizer.load(directory)


@pytest.mark.parametrize("text", ["\ud83d", "a\udc80b"])
def test_lone_surrogate_is_a_request_error(tmp_path: Path, text: str) -> None:
    tokenizer = load(tmp_path, byte_level_backend(), chat_template="{{ messages[0].content }}")
    with pytest.raises(RequestError, match="surrogate") as caught:
        tokenizer.encode(text, add_special_tokens=False)
    assert caught.value.param == "prompt"
    with pytest.raises(RequestError, match="surrogate") as caught:
        tokenizer.chat.render([{"role": "user", "content": text}], add_generation_prompt=True)
    assert caught.value.param == "messages"


def test_room_is_light_to_import() -> None:
    heavy = ("torch", "transformers", "tokenizers", "jinja2", "numpy")
    code = f"import sys, ssd_ascend.text; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# .gguf ---------------------------------------------------------------------------------------------


def test_gguf_byte_level(tmp_path: Path) -> None:
    path = byte_level_gguf(tmp_path / "m.gguf", bos_token_id=263, eos_token_id=265)
    tokenizer = Tokenizer.load(path)
    assert pieces(tokenizer, "the the<|im_end|> é") == ["the", " the", "<|im_end|>", " ", "\ufffd", "\ufffd"]
    assert (tokenizer.bos_id, tokenizer.vocab_size) == (263, 267)
    assert tokenizer.eos_ids == {264, 265}  # <|im_end|> ends a turn though the file names only </s>
    assert tokenizer.is_special(264)
    assert not tokenizer.is_special(266)
    assert tokenizer.encode("the", add_special_tokens=True)[0] != 263


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", [" ", " 1", "2"]),  # one space stays with the number: GPT-2's rule
        ("smollm", ["  ", "1", "2"]),
        ("llama-bpe", [" ", " ", "12"]),
        ("qwen2", [" ", " ", "1", "2"]),
    ],
)
def test_gguf_cuts_as_its_name_says(tmp_path: Path, pre: str, expected: list[str]) -> None:
    tokenizer = Tokenizer.load(byte_level_gguf(tmp_path / "m.gguf", pre=pre, bos_token_id=263))
    assert pieces(tokenizer, "  12") == expected
    assert (pieces(tokenizer, "whole") == ["whole"]) == (pre == "llama-bpe")
    assert (tokenizer.encode("a", add_special_tokens=True)[0] == 263) == (pre == "llama-bpe")


def test_gguf_adds_what_it_says(tmp_path: Path) -> None:
    ids = {"bos_token_id": 263, "eos_token_id": 265}
    tokenizer = Tokenizer.load(byte_level_gguf(tmp_path / "m.gguf", add_bos_token=True, add_eos_token=True, **ids))
    assert tokenizer.encode("the", add_special_tokens=True)[::2] == [263, 265]
    assert len(tokenizer.encode("the", add_special_tokens=False)) == 1


def test_gguf_sentencepiece_merges_by_score(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(sentencepiece_gguf(tmp_path / "m.gguf"))
    # "ba" (-2) is merged before "ab" (-3), then "bab" (-1)
    assert pieces(tokenizer, "abab") == [" a", "bab"]
    assert pieces(tokenizer, "é") == [" ", "\ufffd", "\ufffd"]
    ids = tokenizer.encode("ab é", add_special_tokens=True)
    assert ids[0] == tokenizer.bos_id == 1
    assert tokenizer.decode(ids, skip_special_tokens=True) == "ab é"
    unprefixed = Tokenizer.load(sentencepiece_gguf(tmp_path / "n.gguf", add_space_prefix=False))
    assert pieces(unprefixed, "abab") == ["a", "bab"]
    assert unprefixed.strip_spaces == 0


def test_gguf_metadata_of_every_kind(tmp_path: Path) -> None:
    path = byte_level_gguf(tmp_path / "m.gguf")
    meta = read_gguf_metadata(path, lambda key: key.startswith("general."))
    assert meta["general.architecture"] == "llama"
    assert (meta["general.flag"], meta["general.number"]) == (True, 0.5)
    assert meta["general.languages"] == ["en", "zh"]
    assert not any(key.startswith("tokenizer") for key in meta)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"pre": "nosuch"}, "unknown tokenizer.ggml.pre 'nosuch'.*gpt-2, llama-bpe, qwen2, smollm"),
        ({"eos_token_id": 5000}, "eos_token_id is 5000, but there are 267 tokens"),
    ],
)
def test_gguf_that_cannot_be_right_is_refused(tmp_path: Path, more: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Tokenizer.load(byte_level_gguf(tmp_path / "m.gguf", **more))


def test_gguf_of_another_kind_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"unknown tokenizer kind 'bert'.*known: gpt2, llama"):
        Tokenizer.load(write_gguf(tmp_path / "m.gguf", "bert", ["a"], [NORMAL]))


def test_gguf_cut_off_or_not_gguf(tmp_path: Path) -> None:
    whole = byte_level_gguf(tmp_path / "m.gguf").read_bytes()
    damaged = tmp_path / "d.gguf"
    for size in (5, 20, 60, len(whole) // 2):
        damaged.write_bytes(whole[:size])
        with pytest.raises(ConfigError, match="ends inside its header"):
            Tokenizer.load(damaged)
    for content, message in [
        (b"", "is empty"),
        (b"PK\x03\x04" + bytes(40), "not a GGUF file"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "GGUF version 1"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 0), "holds no tokenizer"),
        (b"GGUF" + struct.pack("<IQQQcIIQ", 3, 0, 1, 1, b"k", 9, 8, 2**60), "ends inside its header"),
        (b"GGUF" + struct.pack("<IQQQcI", 3, 0, 1, 1, b"k", 77), "unknown type 77"),
        (b"GGUF" + struct.pack("<IQQQcI", 3, 0, 1, 1, b"\xff", 0), "not UTF-8"),
    ]:
        damaged.write_bytes(content)
        with pytest.raises(ConfigError, match=message):
            Tokenizer.load(damaged)
    with pytest.raises(ConfigError, match="neither a directory nor"):
        Tokenizer.load(tmp_path / "none.bin")
    with pytest.raises(ConfigError, match="no such file"):
        Tokenizer.load(tmp_path / "none.gguf")
