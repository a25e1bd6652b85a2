"""A tiny model that can chat: a byte-level tokenizer, a chat template of ChatML's kind, random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ssd_ascend.text import Tokenizer
from tests.toys import causal_lm_tensors, llama_config, write_checkpoint
from tests.unit.text_toys import byte_level_backend, write_directory

TEMPLATE = (
    "{% for m in messages %}<s>{{ m.role }}\n{{ m.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)


def write_chatty(path: Path, **changes: Any) -> tuple[Path, Tokenizer]:
    """Model and tokenizer in one directory; `</s>` ends turns."""
    backend = byte_level_backend()
    end = backend.token_to_id("</s>")
    write_directory(path, backend, chat_template=TEMPLATE, eos_token="</s>", bos_token="<s>")
    config = llama_config(
        vocab_size=len(backend.get_vocab(with_added_tokens=True)),
        eos_token_id=end,
        max_position_embeddings=256,
        **changes,
    )
    write_checkpoint(path, config, causal_lm_tensors(config))
    return path, Tokenizer.load(path)
