"""The one tokenizer everybody uses: the server and the offline facade encode with it, streams decode with it.

It is loaded from a model directory or a .gguf file straight into the `tokenizers` library, within tenths of a second.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from ssd_ascend.errors import ConfigError, RequestError
from ssd_ascend.text.byte_codec import codec_of
from ssd_ascend.text.chat_template import ChatTemplate
from ssd_ascend.text.directory_tokenizer import load_directory_tokenizer
from ssd_ascend.text.gguf_tokenizer import load_gguf_tokenizer
from ssd_ascend.text.parts import TokenizerParts


class Tokenizer:
    """Text to ids and back, byte for byte; `chat` renders conversations."""

    def __init__(self, parts: TokenizerParts) -> None:
        self._backend = parts.backend
        self._codec = codec_of(parts.backend, parts.origin)
        self.bos_id = parts.bos_id
        self.eos_ids = parts.eos_ids
        vocabulary = parts.backend.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        self.longest_token = max(map(len, vocabulary), default=0)
        """In characters, as the vocabulary spells it: no token stands for more text."""
        added = parts.backend.get_added_tokens_decoder()
        self._special = frozenset(token_id for token_id, token in added.items() if token.special)
        self._bytes: dict[int, bytes] = {}
        self.chat = ChatTemplate(
            parts.chat_templates, parts.special_tokens, lambda text: self.encode(text, add_special_tokens=False)
        )

    @classmethod
    def load(cls, path: str | Path, *, chat_template: str | Path | None = None) -> Tokenizer:
        """Load from a model directory or a .gguf file; the file `chat_template` replaces the model's own templates.

        Raises ConfigError, naming the path and what was looked for.
        """
        path = Path(path)
        if path.is_dir():
            parts = load_directory_tokenizer(path)
        elif path.suffix == ".gguf":
            parts = load_gguf_tokenizer(path)
        else:
            raise ConfigError(
                f"no tokenizer at {path}: neither a directory nor a .gguf file",
                remedy="give a model directory with a tokenizer.json, or a .gguf file",
            )
        if chat_template is not None:
            parts.chat_templates.clear()
            parts.chat_templates["default"] = _read_template(Path(chat_template))
        return cls(parts)

    @property
    def strip_spaces(self) -> int:
        """Leading spaces that decoding takes off the start of a text: 1 for sentencepiece's dummy prefix, else 0."""
        return self._codec.strip_spaces

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """The ids of `text`; with special tokens, those the model expects around a text (its BOS, if it has one)."""
        try:
            return list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)
        except (UnicodeEncodeError, TypeError) as error:
            # JSON may smuggle in half of a surrogate pair, which no UTF-8 text can hold
            raise RequestError("the text is not valid Unicode: it holds a lone surrogate", param="prompt") from error

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool, continuation: bool = False) -> str:
        """The text of `ids`: their bytes read as UTF-8, with U+FFFD for what is not.

        It is what the tokenizers library answers, but for malformed runs of `<0xNN>` tokens: there the valid
        characters in them survive. `continuation`: the text goes on from another, so a leading space is kept.
        """
        parts = [self.token_bytes(i) for i in ids if not (skip_special_tokens and i in self._special)]
        text = b"".join(parts).decode("utf-8", "replace")
        spaces = 0 if continuation else min(self.strip_spaces, len(text) - len(text.lstrip(" ")))
        return text[spaces:]

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes of one token; none for an id without a token, as models with a padded vocabulary have."""
        known = self._bytes.get(token_id)
        if known is None:
            token = self._backend.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None
            known = self._bytes[token_id] = b"" if token is None else self._codec.encode(token)
        return known

    def token_text(self, token_id: int) -> str:
        """One token by itself as text, for logprobs; parts of a character show as U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def is_special(self, token_id: int) -> bool:
        """Whether the token steers the model and is no text (BOS, EOS, turn marks)."""
        return token_id in self._special


def _read_template(file: Path) -> str:
    try:
        return file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the chat template {file}: {error}") from error
