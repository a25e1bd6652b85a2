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
_CROWD, _CROWD_PROMPT = 16, 128
_LATE, _LATE_TOKENS = 6, 5
"""Steps that a crowd goes on without an answer, and the tokens of each."""


def rehearse(
    make_worker: Callable[[Transport], DraftWorker],
    *,
    max_len: int,
    feature_width: int,
    feature_dtype: torch.dtype,
    shared: bool = False,
    crowd: int = 0,
) -> None:
    """Talk to a worker of `make_worker` as a target would; nothing of it is left but what is warm.

    max_len: tokens a sequence may have; feature_width: of the target's features, 0 when none are sent; shared:
    whether the worker is told where they are instead. crowd: sequences that may come at once, where that is worth
    knowing beforehand.
    """
    casts: list[tuple[tuple[float, ...], int]] = [(cast, _PROMPT) for cast in _CASTS]
    if crowd > 2:
        casts.append(((0.0,) * min(crowd, _CROWD), _CROWD_PROMPT))
    for temperatures, prompt in casts:
        ours, theirs = InProcessTransport.pair(through_wire=False)
        worker = make_worker(theirs)
        theirs.attach_pump(lambda worker=worker: worker.pump())  # type: ignore[misc]
        try:
            conversation = _Conversation(ours, max_len, feature_width, feature_dtype, shared=shared)
            conversation.hold(temperatures, min(prompt, max_len // 2))
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

    def hold(self, temperatures: tuple[float, ...], prompt: int) -> None:
        """Attach a sequence of `prompt` tokens for each temperature, then judge its drafts a few times: all good, none,
        and so on. With a crowd the last answer comes late."""
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
                for seq_id, drafts in zip(answer.seq_ids, answer.drafts, strict=True)
            ]
            lengths.update({u.outcome.seq_id: u.num_tokens_before + len(u.new_tokens) for u in updates})
            if max(lengths.values()) >= self._max_len:
                return
            answer = self._ask([], updates)
        if len(temperatures) > 2:
            self._go_on_without(lengths)

    def _go_on_without(self, lengths: dict[int, int]) -> None:
        """Steps that the worker hears of together."""
        updates: list[Update] = []
        for _ in range(_LATE):
            if max(lengths.values()) + 2 * _LATE_TOKENS >= self._max_len:
                break
            if updates:
                self._say([], updates)
            updates = [self._judge(seq_id, length, [1] * (_LATE_TOKENS - 1)) for seq_id, length in lengths.items()]
            lengths.update({seq_id: length + _LATE_TOKENS for seq_id, length in lengths.items()})
        if updates:
            self._ask([], updates)

    def _judge(self, seq_id: int, length: int, accepted: list[int]) -> Update:
        new_tokens = [*accepted, 1]
        return Update(
            outcome=VerificationOutcome(seq_id, len(accepted), 1),
            num_tokens_before=length,
            new_tokens=new_tokens,
            **self._of(len(new_tokens)),
        )

    def _say(self, attaches: list[Attach], updates: list[Update]) -> None:
        self._number += 1
        self._line.send(Request(number=self._number, released=[], attaches=attaches, updates=updates))

    def _ask(self, attaches: list[Attach], updates: list[Update]) -> Answer:
        self._say(attaches, updates)
        while True:
            message = self._line.recv(None)
            if isinstance(message, Answer) and message.number == self._number:
                return message
            assert isinstance(message, Answer | Foreseen)  # of steps that are over, or what it has foreseen

    def _of(self, count: int) -> dict[str, torch.Tensor]:
        """Features of so many tokens, or where they are."""
        if not self._feature_width:
            return {}
        if self._shared:
            return {"slots": torch.zeros((count, 1), dtype=torch.int64)}
        return {"features": torch.zeros((count, self._feature_width), dtype=self._dtype)}
