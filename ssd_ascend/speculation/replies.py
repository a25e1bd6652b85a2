"""What a draft worker answers each sequence with, and how answers are packed. Used by `draft_worker.py`."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass
from typing import Final

import torch

from ssd_ascend.core.speculation import Source
from ssd_ascend.speculation.base import Chain, DraftSequence
from ssd_ascend.speculation.cache import CachedSpeculation, Carried, drafts_of
from ssd_ascend.transport.messages import Answer, WorkerStats


@dataclass(frozen=True, slots=True)
class Reply:
    """What one sequence is answered with."""

    source: Source
    tokens: list[int]
    law: torch.Tensor | None = None
    hidden: torch.Tensor | None = None

    @staticmethod
    def of(drafted: CachedSpeculation, source: Source) -> Reply:
        """What was drafted, now or earlier."""
        return Reply(source, drafted.tokens, drafted.law, drafted.hidden)


DECLINED: Final = Reply(Source.DECLINED, [])


def replies_of(chain: Chain) -> list[Reply]:
    """The rows of an on-demand chain."""
    carried = Carried.by(chain)
    return [
        Reply.of(CachedSpeculation(tokens, carried, row), Source.MISS) if tokens else DECLINED
        for row, tokens in enumerate(drafts_of(chain))
    ]


def pack(number: int, seqs: Rows[DraftSequence], replies: Rows[Reply], *, width: int, stats: WorkerStats) -> Answer:
    """The answer to request `number`; laws are padded to `width`, and the device is done with them."""
    laws = [_padded(reply.law, width) for reply in replies if reply.law is not None]
    return Answer(
        number=number,
        seq_ids=[seq.id for seq in seqs],
        sources=[int(reply.source) for reply in replies],
        drafts=[list(reply.tokens) for reply in replies],
        has_law=[reply.law is not None for reply in replies],
        law=_whole(torch.stack(laws)) if laws else None,
        stats=stats,
    )


def _whole(law: torch.Tensor) -> torch.Tensor:
    """A worker's thread has a stream of its own, and the target reads the law on another."""
    if law.device.type != "cpu":
        over = torch.Event(device=law.device)
        over.record()
        over.synchronize()
    return law


def _padded(law: torch.Tensor, width: int) -> torch.Tensor:
    """[k, Vd] -> [width, Vd]; the padding is never read."""
    return law if law.shape[0] == width else torch.nn.functional.pad(law, (0, 0, 0, width - law.shape[0]))
