"""The base of every request body: nothing unknown, nothing converted, no flood of errors; and how one is read.

Torch-free. A body may hold millions of wrong values, and finding them all would take half a minute to tell one.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sized
from typing import Annotated, Any, Final, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails, from_json

from ssd_ascend.errors import RequestError, nearest

MAX_MEMBERS = 1 << 16
"""Of one object."""
_WIDEST: Final = (
    ((b"[", b"{"), 1 << 16, "lists and objects"),
    ((b":",), 1 << 17, "members of objects"),
    ((b",",), 1 << 20, "values"),
)
"""What a body may hold, by the bytes that tell of it. Reading keeps the interpreter to itself, also in a thread: within
these bounds for a quarter of a second at most, where eight million empty lists took fifteen."""
_STRING: Final = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)  # the last may have no end
_STRETCH: Final = re.compile(rb'[^"]*+(?:%b[^"]*+){0,4096}' % _STRING.pattern, re.DOTALL)
"""So much as is looked at before other threads have their turn."""
_SHOWN: Final = 64
"""Characters of a name that we say back."""
T = TypeVar("T")


def _bounded(value: Any) -> Any:
    if isinstance(value, Sized) and len(value) > MAX_MEMBERS:
        raise ValueError(f"an object of more than {MAX_MEMBERS} members")
    return value


Items = Annotated[list[T], Field(fail_fast=True)]
"""A list that is wrong at its first wrong item."""
Members = Annotated[dict[str, T], BeforeValidator(_bounded)]
"""An object that maps names to values of one type."""


class Strict(BaseModel):
    """No unknown field, no conversion between types, no NaN or infinity. A null means "not given"."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _no_flood(cls, data: Any) -> Any:
        return _bounded(data) if isinstance(data, dict) else data


RequestT = TypeVar("RequestT", bound=Strict)


def parse(schema: type[RequestT], body: bytes) -> RequestT:
    """A request body as `schema`. Raises RequestError, naming the first field that is wrong."""
    _check_width(body)
    try:
        read = schema.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        if first["type"] == "json_invalid":
            raise RequestError(f"the body is not valid JSON: {first['msg']}") from error
        raise _first_problem(schema, error, from_json(body)) from error
    _check_twins(body)
    return read


def checked(schema: type[RequestT], data: dict[str, Any]) -> RequestT:
    """The same for values that are parsed already."""
    try:
        return schema.model_validate(data)
    except ValidationError as error:
        raise _first_problem(schema, error, data) from error


def _check_width(body: bytes) -> None:
    """Raises RequestError for a body of so many parts that reading it would take long."""
    if all(_count(body, signs) < most for signs, most, _ in _WIDEST):
        return
    counts, at = [0] * len(_WIDEST), 0
    while at < len(body):
        stretch = _STRETCH.match(body, at)
        assert stretch is not None, "any bytes are some, or a string"
        at = stretch.end()
        bare = _STRING.sub(b"", stretch[0])  # a text may have more commas than a list
        for place, (signs, most, what) in enumerate(_WIDEST):
            counts[place] += _count(bare, signs)
            if counts[place] >= most:
                raise RequestError(f"the body has more than {most} {what}", remedy="send less at a time")


def _count(body: bytes, signs: tuple[bytes, ...]) -> int:
    return sum(map(body.count, signs))


def _check_twins(body: bytes) -> None:
    """Raises RequestError for an object that says a key twice, wherever it is: all but the last would be ignored."""
    twins: list[str] = []

    def members(pairs: list[tuple[str, Any]]) -> Any:
        found = dict(pairs)
        if len(found) == len(pairs):
            return found
        times = Counter(name for name, _ in pairs)
        twins.append(next(name for name in times if times[name] > 1))
        return _Twin(twins[-1])

    # the numbers do not matter, and may be longer than Python likes to read
    whole = json.JSONDecoder(object_pairs_hook=members, parse_int=len, parse_float=len).decode(body.decode())
    if twins:
        where = _place_of_twin(whole)
        raise RequestError(f"{_path(where)} is in the body twice", param=str(where[0]), remedy="send it once")


class _Twin(str):
    """In place of an object that says this key twice."""


def _place_of_twin(value: Any) -> tuple[int | str, ...]:
    """Where the first one is; empty when there is none."""
    if isinstance(value, _Twin):
        return (str(value),)
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in parts:
        if inner := _place_of_twin(part):
            return (key, *inner)
    return ()


def _first_problem(schema: type[Strict], error: ValidationError, data: Any) -> RequestError:
    problems = error.errors(include_url=False, include_context=False)
    if not problems[0]["loc"]:
        is_told = problems[0]["type"] == "value_error"
        return RequestError(f"the body is wrong: {problems[0]['msg']}" if is_told else "the body is not a JSON object")
    placed = [(_place(data, problem), problem) for problem in problems]
    first = placed[0][0]
    # a value that fits none of several types is reported once for each: the one that it is most like sees furthest
    where = max((place for place, _ in placed if place[: len(first)] == first), key=len)
    same = [problem for place, problem in placed if place == where]
    name = str(where[0])
    if same[0]["type"] == "extra_forbidden":
        guess = nearest(str(where[-1]), schema.model_fields)
        return RequestError(
            f"unknown field {_path(where)!r}",
            param=name,
            code="unknown_parameter",
            remedy=f"did you mean {guess!r}?" if guess else None,
        )
    wanted = dict.fromkeys(str(problem["msg"]) for problem in same)
    return RequestError(f"{_path(where)} is wrong: {'; or '.join(wanted)}", param=name)


def _place(data: Any, problem: ErrorDetails) -> tuple[int | str, ...]:
    """Where in the body a problem is: pydantic names the type that it tried, too, wherever there were several."""
    place: list[int | str] = []
    *_, last = where = problem["loc"]
    for part in where:
        is_key = isinstance(data, dict) and part in data
        if is_key or (isinstance(data, list) and isinstance(part, int) and part < len(data)):
            place.append(part)
            data = data[part]
    if problem["type"] == "missing":
        place.append(last)
    return tuple(place) or where[:1]


def _path(where: tuple[int | str, ...]) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part[:_SHOWN]}" for part in where).lstrip(".")
