"""What text an answer may be, as a value that travels with a request: a JSON schema, a regular expression, a grammar.

It says nothing about tokens; `structured/` compiles it for a vocabulary. Torch-free.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


class GrammarKind(enum.StrEnum):
    """How `Grammar.source` is written."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    LARK = "lark"


@dataclass(frozen=True, slots=True)
class Grammar:
    """One constraint. `strict` refuses a JSON schema with keywords that cannot be enforced; else those are skipped."""

    kind: GrammarKind
    source: str
    strict: bool = True

    @staticmethod
    def json_schema(schema: Mapping[str, Any], *, strict: bool = True) -> Grammar:
        """Any JSON text that validates against `schema`."""
        return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema, ensure_ascii=False), strict)

    @staticmethod
    def json_object() -> Grammar:
        """Any JSON object."""
        return Grammar.json_schema({"type": "object"})

    @staticmethod
    def regex(pattern: str) -> Grammar:
        """Any text that matches `pattern` as a whole (Rust's syntax: no look-around, no back-references)."""
        return Grammar(GrammarKind.REGEX, pattern)

    @staticmethod
    def lark(grammar: str) -> Grammar:
        """Any text of a context-free grammar in llguidance's dialect of Lark; it begins at `start`."""
        return Grammar(GrammarKind.LARK, grammar)
