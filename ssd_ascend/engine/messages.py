"""What the HTTP front end and the engine process say to each other, as msgpack. Torch-free; never pickle.

Only `engine/async_engine.py` (front end) and `engine/process.py` (engine) speak it. Each message is one frame: its
length in four bytes, then the msgpack of one of these structs.
"""

from __future__ import annotations

import signal
import struct

import msgspec

from ssd_ascend.config.engine import EngineConfig
from ssd_ascend.core.request import EngineRequest, TokenDelta
from ssd_ascend.core.stats import EngineStats
from ssd_ascend.engine.identity import EngineInfo, EngineLimits

HEADER = struct.Struct("!I")
WHERE_SIGNAL = signal.SIGUSR1
"""At which an engine process puts down where it is: what is stuck in a step takes no message."""


# -- front end -> engine -----------------------------------------------------------------------------------------------


class Start(msgspec.Struct, tag="start", frozen=True):
    """The first message: which engine to build."""

    config: EngineConfig


class Submit(msgspec.Struct, tag="submit", frozen=True):
    """New sequences."""

    requests: list[EngineRequest]


class Abort(msgspec.Struct, tag="abort", frozen=True):
    """Sequences nobody waits for any more."""

    seq_ids: list[int]


class Tune(msgspec.Struct, tag="tune", frozen=True):
    """Draft at most so many tokens from now on; 0 switches speculation off. An empty `fan_out` changes nothing."""

    lookahead: int
    fan_out: list[int] = []  # msgspec copies it


class Shutdown(msgspec.Struct, tag="shutdown", frozen=True):
    """Leave now; whatever still runs is dropped."""


Command = Start | Submit | Abort | Tune | Shutdown


# -- engine -> front end -----------------------------------------------------------------------------------------------


class Progress(msgspec.Struct, tag="progress", frozen=True):
    """How far the engine is with being built."""

    stage: str
    done: int = 0
    total: int = 0


class Ready(msgspec.Struct, tag="ready", frozen=True):
    """The engine takes requests."""

    limits: EngineLimits
    info: EngineInfo


class Failed(msgspec.Struct, tag="failed", frozen=True):
    """The engine cannot start or go on, in one sentence; the process ends after it."""

    message: str


class Rejected(msgspec.Struct, tag="rejected", frozen=True):
    """A sequence the engine would not take."""

    seq_id: int
    message: str
    param: str | None = None
    code: str | None = None


class Stepped(msgspec.Struct, tag="stepped", frozen=True):
    """All that one step produced."""

    deltas: list[TokenDelta]


class Stats(msgspec.Struct, tag="stats", frozen=True):
    """The engine's counters, and what is degraded if something is.

    Comes by itself now and then, and whenever the engine runs out of work.
    """

    stats: EngineStats
    degraded: str | None = None


Report = Progress | Ready | Failed | Rejected | Stepped | Stats

_encoder = msgspec.msgpack.Encoder()
_command_decoder = msgspec.msgpack.Decoder(Command)
_report_decoder = msgspec.msgpack.Decoder(Report)


def frame(message: Command | Report) -> bytes:
    """The bytes of one message on the line."""
    body = _encoder.encode(message)
    return HEADER.pack(len(body)) + body


def parse_command(body: bytes | bytearray | memoryview) -> Command:
    """One message for the engine; msgspec.DecodeError when it is none."""
    return _command_decoder.decode(body)


def parse_report(body: bytes | bytearray | memoryview) -> Report:
    """One message for the front end; msgspec.DecodeError when it is none."""
    return _report_decoder.decode(body)
