"""A tiny target, its draft and its head over a vocabulary of bytes, with the tokenizer beside them."""

from __future__ import annotations

from pathlib import Path

from tests.engine.harness import write_pair
from tests.unit.text_toys import byte_level_backend, write_directory

EOS = "</s>"
NO_END = {byte_level_backend().token_to_id(EOS): -100.0}
NO_SPACES = {byte_level_backend().token_to_id(token): -60.0 for token in "ĠĊĉč"}
"""A bias against white space, of which a random model would put as much as a grammar lets it."""


def write_bytes_pair(directory: Path, family: str = "llama", *, noise: float = 0.05) -> Path:
    """`target`, `model` and `eagle3` below `directory`, as `write_pair` makes them, and a byte-level tokenizer."""
    backend = byte_level_backend()
    write_pair(directory, family, vocab=backend.get_vocab_size(), noise=noise, eos=backend.token_to_id(EOS))
    for name in ("target", "model"):
        write_directory(directory / name, backend, eos_token=EOS)
    return directory
