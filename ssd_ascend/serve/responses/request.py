"""The body of /v1/responses, and the chat request it comes down to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, model_validator

from ssd_ascend.errors import RequestError
from ssd_ascend.serve.protocol import NOTHING, ChatRequest, without_no_ops
from ssd_ascend.serve.strict import Items, Members, Strict, checked

RENAMED = {
    "messages": "input",
    "prompt": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text",
    "reasoning_effort": "reasoning",
}
"""What a field of the chat request is called here."""


class TextPart(Strict):
    """A part of a message; answers sent back bring annotations and log-probabilities along."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class MessageItem(Strict):
    """A turn."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Items[TextPart]
    id: str | None = None
    status: str | None = None
    phase: str | None = None


class CallItem(Strict):
    """A call the model made, sent back."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: str | None = None
    async_: None = None
    caller: None = None
    namespace: None = None


class CallOutputItem(Strict):
    """What a call returned."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | Items[TextPart]
    id: str | None = None
    status: str | None = None


class ReasoningItem(Strict):
    """What the model thought, sent back; its template decides whether it reads that again."""

    type: Literal["reasoning"]
    id: str | None = None
    summary: list[Any] = Field(default_factory=list)
    content: Items[dict[str, Any]] | None = None
    encrypted_content: None = None
    status: str | None = None


Item = Annotated[MessageItem | CallItem | CallOutputItem | ReasoningItem, Field(discriminator="type")]


class FunctionTool(Strict):
    """A function, flat as this endpoint writes it."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedTool(Strict):
    """`tool_choice` that names a function."""

    type: Literal["function"]
    name: str


class TextFormat(Strict):
    """A response format, flat as this endpoint writes it."""

    model_config = ConfigDict(protected_namespaces=())

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextOptions(Strict):
    """`text`."""

    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class ReasoningOptions(Strict):
    """`reasoning`."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    summary: None = None
    generate_summary: None = None


class ResponsesRequest(Strict):
    """POST /v1/responses."""

    NO_OP_ONLY: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "access_programs": NOTHING,
        "background": (None, False),
        "background_options": NOTHING,
        "context_management": NOTHING,
        "conversation": NOTHING,
        "image": NOTHING,
        "include": (None, []),
        "max_tool_calls": NOTHING,
        "moderation": NOTHING,
        "previous_response_id": NOTHING,
        "prompt": NOTHING,
        "prompt_cache_options": NOTHING,
        "prompt_cache_retention": NOTHING,
        "service_tier": (None, "auto", "default"),
        "store": (None, False),
        "stream_options": NOTHING,
        "top_logprobs": (None, 0),
        "truncation": (None, "disabled"),
    }

    model: str | None = None
    input: str | Items[Item]
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    tools: Items[FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    metadata: Members[str] | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    user: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _prepare(cls, data: Any) -> Any:
        if isinstance(data, dict) and isinstance(data.get("input"), list):
            # a message may leave its type out
            items = [{"type": "message", **item} if isinstance(item, dict) else item for item in data["input"]]
            data = {**data, "input": items}
        return without_no_ops(cls.NO_OP_ONLY, data)

    def to_chat(self) -> ChatRequest:
        """The same as a chat request. Raises RequestError with this endpoint's names."""
        tools = [
            {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_none=True)}
            for tool in self.tools or ()
        ]
        choice: Any = self.tool_choice
        if isinstance(choice, NamedTool):
            choice = {"type": "function", "function": {"name": choice.name}}
        given = {
            "model": self.model,
            "messages": list(self._messages()),
            "max_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "stream": self.stream,
            "response_format": self._response_format(),
            "reasoning_effort": self.reasoning.effort if self.reasoning else None,
            "tools": tools or None,
            "tool_choice": choice,
            "parallel_tool_calls": self.parallel_tool_calls,
        }
        return checked(ChatRequest, given)

    def _response_format(self) -> dict[str, Any] | None:
        format_ = self.text.format if self.text else None
        if format_ is None or format_.type == "text":
            return None
        if format_.type == "json_object":
            return {"type": "json_object"}
        if format_.name is None:
            raise RequestError("a json_schema needs a name", param="text")
        schema = {"name": format_.name, "schema": format_.schema_, "strict": format_.strict}
        return {"type": "json_schema", "json_schema": schema}

    def _messages(self) -> Iterator[dict[str, Any]]:
        if self.instructions is not None:
            yield {"role": "system", "content": self.instructions}
        if isinstance(self.input, str):
            yield {"role": "user", "content": self.input}
            return
        calls: list[dict[str, Any]] = []
        for item in self.input:
            if isinstance(item, CallItem):  # calls made together are one turn
                function = {"name": item.name, "arguments": item.arguments}
                calls.append({"id": item.call_id, "type": "function", "function": function})
                continue
            if calls:
                yield {"role": "assistant", "tool_calls": calls}
                calls = []
            match item:
                case MessageItem(role=role, content=content):
                    yield {"role": role, "content": _text(content)}
                case CallOutputItem(call_id=call_id, output=output):
                    yield {"role": "tool", "tool_call_id": call_id, "content": _text(output)}
        if calls:
            yield {"role": "assistant", "tool_calls": calls}


def _text(content: str | Items[TextPart]) -> str:
    return content if isinstance(content, str) else "".join([part.text for part in content])
