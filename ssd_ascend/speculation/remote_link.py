"""A `WorkerLink` to a speculator that somebody else started (`python -m ssd_ascend.speculate`), maybe elsewhere.

One thread calls, introduces us, and calls again when the line is lost; the step loop only reads what it has found.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from ssd_ascend import env
from ssd_ascend.errors import ConfigError, TransportError, in_one_line
from ssd_ascend.log import get_logger
from ssd_ascend.speculation.identity import identity_of
from ssd_ascend.speculation.setup import DraftSetup
from ssd_ascend.speculation.workers import Worker
from ssd_ascend.transport import tcp
from ssd_ascend.transport.base import Transport
from ssd_ascend.transport.messages import PROTOCOL_VERSION, Hello, Refusal
from ssd_ascend.weights.loader import read_config

_CONNECT_S: Final = 1.5
_HELLO_S: Final = 5.0
_SEND_S: Final = 0.5
"""A line that takes no more bytes for so long is given up."""
_PAUSE_S: Final = 0.5
_LONGEST_PAUSE_S: Final = 2.0
_REFUSED_PAUSE_S: Final = 10.0
_FIRST_S: Final = 5.0
"""How long a target that starts waits for its speculators; those that come later are welcome too."""
log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Pauses:
    """Between calls, in seconds: doubling from the first to the longest, and after a refusal."""

    first_s: float = _PAUSE_S
    longest_s: float = _LONGEST_PAUSE_S
    refused_s: float = _REFUSED_PAUSE_S


class RefusedError(TransportError):
    """The speculator there cannot serve this target."""


class RemoteLink:
    """See `WorkerLink`. The constructor returns at once; the first call is then under way."""

    def __init__(self, address: str, secret: str, hello: Hello, *, pauses: Pauses | None = None) -> None:
        """hello: what this target says of itself."""
        host, _, port = address.rpartition(":")
        self.address = address
        self._host, self._port = host.strip("[]"), int(port)
        self._secret = secret
        self._hello = hello
        self._pauses = pauses or Pauses()
        self._changed = threading.Condition()
        self._wake = threading.Event()
        self._closing = False
        self._generation = 0
        self._current: Worker | None = None
        self._reason = "not reached yet"
        self._losses = 0
        self.refusal: str | None = None
        self._thread = threading.Thread(target=self._run, name=f"ssd-speculator-{address}", daemon=True)
        self._thread.start()

    # -- for the step loop: none of these waits ------------------------------------------------------------------

    def current(self) -> Worker | None:
        """The speculator at the other end, or None."""
        return self._current

    def report(self, generation: int, reason: str) -> None:
        """Hang up on the speculator of this generation, and call again."""
        with self._changed:
            if self._current is None or self._current.generation != generation:
                return
            self._current, self._reason = None, reason
            self._losses += 1
        self._wake.set()

    def health(self) -> str | None:
        """None when the speculator is in service, else one sentence."""
        with self._changed:
            return None if self._current is not None else f"no speculation from {self.address}: {self._reason}"

    @property
    def restarts(self) -> int:
        """Times the line was lost."""
        return self._losses

    @property
    def work_s(self) -> float | None:
        """Nothing is known of a process elsewhere."""
        return None

    # -- for those who can wait ----------------------------------------------------------------------------------

    def wait_ready(self, timeout_s: float) -> bool:
        """Wait until the speculator is in service or has refused; False when it is not in service then."""
        with self._changed:
            self._changed.wait_for(lambda: self._current is not None or self.refusal is not None, timeout_s)
            return self._current is not None

    def close(self) -> None:
        """Hang up for good. May be called twice."""
        self._closing = True
        self._wake.set()
        self._thread.join(timeout=_CONNECT_S + _HELLO_S + 1.0)

    # -- the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        pause_s = self._pauses.first_s
        while True:
            self._wake.clear()
            if self._closing:  # asked after that: what `close` sets before it must not be lost
                return
            try:
                worker = self._call()
            except RefusedError as error:
                self._note(error.message, refusal=error.message)
                self._wake.wait(self._pauses.refused_s)
            except Exception as error:  # noqa: BLE001  nobody would start this thread again
                self._note(error.message if isinstance(error, TransportError) else in_one_line(error))
                self._wake.wait(pause_s)
                pause_s = min(2.0 * pause_s, self._pauses.longest_s)
            else:
                self._serve(worker)
                pause_s = self._pauses.first_s

    def _call(self) -> Worker:
        line = tcp.connect(self._host, self._port, self._secret, timeout_s=_CONNECT_S, send_timeout_s=_SEND_S)
        try:
            hello = introduce(line, self._hello, timeout_s=_HELLO_S)
        except BaseException:
            line.close()
            raise
        self._generation += 1
        return Worker(line, hello, self._generation)

    def _serve(self, worker: Worker) -> None:
        """Keep the worker in service until it is reported, or we close."""
        log.info("speculator %s in service", self.address)
        with self._changed:
            self._current, self.refusal = worker, None
            self._changed.notify_all()
        self._wake.wait()
        with self._changed:
            self._current = None
        worker.transport.close()
        if not self._closing:
            log.warning("speculator %s lost, serving without it: %s", self.address, self._reason)

    def _note(self, reason: str, *, refusal: str | None = None) -> None:
        with self._changed:
            if reason != self._reason:
                log.warning("speculator %s: %s", self.address, reason)
            self._reason, self.refusal = reason, refusal
            self._changed.notify_all()


def introduce(line: Transport, hello: Hello, *, timeout_s: float) -> Hello:
    """Say who we are and hear who is there. RefusedError when it will not serve us, TransportError for anything else
    but a hello."""
    line.send(hello)
    answer = line.recv(timeout_s)
    if isinstance(answer, Refusal):
        raise RefusedError(f"refused: {answer.reason}", remedy="start both for the same models, with the same flags")
    if not isinstance(answer, Hello):
        what = f"nothing within {timeout_s:g} s" if answer is None else f"a {type(answer).__name__}"
        raise TransportError(f"said {what} where a hello was due")
    reason = mismatch(hello, answer)
    if reason is not None:
        raise RefusedError(reason)
    return answer


def mismatch(target: Hello, speculator: Hello) -> str | None:
    """Why the two cannot work together, naming both values; None when they can. Either side asks."""
    for name in ("version", "target", "target_vocab", "drafter", "lookahead", "feature_width"):
        wanted, offered = getattr(target, name), getattr(speculator, name)
        if wanted != offered:
            return f"the target has {name} {wanted!r}, the speculator {offered!r}"
    if target.max_model_len > speculator.max_model_len:
        return (
            f"the target's sequences have up to {target.max_model_len} tokens, "
            f"the speculator follows {speculator.max_model_len}"
        )
    return None


def target_hello(setup: DraftSetup) -> Hello:
    """What a target says of itself to a remote speculator."""
    facts = setup.target
    return Hello(
        version=PROTOCOL_VERSION,
        target_vocab=facts.vocab_size,
        draft_vocab=facts.vocab_size,
        feature_width=facts.feature_width,
        lookahead=setup.lookahead,
        drafter=setup.config.drafter,
        target=identity_of(read_config(facts.path)),
        max_model_len=facts.max_model_len,
    )


def connect_all(addresses: Iterable[str], setup: DraftSetup) -> list[RemoteLink]:
    """Links to all of them. Waits a little; ConfigError when one refuses us, for that will not pass by itself."""
    hello, secret = target_hello(setup), required_secret()
    links = [RemoteLink(address, secret, hello) for address in addresses]
    deadline = time.monotonic() + _FIRST_S
    for link in links:
        if not link.wait_ready(max(0.0, deadline - time.monotonic())) and link.refusal is not None:
            refusal = f"speculator {link.address} {link.refusal}"
            for each in links:
                each.close()
            raise ConfigError(refusal, remedy="start both for the same models, with the same flags")
    return links


def required_secret() -> str:
    """What both sides must know. ConfigError when it is not set or too short."""
    secret = env.speculator_secret()
    if secret is None or len(secret) < tcp.LEAST_SECRET:
        raise ConfigError(
            "remote speculators and their targets share a secret, and SSD_SPECULATOR_SECRET is "
            + ("not set" if secret is None else f"{len(secret)} characters long"),
            remedy=f"set it to the same {tcp.LEAST_SECRET} characters or more on both sides: openssl rand -hex 32",
        )
    return secret
