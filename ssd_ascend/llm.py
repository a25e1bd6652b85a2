"""The offline facade: prompts in, whole answers out, in this process.

from ssd_ascend import LLM, SamplingParams
with LLM("smollm2-135m") as llm:
    for output in llm.generate(["The capital of France is"], SamplingParams(temperature=0, max_tokens=16)):
        print(output.answers[0].text)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from types import TracebackType
from typing import Any

from ssd_ascend import catalogue
from ssd_ascend.config.engine import EngineConfig
from ssd_ascend.config.speculation import SpeculationConfig
from ssd_ascend.core.sampling import SamplingParams
from ssd_ascend.core.stats import EngineStats
from ssd_ascend.engine.answers import Answer, AnswerDelta, stats_dict
from ssd_ascend.engine.builder import build_engine
from ssd_ascend.engine.engine import Engine
from ssd_ascend.engine.identity import EngineInfo
from ssd_ascend.engine.outputs import OutputProcessor
from ssd_ascend.errors import ConfigError, RequestError, unknown_name
from ssd_ascend.text import Tokenizer

Prompt = str | Sequence[int]
Message = dict[str, Any]
Sampling = SamplingParams | Sequence[SamplingParams] | None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The answers to one prompt, in the order of their index (n of them)."""

    prompt_token_ids: list[int]
    answers: list[Answer]


class LLM:
    """One engine and its tokenizer. Keyword arguments are those of `EngineConfig`.

    Use it in a `with` block, or `close`.
    """

    def __init__(
        self, model: str | EngineConfig, *, progress: Callable[[int, int], None] | None = None, **options: Any
    ) -> None:
        _check(options)
        config = model if isinstance(model, EngineConfig) else EngineConfig(model=model, **options)
        self.config = config
        self.tokenizer = Tokenizer.load(catalogue.resolve_model(config.model), chat_template=config.chat_template)
        self._engine: Engine = build_engine(config, progress=progress)
        self._outputs = OutputProcessor(self.tokenizer, seed=config.seed)

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def info(self) -> EngineInfo:
        """What the engine is: model, device, dtype, speculator."""
        return self._engine.info

    def engine_stats(self) -> EngineStats:
        """Counters of the engine so far."""
        return self._engine.stats()

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling = None) -> list[RequestOutput]:
        """Answers to prompts (texts or token ids), in their order. One `sampling` for all, or one each."""
        return self.run(prompts, sampling)

    def chat(self, conversations: Sequence[Sequence[Message]], sampling: Sampling = None) -> list[RequestOutput]:
        """Answers to conversations ({"role", "content"} messages), rendered with the model's chat template."""
        return self.run(conversations, sampling)

    def stream(
        self, prompt_token_ids: Sequence[int], sampling: SamplingParams, *, continuation: bool
    ) -> Iterator[AnswerDelta]:
        """The deltas of one request as they come. Leaving the loop early ends the request."""
        submission = self._outputs.add(prompt_token_ids, sampling, continuation=continuation)
        try:
            for request in submission.requests:
                self._engine.submit(request)
            while self._outputs.num_requests:
                yield from self.step()
        finally:
            self._engine.abort(self._outputs.cancel(submission.request_id))

    def step(self) -> list[AnswerDelta]:
        """One engine step, as text."""
        processed = self._outputs.process(self._engine.step())
        if processed.abort:
            self._engine.abort(processed.abort)
        return processed.deltas

    def stats_of(self, answer: Answer) -> dict[str, object]:
        """The `stats` object of a finished answer."""
        assert answer.stats is not None, "the answer has not ended"
        return stats_dict(answer.stats, device=self.info.device)

    def close(self) -> None:
        """Stop worker processes and give memory back. May be called twice."""
        self._engine.close()

    def run(
        self,
        items: Sequence[Prompt | Sequence[Message]],
        sampling: Sampling = None,
        *,
        watch: Callable[[int], None] = lambda tokens: None,
    ) -> list[RequestOutput]:
        """Answers to prompts and conversations, mixed as they come. `watch` is told the tokens that each step added."""
        given = sampling if sampling is not None else SamplingParams()
        each = [given] * len(items) if isinstance(given, SamplingParams) else list(given)
        if len(each) != len(items):
            raise RequestError(f"{len(each)} sampling parameters for {len(items)} prompts", param="sampling")
        outputs: dict[int, RequestOutput] = {}
        try:
            for item, params in zip(items, each, strict=True):
                self._submit(item, params, outputs)
            while self._outputs.num_requests:
                deltas = self.step()
                for delta in deltas:
                    outputs[delta.request_id].answers[delta.index].extend(delta)
                watch(sum(len(delta.token_ids) for delta in deltas))
        finally:
            for request_id in outputs:
                self._engine.abort(self._outputs.cancel(request_id))
        return list(outputs.values())

    def _submit(
        self, item: Prompt | Sequence[Message], params: SamplingParams, outputs: dict[int, RequestOutput]
    ) -> None:
        messages = [part for part in item if isinstance(part, dict)]
        is_chat = bool(messages)
        ids = self.tokenizer.chat.render(messages, add_generation_prompt=True) if is_chat else self._encode(item)
        submission = self._outputs.add(ids, params, continuation=not is_chat)
        outputs[submission.request_id] = RequestOutput(ids, [Answer(i) for i in range(params.n)])
        for request in submission.requests:
            self._engine.submit(request)

    def _encode(self, prompt: Any) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt, add_special_tokens=True)
        return list(prompt)


def _check(options: Mapping[str, Any]) -> None:
    """ConfigError for what is no option; how to speculate is an object of its own."""
    known = [field.name for field in fields(EngineConfig)]
    speculation = {field.name for field in fields(SpeculationConfig)}
    for name in options:
        if name not in known and name in speculation:
            raise ConfigError(f"{name!r} is no option of LLM", remedy=f"give speculation=SpeculationConfig({name}=...)")
        if name not in known:
            raise unknown_name("option of LLM", name, known)
