"""What the handlers of one server share: engine, tokenizer, limits, metrics. `server.py` makes one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from starlette.requests import Request

from ssd_ascend import catalogue
from ssd_ascend.core.grammar import Grammar
from ssd_ascend.core.sampling import SamplingParams
from ssd_ascend.engine.answer_stream import AnswerStream
from ssd_ascend.engine.answers import AnswerDelta
from ssd_ascend.engine.async_engine import AsyncEngine, State
from ssd_ascend.errors import RequestError
from ssd_ascend.serve.bodies import read_body
from ssd_ascend.serve.config import ServerConfig
from ssd_ascend.serve.errors import ApiError
from ssd_ascend.serve.limits import QueueLimit, RateLimit
from ssd_ascend.serve.metrics import ServerMetrics
from ssd_ascend.serve.protocol import Message
from ssd_ascend.serve.streaming import AnswerResponse, Writer
from ssd_ascend.serve.strict import RequestT, parse
from ssd_ascend.serve.tools.formats import FORMATS, ToolFormat, for_template
from ssd_ascend.structured.checker import CheckerBusyError, CheckerError, GrammarChecker
from ssd_ascend.text import Tokenizer

_THREAD_ABOVE = 20_000
"""Characters from which tokenizing leaves the event loop: it takes milliseconds, and other streams shall not notice."""

_LARGE_BODY = 64 << 10
_PER_TEXT = 32
"""Characters that a text takes as long as, beside its own."""
_TURN_FIELDS = {"role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content"}

_WHEN_GRAMMARS_WAIT = {"Retry-After": "5"}

T = TypeVar("T")


@dataclass(eq=False)
class ServerState:
    """One server."""

    engine: AsyncEngine
    tokenizer: Tokenizer
    model_name: str
    config: ServerConfig = field(default_factory=ServerConfig)
    created: int = field(default_factory=lambda: int(time.time()))
    metrics: ServerMetrics = field(init=False)
    tool_format: ToolFormat = field(init=False)
    queue: QueueLimit = field(init=False)
    rate: RateLimit | None = field(init=False)
    grammars: GrammarChecker = field(init=False)

    def __post_init__(self) -> None:
        self.metrics = ServerMetrics(lambda: self.engine.stats, lambda: self.engine.state is State.READY)
        self.engine.on_delta = self._on_delta
        self.engine.on_loss = self.metrics.on_loss
        wanted = self.config.tool_format
        self.tool_format = for_template(self.tokenizer.chat.mentions) if wanted == "auto" else FORMATS[wanted]
        self.queue = QueueLimit(self.config.max_queue, self.engine.config.max_num_seqs)
        self.rate = None if self.config.rate_limit is None else RateLimit(self.config.rate_limit)
        self.grammars = GrammarChecker(lambda: catalogue.resolve_model(self.engine.config.model))

    def _on_delta(self, delta: AnswerDelta) -> None:
        self.metrics.on_delta(delta)
        if delta.finish_reason is not None:
            self.queue.saw_end()

    async def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams, *, continuation: bool = False
    ) -> AnswerStream:
        """See `AsyncEngine.generate`; raises ApiError 429 when the queue is full."""
        self.queue.check(self.engine.num_sequences, len(prompts) * sampling.n)
        return await self.engine.generate(prompts, sampling, continuation=continuation)

    def check_model(self, name: str | None) -> None:
        """Raises ApiError 404 when a request names a model that is not served here."""
        if name is not None and name != self.model_name:
            raise ApiError(
                404,
                f"the model {name!r} is not served here; {self.model_name!r} is",
                param="model",
                code="model_not_found",
            )

    def respond(
        self, stream: AnswerStream, writer: Writer, *, num_answers: int, streamed: bool, names: Mapping[str, str]
    ) -> AnswerResponse:
        """The response that sends the answers of `stream`, within this server's time for one. names: of fields, where
        the endpoint has its own."""
        return AnswerResponse(
            stream,
            writer,
            num_answers=num_answers,
            streamed=streamed,
            on_disconnect=self.metrics.disconnects.inc,
            timeout_s=self.config.request_timeout_s,
            names=names,
        )

    async def encode(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """The ids of prompts of text, each with the special tokens the model expects around one."""

        def work() -> list[list[int]]:
            return [self._encode(text, param="prompt", add_special_tokens=add_special_tokens) for text in texts]

        return await self.off_loop(sum(len(text) + _PER_TEXT for text in texts), work)

    async def decode(self, prompts: Sequence[Sequence[int]]) -> list[str]:
        """The texts of prompts of ids."""

        def work() -> list[str]:
            return [self.tokenizer.decode(ids, skip_special_tokens=True) for ids in prompts]

        return await self.off_loop(sum(len(ids) + _PER_TEXT for ids in prompts), work)

    def _encode(self, text: str, *, param: str, add_special_tokens: bool) -> list[int]:
        """The ids of a prompt. Raises RequestError for one that cannot fit, before megabytes of it are tokenized."""
        room = self.engine.require_ready().max_tokens_that_fit
        if len(text) > room * self.tokenizer.longest_token:
            raise RequestError(
                f"the prompt has {len(text)} characters, and an engine for {room} tokens cannot read that many",
                param=param,
                code="context_length_exceeded",
                remedy="shorten the prompt",
            )
        try:
            return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        except RequestError as error:
            raise RequestError(error.message, param=param) from error

    async def render_chat(
        self,
        turns: Sequence[dict[str, Any]],
        *,
        add_generation_prompt: bool,
        variables: dict[str, Any] | None,
        tools: list[dict[str, Any]] | None = None,
    ) -> list[int]:
        """The ids of a conversation in the model's own format. `variables` reach the template."""
        reserved = sorted({"self", "messages", "tools", "add_generation_prompt"} & set(variables or ()))
        if reserved:
            raise RequestError(f"chat_template_kwargs may not set {reserved[0]}", param="chat_template_kwargs")

        def work() -> list[int]:
            text = self.tokenizer.chat.render_text(
                turns, add_generation_prompt=add_generation_prompt, tools=tools, **(variables or {})
            )
            return self._encode(text, param="messages", add_special_tokens=False)  # the template wrote them

        return await self.off_loop(sum(len(str(turn.get("content"))) + _PER_TEXT for turn in turns), work)

    def turn(self, message: Message) -> dict[str, Any]:
        """A message as templates read it. Raises RequestError when it says nothing."""
        turn = message.model_dump(include=_TURN_FIELDS, exclude_none=True)
        if message.content is None and message.role != "assistant":
            raise RequestError(f"a message of role {message.role!r} has no content", param="messages")
        turn.setdefault("content", "")
        if message.role == "developer":  # OpenAI's newer word; templates know the older one
            turn["role"] = "system"
        return turn

    async def check_grammar(self, constraint: tuple[Grammar, str] | None) -> None:
        """Raises RequestError naming the field when an answer cannot be held to what a request asks; ApiError when
        that cannot be found out."""
        if constraint is not None:
            grammar, param = constraint
            try:
                await self.grammars.check(grammar, param=param)
            except CheckerBusyError as error:
                raise ApiError(
                    503, str(error), param=param, code="grammar_checker_busy", headers=_WHEN_GRAMMARS_WAIT
                ) from error
            except CheckerError as error:
                raise ApiError(500, str(error), param=param, code="grammar_checker_unavailable") from error

    async def read(self, schema: type[RequestT], request: Request) -> RequestT:
        """The body of a request, checked. Raises ApiError for one that is not within this server's bounds, RequestError
        for one that is wrong."""
        config = self.config
        body = await read_body(request, max_bytes=config.max_body_bytes, timeout_s=config.read_timeout_s)
        return await self.off_loop(len(body), partial(parse, schema, body), above=_LARGE_BODY)

    @staticmethod
    async def off_loop(size: int, work: Callable[[], T], *, above: int = _THREAD_ABOVE) -> T:
        """Do `work` on `size` characters: here when it is short, in a thread when others would have to wait for it."""
        return work() if size <= above else await asyncio.to_thread(work)
