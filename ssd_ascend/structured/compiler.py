"""Compiles a `Grammar` for one vocabulary with llguidance; engine and draft worker each hold a compiler.

llguidance, because a matcher of it can be rolled back and copied, masks all rows of a speculation in one call, needs no
other package, and comes built for x86 and ARM. It is imported on first use, so a server without it serves all else.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from ssd_ascend.core.grammar import Grammar, GrammarKind
from ssd_ascend.errors import RequestError, SsdError
from ssd_ascend.log import get_logger

if TYPE_CHECKING:
    import llguidance

log = get_logger(__name__)

MAX_SOURCE_BYTES = 1 << 20
_KEPT = 64
_SHOWN = 300
_WHITESPACE = r"[ \n\r\t]{1,20}"
"""Between the tokens of a JSON text. Bounded, because a model that is cornered would else put white space forever."""
_LIMITS = {"initial_lexer_fuel": 1_000_000, "step_lexer_fuel": 200_000, "max_grammar_size": 100_000}
"""What one grammar may cost; the fuel is about 20 ms of work each time."""


class Vocabulary(Protocol):
    """What a compiler asks of a tokenizer."""

    @property
    def vocab_size(self) -> int: ...
    def token_bytes(self, token_id: int) -> bytes: ...
    def is_special(self, token_id: int) -> bool: ...
    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...


def with_options(schema: Mapping[str, Any], *, strict: bool) -> dict[str, Any]:
    """`schema` as llguidance is to read it, alone or behind `%json` in a grammar."""
    # these replace what a schema may bring along: they are not the client's to set
    return {**schema, "x-guidance": {"whitespace_pattern": _WHITESPACE, "lenient": not strict}}


def check(grammar: Grammar, *, param: str) -> None:
    """Raises RequestError naming `param` when a grammar is not sound, is too large, or llguidance is not installed."""
    matcher = _library(param).LLMatcher
    if len(grammar.source.encode("utf-8", "surrogatepass")) > MAX_SOURCE_BYTES:
        raise RequestError(f"the grammar is over the limit of {MAX_SOURCE_BYTES} bytes", param=param)
    try:
        is_error, messages = matcher.validate_grammar_with_warnings(_spelt(grammar, matcher), None, limits=_limits())
    except (ValueError, TypeError) as error:  # a schema that is no JSON object, text that is no Unicode
        raise RequestError(f"{_NAMES[grammar.kind]} is not sound: {error}", param=param) from error
    if is_error:
        raise RequestError(f"{_NAMES[grammar.kind]} cannot be enforced: {_summary(messages)}", param=param)


class GrammarCompiler:
    """Matchers for one vocabulary. `load` is called once, on first use, from whichever thread comes first."""

    def __init__(self, load: Callable[[], Vocabulary], *, vocab_size: int, eos_ids: Collection[int]) -> None:
        """vocab_size: the model's, which may be larger than the tokenizer's; eos_ids: what may follow a whole text."""
        self.vocab_size = vocab_size
        self._load = load
        self._eos_ids = sorted(eos_ids)
        self._lock = threading.Lock()
        self._tokenizer: llguidance.LLTokenizer | None = None
        self._compiled: OrderedDict[Grammar, llguidance.LLMatcher] = OrderedDict()

    def warm(self) -> None:
        """Read the vocabulary now (tenths of a second), so that the first request need not wait for it."""
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = self._read_vocabulary()

    def warm_beside(self) -> None:
        """The same in a thread of its own, for processes whose loop must not wait for it."""
        threading.Thread(target=self._try_to_warm, daemon=True).start()

    def _try_to_warm(self) -> None:
        try:
            self.warm()
        except SsdError as error:
            log.debug("no grammars: %s", error)  # whoever asks for one is told

    def matcher(self, grammar: Grammar) -> llguidance.LLMatcher:
        """A fresh matcher at the beginning of `grammar`. Raises RequestError when the grammar cannot be compiled."""
        self.warm()
        known = self._compiled.get(grammar)
        if known is None:
            known = self._compiled[grammar] = self._compile(grammar)
        self._compiled.move_to_end(grammar)
        if len(self._compiled) > _KEPT:
            self._compiled.popitem(last=False)
        return known.deep_copy()

    def _compile(self, grammar: Grammar) -> llguidance.LLMatcher:
        library = _library("grammar")
        assert self._tokenizer is not None
        matcher: llguidance.LLMatcher = library.LLMatcher(
            self._tokenizer, _spelt(grammar, library.LLMatcher), log_level=0, limits=_limits()
        )
        trial = matcher.deep_copy()
        if not trial.is_error():
            trial.compute_bitmask()  # some compile and cannot begin
        if trial.is_error():
            raise RequestError(
                f"{_NAMES[grammar.kind]} cannot be enforced: {_summary([trial.get_error()])}", param="grammar"
            )
        return matcher

    def _read_vocabulary(self) -> llguidance.LLTokenizer:
        if not self._eos_ids:
            raise RequestError("this model has no end-of-sequence token, so no grammar could end", param="grammar")
        library, vocabulary = _library("grammar"), self._load()
        ids = range(self.vocab_size)
        wrapper = library.TokenizerWrapper(_Wrapped(vocabulary, ids, self._eos_ids))
        read: llguidance.LLTokenizer = library.LLTokenizer(wrapper, n_vocab=self.vocab_size, eos_token=self._eos_ids)
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


_NAMES = {
    GrammarKind.JSON_SCHEMA: "the JSON schema",
    GrammarKind.REGEX: "the regular expression",
    GrammarKind.LARK: "the grammar",
}


def _spelt(grammar: Grammar, matcher: Any) -> str:
    """`grammar` in llguidance's own JSON."""
    match grammar.kind:
        case GrammarKind.REGEX:
            spelt = matcher.grammar_from_regex(grammar.source)
        case GrammarKind.LARK:
            spelt = matcher.grammar_from_lark(grammar.source)
        case GrammarKind.JSON_SCHEMA:
            schema = json.loads(grammar.source)
            if not isinstance(schema, dict):
                raise ValueError("a schema is a JSON object")
            spelt = matcher.grammar_from_json_schema(json.dumps(with_options(schema, strict=grammar.strict)))
    return str(spelt)


def _limits() -> llguidance.LLParserLimits:
    limits: llguidance.LLParserLimits = _library("grammar").LLParserLimits(**_LIMITS, verbose_errors=False)
    return limits


def _library(param: str) -> Any:
    try:
        import llguidance
    except ModuleNotFoundError as error:
        raise RequestError(
            "this installation cannot constrain answers: llguidance is missing",
            param=param,
            code="unsupported_parameter",
            remedy="pip install 'ssd-ascend[structured]'",
        ) from error
    return llguidance


def _summary(messages: list[str]) -> str:
    """Messages of several lines as one, not too long."""
    return " ".join(" ".join(messages).split())[:_SHOWN] or "unknown reason"
