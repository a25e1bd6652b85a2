"""`ssd`: speculative speculative decoding. A worker drafts for every likely outcome while the target verifies.

`observe` looks the outcomes up among what the worker has told ahead, and posts them before the scheduler commits;
`propose` takes the drafts, waiting for the worker's answer only where they were not there. Where all were, and the
worker has time, the post itself waits until the device is at work (`meanwhile`), when there also is time to hear what
is told ahead. Whatever happens to the worker costs speed only: rows without an offer decode plainly.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Rows
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from ssd_ascend import trace
from ssd_ascend.core.batch import Awaited
from ssd_ascend.core.plan import DecodeRow
from ssd_ascend.core.sequence import Sequence
from ssd_ascend.core.speculation import Source, Speculation, Verification, VerificationOutcome
from ssd_ascend.core.stats import SpeculationStats
from ssd_ascend.runtime.pack import to_device
from ssd_ascend.speculation.base import FeatureReader, NextRow, Speculator
from ssd_ascend.speculation.draft_sampler import widen
from ssd_ascend.speculation.news import Going, attach_of, that_fit, who_go_on
from ssd_ascend.speculation.offers import Asked, LookedUp, Offer
from ssd_ascend.speculation.recent import Recent
from ssd_ascend.speculation.remote_link import connect_all
from ssd_ascend.speculation.setup import TargetSide
from ssd_ascend.speculation.worker_link import is_beside_the_target, make_link
from ssd_ascend.speculation.worker_pool import make_worker_client
from ssd_ascend.speculation.workers import WorkerLink
from ssd_ascend.transport.messages import Attach, Update

ToHost = Callable[[Rows[torch.Tensor]], list[torch.Tensor]]
"""`Backend.to_host`: copies all tensors to the host together."""
_GRAIN_S = 0.001
"""By so much may a wait for a message be longer than was asked for."""
_LISTENING = 0.75
"""Of the time that a step usually takes the device. Then the verdict is looked for as well."""


def build(side: TargetSide) -> Speculator:
    """Starts the worker (a process of its own, or in this one), or connects to those that others started."""
    setup = side.setup
    remote = setup.config.speculators
    return SsdSpeculator(
        connect_all(remote, setup) if remote else [make_link(side)],
        lookahead=setup.lookahead,
        features=side.features,
        target_vocab=setup.target.vocab_size,
        device=setup.device,
        to_host=setup.backend.to_host,
        beside=None if setup.backend.capabilities.host_memory else setup.backend.stream,
        silence_s=setup.config.worker_timeout_s,
        is_apart=bool(remote) or not is_beside_the_target(setup),
    )


class _QueuedRow(NamedTuple):
    """A row of the step that was queued: tokens of its sequence by then, and how many drafts it has there."""

    number: int
    num_tokens: int
    num_drafts: int

    def holds(self, seq: Sequence, num_drafts: int) -> bool:
        """Whether that is what is wanted."""
        return (self.num_tokens, self.num_drafts) == (seq.num_tokens, num_drafts)


class _Following(NamedTuple):
    """Who goes on after a step; what is known of them; and the next step's rows, None where some are not known."""

    going: list[Going]
    looked: LookedUp
    rows: list[NextRow] | None


class _Place(NamedTuple):
    """Positions [start, end) of the sequence with this block table."""

    block_table: list[int]
    start: int
    end: int


class SsdSpeculator:
    """The target's side of `ssd`."""

    def __init__(
        self,
        links: Rows[WorkerLink],
        *,
        lookahead: int,
        features: FeatureReader | None,
        target_vocab: int,
        device: torch.device,
        to_host: ToHost,
        beside: Callable[[], AbstractContextManager[Any]] | None,
        silence_s: float,
        is_apart: bool,
    ) -> None:
        """beside: a context whose work runs beside the device's next step; None where the host is the device.
        is_apart: whether who drafts shares no device with the target, and can read a prompt at the same time."""
        self.stats = SpeculationStats()
        self.lookahead = self._most = lookahead
        self.wants_features = features is not None
        self._features = features
        self._target_vocab = target_vocab
        self._device = device
        self._to_host = to_host
        self._beside = beside
        self.is_apart = is_apart
        self._later: Callable[[], None] | None = None
        """The post that waits until the device is at work."""
        self._began_s: float | None = None
        """When the device was last left alone with a step."""
        self._busy_s = Recent()
        self._queued_s: float | None = None
        """When the step under way was queued, where that was before it was asked for."""
        self._queue: Callable[[Rows[NextRow]], bool] | None = None
        self._borrowed: list[torch.Tensor] = []
        """Laws that the step under way reads. A worker's thread has another stream: its memory must not be given back
        to that before this one is done."""
        self._under_way: dict[int, _QueuedRow] = {}
        """Rows of the step that was queued already, by sequence."""
        self._worker = make_worker_client(
            links, self.stats, target_vocab=target_vocab, lookahead=lookahead, silence_s=silence_s
        )

    # -- what the target is offered ----------------------------------------------------------------------------------

    def propose(self, rows: Rows[DecodeRow]) -> Speculation:
        """The worker's offers for these rows; a row without one declines."""
        with trace.span("wait"):
            if self._later is None:
                self._worker.collect()
        offers = [self._worker.take(row.seq) for row in rows]
        num_tokens = [
            0 if offer is None else min(len(offer.tokens), row.max_drafts)
            for offer, row in zip(offers, rows, strict=True)
        ]
        looked_up = [offer is not None and offer.looked_up for offer in offers]
        under_way, self._under_way = self._rows_under_way(rows, num_tokens), {}
        if not any(num_tokens):
            nothing = Speculation.declined(len(rows))
            return Speculation(
                None, nothing.num_tokens, nothing.source, None, nothing.has_law, looked_up, under_way=under_way
            )
        sources = [
            offer.source if offer is not None and n else Source.DECLINED
            for offer, n in zip(offers, num_tokens, strict=True)
        ]
        has_law = [offer is not None and offer.law is not None for offer in offers]
        draft_logits = self._laws(offers, max(num_tokens)) if any(has_law) else None
        width = max(num_tokens)
        drafts = [[] if offer is None else offer.tokens[:width] for offer in offers]
        padded = [own + [0] * (width - len(own)) for own in drafts]
        return Speculation(
            tokens=torch.tensor(padded, dtype=torch.int64),
            num_tokens=num_tokens,
            source=sources,
            draft_logits=draft_logits,
            has_law=has_law,
            looked_up=looked_up,
            host_tokens=padded,
            under_way=under_way,
        )

    def _rows_under_way(self, rows: Rows[DecodeRow], num_tokens: Rows[int]) -> list[int]:
        """The rows of the queued step that these are; [] when some are not in it, or with other drafts."""
        found = [self._under_way.get(row.seq.id) for row in rows]
        known = [
            queued.number
            for queued, row, count in zip(found, rows, num_tokens, strict=True)
            if queued is not None and queued.holds(row.seq, count)
        ]
        if len(known) == len(rows):
            return known
        self._queued_s = None
        return []

    def _laws(self, offers: Rows[Offer | None], width: int) -> torch.Tensor:
        """float32 [B, width, V]; rows without a law are never read."""
        laws = torch.zeros((len(offers), width, self._target_vocab), device=self._device)
        to_target = self._worker.to_target
        for i, offer in enumerate(offers):
            if offer is not None and offer.law is not None:
                law = to_device(offer.law[:width], self._device)
                laws[i, : law.shape[0]] = widen(law, to_target, self._target_vocab)
                self._borrowed.append(offer.law)
        return laws

    # -- what the worker is told ---------------------------------------------------------------------------------------

    def prepare(self, sequences: Rows[Sequence]) -> None:
        """Have the worker read the prompts too, and foresee the first token; drafts follow that at once then.

        Only where it needs no features, and of greedy sequences: what is drawn is not told ahead."""
        if not self.is_apart or self.wants_features or not self._worker.is_ready():
            return
        news = [
            seq
            for seq in sequences
            if seq.sampling.greedy
            and seq.sampling.speculation
            and seq.num_remaining > 1
            and seq.id not in self._worker.attached
        ]
        if news:
            self._post_what_waits()
            self._worker.expect([attach_of(seq, []) for seq in news])

    def observe(self, sequences: Rows[Sequence], verification: Verification, *, read_prompts: bool) -> None:
        """Look up and post the outcomes of every sequence that goes on.

        The device may wait for what comes before `_queue_next`, and does not for what comes after it.
        """
        self._borrowed.clear()
        if self._began_s is not None:
            self._busy_s.add(time.monotonic() - self._began_s)
            self._began_s = None
        self._post_what_waits()  # a step that came without a forward
        if not self._worker.is_ready():
            return
        going, looked, rows = self._follow(sequences, verification)
        queued = rows is not None and self._queue_next(rows)
        self._worker.note(looked)
        attaches = [one.attach() for one in going if not one.known]
        updates = [one.update() for one in going if one.known]
        asked = {one.seq.id: one.asked for one in going}
        post = partial(self._post, attaches, updates, asked, self._places(going))
        if queued:
            post(self._beside or nullcontext)  # the device is at work: nothing waits for this
        elif looked.is_settled and self._beside is not None and (attaches or self._worker.has_slack):
            self._later = partial(post, self._beside)
        else:
            post(nullcontext)

    def _follow(self, sequences: Rows[Sequence], verification: Verification) -> _Following:
        """What follows from a verdict. Nothing comes of it yet."""
        everybody = who_go_on(sequences, verification, self._worker.attached)
        going = that_fit([one for one in everybody if one.seq.sampling.speculation], self._token_bytes)
        looked = self._worker.look_up([one for one in going if one.known])
        if not looked.is_settled or len(going) < len(everybody):
            return _Following(going, looked, None)
        rows = []
        for seq, _, _, new_tokens, num_tokens, _ in going:
            most = min(self._most, seq.max_total_tokens - num_tokens - 1)
            drafts = looked.drafts.get(seq.id, [])[:most]
            rows.append(NextRow(seq, new_tokens[-1], drafts, num_tokens + len(drafts)))
        return _Following(going, looked, rows)

    def foretold(self, sequences: Rows[Sequence]) -> list[VerificationOutcome]:
        """See `ForetellingSpeculator`."""
        outcomes = [self._worker.foretold(seq.id) for seq in sequences]
        return [outcome for outcome in outcomes if outcome is not None]

    def next_rows(self, sequences: Rows[Sequence], verification: Verification) -> list[NextRow]:
        """See `ForetellingSpeculator`."""
        return self._follow(sequences, verification).rows or []

    @property
    def _token_bytes(self) -> int:
        """What a new sequence adds to a message for each of its tokens: features, unless the worker reads them."""
        store = None if self._features is None else self._features.features
        return 0 if store is None or self._worker.reads_features else store.shape[1] * store.element_size()

    def queue_with(self, queue: Callable[[Rows[NextRow]], bool]) -> None:
        """See `LookingUpSpeculator`."""
        self._queue = queue

    def _queue_next(self, rows: Rows[NextRow]) -> bool:
        """Have the next step run, whose rows these are."""
        if self._queue is None:
            return False
        with trace.span("ahead"):
            if not self._queue(rows):
                return False
        self._queued_s = time.monotonic()
        self._under_way = {
            row.seq.id: _QueuedRow(i, row.end - len(row.drafts), len(row.drafts)) for i, row in enumerate(rows)
        }
        return True

    def meanwhile(self, verdict: Awaited | None) -> None:
        """Post what could wait; hear what is told ahead, so that it need not be read when the verdict is there."""
        began_s, self._queued_s = self._queued_s or time.monotonic(), None
        self._post_what_waits()
        if self._beside is None:
            return
        self._began_s = began_s
        if (busy_s := self._busy_s.typical) is not None:
            self._worker.listen(began_s + _LISTENING * busy_s - _GRAIN_S, verdict)

    def _post_what_waits(self) -> None:
        later, self._later = self._later, None
        if later is not None:
            later()

    def _post(
        self,
        attaches: list[Attach],
        updates: list[Update],
        asked: dict[int, Asked],
        places: dict[int, _Place],
        where: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        slots = self._slots(places)
        features: dict[int, torch.Tensor] = {}
        if self._worker.reads_features:
            rows = {seq_id: torch.from_numpy(own).unsqueeze(1) for seq_id, own in slots.items()}
            attaches = [replace(attach, slots=rows[attach.seq_id]) for attach in attaches]
            updates = [replace(update, slots=rows[update.outcome.seq_id]) for update in updates]
        else:
            with where():
                features = self._read_features(slots)
        if features:
            attaches = [replace(attach, features=features[attach.seq_id]) for attach in attaches]
            updates = [replace(update, features=features[update.outcome.seq_id]) for update in updates]
        self._worker.post(attaches, updates, asked)

    def _places(self, going: Rows[Going]) -> dict[int, _Place]:
        """Where the features lie that each message carries, by sequence; {} where none are wanted. They stay there
        while the next step runs, which writes behind them."""
        if self._features is None or self._features.features is None:
            return {}
        return {one.seq.id: _Place(list(one.seq.block_table), one.start, one.end) for one in going}

    def _slots(self, places: dict[int, _Place]) -> dict[int, np.ndarray]:
        """Rows of the store, by sequence."""
        if not places:
            return {}
        assert self._features is not None
        return {seq_id: self._features.slots(*place) for seq_id, place in places.items()}

    def _read_features(self, slots: dict[int, np.ndarray]) -> dict[int, torch.Tensor]:
        """By sequence, read together: one look-up, and one copy to where messages are packed."""
        if not slots:
            return {}
        assert self._features is not None
        store = self._features.features
        assert store is not None
        index = to_device(torch.from_numpy(np.concatenate(list(slots.values()))), store.device)
        read = self._to_host([store.index_select(0, index)])[0].split([len(part) for part in slots.values()])
        return dict(zip(slots, read, strict=True))

    def release(self, seq_ids: Rows[int]) -> None:
        """The worker hears of it with the next request."""
        if seq_ids:
            self._post_what_waits()  # what is to be forgotten must be known first
        self._worker.release(seq_ids)

    def tune(self, lookahead: int, fan_out: Rows[int]) -> None:
        """Of guesses the worker hears with the next request, and so does every one after it; drafts are cut here."""
        self._most = lookahead
        if fan_out:
            self._worker.tune(fan_out)

    def health(self) -> str | None:
        """One sentence while there is no worker."""
        return self._worker.health()

    def close(self) -> None:
        """End the worker."""
        self._worker.close()
