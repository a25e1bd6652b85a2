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


def set_bos_eos(backend: tokenizers.Tokenizer, *, bos: str | None, eos: str | None) -> None:
    """Make `backend` put `bos` before and `eos` after a text that is encoded with special tokens (None: neither)."""
    from tokenizers.processors import TemplateProcessing

    pieces = [token for token in (bos, "$A", eos) if token is not None]
    used = {token: backend.token_to_id(token) for token in (bos, eos) if token is not None}
    backend.post_processor = TemplateProcessing(single=pieces, special_tokens=list(used.items()))
