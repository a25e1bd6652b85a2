"""The seam between processes of two models: whole messages, in order, with a bound on every wait."""

from __future__ import annotations

from typing import Protocol

from ssd_ascend.transport.messages import Message


class Transport(Protocol):
    """One end of a line. After any `TransportError` the line is dead; only `close` may still be called."""

    def send(self, message: Message) -> None:
        """Hand the message over as one packed buffer. Raises `TransportError` when the other side is gone."""
        ...

    def recv(self, timeout_s: float | None) -> Message | None:
        """The next message; None when none came within timeout_s (0 polls, None waits for ever).

        Raises `TransportError` when the other side is gone or what came is no message.
        """
        ...

    def close(self) -> None:
        """Give the line up; wakes a waiting `recv` of the other side with `TransportError`. May be called twice."""
        ...
