"""How a target gets its draft worker: built in this process, or supervised in a process of its own."""

from __future__ import annotations

from dataclasses import replace

from ssd_ascend.speculation.draft_worker import DraftWorker
from ssd_ascend.speculation.fallback import FallbackPolicy
from ssd_ascend.speculation.fan_out import FanOut, make_fan_out
from ssd_ascend.speculation.setup import DrafterKind, DraftSetup, TargetSide
from ssd_ascend.speculation.worker_client import Worker, WorkerLink
from ssd_ascend.transport.base import Transport
from ssd_ascend.transport.inprocess import InProcessTransport
from ssd_ascend.transport.messages import PROTOCOL_VERSION, Hello


def make_link(side: TargetSide) -> WorkerLink:
    """The link that the configuration asks for."""
    return InProcessLink(side)


def build_worker(kind: DrafterKind, setup: DraftSetup, transport: Transport) -> tuple[DraftWorker, Hello]:
    """A worker on this side of `transport`, and what it says of itself first."""
    config = setup.config
    fan_out: FanOut = make_fan_out(config.fan_out, setup.lookahead)
    drafter = kind.build(replace(setup, width=fan_out.width))
    worker = DraftWorker(
        drafter,
        transport,
        lookahead=setup.lookahead,
        fan_out=fan_out,
        fallback=FallbackPolicy(config.on_miss),
    )
    hello = Hello(
        version=PROTOCOL_VERSION,
        target_vocab=setup.target.vocab_size,
        draft_vocab=setup.target.vocab_size if drafter.to_target is None else int(drafter.to_target.shape[0]),
        feature_width=setup.target.feature_width if drafter.wants_features else 0,
        lookahead=setup.lookahead,
        drafter=config.drafter,
        to_target=drafter.to_target,
    )
    return worker, hello


class InProcessLink:
    """A worker in this very thread: it drafts while the target waits for the answer. For tests, and to measure against."""

    def __init__(self, side: TargetSide) -> None:
        target_end, worker_end = InProcessTransport.pair()
        worker, hello = build_worker(side.kind, side.setup, worker_end)
        worker_end.attach_pump(worker.pump)
        self._worker = Worker(target_end, hello, generation=0)
        self._reason: str | None = None

    @property
    def restarts(self) -> int:
        """Nothing restarts here."""
        return 0

    def current(self) -> Worker | None:
        """The worker, until it was reported."""
        return self._worker if self._reason is None else None

    def report(self, generation: int, reason: str) -> None:
        """Gone for good: what fails in process would fail again."""
        self._reason = reason
        self._worker.transport.close()

    def health(self) -> str | None:
        """Why there is no worker."""
        return None if self._reason is None else f"no speculation: {self._reason}"

    def close(self) -> None:
        """Close both ends."""
        self._worker.transport.close()
