"""A worker that reads its target's features in the target's own memory: told where they are, it is never sent any."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ssd_ascend.errors import TransportError
from ssd_ascend.speculation.setup import TargetSide
from ssd_ascend.speculation.worker_link import InProcessLink, _open_store
from ssd_ascend.speculation.workers import Worker
from ssd_ascend.transport.base import Transport
from ssd_ascend.transport.messages import Message, Request
from tests.engine.harness import Run, greedy, prompts_of, run, speculation

PROMPTS = prompts_of([8, 1, 17, 33, 5])


class Watched:
    """A line that looks at the requests on their way."""

    def __init__(self, line: Transport) -> None:
        self._line = line
        self.with_features = self.with_slots = 0

    def send(self, message: Message) -> None:
        if isinstance(message, Request):
            for part in (*message.attaches, *message.updates):
                self.with_features += part.features is not None
                self.with_slots += part.slots is not None
        self._line.send(message)

    def recv(self, timeout_s: float | None) -> Message | None:
        return self._line.recv(timeout_s)

    def close(self) -> None:
        self._line.close()


def served(monkeypatch: pytest.MonkeyPatch, pair: Path, *, shared: bool, graphs: bool) -> tuple[Run, Watched]:
    """A run with a worker in process, which sees the target's memory in any case: here it is told to use it."""
    lines: list[Watched] = []

    def make_link(side: TargetSide) -> InProcessLink:
        assert side.features is not None
        store = side.features.features if shared else None
        link = InProcessLink(replace(side, setup=replace(side.setup, feature_store=store)))
        lines.append(Watched(link._worker.transport))
        link._worker = Worker(lines[-1], link._worker.hello, 0)
        return link

    with monkeypatch.context() as patch:
        patch.setattr("ssd_ascend.speculation.speculators.ssd.make_link", make_link)
        return run(
            pair, PROMPTS, greedy(30), speculation(pair, "ssd", "eagle3", on_miss="draft"), graphs=graphs
        ), lines[0]


@pytest.mark.parametrize("graphs", [False, True])
def test_features_where_they_are_draft_what_features_that_were_sent_draft(
    pair: Path, monkeypatch: pytest.MonkeyPatch, graphs: bool
) -> None:
    sent, sending = served(monkeypatch, pair, shared=False, graphs=graphs)
    read, reading = served(monkeypatch, pair, shared=True, graphs=graphs)
    assert sending.with_features > 0
    assert sending.with_slots == 0
    assert reading.with_slots > 0
    assert reading.with_features == 0
    assert read.tokens == sent.tokens == run(pair, PROMPTS, greedy(30)).tokens
    assert read.stats.speculation.accepted == sent.stats.speculation.accepted > 0


def test_preempted_sequences_are_told_anew_where_their_features_are(
    pair: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks move to others meanwhile; whatever the worker read in them, answers do not change."""

    def make_link(side: TargetSide) -> InProcessLink:
        assert side.features is not None
        return InProcessLink(replace(side, setup=replace(side.setup, feature_store=side.features.features)))

    monkeypatch.setattr("ssd_ascend.speculation.speculators.ssd.make_link", make_link)
    prompts = prompts_of([40, 30, 20, 45, 16, 33])
    result = run(pair, prompts, greedy(60), speculation(pair, "ssd", "eagle3"), num_kv_blocks=11)
    assert result.stats.preemptions > 0
    assert result.tokens == run(pair, prompts, greedy(60)).tokens
    assert result.stats.speculation.worker_alive


class Neighbours:
    """A backend whose devices read one another's memory, or cannot after all."""

    def __init__(self, *, reachable: bool) -> None:
        self._reachable = reachable
        self.opened = torch.zeros(3, 4)

    def share(self, tensor: torch.Tensor) -> str:
        return "there"

    def open_shared(self, text: str, device: torch.device) -> torch.Tensor:
        if not self._reachable:
            raise TransportError("no way there")
        return self.opened


def test_a_worker_that_cannot_reach_its_targets_memory_is_sent_the_features(caplog: pytest.LogCaptureFixture) -> None:
    device = torch.device("cpu")
    near: Any = Neighbours(reachable=True)
    assert _open_store(near, device, "there") is near.opened
    assert _open_store(near, device, None) is None
    far: Any = Neighbours(reachable=False)
    assert _open_store(far, device, "there") is None
    assert "features travel with the messages: no way there" in caplog.text
