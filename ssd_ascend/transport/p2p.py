"""A line over point-to-point sends of device collectives: one packed message each way.

A `Peer` is what a backend brings: `gloo.py` for host memory; others move buffers on their device and keep one
communicator per direction, since a receive that waits would hold up a send behind it. Such libraries match a receive to
a send by size, so a message goes out as a fixed head and, when longer, the rest, whose size the head tells.
"""

from __future__ import annotations

import queue
import threading
from typing import Final, Protocol

import torch

from ssd_ascend.errors import TransportError
from ssd_ascend.transport.frame import HEADER_BYTES, MAX_MESSAGE_BYTES, total_bytes
from ssd_ascend.transport.messages import Message
from ssd_ascend.transport.socket import SEND_TIMEOUT_S
from ssd_ascend.transport.wire import decode, encode

HEAD_BYTES: Final = 4096
"""Holds a greedy round of some ten sequences, so that the common message is a single send."""


class Peer(Protocol):
    """The other one of two ranks. Buffers are contiguous uint8 rows on `device`; both sides agree on their sizes.

    Connected and warmed when handed over: the first real message must not pay for set-up.
    """

    device: torch.device

    def send(self, buffer: torch.Tensor, timeout_s: float) -> None:
        """Returns once `buffer` may be reused; TransportError when the peer is gone or does not take it in time."""
        ...

    def recv(self, buffer: torch.Tensor) -> None:
        """Waits until `buffer` is full; TransportError when the peer goes or `close` is called."""
        ...

    def close(self) -> None:
        """Wakes a waiting `recv` on both sides. May be called twice."""
        ...


class P2PTransport:
    """One end. A thread waits for frames, which gives `recv` its time limit and notices a death between messages."""

    def __init__(self, peer: Peer, *, send_timeout_s: float = SEND_TIMEOUT_S, limit: int = MAX_MESSAGE_BYTES) -> None:
        self._peer = peer
        self._send_timeout_s = send_timeout_s
        self._limit = limit
        self._head = torch.zeros(HEAD_BYTES, dtype=torch.uint8)
        self._sending = threading.Lock()
        self._frames: queue.SimpleQueue[bytearray | TransportError] = queue.SimpleQueue()
        self._broken: TransportError | None = None
        self._receiver = threading.Thread(target=self._receive, name="ssd-p2p-receiver", daemon=True)
        self._receiver.start()

    def send(self, message: Message) -> None:
        """See `Transport.send`; waits at most `send_timeout_s` for each of the two parts."""
        self._must_be_whole()
        frame = torch.frombuffer(encode(message, limit=self._limit), dtype=torch.uint8)
        first = min(len(frame), HEAD_BYTES)
        with self._sending:
            self._head[:first] = frame[:first]
            try:
                self._peer.send(self._head.to(self._peer.device), self._send_timeout_s)
                if len(frame) > HEAD_BYTES:
                    self._peer.send(frame[HEAD_BYTES:].to(self._peer.device), self._send_timeout_s)
            except TransportError as error:
                raise self._break(error) from error

    def recv(self, timeout_s: float | None) -> Message | None:
        """See `Transport.recv`."""
        self._must_be_whole()
        try:
            item = self._frames.get_nowait() if timeout_s == 0 else self._frames.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if isinstance(item, TransportError):
            raise self._break(item)
        try:
            return decode(item, limit=self._limit)
        except TransportError as error:
            raise self._break(error) from error

    def close(self) -> None:
        """See `Transport.close`."""
        self._break(TransportError("the line was closed by this side"))
        self._receiver.join(timeout=self._send_timeout_s)

    def _receive(self) -> None:
        """Body of the receiver thread; its last word is why it ended."""
        last_word = TransportError("the receiver of this line stopped")
        try:
            head = torch.empty(HEAD_BYTES, dtype=torch.uint8, device=self._peer.device)
            while True:
                self._frames.put(self._receive_frame(head))
        except TransportError as error:
            last_word = error
        finally:
            self._frames.put(self._broken or last_word)

    def _receive_frame(self, head: torch.Tensor) -> bytearray:
        self._peer.recv(head)
        start = head.to("cpu")
        frame = bytearray(total_bytes(bytearray(start[:HEADER_BYTES].tolist()), limit=self._limit))
        room = torch.frombuffer(frame, dtype=torch.uint8)
        room[:HEAD_BYTES] = start[: len(room)]
        if len(room) > HEAD_BYTES:
            self._receive_rest(room[HEAD_BYTES:])
        return frame

    def _receive_rest(self, room: torch.Tensor) -> None:
        if self._peer.device.type == room.device.type:
            self._peer.recv(room)
            return
        rest = torch.empty_like(room, device=self._peer.device)
        self._peer.recv(rest)
        room.copy_(rest)

    def _must_be_whole(self) -> None:
        if self._broken is not None:
            raise TransportError(self._broken.message)

    def _break(self, error: TransportError) -> TransportError:
        """Give the line up for good; the first reason stays."""
        if self._broken is None:
            self._broken = error
        self._peer.close()
        return TransportError(error.message)
