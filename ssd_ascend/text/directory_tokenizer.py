"""Loads the tokenizer of a model directory: tokenizer.json and the small files beside it; `Tokenizer.load` calls it.

`transformers` takes seconds to import, so it is used only for directories that have no tokenizer.json, to convert what
they do have. Code that comes with a model is never run.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ssd_ascend.errors import ConfigError
from ssd_ascend.text.parts import TokenizerParts

if TYPE_CHECKING:
    import tokenizers

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
_CONVERTIBLE = ("tokenizer.model", "vocab.json")


def load_directory_tokenizer(path: Path) -> TokenizerParts:
    """The tokenizer of a model directory. Raises ConfigError naming the files looked for when there is none.

    What goes around a text (BOS) is tokenizer.json's to say; add_bos_token of older files is not heard, here as in
    transformers 5.
    """
    config = {**_read_json(path / "special_tokens_map.json"), **_read_json(path / "tokenizer_config.json")}
    backend = _read_backend(path)
    special = {name: text for name in _SPECIAL_NAMES if (text := _content(config.get(name))) is not None}
    bos = special.get("bos_token")
    return TokenizerParts(
        origin=path,
        backend=backend,
        special_tokens=special,
        bos_id=backend.token_to_id(bos) if bos is not None else None,
        eos_ids=_eos_ids(path, backend, special.get("eos_token")),
        chat_templates=_chat_templates(path, config),
    )


def _read_backend(path: Path) -> tokenizers.Tokenizer:
    import tokenizers

    file = path / "tokenizer.json"
    if file.is_file():
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises a bare Exception for a file it cannot read
            raise ConfigError(f"cannot read {file}: {error}", remedy="download it again") from error
        backend.no_truncation()  # limits and padding of the training run do not belong to serving
        backend.no_padding()
        return backend
    if any((path / name).is_file() for name in _CONVERTIBLE):
        return _convert(path)
    looked_for = ", ".join(("tokenizer.json", *_CONVERTIBLE))
    raise ConfigError(
        f"no tokenizer in {path}: looked for {looked_for}",
        remedy="copy the tokenizer files of the model into its directory",
    )


def _convert(path: Path) -> tokenizers.Tokenizer:
    from transformers import AutoTokenizer

    remedy = "put the model's tokenizer.json into its directory"
    try:
        slow = AutoTokenizer.from_pretrained(str(path), trust_remote_code=False, local_files_only=True)
    except Exception as error:  # the library's code on foreign files: anything may come
        raise ConfigError(f"cannot convert the tokenizer of {path}: {error}", remedy=remedy) from error
    backend: tokenizers.Tokenizer | None = getattr(slow, "backend_tokenizer", None)
    if backend is None:
        raise ConfigError(f"{type(slow).__name__}, the tokenizer of {path}, has no fast form", remedy=remedy)
    return backend


def _eos_ids(path: Path, backend: tokenizers.Tokenizer, eos_token: str | None) -> frozenset[int]:
    """All ids that end an answer: chat models list theirs in generation_config.json, beside the tokenizer's one."""
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        value = _read_json(path / name).get("eos_token_id")
        listed = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(token_id) is int for token_id in listed):
            raise ConfigError(f"{path / name}: eos_token_id is {value!r}", remedy="it is an integer or a list of them")
        found.update(listed)
    eos_id = backend.token_to_id(eos_token) if eos_token is not None else None
    return frozenset(found if eos_id is None else found | {eos_id})


def _chat_templates(path: Path, config: dict[str, Any]) -> dict[str, str]:
    """By name; files of their own beat the entry in tokenizer_config.json, as in transformers."""
    entry = config.get("chat_template")
    templates: dict[str, str] = {}
    if isinstance(entry, str):
        templates["default"] = entry
    elif isinstance(entry, list):
        templates = {item["name"]: item["template"] for item in entry}
    for file in sorted((path / "additional_chat_templates").glob("*.jinja")):
        templates[file.stem] = file.read_text("utf-8")
    if (file := path / "chat_template.jinja").is_file():
        templates["default"] = file.read_text("utf-8")
    return templates


def _content(token: object) -> str | None:
    """A special token is written as a string, or as an object with a `content`."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text("utf-8"))
    except ValueError as error:
        raise ConfigError(f"cannot read {file}: {error}", remedy="download it again") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{file} holds a {type(value).__name__}, not an object", remedy="download it again")
    return value
