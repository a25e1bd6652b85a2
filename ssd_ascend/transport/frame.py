"""The frame all messages travel in: a checked header, a control part of plain numbers and text, then raw tensors.

`wire.py` fills and reads frames, `socket.py` and `p2p.py` need `total_bytes` to know how much is still to come.

    header   40 B   magic, version, kind, total bytes, counts of the three control lists, their CRC, the header's CRC
    words    8 B    int64: ids, counts, lengths, shapes
    floats   8 B    float64
    text     1 B    utf-8, lengths among the words
    tensors         each at a multiple of 64, raw bytes in the sender's dtype, shapes among the words

Numbers are in the machine's own byte order; a machine of the other order sees a wrong magic. The CRCs cover all that
sizes or steers; tensor payloads are checked by meaning in `wire.py` (the lines below us have checksums of their own).
"""

from __future__ import annotations

import math
import struct
import zlib
from array import array
from collections.abc import Collection, Sequence
from typing import Final, NamedTuple, cast

import torch

from ssd_ascend.errors import TransportError

WIRE_VERSION: Final = 1
HEADER_BYTES: Final = 40
MAX_MESSAGE_BYTES: Final = 1 << 30
"""What a receiver takes unless told otherwise. Memory is touched only as bytes arrive."""
MAX_CONTROL_ITEMS: Final = 1 << 26

_MAGIC: Final = 0x53534457
_HEADER: Final = struct.Struct("=IHHQIIII")
_CHECKED: Final = _HEADER.size
_CRC: Final = struct.Struct("=I4x")
"""Of all of the header in front of it."""
_ALIGN: Final = 64
_MAX_DIMS: Final = 4
_MAX_SIDE: Final = 1 << 31
_DTYPES: Final = (torch.int64, torch.float32, torch.bfloat16, torch.float16)
_CODES: Final = {dtype: code for code, dtype in enumerate(_DTYPES)}
FLOAT_DTYPES: Final = frozenset({torch.float32, torch.bfloat16, torch.float16})


def _aligned(offset: int) -> int:
    return (offset + _ALIGN - 1) & -_ALIGN


def total_bytes(header: bytearray | memoryview, *, limit: int = MAX_MESSAGE_BYTES) -> int:
    """Length of the frame that starts with `header` (HEADER_BYTES or more); TransportError when it starts none."""
    return _read_header(header, limit).total


class _Header(NamedTuple):
    magic: int
    version: int
    kind: int
    total: int
    words: int
    floats: int
    text: int
    crc: int


def _read_header(header: bytearray | memoryview, limit: int) -> _Header:
    if len(header) < HEADER_BYTES:
        raise TransportError(f"truncated frame: {len(header)} bytes, a header has {HEADER_BYTES}")
    read = _Header._make(_HEADER.unpack_from(header))
    magic, version, _, total, words, floats, text, _ = read
    if magic != _MAGIC:
        raise TransportError(f"bad magic {magic:#010x}: expected {_MAGIC:#010x}", remedy="is the peer a draft worker?")
    if version != WIRE_VERSION:
        raise TransportError(
            f"wire version {version} from the other side, {WIRE_VERSION} here", remedy="run the same release on both"
        )
    if _CRC.unpack_from(header, _CHECKED)[0] != zlib.crc32(header[:_CHECKED]):
        raise TransportError("damaged header: its checksum does not match")
    if not HEADER_BYTES <= total <= limit:
        raise TransportError(f"frame of {total} bytes: expected {HEADER_BYTES} to {limit}")
    if max(words, floats, text) > MAX_CONTROL_ITEMS or HEADER_BYTES + 8 * (words + floats) + text > total:
        raise TransportError(f"{words} words, {floats} floats, {text} text bytes in a frame of {total} bytes")
    return read


class FrameWriter:
    """Collects the parts of one message; `finish` packs them, copying each tensor once."""

    __slots__ = ("_sizes", "_tensors", "_text", "floats", "words")

    def __init__(self) -> None:
        self.words: list[int] = []
        self.floats: list[float] = []
        self._text: list[bytes] = []
        self._tensors: list[torch.Tensor] = []
        self._sizes: list[int] = []

    def ints(self, values: Sequence[int]) -> None:
        """A counted list of integers."""
        self.words.append(len(values))
        self.words.extend(values)

    def text(self, value: str) -> None:
        """A counted string; lone surrogates survive."""
        raw = value.encode("utf-8", "surrogatepass")
        self.words.append(len(raw))
        self._text.append(raw)

    def tensor(self, value: torch.Tensor | None) -> None:
        """A tensor of any device, or None."""
        if value is None:
            self.words.append(-1)
            return
        code = _CODES.get(value.dtype)
        if code is None or value.dim() > _MAX_DIMS:
            raise TransportError(f"a {value.dtype} tensor of shape {tuple(value.shape)} cannot travel")
        self.words += (code, value.dim(), *value.shape)
        self._tensors.append(value)
        self._sizes.append(value.numel() * value.element_size())

    def finish(self, kind: int, *, limit: int = MAX_MESSAGE_BYTES) -> bytearray:
        """The frame."""
        text = b"".join(self._text)
        control = self._numbers(kind) + text
        start = HEADER_BYTES + len(control)
        total = start
        for size in self._sizes:
            total = _aligned(total) + size if size else total
        if total > limit:
            raise TransportError(f"a message of {total} bytes: the limit is {limit}", remedy="send less at once")
        counts = (len(self.words), len(self.floats), len(text), zlib.crc32(control))
        head = _HEADER.pack(_MAGIC, WIRE_VERSION, kind, total, *counts)
        frame = bytearray(total)
        frame[:_CHECKED] = head
        _CRC.pack_into(frame, _CHECKED, zlib.crc32(head))
        frame[HEADER_BYTES:start] = control
        for value, size in zip(self._tensors, self._sizes, strict=True):
            if size:
                begin = _aligned(start)
                start = begin + size
                torch.frombuffer(frame, dtype=value.dtype, count=value.numel(), offset=begin).view(value.shape).copy_(
                    value
                )
        return frame

    def _numbers(self, kind: int) -> bytes:
        try:
            return array("q", self.words).tobytes() + array("d", self.floats).tobytes()
        except (OverflowError, TypeError) as error:
            raise TransportError(f"a message of kind {kind} holds what is no int64 or float: {error}") from error


class FrameReader:
    """Takes the parts of one frame in the order they were written. Every read is bounded by what the frame holds."""

    __slots__ = (
        *("_view", "_word_at", "_float_at", "_text_at", "_text_end", "_tensors_at"),
        *("kind", "words", "floats"),
    )

    def __init__(self, frame: bytearray, *, limit: int = MAX_MESSAGE_BYTES) -> None:
        view = memoryview(frame)
        _, _, self.kind, total, words, floats, text, crc = _read_header(view, limit)
        if total != len(view):
            raise TransportError(f"truncated frame: {len(view)} bytes of {total}")
        floats_at = HEADER_BYTES + 8 * words
        text_at = floats_at + 8 * floats
        if crc != zlib.crc32(view[HEADER_BYTES : text_at + text]):
            raise TransportError("damaged message: the checksum of its control part does not match")
        self.words: list[int] = view[HEADER_BYTES:floats_at].cast("q").tolist()
        self.floats = cast(list[float], view[floats_at:text_at].cast("d").tolist())
        self._view = view
        self._word_at = self._float_at = 0
        self._text_at, self._text_end = text_at, text_at + text
        self._tensors_at = self._text_end

    def take(self, count: int) -> list[int]:
        """The next `count` words."""
        end = self._word_at + count
        if count < 0 or end > len(self.words):
            raise TransportError(f"a list of {count} numbers where {len(self.words) - self._word_at} are left")
        values = self.words[self._word_at : end]
        self._word_at = end
        return values

    def word(self, what: str, low: int, high: int) -> int:
        """The next word, within bounds."""
        at = self._word_at
        if at == len(self.words):
            raise TransportError(f"the message ends before {what}")
        value = self.words[at]
        if not low <= value <= high:
            raise TransportError(f"{what} has {value}: expected {low} to {high}")
        self._word_at = at + 1
        return value

    def count(self, what: str) -> int:
        """The next word as a length: at most the number of words, so that no loop runs away."""
        return self.word(what, 0, len(self.words))

    def ints(self, what: str, low: int, high: int) -> list[int]:
        """A counted list of integers, each within bounds."""
        values = self.take(self.count(what))
        if values and (min(values) < low or max(values) > high):
            bad = next(value for value in values if not low <= value <= high)
            raise TransportError(f"{what} holds {bad}: expected {low} to {high}")
        return values

    def take_floats(self, count: int) -> list[float]:
        """The next `count` floats."""
        end = self._float_at + count
        if end > len(self.floats):
            raise TransportError(f"{count} floats where {len(self.floats) - self._float_at} are left")
        values = self.floats[self._float_at : end]
        self._float_at = end
        return values

    def text(self, what: str, max_bytes: int) -> str:
        """A counted string."""
        end = self._text_at + self.word(what, 0, min(max_bytes, self._text_end - self._text_at))
        raw = bytes(self._view[self._text_at : end])
        self._text_at = end
        try:
            return raw.decode("utf-8", "surrogatepass")
        except UnicodeDecodeError as error:
            raise TransportError(f"{what} is not utf-8: {error}") from error

    def tensor(self, what: str, dtypes: Collection[torch.dtype], shape: tuple[int | None, ...]) -> torch.Tensor | None:
        """The next tensor, a view of the frame, or None when none was sent. A None in `shape` takes any size."""
        code = self.word(what, -1, len(_DTYPES) - 1)
        if code < 0:
            return None
        dtype = _DTYPES[code]
        if dtype not in dtypes:
            raise TransportError(f"{what} is {dtype}: expected {', '.join(sorted(map(str, dtypes)))}")
        dims = self.take(self.word(what, 0, _MAX_DIMS))
        fits = len(dims) == len(shape) and all(
            0 <= d <= _MAX_SIDE and s in (None, d) for d, s in zip(dims, shape, strict=True)
        )
        if not fits:
            raise TransportError(f"shape of {what} is {dims}: expected {list(shape)}")
        count = math.prod(dims)
        if count == 0:
            return torch.empty(dims, dtype=dtype)
        begin = _aligned(self._tensors_at)
        end = begin + count * dtype.itemsize
        if end > len(self._view):
            raise TransportError(f"{what} of shape {dims} does not fit a frame of {len(self._view)} bytes")
        self._tensors_at = end
        return torch.frombuffer(self._view, dtype=dtype, count=count, offset=begin).view(dims)

    def finish(self) -> None:
        """TransportError unless everything was taken."""
        left = len(self.words) - self._word_at + len(self.floats) - self._float_at + self._text_end - self._text_at
        if left or self._tensors_at != len(self._view):
            raise TransportError(f"a message of kind {self.kind} is longer than its contents")
