"""JSON schemas of every kind that can be enforced, small enough that a random model ends its answers.

Two hundred of them: handwritten ones for what is peculiar, and seeded combinations of all parts for what is not.
"""

from __future__ import annotations

import random
from typing import Any

Schema = dict[str, Any]

WORD = {"type": "string", "maxLength": 6}
DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}


def record(**properties: Schema) -> Schema:
    """An object of exactly these."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


PECULIAR: dict[str, Schema] = {
    "true": {"type": "boolean"},
    "null": {"type": "null"},
    "const": {"const": {"a": [1, "two", None]}},
    "enum of all types": {"enum": [1, "one", None, True, [1], {"a": 1}]},
    "one digit": DIGIT,
    "negative": {"type": "integer", "minimum": -20, "maximum": -3},
    "exclusive": {"type": "integer", "exclusiveMinimum": 5, "exclusiveMaximum": 8},
    "number": {"type": "number", "minimum": 0, "maximum": 1},
    "multiple": {"type": "integer", "minimum": 0, "maximum": 60, "multipleOf": 7},
    "word": WORD,
    "exact length": {"type": "string", "minLength": 3, "maxLength": 3},
    "empty string": {"type": "string", "maxLength": 0},
    "pattern": {"type": "string", "pattern": "^[a-c]{2}-[0-9]{3}$"},
    "unicode pattern": {"type": "string", "pattern": "^[äöü]{1,3}$"},
    "date": {"type": "string", "format": "date"},
    "uuid": {"type": "string", "format": "uuid"},
    "address": {"type": "string", "format": "ipv4"},
    "empty array": {"type": "array", "maxItems": 0},
    "pair": {"type": "array", "prefixItems": [DIGIT, WORD], "items": False, "minItems": 2},
    "nested arrays": {
        "type": "array",
        "items": {"type": "array", "items": DIGIT, "maxItems": 2},
        "minItems": 1,
        "maxItems": 2,
    },
    "empty object": {"type": "object", "additionalProperties": False},
    "optional": {"type": "object", "properties": {"a": DIGIT, "b": WORD}, "additionalProperties": False},
    "one required": {
        "type": "object",
        "properties": {"a": DIGIT, "b": DIGIT},
        "required": ["b"],
        "additionalProperties": False,
    },
    "odd names": record(**{'quo"te': DIGIT, "new\nline": DIGIT, "ключ": DIGIT, "": DIGIT}),
    "deep": record(a=record(b=record(c=record(d=DIGIT)))),
    "any of": {"anyOf": [DIGIT, record(a=DIGIT), {"type": "null"}]},
    "type list": {"type": ["integer", "null"], "minimum": 0, "maximum": 3},
    "all of": {"allOf": [{"type": "object", "properties": {"a": DIGIT}}, {"required": ["a"]}], "maxProperties": 1}
    | {"additionalProperties": False, "properties": {"a": DIGIT}},
    "reference": {"$defs": {"leaf": record(v=DIGIT)}, **record(left={"$ref": "#/$defs/leaf"})},
    "recursive": {
        "$defs": {
            "list": {"anyOf": [{"type": "null"}, record(head=DIGIT, tail={"$ref": "#/$defs/list"})]},
        },
        "$ref": "#/$defs/list",
    },
}


def combined(seed: int) -> Schema:
    """A schema put together at random."""
    rng = random.Random(seed)

    def leaf() -> Schema:
        low = rng.randrange(-50, 50)
        return rng.choice(
            [
                {"type": "boolean"},
                {"type": "null"},
                {"type": "integer", "minimum": low, "maximum": low + rng.randrange(1, 200)},
                {"type": "string", "minLength": rng.randrange(2), "maxLength": rng.randrange(2, 7)},
                {"type": "string", "pattern": rng.choice(["^[a-z]{1,4}$", "^(yes|no)$", "^[0-9]{2}:[0-9]{2}$"])},
                {"enum": rng.sample(["red", "green", "blue", 1, 2, None], 3)},
                {"const": rng.choice(["x", 7, None, ["a"]])},
            ]
        )

    def grow(depth: int) -> Schema:
        if depth == 0:
            return leaf()
        kind = rng.randrange(4)
        if kind == 0:
            return {"type": "array", "items": grow(depth - 1), "minItems": rng.randrange(2), "maxItems": 2}
        if kind == 1:
            return {"anyOf": [grow(depth - 1), leaf()]}
        names = rng.sample(["name", "age", "unit", "kind", "n", "next"], rng.randrange(1, 4))
        whole = record(**{name: grow(depth - 1) for name in names})
        return {**whole, "required": whole["required"][: rng.randrange(len(names) + 1)]} if kind == 2 else whole

    return grow(1 + seed % 3)


SCHEMAS: dict[str, Schema] = {**PECULIAR, **{f"combined {i}": combined(i) for i in range(200 - len(PECULIAR))}}
