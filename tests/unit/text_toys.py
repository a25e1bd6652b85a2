"""Tiny tokenizers of the two supported families, built on the spot, for the tests of the text room."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from ssd_ascend.text import Tokenizer as SsdTokenizer

SPECIAL = ["<s>", "</s>", "<|turn|>"]

# letters that merge, spaces, and characters of two to four bytes: emoji with modifiers, CJK, combining marks, Hebrew
TEXTS = st.text(alphabet="ab en the 12\n" + "é́你好世界😀👩🏽‍🚀🇩🇪שלום\u200d�▁", max_size=40) | st.text(max_size=20)


def byte_level_backend() -> Tokenizer:
    """GPT-2's kind: 256 byte tokens, a few merges, three special tokens and one plain added token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("e", "n"), ("ð", "Ł"), ("ä", "½")]
    words = [*alphabet, *dict.fromkeys(left + right for left, right in merges)]
    backend = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return _with_added_tokens(backend)


def byte_fallback_backend(*, strip: bool = True) -> Tokenizer:
    """Llama 2's kind: `▁` for a space, `<0xNN>` for what has no token, one leading space that decoding takes off."""
    merges = [("t", "h"), ("th", "e"), ("▁", "the"), ("e", "n")]
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abtehnd", "你", "é"]
    words += [left + right for left, right in merges]
    backend = Tokenizer(
        models.BPE(
            vocab={word: i for i, word in enumerate(words)},
            merges=merges,
            byte_fallback=True,
            unk_token="<unk>",
            fuse_unk=True,
        )
    )
    spaces = normalizers.Replace(" ", "▁")
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if strip else spaces
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    return _with_added_tokens(backend)


def _with_added_tokens(backend: Tokenizer) -> Tokenizer:
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    backend.add_tokens([AddedToken("<plain token>", special=False, normalized=False)])
    return backend


def putting_bos(backend: Tokenizer) -> Tokenizer:
    """Let `backend` put <s> before a text, as Llama's does."""
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))]
    )
    return backend


def write_directory(path: Path, backend: Tokenizer, **config: Any) -> Path:
    """A model directory with a tokenizer.json and a tokenizer_config.json of `config`."""
    path.mkdir(parents=True, exist_ok=True)
    backend.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    return path


def load(path: Path, backend: Tokenizer, **config: Any) -> SsdTokenizer:
    """Write, then load as users do."""
    return SsdTokenizer.load(write_directory(path, backend, **config))


def runs_of(ids: list[int], size: int) -> list[list[int]]:
    """`ids` as they come with `size` tokens a step."""
    return [ids[at : at + size] for at in range(0, len(ids), size)]
