"""What a request asks of the sampler: one frozen value, checked once, read by scheduler, sampler, verifier and
drafters.

Torch-free. The law that these numbers define over a row of logits lives in `runtime/sampler.py`, and only there.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from ssd_ascend.core.grammar import Grammar
from ssd_ascend.errors import RequestError

MAX_LOGPROBS = 20
MIN_TEMPERATURE = 1e-5
"""Below it a temperature counts as 0: dividing by less overflows float32, and the law is the arg-max anyway."""
MAX_N = 128
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1024
"""Characters of a stop string: each is a state of the automaton that looks for it."""
MAX_STOP_TOKENS = 1024
_MAX_TOKEN = 1 << 31
_MAX_BIAS = 100
_INT64_MIN, _INT64_MAX = -(1 << 63), (1 << 63) - 1


def _require(condition: bool, param: str, value: object, rule: str) -> None:  # noqa: FBT001 - a predicate, not a mode
    if not condition:
        raise RequestError(f"{param} is {value!r}: it must be {rule}", param=param)


def _number(param: str, value: object, low: float, high: float) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    in_range = is_number and low <= value <= high  # type: ignore[operator]  # a NaN is not
    _require(in_range, param, value, f"a number from {low:g} to {high:g}")


def _integer(param: str, value: object, low: int, high: int) -> None:
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    _require(is_integer and low <= value <= high, param, value, f"an integer from {low} to {high}")  # type: ignore[operator]


def _are_tokens(values: Collection[object]) -> bool:
    """Whether these are token ids, seen at the pace of C: there may be as many as a vocabulary has."""
    return set(map(type, values)) <= {int} and min(values) >= 0 and max(values) <= _MAX_TOKEN  # type: ignore[type-var,operator]


def _are_biases(values: Collection[float]) -> bool:
    is_numbers = set(map(type, values)) <= {int, float}
    # the range first, as integers may be too large to be finite; a NaN passes or fails it by where it stands
    in_range = is_numbers and min(values) >= -_MAX_BIAS and max(values) <= _MAX_BIAS
    return in_range and all(map(math.isfinite, values))


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one answer is drawn. Field names follow the OpenAI API and its common extensions.

    `temperature` 0 is greedy. `top_k` 0 or -1 keeps every token. `max_tokens` None means "to the model's limit".
    `seed` None draws a fresh one per request. `logprobs` is the number of alternatives wanted per token (0: only the
    chosen token's), None for none. `reproducible` is set for requests that bring a seed: drafts are then drawn so that
    they cannot change the answer, at the price of some acceptance. `grammar` is what the answer's text must be.
    `speculation` False decodes plainly, for comparison. Raises `RequestError` naming the field when a value is out of
    range.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    min_tokens: int = 0
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    reproducible: bool = False
    logprobs: int | None = None
    n: int = 1
    grammar: Grammar | None = None
    speculation: bool = True

    def __post_init__(self) -> None:
        _number("temperature", self.temperature, 0.0, 100.0)
        if self.temperature < MIN_TEMPERATURE:
            object.__setattr__(self, "temperature", 0.0)
        _number("top_p", self.top_p, 0.0, 1.0)
        _require(self.top_p > 0.0, "top_p", self.top_p, "above 0")
        _integer("top_k", self.top_k, -1, 1 << 31)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _number("repetition_penalty", self.repetition_penalty, 1e-6, 100.0)
        if self.seed is not None:
            _integer("seed", self.seed, _INT64_MIN, _INT64_MAX)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1, 1 << 31)
        _integer("min_tokens", self.min_tokens, 0, 1 << 31)
        fits = self.max_tokens is None or self.min_tokens <= self.max_tokens
        _require(fits, "min_tokens", self.min_tokens, f"at most max_tokens ({self.max_tokens})")
        if self.logprobs is not None:
            _integer("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        _integer("n", self.n, 1, MAX_N)
        self._check_stops()
        self._check_bias()
        self._check_grammar()

    def _check_stops(self) -> None:
        if len(self.stop) > MAX_STOP_STRINGS:
            raise RequestError(f"stop has {len(self.stop)} strings: at most {MAX_STOP_STRINGS} are taken", param="stop")
        for text in self.stop:
            _require(isinstance(text, str) and text != "", "stop", text, "a non-empty string")
            if len(text) > MAX_STOP_LENGTH:
                raise RequestError(
                    f"stop has a string of {len(text)} characters: at most {MAX_STOP_LENGTH} are looked for",
                    param="stop",
                    remedy="its beginning or its end will do",
                )
        if len(self.stop_token_ids) > MAX_STOP_TOKENS:
            raise RequestError(
                f"stop_token_ids has {len(self.stop_token_ids)} tokens: at most {MAX_STOP_TOKENS} are taken",
                param="stop_token_ids",
            )
        for token in self.stop_token_ids:
            _integer("stop_token_ids", token, 0, _MAX_TOKEN)

    def _check_bias(self) -> None:
        """As every copy of a request checks all of its biases, those that are right are seen to be at once."""
        biases = self.logit_bias
        if not biases or (_are_tokens(biases) and _are_biases(biases.values())):
            return
        for token, bias in biases.items():
            if not _are_tokens((token,)):
                raise RequestError(
                    f"logit_bias has the key {token!r}: a key must be a token id, an integer from 0 to {_MAX_TOKEN}",
                    param="logit_bias",
                )
            _number("logit_bias", bias, -_MAX_BIAS, _MAX_BIAS)

    def _check_grammar(self) -> None:
        """A text that is complete can only end, so nothing may forbid it to."""
        if self.grammar is not None:
            _require(self.min_tokens == 0, "min_tokens", self.min_tokens, "0 where a grammar says when the answer ends")
            _require(not self.ignore_eos, "ignore_eos", self.ignore_eos, "false where a grammar says when it ends")

    @property
    def greedy(self) -> bool:
        """True when the answer is the arg-max at every position."""
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        """True when the law at a position depends on which tokens came before it."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0

    @property
    def is_plain(self) -> bool:
        """True when nothing but temperature shapes the law: the fast path of sampler and verifier."""
        return not (
            self.has_penalties
            or self.logit_bias
            or self.min_tokens
            or self.top_p < 1.0
            or self.top_k > 0
            or self.min_p > 0.0
            or self.grammar is not None
        )

    @property
    def wants_only_arg_max(self) -> bool:
        """Whether the arg-max of the logits as they are is all that is asked."""
        return self.greedy and self.is_plain and self.logprobs is None
