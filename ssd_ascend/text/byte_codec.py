"""Says which bytes each token stands for, read from the tokenizer's own decoder; `Tokenizer` asks it.

Once every token has its bytes, a text is the UTF-8 reading of their concatenation. That makes decoding incremental,
linear, and free of a way in which the grouping of tokens could matter. Two families of decoders work like that: GPT-2's
byte alphabet, and sentencepiece's `▁` for a space with `<0xNN>` for a byte. Others are refused by name.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ssd_ascend.errors import ConfigError

if TYPE_CHECKING:
    import tokenizers

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, slots=True)
class ByteCodec:
    """`strip_spaces`: leading spaces the decoder takes off the start of a text (sentencepiece's dummy prefix)."""

    byte_level: bool = False
    byte_fallback: bool = False
    replacements: tuple[tuple[str, str], ...] = ()
    strip_spaces: int = 0

    def encode(self, token: str) -> bytes:
        """The bytes that `token`, as the vocabulary spells it, stands for."""
        if self.byte_level:
            try:
                return bytes(_BYTE_OF[character] for character in token)
            except KeyError:  # an added token is spelt plainly, e.g. with a real space
                return token.encode("utf-8")
        for old, new in self.replacements:
            token = token.replace(old, new)
        if self.byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        return token.encode("utf-8")


def codec_of(backend: tokenizers.Tokenizer, origin: Path) -> ByteCodec:
    """The codec that agrees with `backend`'s decoder. Raises ConfigError for a decoder that is not bytewise."""
    decoder = backend.decoder
    spec: dict[str, Any] = json.loads(decoder.__getstate__()) if decoder is not None else {"type": "none"}
    byte_level = byte_fallback = False
    replacements: list[tuple[str, str]] = []
    strip_spaces = 0
    for step in spec["decoders"] if spec["type"] == "Sequence" else [spec]:
        match step:
            case {"type": "ByteLevel"}:
                byte_level = True
            case {"type": "ByteFallback"}:
                byte_fallback = True
            case {"type": "Fuse"}:
                pass
            case {"type": "Replace", "pattern": {"String": old}, "content": new}:
                replacements.append((old, new))
            case {"type": "Strip", "content": " ", "start": start, "stop": 0}:
                strip_spaces = start
            case _:
                raise ConfigError(
                    f"the tokenizer of {origin} decodes with {json.dumps(step)}, which no stream can follow",
                    remedy="byte-level (GPT-2) and sentencepiece-like decoders are supported",
                )
    return ByteCodec(byte_level, byte_fallback, tuple(replacements), strip_spaces)


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 bytes are their own characters, the 68 others follow from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return alphabet


_BYTE_OF = _byte_alphabet()
