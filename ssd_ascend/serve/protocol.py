"""The bodies of requests, checked strictly: what the API takes, and nothing else is silently ignored. Torch-free.

A field is either here and works, or in a table of fields that are taken at their no-op values only, or unknown; the
last two answer 400 and name it. Ranges live in `SamplingParams`. Used by the handlers of this room.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import Field, model_validator

from ssd_ascend.core.grammar import Grammar
from ssd_ascend.core.sampling import MAX_LOGPROBS, MAX_N, SamplingParams
from ssd_ascend.errors import RequestError
from ssd_ascend.serve.constraints import ResponseFormat, grammar_of
from ssd_ascend.serve.strict import Items, Members, Strict
from ssd_ascend.serve.tools.offer import Tool, ToolChoice, ToolOffer, offer_of

MAX_PROMPTS = 2048
MAX_ANSWERS = 2048
"""To one request: `n` to each of its prompts."""
MAX_BIASES = 1 << 18
"""To one request: `logit_bias` for each of its answers. Each is sent to the engine, and looked at in every step; OpenAI
takes 300 for an answer."""
MAX_MESSAGES = 1 << 14
NOTHING: tuple[object, ...] = (None,)


class StreamOptions(Strict):
    """`include_usage` sends one more chunk, with the token counts, before [DONE]. Nothing is obfuscated."""

    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class Message(Strict):
    """One turn of a conversation. Fields that only answers carry are taken too, so that they can be sent back."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Items[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: Items[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: None = None
    function_call: None = None


Conversation = Annotated[Items[Message], Field(max_length=MAX_MESSAGES)]
"""The turns so far."""


def without_no_ops(no_ops: Mapping[str, tuple[object, ...]], data: Any) -> Any:
    """A body without the fields that do nothing. Raises RequestError naming one that should do something."""
    if not isinstance(data, dict):
        return data
    for name, accepted in no_ops.items():
        if name in data and not any(type(data[name]) is type(value) and data[name] == value for value in accepted):
            raise RequestError(
                f"{name} is not supported by this server",
                param=name,
                code="unsupported_parameter",
                remedy="leave it out",
            )
    return {name: value for name, value in data.items() if name not in no_ops}


class _Sampled(Strict):
    """What chat and text completions share. `NO_OP_ONLY` names fields of the API that do nothing yet, with the values
    at which doing nothing is right."""

    NO_OP_ONLY: ClassVar[Mapping[str, tuple[object, ...]]] = {}

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = Field(default=None, ge=1, le=MAX_N)
    stop: str | Items[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Members[float] | None = None
    seed: int | None = None
    user: str | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Items[int] | None = None
    include_stop_str_in_output: bool | None = None
    response_format: ResponseFormat | None = None
    regex: str | None = None
    grammar: str | None = None
    speculation: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_no_ops(cls, data: Any) -> Any:
        return without_no_ops(cls.NO_OP_ONLY, data)

    @property
    def wants_usage_chunk(self) -> bool:
        """Whether a stream ends with a chunk of token counts."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def constraint(self) -> tuple[Grammar, str] | None:
        """What the answer must look like, and the field that says so."""
        return grammar_of(self.response_format, self.regex, self.grammar)

    def sampling(self, *, max_tokens: int | None, logprobs: int | None, num_prompts: int = 1) -> SamplingParams:
        """The request as the engine takes it, without its constraint. Raises RequestError naming a field that is out of
        range."""
        num_biases, num_answers = len(self.logit_bias or ()), num_prompts * (self.n or 1)
        if num_biases * num_answers > MAX_BIASES:
            raise RequestError(
                f"logit_bias has {num_biases} entries for each of {num_answers} answers: at most {MAX_BIASES} in all",
                param="logit_bias",
                remedy="bias fewer tokens, or ask for fewer answers at a time",
            )
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options needs stream: true", param="stream_options")
        given = {name: getattr(self, name) for name in _PASSED_ON}
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        return SamplingParams(
            **{name: value for name, value in given.items() if value is not None},
            stop=stop,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            logit_bias=_token_biases(self.logit_bias or {}),
            max_tokens=max_tokens,
            logprobs=logprobs,
        )


_TOKEN: Final = re.compile("0|[1-9][0-9]{0,9}")
_SHOWN: Final = 32
_PASSED_ON = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "n",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "min_tokens",
    "ignore_eos",
    "include_stop_str_in_output",
    "speculation",
)


def _token_biases(biases: Mapping[str, float]) -> dict[int, float]:
    """By token. A key is a number in one way only: Python would read " 5 ", "5_0" and "05", each beside "5"."""
    strange = next((key for key in biases if not _TOKEN.fullmatch(key)), None)
    if strange is not None:
        shown = strange if len(strange) <= _SHOWN else f"{strange[:_SHOWN]}..."
        raise RequestError(
            f"logit_bias has the key {shown!r}: a key must be a token id, in plain digits", param="logit_bias"
        )
    return {int(token): bias for token, bias in biases.items()}


class ChatRequest(_Sampled):
    """POST /v1/chat/completions."""

    NO_OP_ONLY: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "audio": NOTHING,
        "function_call": (None, "none"),
        "functions": (None, []),
        "modalities": (None, ["text"]),
        "moderation": NOTHING,
        "prediction": NOTHING,
        "prompt_cache_options": NOTHING,
        "prompt_cache_retention": NOTHING,
        "service_tier": (None, "auto", "default"),
        "store": (None, False),
        "verbosity": (None, "medium"),
        "web_search_options": NOTHING,
    }

    messages: Conversation
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    metadata: Members[str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    tools: Items[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    return_token_sources: bool | None = None

    def offer(self) -> ToolOffer | None:
        """The tools the model may call, if any."""
        return offer_of(self.tools, self.tool_choice, parallel=self.parallel_tool_calls)

    def to_sampling(self) -> SamplingParams:
        """See `sampling`."""
        if self.top_logprobs and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs: true", param="top_logprobs")
        both = (self.max_tokens, self.max_completion_tokens)
        if None not in both and both[0] != both[1]:
            raise RequestError(f"max_tokens is {both[0]} and max_completion_tokens is {both[1]}", param="max_tokens")
        name = self.max_tokens_name
        return self.sampling(
            max_tokens=_at_least_one(name, getattr(self, name)),
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
        )

    @property
    def max_tokens_name(self) -> str:
        """The name under which this request limits its answer."""
        return "max_completion_tokens" if self.max_completion_tokens is not None else "max_tokens"


class CompletionRequest(_Sampled):
    """POST /v1/completions."""

    NO_OP_ONLY: ClassVar[Mapping[str, tuple[object, ...]]] = {"best_of": (None, 1), "suffix": (None, "")}

    prompt: str | Items[str] | Items[int] | Items[Items[int]]
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    echo: bool | None = None

    def to_sampling(self) -> SamplingParams:
        """See `sampling`."""
        if self.echo and self.logprobs is not None:
            raise RequestError("echo together with logprobs is not supported", param="echo", remedy="leave one out")
        if len(self.prompts) * (self.n or 1) > MAX_ANSWERS:
            raise RequestError(
                f"{len(self.prompts)} prompts with n = {self.n} are more than {MAX_ANSWERS} answers", param="n"
            )
        return self.sampling(
            max_tokens=_at_least_one("max_tokens", self.max_tokens),
            logprobs=self.logprobs,
            num_prompts=len(self.prompts),
        )

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts, one by one. Raises RequestError when there are none or too many."""
        prompt = self.prompt
        found: Any = [prompt] if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)) else prompt
        if not found:
            raise RequestError("there is no prompt", param="prompt", remedy="send at least one")
        if len(found) > MAX_PROMPTS:
            raise RequestError(f"{len(found)} prompts: at most {MAX_PROMPTS} go in one request", param="prompt")
        return list(found)


def _at_least_one(name: str, value: int | None) -> int | None:
    if value is not None and value < 1:
        raise RequestError(f"{name} is {value}: it must be at least 1", param=name)
    return value


class TokenizeRequest(Strict):
    """POST /tokenize: a text, or a conversation as the chat endpoint would make it."""

    model: str | None = None
    prompt: str | None = None
    messages: Conversation | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(Strict):
    """POST /detokenize."""

    model: str | None = None
    tokens: Items[Annotated[int, Field(ge=0)]]
    skip_special_tokens: bool = False
