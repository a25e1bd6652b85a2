"""Whether a worker's answer fits what it was asked: a broken worker must not reach the verifier.

What `transport/wire.py` cannot know is checked here; called by `worker_client.py`.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Final

from ssd_ascend.core.speculation import Source
from ssd_ascend.errors import TransportError
from ssd_ascend.transport.messages import Answer

_SOURCES: Final = frozenset(int(source) for source in Source)


def check_answer(
    answer: Answer, *, after: int, last: int, asked: Container[int], lookahead: int, target_vocab: int, draft_vocab: int
) -> None:
    """`TransportError` when it does not fit. after: the last request that was answered; last: the last of all, with the
    sequences it `asked` for."""
    rows = len(answer.seq_ids)
    fits = (
        after < answer.number <= last
        and len(answer.sources) == len(answer.drafts) == len(answer.has_law) == rows
        and all(len(drafts) <= lookahead for drafts in answer.drafts)
        and all(source in _SOURCES for source in answer.sources)
        and all(0 <= token < target_vocab for drafts in answer.drafts for token in drafts)
        and len(set(answer.seq_ids)) == rows
    )
    if fits and answer.number == last:
        fits = all(seq_id in asked for seq_id in answer.seq_ids)
    if fits and any(answer.has_law):
        expected = (sum(answer.has_law), lookahead, draft_vocab)
        fits = answer.law is not None and tuple(answer.law.shape) == expected
    if not fits:
        raise TransportError(f"the worker's answer {answer.number} does not fit request {last}")
