"""Builds a tokenizer from the vocabulary inside a .gguf file; `Tokenizer.load` calls it.

Two kinds exist among the models served here: byte-level BPE (`gpt2`) and sentencepiece (`llama`). How a text is cut
before merging is not in the file, only its name (`tokenizer.ggml.pre`); the rules are those the model's authors publish
in tokenizer.json, and what llama.cpp runs for the same name (src/llama-vocab.cpp).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ssd_ascend.errors import ConfigError, unknown_name
from ssd_ascend.text.gguf_metadata import read_gguf_metadata
from ssd_ascend.text.parts import TokenizerParts

if TYPE_CHECKING:
    import tokenizers

_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6  # tokenizer.ggml.token_type
_NAMES = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}

# Converters often give one end token only; these end a turn in every model that has them.
_TURN_ENDS = frozenset({"<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>"})

_LLAMA3_CUT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class _Cut:
    """How byte-level BPE cuts a text into words: GPT-2's own rule unless `pattern` is given."""

    pattern: str | None = None
    single_digits: bool = False
    whole_words_first: bool = False  # a word that is itself a token is never merged from parts
    nfc: bool = False
    adds_bos: bool = False


_CUTS = {
    "gpt-2": _Cut(),
    "smollm": _Cut(single_digits=True),
    "llama-bpe": _Cut(_LLAMA3_CUT, whole_words_first=True, adds_bos=True),
    "qwen2": _Cut(_LLAMA3_CUT.replace(r"\p{N}{1,3}", r"\p{N}"), nfc=True),
}


def load_gguf_tokenizer(path: Path) -> TokenizerParts:
    """The tokenizer of a .gguf file. Raises ConfigError, naming the kind, for one that is not supported."""
    meta = read_gguf_metadata(path, lambda key: key.startswith("tokenizer."))
    kind = meta.get("tokenizer.ggml.model")
    if kind is None or "tokenizer.ggml.tokens" not in meta:
        raise ConfigError(
            f"{path} holds no tokenizer (no tokenizer.ggml.model or tokenizer.ggml.tokens in its header)",
            remedy="convert the model again together with its tokenizer files",
        )
    builders = {"gpt2": _byte_level_bpe, "llama": _sentencepiece}
    if kind not in builders:
        raise unknown_name("tokenizer kind", str(kind), builders, where=str(path))
    tokens: list[str] = meta["tokenizer.ggml.tokens"]
    backend, adds_bos = builders[kind](meta, tokens, path)
    _add_special_tokens(backend, tokens, meta.get("tokenizer.ggml.token_type", ()))

    ids = {name: _token_id(meta, f"tokenizer.ggml.{name}_token_id", tokens, path) for name in _NAMES}
    special = {_NAMES[name]: tokens[token_id] for name, token_id in ids.items() if token_id is not None}
    adds_bos = bool(meta.get("tokenizer.ggml.add_bos_token", adds_bos))
    adds_eos = bool(meta.get("tokenizer.ggml.add_eos_token", False))
    _set_bos_eos(
        backend,
        bos=special.get("bos_token") if adds_bos else None,
        eos=special.get("eos_token") if adds_eos else None,
    )
    return TokenizerParts(path, backend, special, ids["bos"], _eos_ids(meta, tokens, path), _chat_templates(meta))


def _byte_level_bpe(meta: dict[str, Any], tokens: list[str], path: Path) -> tuple[tokenizers.Tokenizer, bool]:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    name = str(meta.get("tokenizer.ggml.pre", "none given"))
    if name not in _CUTS:
        raise unknown_name("tokenizer.ggml.pre", name, _CUTS, where=str(path))
    cut = _CUTS[name]
    merges = [tuple(merge.split(" ", 1)) for merge in meta.get("tokenizer.ggml.merges", ())]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=cut.whole_words_first))
    steps: list[pre_tokenizers.PreTokenizer] = []
    if cut.single_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if cut.pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(cut.pattern), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=cut.pattern is None))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if cut.nfc:
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    return backend, cut.adds_bos


def _sentencepiece(meta: dict[str, Any], tokens: list[str], path: Path) -> tuple[tokenizers.Tokenizer, bool]:
    from tokenizers import Tokenizer, decoders, models, normalizers

    scores: list[float] = meta.get("tokenizer.ggml.scores", [])
    kinds: list[int] = meta.get("tokenizer.ggml.token_type", [])
    if len(scores) != len(tokens) or len(kinds) != len(tokens):
        raise ConfigError(
            f"{path} has {len(tokens)} tokens, but {len(scores)} scores and {len(kinds)} token types",
            remedy="convert the model again with a current converter",
        )
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    unknown = _token_id(meta, "tokenizer.ggml.unknown_token_id", tokens, path)
    backend = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=_merges_of_scores(tokens, scores, kinds, vocab),
            unk_token=tokens[unknown] if unknown is not None else None,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = bool(meta.get("tokenizer.ggml.add_space_prefix", True))
    spaces = normalizers.Replace(" ", "▁")
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefix else spaces
    steps: list[decoders.Decoder] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return backend, True


def _merges_of_scores(
    tokens: Sequence[str], scores: Sequence[float], kinds: Sequence[int], vocab: dict[str, int]
) -> list[tuple[str, str]]:
    """Sentencepiece merges the pair whose union scores best; as an ordered list of pairs that is BPE."""
    apart = {_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE}
    mergeable = {token for token, kind in zip(tokens, kinds, strict=True) if kind not in apart}
    ranked: list[tuple[float, int, int, str, str]] = []
    for token in mergeable:
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in mergeable and right in mergeable:
                ranked.append((-scores[vocab[token]], vocab[left], vocab[right], left, right))
    ranked.sort()
    return [(left, right) for *_, left, right in ranked]


def _add_special_tokens(backend: tokenizers.Tokenizer, tokens: Sequence[str], kinds: Sequence[int]) -> None:
    from tokenizers import AddedToken

    def of_kind(*wanted: int) -> list[str]:
        return [token for token, kind in zip(tokens, kinds, strict=False) if kind in wanted]

    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in of_kind(_UNKNOWN, _CONTROL)])
    backend.add_tokens([AddedToken(t, special=False, normalized=False) for t in of_kind(_USER_DEFINED)])


def _set_bos_eos(backend: tokenizers.Tokenizer, *, bos: str | None, eos: str | None) -> None:
    """Make `backend` put `bos` before and `eos` after a text that is encoded with special tokens (None: neither)."""
    from tokenizers.processors import TemplateProcessing

    pieces = [token for token in (bos, "$A", eos) if token is not None]
    used = {token: backend.token_to_id(token) for token in (bos, eos) if token is not None}
    backend.post_processor = TemplateProcessing(single=pieces, special_tokens=list(used.items()))


def _token_id(meta: dict[str, Any], key: str, tokens: Sequence[str], path: Path) -> int | None:
    token_id = meta.get(key)
    if token_id is None:
        return None
    if not 0 <= token_id < len(tokens):
        raise ConfigError(f"{path}: {key} is {token_id}, but there are {len(tokens)} tokens")
    return int(token_id)


def _eos_ids(meta: dict[str, Any], tokens: Sequence[str], path: Path) -> frozenset[int]:
    keys = [f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom")]
    named = {_token_id(meta, key, tokens, path) for key in keys} - {None}
    kinds = meta.get("tokenizer.ggml.token_type", ())
    ends = {
        token_id
        for token_id, (token, kind) in enumerate(zip(tokens, kinds, strict=False))
        if kind in (_CONTROL, _USER_DEFINED) and token in _TURN_ENDS
    }
    return frozenset(token_id for token_id in named | ends if token_id is not None)


def _chat_templates(meta: dict[str, Any]) -> dict[str, str]:
    base = "tokenizer.chat_template"
    named = {key[len(base) + 1 :]: value for key, value in meta.items() if key.startswith(base + ".")}
    return named | ({"default": meta[base]} if base in meta else {})
