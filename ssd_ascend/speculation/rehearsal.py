"""A made-up conversation with a drafter, before its worker says hello.

Kernels compile and memory is touched while nobody waits; otherwise the first requests would be served without
speculation for as long as that takes, which is seconds on a GPU. Called by `worker_link.warm_up`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ssd_ascend.core.sampling import SamplingParams
from ssd_ascend.core.speculation import VerificationOutcome
from ssd_ascend.speculation.draft_worker import DraftWorker
from ssd_ascend.transport.base import Transport
from ssd_ascend.transport.inprocess import InProcessTransport
from ssd_ascend.transport.messages import Answer, Attach, Foreseen, Request, Update

_PROMPT = 24
_ROUNDS = 4
_CASTS = ((0.0,), (0.0, 0.0), (1.0,))
"""Temperatures of the sequences of each conversation."""


def rehearse(
    make_worker: Callable[[Transport], DraftWorker],
    *,
    max_len: int,
    feature_width: int,
    feature_dtype: torch.dtype,
    shared: bool = False,
) -> None:
    """Talk to a worker of `make_worker` as a target would; nothing of it is left but what is warm.

    max_len: tokens a sequence may have; feature_width: of the target's features, 0 when none are sent; shared:
    whether the worker is told where they are instead.
    """
    for temperatures in _CASTS:
        ours, theirs = InProcessTransport.pair(through_wire=False)
        worker = make_worker(theirs)
        theirs.attach_pump(lambda worker=worker: worker.pump())  # type: ignore[misc]
        try:
            _Conversation(ours, max_len, feature_width, feature_dtype, shared=shared).hold(temperatures)
        finally:
            worker.close()


class _Conversation:
    """The target's part. It knows how many tokens each sequence has, and makes the rest up."""

    def __init__(self, line: Transport, max_len: int, feature_width: int, dtype: torch.dtype, *, shared: bool) -> None:
        self._line = line
        self._max_len = max_len
        self._feature_width = feature_width
        self._dtype = dtype
        self._shared = shared
        self._number = 0

    def hold(self, temperatures: tuple[float, ...]) -> None:
        """Attach a sequence for each temperature, then judge its drafts a few times: all good, none, and so on."""
        prompt = min(_PROMPT, self._max_len // 2)
        if prompt < 2:
            return
        lengths = dict.fromkeys(range(len(temperatures)), prompt)
        attaches = [
            Attach(
                seq_id=i, token_ids=[1] * prompt, num_prompt_tokens=prompt, seed=0, stop_ids=frozenset(),
                sampling=SamplingParams(temperature=temperature), **self._of(prompt - 1),
            )
            for i, temperature in enumerate(temperatures)
        ]  # fmt: skip
        answer = self._ask(attaches, [])
        for number in range(_ROUNDS):
            updates = [
                self._judge(seq_id, lengths[seq_id], drafts if number % 2 == 0 else [])
                for seq_id, drafts in zip(answer.seq_ids, _drafts(answer), strict=True)
            ]
            lengths.update({u.outcome.seq_id: u.num_tokens_before + len(u.new_tokens) for u in updates})
            if max(lengths.values()) >= self._max_len:
                return
            answer = self._ask([], updates)

    def _judge(self, seq_id: int, length: int, accepted: list[int]) -> Update:
        new_tokens = [*accepted, 1]
        return Update(
            outcome=VerificationOutcome(seq_id, len(accepted), 1),
            num_tokens_before=length,
            new_tokens=new_tokens,
            **self._of(len(new_tokens)),
        )

    def _ask(self, attaches: list[Attach], updates: list[Update]) -> Answer:
        self._number += 1
        self._line.send(Request(number=self._number, released=[], attaches=attaches, updates=updates))
        while not isinstance(answer := self._line.recv(None), Answer):  # what it has foreseen lies before it
            assert isinstance(answer, Foreseen)
        return answer

    def _of(self, count: int) -> dict[str, torch.Tensor]:
        """Features of so many tokens, or where they are."""
        if not self._feature_width:
            return {}
        if self._shared:
            return {"slots": torch.zeros((count, 1), dtype=torch.int64)}
        return {"features": torch.zeros((count, self._feature_width), dtype=self._dtype)}


def _drafts(answer: Answer) -> list[list[int]]:
    return [row[:count] for row, count in zip(answer.tokens.tolist(), answer.num_tokens, strict=True)]
