"""Where a run of new tokens ends. One pure function, used by `Scheduler.commit` only. Torch-free.

Stop *strings* are text and are found by whoever detokenizes; here are only token ids and lengths.
"""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from typing import NamedTuple

from ssd_ascend.core.sequence import FinishReason, Sequence


class Ending(NamedTuple):
    """The first `num_kept` tokens of the run are emitted; `reason` is None when the sequence goes on."""

    num_kept: int
    reason: FinishReason | None = None
    stop_token: int | None = None


def find_ending(seq: Sequence, new_tokens: Tokens[int]) -> Ending:
    """Cut `new_tokens` at the first stop token or at the length cap, whichever comes first.

    At each position the stop test comes first: a stop token that fills the last place ends with "stop". A stop token
    counts once `min_tokens` tokens came before it; until then the sampler gives it no probability.
    """
    num_before = seq.num_output_tokens
    for index, token in enumerate(new_tokens):
        if token in seq.stop_ids and num_before + index >= seq.sampling.min_tokens:
            return Ending(index + 1, FinishReason.STOP, token)
        if index + 1 == seq.num_remaining:
            return Ending(index + 1, FinishReason.LENGTH)
    return Ending(len(new_tokens))
