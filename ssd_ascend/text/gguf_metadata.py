"""Reads a .gguf header: chosen keys for the tokenizer and the model's config, the list of tensors for `weights.gguf`.

The `gguf` package indexes every value and tensor first, which takes seconds for a 49k vocabulary; walking the header
and decoding only the wanted keys takes about a tenth. Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from ssd_ascend.errors import ConfigError

T = TypeVar("T")
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


def read_gguf_metadata(path: Path, wanted: Callable[[str], bool]) -> dict[str, Any]:
    """The header's values whose key satisfies `wanted`; scalars, strings and lists.

    Raises ConfigError when the file is missing, not GGUF version 2 or 3, or cut off inside its header.
    """
    return _walk(path, lambda header: header.read(wanted))


class GgufTensor(NamedTuple):
    """Where a tensor lies. shape: outermost dimension first; kind: ggml's number of its encoding; offset: bytes."""

    shape: tuple[int, ...]
    kind: int
    offset: int


def read_gguf_tensors(path: Path) -> dict[str, GgufTensor]:
    """The header's list of tensors, by the names in the file; errors as `read_gguf_metadata`."""
    return _walk(path, lambda header: header.read_tensors())


def _walk(path: Path, walk: Callable[[_Header], T]) -> T:
    """Open the file, hand `walk` a cursor at its start."""
    if not path.is_file():
        raise ConfigError(f"no such file: {path}", remedy="give the path of a .gguf file")
    with path.open("rb") as file:
        try:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError as error:  # mmap refuses an empty file
            raise ConfigError(f"{path} is empty", remedy="download it again") from error
        with data:
            header = _Header(data, path)
            try:
                return walk(header)
            except (struct.error, IndexError) as error:
                raise ConfigError(f"{path} ends inside its header", remedy="download it again") from error
            except UnicodeDecodeError as error:
                raise ConfigError(f"{path} holds a name or token that is not UTF-8: {error}") from error


class _Header:
    """A cursor over the header; every read moves it past what was read."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self._data = data
        self._path = path
        self._at = 0

    def read(self, wanted: Callable[[str], bool]) -> dict[str, Any]:
        """The wanted values; leaves the cursor behind the last value."""
        _, num_values = self._counts()
        found: dict[str, Any] = {}
        for _ in range(num_values):
            key, kind = self._string(), self._scalar("I")
            if wanted(key):
                found[key] = self._value(kind)
            else:
                self._skip(kind)
        return found

    def read_tensors(self) -> dict[str, GgufTensor]:
        """The list behind the values; its offsets count from the aligned end of the header."""
        num_tensors, _ = self._counts()
        alignment = self.read(lambda key: key == "general.alignment").get("general.alignment", 32)
        self._must_hold(num_tensors)
        entries: list[tuple[str, GgufTensor]] = []
        for _ in range(num_tensors):
            name, num_dims = self._string(), self._scalar("I")
            shape = tuple(self._scalar("Q") for _ in range(num_dims))[::-1]
            entries.append((name, GgufTensor(shape, self._scalar("I"), self._scalar("Q"))))
        start = -(-self._at // alignment) * alignment
        return {name: tensor._replace(offset=start + tensor.offset) for name, tensor in entries}

    def _counts(self) -> tuple[int, int]:
        """Numbers of tensors and of values; leaves the cursor at the first value."""
        if self._data[:4] != b"GGUF":
            raise ConfigError(f"{self._path} is not a GGUF file: it starts with {self._data[:4]!r}")
        self._at = 4
        version = self._scalar("I")
        if version not in (2, 3):
            raise ConfigError(
                f"{self._path} has GGUF version {version}; versions 2 and 3 (little-endian) are supported",
                remedy="convert the model again with a current converter",
            )
        return int(self._scalar("Q")), int(self._scalar("Q"))

    def _scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from(f"<{code}", self._data, self._at)
        self._at += struct.calcsize(f"<{code}")
        return value

    def _bytes(self) -> bytes:
        size = self._scalar("Q")
        raw = self._data[self._at : self._at + size]
        if len(raw) != size:
            raise IndexError(self._at)
        self._at += size
        return raw

    def _string(self) -> str:
        return self._bytes().decode("utf-8")

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._scalar(self._code(kind))
        item, size = self._scalar("I"), self._scalar("Q")
        if item in (_STRING, _ARRAY):
            self._must_hold(size)
            return [self._value(item) for _ in range(size)]
        layout = f"<{size}{self._code(item)}"
        values = list(struct.unpack_from(layout, self._data, self._at))
        self._at += struct.calcsize(layout)
        return values

    def _skip(self, kind: int) -> None:
        if kind == _STRING:
            self._bytes()
        elif kind != _ARRAY:
            self._at += struct.calcsize(f"<{self._code(kind)}")
        else:
            item, size = self._scalar("I"), self._scalar("Q")
            if item in (_STRING, _ARRAY):
                self._must_hold(size)
                for _ in range(size):
                    self._skip(item)
            else:
                self._at += struct.calcsize(f"<{self._code(item)}") * size

    def _must_hold(self, size: int) -> None:
        """A damaged length must fail at once, not after an endless loop: every item takes 8 bytes at least."""
        if size * 8 > len(self._data) - self._at:
            raise IndexError(self._at)

    def _code(self, kind: int) -> str:
        try:
            return _SCALARS[kind]
        except KeyError:
            raise ConfigError(
                f"{self._path} has a value of unknown type {kind} in its header", remedy="download it again"
            ) from None
