"""Reads our own files (presets, topologies, training runs) into frozen dataclasses, strictly.

An unknown key, a missing key and a value of the wrong type are errors that name the file, the line and the nearest
known key. Callers: `config/preset.py`, `planner`, `training`. Foreign files (`config.json`) are not read with this.
"""

from __future__ import annotations

import dataclasses
import re
import tomllib
import types
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date, time
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from ssd_ascend.errors import ConfigError, nearest

T = TypeVar("T")


class FieldError(ConfigError):
    """What a dataclass's own check raises when one of its keys is at fault: the message then names that key's line."""

    def __init__(self, message: str, *keys: str, remedy: str | None = None) -> None:
        super().__init__(message, remedy=remedy)
        self.keys = keys


def load_toml(path: Path, schema: type[T]) -> T:
    """Read the TOML file `path` into the dataclass `schema`; ConfigError names file, line, key and reason."""
    text, data = read_toml(path)
    return from_dict(data, schema, where=str(path), text=text)


def read_toml(path: Path) -> tuple[str, dict[str, Any]]:
    """The text of a TOML file and what it says. ConfigError for one that cannot be read, or is none."""
    try:
        text = path.read_text(encoding="utf-8-sig")  # some editors put a byte order mark in front
        return text, tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error


def as_toml(value: Any) -> str:
    """A value of such a file, for messages, about as it stands there."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, date | time):  # a datetime is a date
        return value.isoformat()
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key} = {as_toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(as_toml(item) for item in value) + "]"
    return repr(value)


def from_dict(data: Mapping[str, Any], schema: type[T], *, where: str, text: str = "") -> T:
    """Build the dataclass `schema` from `data`; `where` and the source `text` only serve the messages."""
    built: T = _build(data, schema, _Place(where, text))
    return built


@dataclass(frozen=True, slots=True)
class _Place:
    """Where in a file we are, for messages."""

    where: str
    text: str
    keys: tuple[str, ...] = ()

    def at(self, *keys: str) -> _Place:
        return dataclasses.replace(self, keys=(*self.keys, *keys))

    def error(self, reason: str, *, remedy: str | None = None) -> ConfigError:
        enclosing = (self.keys[:depth] for depth in range(len(self.keys), 0, -1))  # an inline table has one line
        line = next((line for keys in enclosing if (line := _line_of(self.text, keys))), None)
        place = f"{self.where}:{line}" if line else self.where
        key = ".".join(self.keys)
        return ConfigError(f"{place}: {key}: {reason}" if key else f"{place}: {reason}", remedy=remedy)


def _line_of(text: str, keys: tuple[str, ...]) -> int | None:
    """The 1-based line of a key in TOML `text`; good enough for messages, None when it is written in another way."""
    if not text or not keys:
        return None
    section: tuple[str, ...] = ()
    for number, line in enumerate(text.splitlines(), start=1):
        if header := re.match(r"\s*\[{1,2}\s*([^\[\]]+?)\s*\]{1,2}", line):
            section = tuple(part.strip().strip("\"'") for part in header[1].split("."))
            if section == keys:
                return number
        elif (entry := re.match(r"\s*([\w.\"'-]+)\s*=", line)) and (
            section + tuple(part.strip("\"'") for part in entry[1].split("."))
        )[: len(keys)] == keys:
            return number
    return None


def _build(data: Any, schema: Any, place: _Place) -> Any:
    """Build one (nested) dataclass; a ConfigError of its own checks is given the place."""
    if not isinstance(data, Mapping):
        raise place.error(f"{as_toml(data)} is not a table")
    hints = get_type_hints(schema)
    fields = {field.name: field for field in dataclasses.fields(schema) if field.init}
    for key in data:
        if key not in fields:
            guess = nearest(str(key), fields)
            raise place.at(str(key)).error(
                f"unknown key; known: {', '.join(sorted(fields))}", remedy=f"did you mean {guess!r}?" if guess else None
            )
    required = [name for name, field in fields.items() if _is_required(field) and name not in data]
    if required:
        raise place.error(f"missing {', '.join(required)}", remedy=f"add {required[0]} = ...")
    values = {key: _convert(value, hints[key], place.at(key)) for key, value in data.items()}
    try:
        return schema(**values)
    except ConfigError as error:
        keys = error.keys if isinstance(error, FieldError) else ()
        raise place.at(*keys).error(error.message, remedy=error.remedy) from error


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _convert(value: Any, hint: Any, place: _Place) -> Any:
    """`value` as the annotated type `hint`, or an error that names what was expected."""
    origin, args = get_origin(hint), get_args(hint)
    if dataclasses.is_dataclass(hint):
        return _build(value, hint, place)
    if origin in (Union, types.UnionType):
        return _convert_union(value, args, hint, place)
    if origin is tuple and isinstance(value, list | tuple):
        return _convert_tuple(value, args, hint, place)
    if origin in (dict, Mapping) or hint in (dict, Mapping):
        if not isinstance(value, Mapping):
            raise _mismatch(value, hint, place)
        inner = args[1] if args else Any
        return {str(key): _convert(item, inner, place.at(str(key))) for key, item in value.items()}
    if origin is Literal:
        if any(type(value) is type(choice) and value == choice for choice in args):
            return value
        guess = nearest(value, [str(choice) for choice in args]) if isinstance(value, str) else None
        raise _mismatch(value, hint, place, remedy=f"did you mean {guess!r}?" if guess else None)
    return _convert_scalar(value, hint, place)


def _convert_scalar(value: Any, hint: Any, place: _Place) -> Any:
    if hint in (Any, object):
        return value
    if hint is float and type(value) in (int, float):
        return float(value)
    if hint is Path and isinstance(value, str):
        return Path(value)
    if hint in (None, type(None)) and value is None:
        return None
    if hint in (bool, int, str) and type(value) is hint:  # type(): True must not pass for the number 1
        return value
    raise _mismatch(value, hint, place)


def _convert_tuple(value: Any, args: tuple[Any, ...], hint: Any, place: _Place) -> tuple[Any, ...]:
    if len(args) == 2 and args[1] is Ellipsis:
        inner = [args[0]] * len(value)
    elif len(args) == len(value):
        inner = list(args)
    else:
        raise _mismatch(value, hint, place)
    return tuple(_convert(item, kind, place) for item, kind in zip(value, inner, strict=True))


def _convert_union(value: Any, args: tuple[Any, ...], hint: Any, place: _Place) -> Any:
    """The first member that fits; a table goes to the one dataclass member, whose own message is the better one."""
    tables = [arg for arg in args if dataclasses.is_dataclass(arg)]
    if isinstance(value, Mapping) and len(tables) == 1:
        return _build(value, tables[0], place)
    for arg in args:
        try:
            return _convert(value, arg, place)
        except ConfigError:
            continue
    raise _mismatch(value, hint, place)


def _mismatch(value: Any, hint: Any, place: _Place, *, remedy: str | None = None) -> ConfigError:
    return place.error(f"{as_toml(value)} is {_article(type(value).__name__)}, expected {_spell(hint)}", remedy=remedy)


def _article(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def _spell(hint: Any) -> str:
    """A type as a reader of a TOML file would say it."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(_spell(arg) for arg in args if arg is not type(None))
    if origin is Literal:
        return "one of " + ", ".join(repr(choice) for choice in args)
    if origin is tuple:
        many = len(args) == 2 and args[1] is Ellipsis
        return f"a list of {_spell(args[0])}" if many else f"a list of {len(args)} values"
    if origin in (dict, Mapping) or dataclasses.is_dataclass(hint):
        return "a table"
    names = {int: "an integer", float: "a number", str: "a string", bool: "true or false", Path: "a path"}
    return names.get(hint, str(getattr(hint, "__name__", hint)))
