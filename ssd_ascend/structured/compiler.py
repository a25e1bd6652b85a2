"""Compiles a `Grammar` for one vocabulary with llguidance; engine, draft worker and grammar checker have one each.

llguidance, because a matcher of it can be rolled back and copied, masks all rows of a speculation in one call, needs no
other package, and comes built for x86 and ARM. It is imported on first use, so a server without it serves all else.
It compiles without Python's lock, in threads of our own: whoever steps an engine need not wait for a large grammar.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from ssd_ascend.core.grammar import Grammar, GrammarKind
from ssd_ascend.errors import RequestError, SsdError
from ssd_ascend.log import get_logger
from ssd_ascend.structured.reasons import NAMES, refusal, too_much
from ssd_ascend.structured.vocabulary import Vocabulary, library_of_grammars, read_vocabulary

if TYPE_CHECKING:
    import llguidance

log = get_logger(__name__)

_KEPT = 64
_KEPT_S = 2.0
"""Processor time that all kept grammars together took to compile. llguidance tells no sizes, but what is built quickly
is small: of long literals, long repeats and large divisors it makes 60 to 230 MB a second."""
_HELD_S = 4.0
"""The same of all grammars that sequences of now hold; `has_room` says who need not be asked."""
_LIGHT_S = 0.05
_STACK_BYTES = 16 << 20
"""Of a thread that compiles: llguidance calls itself for every link of a chain of rules or references. The grammar
checker has a small part of it, so what passes there cannot overflow here."""
_STARTING_A_THREAD: Final = threading.Lock()
"""The size of a stack is set for all threads that start."""
_WHITESPACE = r"[ \n\r\t]{1,20}"
"""Between the tokens of a JSON text. Bounded, because a model that is cornered would else put white space forever."""
_LIMITS = {"initial_lexer_fuel": 1_000_000, "step_lexer_fuel": 200_000, "max_grammar_size": 100_000}
"""What one grammar may cost; the fuel is about 20 ms of work each time."""


def with_options(schema: Mapping[str, Any], *, strict: bool) -> dict[str, Any]:
    """`schema` as llguidance is to read it, alone or behind `%json` in a grammar."""
    # these replace what a schema may bring along: they are not the client's to set
    return {**schema, "x-guidance": {"whitespace_pattern": _WHITESPACE, "lenient": not strict}}


@dataclass(frozen=True, slots=True)
class _Compiled:
    """A matcher at its beginning, and the processor time it took."""

    matcher: llguidance.LLMatcher
    cpu_s: float


@dataclass(slots=True)
class _Held:
    """A grammar that `count` sequences need."""

    compiled: Future[_Compiled]
    count: int


class GrammarCompiler:
    """Matchers for one vocabulary. `load` is called once, on first use, from whichever thread comes first."""

    def __init__(
        self,
        load: Callable[[], Vocabulary],
        *,
        vocab_size: int,
        eos_ids: Collection[int],
        stack_bytes: int = _STACK_BYTES,
    ) -> None:
        """vocab_size: the model's, which may be larger than the tokenizer's; eos_ids: what may follow a whole text."""
        self.vocab_size = vocab_size
        self._load = load
        self._eos_ids = sorted(eos_ids)
        self._stack_bytes = stack_bytes
        self._lock = threading.Lock()
        self._one_at_a_time = threading.Lock()
        self._tokenizer: llguidance.LLTokenizer | None = None
        self._kept: OrderedDict[Grammar, Future[_Compiled]] = OrderedDict()
        self._held: dict[Grammar, _Held] = {}

    def warm(self) -> None:
        """Read the vocabulary now (tenths of a second), so that the first request need not wait for it."""
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = read_vocabulary(self._load(), self.vocab_size, self._eos_ids)

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
        return self._begun(grammar).result().matcher.deep_copy()

    def is_ready(self, grammar: Grammar, *, patience_s: float) -> bool:
        """Whether `matcher` would answer at once, now or within `patience_s`; what is not ready is compiled meanwhile.
        Raises RequestError when the grammar cannot be compiled."""
        with contextlib.suppress(TimeoutError):
            self._begun(grammar).result(patience_s)
            return True
        return False

    def examine(self, grammar: Grammar) -> None:
        """Compile a grammar, and keep nothing of it. Raises RequestError."""
        self._begin(grammar).result()

    def cost_s(self, grammar: Grammar) -> float:
        """The processor time that a grammar took which is ready."""
        return self._begun(grammar).result().cpu_s

    def has_room(self, grammar: Grammar, cost_s: float) -> bool:
        """Whether one more sequence may hold a grammar of this cost. Light ones always may."""
        if cost_s <= _LIGHT_S or not self._held or grammar in self._held:
            return True
        return cost_s + sum(held.compiled.result().cpu_s for held in self._held.values()) <= _HELD_S

    def hold(self, grammar: Grammar) -> None:
        """Keep a grammar that is ready, whatever else is asked for, until `let_go` was called as often."""
        future = self._begun(grammar)
        with self._lock:
            self._kept.pop(grammar, None)
            self._held.setdefault(grammar, _Held(future, 0)).count += 1

    def let_go(self, grammar: Grammar) -> None:
        """The end of one `hold`."""
        with self._lock:
            held = self._held[grammar]
            held.count -= 1
            if held.count == 0:
                del self._held[grammar]
                self._kept[grammar] = held.compiled
                self._drop_oldest()

    def _begun(self, grammar: Grammar) -> Future[_Compiled]:
        with self._lock:
            if grammar in self._held:
                return self._held[grammar].compiled
            known = self._kept.get(grammar)
            if known is None:
                known = self._kept[grammar] = self._begin(grammar)
            self._kept.move_to_end(grammar)
            self._drop_oldest()
        return known

    def _drop_oldest(self) -> None:
        """Keep what was asked for last, within bounds; what is being compiled stays."""
        costs = [(grammar, _cost_of(future)) for grammar, future in self._kept.items()]
        total_s = sum(cost or 0.0 for _, cost in costs)
        for grammar, cost in costs[:-1]:
            if len(self._kept) <= _KEPT and total_s <= _KEPT_S:
                return
            if cost is not None:
                del self._kept[grammar]
                total_s -= cost

    def _begin(self, grammar: Grammar) -> Future[_Compiled]:
        """Compile in a thread with a stack of its own."""
        future: Future[_Compiled] = Future()
        thread = threading.Thread(target=self._work, args=(grammar, future), name="grammar", daemon=True)
        with _STARTING_A_THREAD:
            usual = threading.stack_size(self._stack_bytes)
            try:
                thread.start()
            finally:
                threading.stack_size(usual)
        return future

    def _work(self, grammar: Grammar, future: Future[_Compiled]) -> None:
        try:
            self.warm()
            with self._one_at_a_time:
                started_s = time.thread_time()
                matcher = self._compile(grammar)
                future.set_result(_Compiled(matcher, time.thread_time() - started_s))
        except (RecursionError, MemoryError):  # in our own hands already: a text that is nested too deeply
            future.set_exception(too_much(NAMES[grammar.kind]))
        except BaseException as error:  # noqa: BLE001 - whoever asked is told; a panic of llguidance is no Exception
            told = error if isinstance(error, Exception) else too_much(NAMES[grammar.kind])
            future.set_exception(told.with_traceback(None))  # its frames hold the matcher

    def _compile(self, grammar: Grammar) -> llguidance.LLMatcher:
        library = library_of_grammars()
        assert self._tokenizer is not None
        try:
            spelt = _spelt(grammar, library.LLMatcher)
        except (ValueError, TypeError) as error:  # a schema that is no JSON object, text that is no Unicode
            raise RequestError(f"{NAMES[grammar.kind]} is not sound: {error}", param="grammar") from error
        matcher: llguidance.LLMatcher = library.LLMatcher(self._tokenizer, spelt, log_level=0, limits=_limits())
        for trial in _first_steps(matcher):
            if trial.is_error():
                raise refusal(grammar, trial.get_error())
        return matcher


def _cost_of(future: Future[_Compiled]) -> float | None:
    """Processor seconds; None while they are not known."""
    if not future.done():
        return None
    return 0.0 if future.exception() is not None else future.result().cpu_s


def _first_steps(matcher: llguidance.LLMatcher) -> Iterator[llguidance.LLMatcher]:
    """Copies of a matcher that have done what answers begin with: nothing, two beginnings, and a token after one."""
    yield matcher
    for _ in range(2):  # what the first one finds is kept for all copies, and some have no room for more
        trial = matcher.deep_copy()
        allowed = trial.compute_bitmask()
        yield trial
    first = next((8 * i + (byte & -byte).bit_length() - 1 for i, byte in enumerate(allowed) if byte), None)
    if first is not None and trial.consume_token(first) and not trial.is_stopped():
        trial.compute_bitmask()
    yield trial


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
    limits: llguidance.LLParserLimits = library_of_grammars().LLParserLimits(**_LIMITS, verbose_errors=False)
    return limits
