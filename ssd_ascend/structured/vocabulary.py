"""A model's vocabulary as llguidance reads it, and llguidance itself, imported on first use. `compiler.py` asks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Protocol

from ssd_ascend.errors import RequestError

if TYPE_CHECKING:
    import llguidance


class Vocabulary(Protocol):
    """What a compiler asks of a tokenizer."""

    @property
    def vocab_size(self) -> int: ...
    def token_bytes(self, token_id: int) -> bytes: ...
    def is_special(self, token_id: int) -> bool: ...
    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...


def read_vocabulary(vocabulary: Vocabulary, vocab_size: int, eos_ids: list[int]) -> llguidance.LLTokenizer:
    """`vocabulary` with ids up to the model's `vocab_size`, some of which may have no token. Raises RequestError."""
    if not eos_ids:
        raise RequestError("this model has no end-of-sequence token, so no grammar could end", param="grammar")
    library = library_of_grammars()
    wrapper = library.TokenizerWrapper(_Wrapped(vocabulary, range(vocab_size), eos_ids))
    read: llguidance.LLTokenizer = library.LLTokenizer(wrapper, n_vocab=vocab_size, eos_token=eos_ids)
    return read


class _Wrapped:
    """A tokenizer in the form llguidance reads."""

    bos_token_id: int | None = None

    def __init__(self, vocabulary: Vocabulary, ids: Iterable[int], eos_ids: list[int]) -> None:
        known = vocabulary.vocab_size
        self._vocabulary = vocabulary
        self.eos_token_id = eos_ids[0]
        self.tokens = [vocabulary.token_bytes(i) if i < known else b"" for i in ids]
        self.special_token_ids = [i for i in ids if i < known and vocabulary.is_special(i)]

    def __call__(self, text: str | bytes) -> list[int]:
        as_text = text if isinstance(text, str) else text.decode("utf-8")
        return self._vocabulary.encode(as_text, add_special_tokens=False)


def library_of_grammars() -> Any:
    """llguidance. Raises RequestError where it is not installed."""
    try:
        import llguidance
    except ModuleNotFoundError as error:
        raise RequestError(
            "this installation cannot constrain answers: llguidance is missing",
            param="grammar",
            code="unsupported_parameter",
            remedy="pip install 'ssd-ascend[structured]'",
        ) from error
    return llguidance
