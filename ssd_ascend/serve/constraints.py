"""What a request may ask its answer to look like: `response_format`, and the extensions `regex` and `grammar`.

`serve/protocol.py` holds these as fields; `grammar_of` makes one `Grammar` of them. Nothing is compiled here.
Torch-free.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from ssd_ascend.core.grammar import Grammar
from ssd_ascend.errors import RequestError
from ssd_ascend.serve.strict import Strict


class TextFormat(Strict):
    """Any text."""

    type: Literal["text"]


class JsonObjectFormat(Strict):
    """Any JSON object."""

    type: Literal["json_object"]


class JsonSchema(Strict):
    """A schema with a name. Without `strict`, keywords that cannot be enforced are left to the model."""

    model_config = ConfigDict(protected_namespaces=())

    name: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class JsonSchemaFormat(Strict):
    """A JSON text that validates."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


def grammar_of(format_: ResponseFormat | None, regex: str | None, grammar: str | None) -> tuple[Grammar, str] | None:
    """The constraint that a request sets and the field that sets it. Raises RequestError when several do."""
    found = [pair for pair in (_of_format(format_), _of_regex(regex), _of_grammar(grammar)) if pair is not None]
    if len(found) > 1:
        raise RequestError(f"{found[0][1]} and {found[1][1]} both constrain the answer", param=found[1][1])
    return found[0] if found else None


def _of_format(format_: ResponseFormat | None) -> tuple[Grammar, str] | None:
    match format_:
        case JsonObjectFormat():
            return Grammar.json_object(), "response_format"
        case JsonSchemaFormat(json_schema=JsonSchema(schema_=schema, strict=strict)):
            # without a schema, any JSON object will do
            return Grammar.json_schema(schema or {"type": "object"}, strict=bool(strict)), "response_format"
    return None


def _of_regex(regex: str | None) -> tuple[Grammar, str] | None:
    return None if regex is None else (Grammar.regex(regex), "regex")


def _of_grammar(grammar: str | None) -> tuple[Grammar, str] | None:
    return None if grammar is None else (Grammar.lark(grammar), "grammar")
