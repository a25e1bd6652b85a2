"""The fields `tools`, `tool_choice` and `parallel_tool_calls` of a chat request, checked, as one `ToolOffer`.

Torch-free.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field

from ssd_ascend.errors import RequestError
from ssd_ascend.serve.strict import Strict

MAX_TOOLS = 128


class Function(Strict):
    """A function the model may call. `strict` holds its arguments to the schema wherever calls are constrained."""

    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    """One entry of `tools`."""

    type: Literal["function"]
    function: Function


class NamedFunction(Strict):
    """A function by name."""

    name: str


class NamedTool(Strict):
    """`tool_choice` that names a function."""

    type: Literal["function"]
    function: NamedFunction


ToolChoice = Literal["none", "auto", "required"] | NamedTool


@dataclass(frozen=True, slots=True)
class ToolOffer:
    """What the model may call. `must_call`: the answer is calls and nothing else."""

    functions: tuple[Function, ...]
    must_call: bool = False
    parallel: bool = True

    @property
    def is_strict(self) -> bool:
        """Whether some function asks that its arguments be held to its schema."""
        return any(function.strict for function in self.functions)

    def for_template(self) -> list[dict[str, Any]]:
        """The tools as templates print them: OpenAI's own objects, without the fields that were not given."""
        return [
            {"type": "function", "function": function.model_dump(exclude={"strict"}, exclude_none=True)}
            for function in self.functions
        ]


def offer_of(tools: Sequence[Tool] | None, choice: ToolChoice | None, *, parallel: bool | None) -> ToolOffer | None:
    """The offer of a request; None when it has no tools or must not use them. Raises RequestError naming the field."""
    functions = tuple(tool.function for tool in tools or ())
    if not functions:
        if choice not in (None, "none", "auto"):
            raise RequestError("tool_choice needs tools", param="tool_choice", remedy="send the tools to choose from")
        return None
    _check_names(functions)
    if choice == "none":
        return None
    if isinstance(choice, NamedTool):
        wanted = choice.function.name
        functions = tuple(function for function in functions if function.name == wanted)
        if not functions:
            raise RequestError(f"tool_choice names {wanted!r}, which is none of the tools", param="tool_choice")
        return ToolOffer(functions, must_call=True, parallel=False)
    return ToolOffer(functions, must_call=choice == "required", parallel=parallel is not False)


def _check_names(functions: Sequence[Function]) -> None:
    if len(functions) > MAX_TOOLS:
        raise RequestError(f"{len(functions)} tools: at most {MAX_TOOLS} go in one request", param="tools")
    seen: set[str] = set()
    for function in functions:
        if function.name in seen:
            raise RequestError(f"two tools are called {function.name!r}", param="tools")
        seen.add(function.name)
