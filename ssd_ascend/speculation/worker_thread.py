"""A draft worker in a thread of the target's process, with a stream of its own: for a target and a draft on one device.

A device gives the kernels of two processes turns; those of two streams run side by side. The price: an error is caught
here like one of a process, but whatever ends the process ends the target with it, nobody starts the worker again, and
both share one interpreter. A round of greedy rows leaves it early: two launches, one wait. Made by `worker_link.py`.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Final, NoReturn

from ssd_ascend.errors import ConfigError, TransportError
from ssd_ascend.log import get_logger
from ssd_ascend.speculation.draft_worker import DraftWorker
from ssd_ascend.speculation.setup import DraftSetup
from ssd_ascend.speculation.unsupervised import UnsupervisedLink
from ssd_ascend.speculation.workers import Worker
from ssd_ascend.transport.base import Transport
from ssd_ascend.transport.messages import Hello
from ssd_ascend.transport.queues import QueueTransport

_LEAVE_S: Final = 10.0
_SWITCH_S: Final = 0.0005
"""How long a thread may keep the interpreter while the other waits for it; Python's own 5 ms are a whole round."""

Build = Callable[[DraftSetup, Transport], tuple[DraftWorker, Hello]]
"""Loads the drafter and warms it up."""

log = get_logger(__name__)


class ThreadLink(UnsupervisedLink):
    """See `WorkerLink`. The constructor waits until the worker has said hello."""

    def __init__(self, build: Build, setup: DraftSetup, *, start_timeout_s: float) -> None:
        """Raises `ConfigError` when the drafter cannot be built, or is not within `start_timeout_s`."""
        self._setup = replace(setup, grammars=None)  # a compiler of grammars is not for two threads
        self._build = build
        ours, self._theirs = QueueTransport.pair()
        super().__init__(ours)
        self._ready = threading.Event()
        self._is_given_up = False
        self._thread = threading.Thread(target=self._run, name="ssd-draft-worker", daemon=True)
        self._switch_s = sys.getswitchinterval()
        sys.setswitchinterval(_SWITCH_S)
        self._thread.start()
        if not self._ready.wait(start_timeout_s):
            self._is_given_up = True
            self._refuse(
                f"its thread was not ready within {start_timeout_s:g} s",
                remedy="see whether the device hangs; --worker process gives it a process, which can be ended",
            )
        if self._worker is None:
            self._refuse(self._failure, remedy="its own message is above")

    def _refuse(self, reason: str | None, *, remedy: str) -> NoReturn:
        self.close()
        raise ConfigError(f"the draft worker did not start: {reason}", remedy=remedy)

    def _run(self) -> None:
        """Build and serve. However it fails, the target goes on alone."""
        backend, device = self._setup.backend, self._setup.device
        try:
            with ExitStack() as stack:
                if not backend.capabilities.host_memory:
                    backend.device(device.index or 0)  # current for this thread, too
                    stack.enter_context(backend.stream())
                began = time.monotonic()
                worker, hello = self._build(self._setup, self._theirs)
                if self._is_given_up:
                    raise TransportError("ready too late, nobody waits for it any more")
                log.info("draft worker ready in a thread after %.1f s", time.monotonic() - began)
                self._worker = Worker(self._line, hello, generation=0)
                self._ready.set()
                worker.serve()
        except TransportError as error:
            log.info("draft worker leaves: %s", error)
            self._failure = str(error)
        except Exception as error:
            log.exception("draft worker lost, serving without speculation")
            self._failure = f"{type(error).__name__}: {error}"
        finally:
            self._theirs.close()
            self._ready.set()

    def close(self) -> None:
        """Close the line, and wait for the thread to notice. One that a device holds is left behind."""
        super().close()
        self._thread.join(0.0 if self._is_given_up else _LEAVE_S)
        if self._thread.is_alive():
            log.warning("the draft worker's thread is held by its device, and ends with this process")
        sys.setswitchinterval(self._switch_s)
