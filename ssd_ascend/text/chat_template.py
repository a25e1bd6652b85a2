"""Renders a conversation into the model's own format; `Tokenizer.chat` is one, the chat endpoint and `chat` call it.

The template writes every special token itself, so the text is encoded without adding any: no double BOS, and the prompt
is exactly as long as the template makes it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ssd_ascend.errors import ConfigError, RequestError

if TYPE_CHECKING:
    import jinja2

_PROBE = "is a string welcome?"


class ChatTemplate:
    """A model's templates by name (`default`, and `tool_use` where tools have one of their own); there may be none."""

    def __init__(
        self, sources: Mapping[str, str], special_tokens: Mapping[str, str], encode: Callable[[str], list[int]]
    ) -> None:
        self._special_tokens = dict(special_tokens)
        self._encode = encode
        self._sources = tuple(sources.values())
        self._templates = {name: _compile(source) for name, source in sources.items()}

    @property
    def available(self) -> bool:
        """Whether the model has a template at all."""
        return bool(self._templates)

    def mentions(self, text: str) -> bool:
        """Whether some template has `text` in its source: how a model's dialect is recognised."""
        return any(text in source for source in self._sources)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> list[int]:
        """The prompt's token ids. `variables` reach the template (e.g. enable_thinking).

        Raises RequestError(param="messages") when there is no template, the template refuses the messages, or a
        content part is not text.
        """
        text = self.render_text(messages, add_generation_prompt=add_generation_prompt, tools=tools, **variables)
        try:
            return self._encode(text)
        except RequestError as error:  # the text is the messages', and that is where the user must look
            raise RequestError(error.message, param="messages") from error

    def render_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The prompt as text; see `render`."""
        if not messages:
            raise RequestError("there are no messages", param="messages", remedy="send at least one")
        template = self._choose(with_tools=bool(tools))
        plain = [_plain_message(message, index) for index, message in enumerate(messages)]
        if not self._takes_strings:
            plain = [_with_parts(message) for message in plain]
        return self._run(
            template, {**variables, "messages": plain, "tools": tools, "add_generation_prompt": add_generation_prompt}
        )

    def _choose(self, *, with_tools: bool) -> jinja2.Template:
        template = self._templates.get("tool_use") if with_tools else None
        template = template or self._templates.get("default")
        if template is None:
            raise RequestError(
                "this model has no chat template, so it cannot take messages",
                param="messages",
                remedy="use /v1/completions, or start with --chat-template FILE",
            )
        return template

    @cached_property
    def _takes_strings(self) -> bool:
        """Whether the template prints a content that is a string; if it does not, it walks over content parts."""
        messages = [{"role": "user", "content": _PROBE}]
        try:
            return _PROBE in self._run(
                self._choose(with_tools=False), {"messages": messages, "tools": None, "add_generation_prompt": False}
            )
        except RequestError:
            return True  # refuses for a reason of its own; strings are what nearly all templates take

    def _run(self, template: jinja2.Template, variables: Mapping[str, Any]) -> str:
        from jinja2 import TemplateError
        from jinja2.exceptions import SecurityError

        # a template that trips over the data (None + "text", a missing key) refuses it as surely as one that says so
        refusals = (TemplateError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)

        try:
            return template.render({**self._special_tokens, **variables})
        except SecurityError as error:
            raise RequestError(f"the chat template does what none may do: {error}", param="messages") from error
        except refusals as error:
            raise RequestError(f"the chat template refuses these messages: {error}", param="messages") from error


def _compile(source: str) -> jinja2.Template:
    from jinja2 import TemplateSyntaxError

    from ssd_ascend.text.sandbox import template_environment

    try:
        return template_environment().from_string(source)
    except TemplateSyntaxError as error:
        raise ConfigError(
            f"the chat template is not valid Jinja, line {error.lineno}: {error.message}",
            remedy="give a sound one with --chat-template FILE",
        ) from error


def _plain_message(message: Mapping[str, Any], index: int) -> dict[str, Any]:
    """Content parts joined to one string, and tool call arguments as objects: the form templates are written for."""
    plain = dict(message)
    if isinstance(plain.get("content"), Sequence) and not isinstance(plain["content"], str):
        plain["content"] = "\n".join(_text_of(part, index) for part in plain["content"])
    if plain.get("tool_calls"):
        plain["tool_calls"] = [_plain_call(call) for call in plain["tool_calls"]]
    return plain


def _text_of(part: object, index: int) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise RequestError(
        f"messages[{index}] has a content part of type {kind!r}; this model reads text only", param="messages"
    )


def _with_parts(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def _plain_call(call: Mapping[str, Any]) -> dict[str, Any]:
    """OpenAI sends arguments as a JSON text, templates print them with `tojson`, which would quote it once more."""
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return dict(call)
    try:
        arguments = json.loads(function["arguments"])
    except ValueError:
        return dict(call)  # not JSON: the template gets the text as it came
    return {**call, "function": {**function, "arguments": arguments}}
