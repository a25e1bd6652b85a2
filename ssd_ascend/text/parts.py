"""What a tokenizer is made of, whatever file it came from: the two loaders fill it, `Tokenizer` serves from it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import tokenizers


@dataclass(frozen=True, slots=True)
class TokenizerParts:
    """`special_tokens` are the names chat templates use (bos_token, eos_token, ...); `chat_templates` go by name."""

    origin: Path
    backend: tokenizers.Tokenizer
    special_tokens: dict[str, str]
    bos_id: int | None
    eos_ids: frozenset[int]
    chat_templates: dict[str, str]
