"""Several workers as one: each sequence is drafted for by one of them. What `WorkerClient` is for one, this is for all.

A sequence stays where it is as long as its worker lives; a new one goes to whoever has the fewest. Workers may come and
go at any step; when one has come, the most crowded hands it a sequence a step until they are even.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from collections.abc import Sequence as Rows

import torch

from ssd_ascend.core.batch import Awaited
from ssd_ascend.core.sequence import Sequence
from ssd_ascend.core.speculation import VerificationOutcome
from ssd_ascend.core.stats import SpeculationStats
from ssd_ascend.speculation.offers import Asked, LookedUp, Offer, Step
from ssd_ascend.speculation.worker_client import WorkerClient
from ssd_ascend.speculation.workers import WorkerLink
from ssd_ascend.transport.messages import Attach, Update

_SUMMED = ("lookups", "hits", "target_wait_s", "draft_idle_s", "wasted", "cache_bytes")
"""What a client writes into its own counters; the pool's are the sums."""


class _AnyOf:
    """Sets as one, without copying them."""

    def __init__(self, sets: Rows[set[int]]) -> None:
        self._sets = sets

    def __contains__(self, item: object) -> bool:
        return any(item in each for each in self._sets)


class WorkerPool:
    """Routes by sequence; see the module."""

    def __init__(
        self, links: Rows[WorkerLink], stats: SpeculationStats, *, target_vocab: int, lookahead: int, silence_s: float
    ) -> None:
        self.stats = stats
        self._links = tuple(links)
        self._clients = [
            WorkerClient(link, SpeculationStats(), target_vocab=target_vocab, lookahead=lookahead, silence_s=silence_s)
            for link in links
        ]
        self._ready: list[WorkerClient] = []

    # -- what the speculator does --------------------------------------------------------------------------------

    def is_ready(self) -> bool:
        """True when any worker is in service."""
        self._ready = [client for client in self._clients if client.is_ready()]
        self._even_out()
        self.stats.worker_alive = bool(self._ready)
        self._add_up()
        return bool(self._ready)

    def _even_out(self) -> None:
        """Move one sequence from the most crowded worker to the emptiest, where that brings them closer."""
        if len(self._ready) < 2:
            return
        crowded = max(self._ready, key=lambda client: len(client.attached))
        empty = min(self._ready, key=lambda client: len(client.attached))
        if len(crowded.attached) > len(empty.attached) + 1:
            crowded.release([max(crowded.attached)])  # the youngest, which has the least to read again

    def tune(self, fan_out: Rows[int]) -> None:
        """See `WorkerClient.tune`."""
        for client in self._clients:
            client.tune(fan_out)

    @property
    def attached(self) -> Container[int]:
        """Sequences that some worker knows."""
        return _AnyOf([client.attached for client in self._clients])

    @property
    def to_target(self) -> torch.Tensor | None:
        """The target id of every draft id; the same for all, which their hellos were checked for."""
        return self._ready[0].to_target if self._ready else None

    def post(self, attaches: list[Attach], updates: list[Update], asked: Mapping[int, Asked]) -> None:
        """Send each worker the outcomes of its sequences; new ones go to the emptiest."""
        for client, own in self._shared_out(attaches):
            known = [update for update in updates if update.outcome.seq_id in client.attached]
            ids = {attach.seq_id for attach in own} | {update.outcome.seq_id for update in known}
            client.post(own, known, {seq_id: asked[seq_id] for seq_id in ids})

    def _shared_out(self, attaches: list[Attach]) -> list[tuple[WorkerClient, list[Attach]]]:
        """Which worker gets which of the new ones: the emptiest the next one."""
        loads = [len(client.attached) for client in self._ready]
        news: list[list[Attach]] = [[] for _ in loads]
        for attach in attaches:
            least = loads.index(min(loads))
            loads[least] += 1
            news[least].append(attach)
        return list(zip(self._ready, news, strict=True))

    def expect(self, attaches: list[Attach]) -> None:
        """See `WorkerClient.expect`; the emptiest read them."""
        for client, own in self._shared_out(attaches):
            client.expect(own)

    def look_up(self, steps: Rows[Step]) -> LookedUp:
        """See `WorkerClient.look_up`; each worker is asked for its own sequences."""
        found = LookedUp(steps, {}, set())
        for client in self._ready:
            own = client.look_up([step for step in steps if step.outcome.seq_id in client.attached])
            found.drafts.update(own.drafts)
            found.declined.update(own.declined)
        return found

    def note(self, looked: LookedUp) -> None:
        """See `WorkerClient.note`."""
        for client in self._ready:
            client.note(looked.of(client.attached))

    def foretold(self, seq_id: int) -> VerificationOutcome | None:
        """See `WorkerClient.foretold`."""
        outcomes = (client.foretold(seq_id) for client in self._ready)
        return next((outcome for outcome in outcomes if outcome is not None), None)

    @property
    def has_slack(self) -> bool:
        """True when all have."""
        return all(client.has_slack for client in self._ready)

    @property
    def reads_features(self) -> bool:
        """Never: only a worker of the target's own can."""
        return False

    def listen(self, until_s: float, verdict: Awaited | None = None) -> None:
        """See `WorkerClient.listen`."""
        for client in self._ready:
            client.listen(until_s, verdict)

    def collect(self) -> None:
        """Take every worker's answer; all of them were asked before any is waited for."""
        for client in self._clients:
            client.collect()
        self._add_up()

    def _add_up(self) -> None:
        self.stats.worker_restarts = sum(link.restarts for link in self._links)
        for name in _SUMMED:
            setattr(self.stats, name, sum(getattr(client.stats, name) for client in self._clients))

    def take(self, seq: Sequence) -> Offer | None:
        """The offer for `seq` as it stands now, if any worker made one."""
        for client in self._clients:
            if (offer := client.take(seq)) is not None:
                return offer
        return None

    def release(self, seq_ids: Iterable[int]) -> None:
        """See `WorkerClient.release`."""
        seq_ids = list(seq_ids)
        for client in self._clients:
            client.release(seq_ids)

    def health(self) -> str | None:
        """None when all are in service, else how many are not, and why the first is not."""
        self.stats.worker_alive = any(link.current() is not None for link in self._links)
        self._add_up()
        missing = [reason for client in self._clients if (reason := client.health()) is not None]
        if not missing:
            return None
        return f"{len(missing)} of {len(self._clients)} speculators are not in service: {missing[0]}"

    def close(self) -> None:
        """Part from all of them."""
        for client in self._clients:
            client.close()


def make_worker_client(
    links: Rows[WorkerLink], stats: SpeculationStats, *, target_vocab: int, lookahead: int, silence_s: float
) -> WorkerClient | WorkerPool:
    """One client for one link, a pool for several."""
    if len(links) == 1:
        return WorkerClient(links[0], stats, target_vocab=target_vocab, lookahead=lookahead, silence_s=silence_s)
    return WorkerPool(links, stats, target_vocab=target_vocab, lookahead=lookahead, silence_s=silence_s)
