"""The live sequences in order of arrival: those that run, then those that wait. Used by `Scheduler` only. Torch-free.

The order is kept by construction: only the head of the queue is let in, only the latest of the running is put back.
"""

from __future__ import annotations

from collections import deque

from ssd_ascend.core.sequence import Sequence, Status


class Queues:
    """Every running sequence arrived before every waiting one. Blocks are not this class's business."""

    def __init__(self) -> None:
        self.by_id: dict[int, Sequence] = {}
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._prefilling: set[int] = set()
        """Running sequences that have not drawn a token since they were let in."""

    def add(self, seq: Sequence) -> None:
        """Queue a new sequence."""
        self.by_id[seq.id] = seq
        self.waiting.append(seq)

    def start_next(self) -> Sequence:
        """Let the head of the queue in."""
        seq = self.waiting.popleft()
        seq.status = Status.RUNNING
        self.running.append(seq)
        self._prefilling.add(seq.id)
        return seq

    def put_back_latest(self) -> Sequence:
        """Make the latest of the running sequences the head of the queue."""
        seq = self.running.pop()
        seq.status = Status.WAITING
        self.waiting.appendleft(seq)
        self._prefilling.discard(seq.id)
        return seq

    def mark_decoding(self, seq: Sequence) -> None:
        """All tokens of `seq` are computed: from the next step on it decodes."""
        self._prefilling.discard(seq.id)

    @property
    def decoding(self) -> list[Sequence]:
        """Running sequences that decode."""
        if not self._prefilling:
            return list(self.running)
        return [seq for seq in self.running if seq.id not in self._prefilling]

    @property
    def prefilling(self) -> list[Sequence]:
        """Running sequences with tokens to compute before they draw the next."""
        return [seq for seq in self.running if seq.id in self._prefilling] if self._prefilling else []

    def finish(self, seq: Sequence) -> None:
        """Forget `seq`, but for its place in line, which `sweep` clears once for all that finish together."""
        seq.status = Status.FINISHED
        self._prefilling.discard(seq.id)
        del self.by_id[seq.id]

    def sweep(self) -> None:
        """Close the gaps that finished sequences left."""
        if any(seq.status is Status.FINISHED for seq in self.running):
            self.running = [seq for seq in self.running if seq.status is Status.RUNNING]
        if len(self.running) + len(self.waiting) > len(self.by_id):
            self.waiting = deque(seq for seq in self.waiting if seq.status is Status.WAITING)
