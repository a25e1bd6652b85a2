"""Log-probabilities of emitted tokens under the model's own law: raw logits, before temperature and processors.

Computed on the device for the rows that want them, read on the host after the step's one copy. Called by the verifier.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ssd_ascend.core.speculation import TokenLogprobs


class LogprobColumns(NamedTuple):
    """One entry per row: the token, its log-probability and rank, and the n likeliest tokens with theirs."""

    token: torch.Tensor
    logprob: torch.Tensor
    rank: torch.Tensor
    top_token: torch.Tensor
    top_logprob: torch.Tensor


def gather_logprobs(logits: torch.Tensor, tokens: torch.Tensor, num_top: int) -> LogprobColumns:
    """Columns for tokens int64 [R] under logits [R, V], with `num_top` alternatives.

    By `log_softmax`, which goes row by row: how `logsumexp` adds up depends on how many rows there are.
    """
    values = logits.to(torch.float32)
    laws = values.log_softmax(-1)
    index = tokens.unsqueeze(1)
    rank = (values > values.gather(1, index)).sum(-1) + 1
    top = values.topk(min(num_top, values.shape[1])).indices
    return LogprobColumns(tokens, laws.gather(1, index).squeeze(1), rank, top, laws.gather(1, top))


def read_logprobs(columns: Sequence[torch.Tensor], wanted: Sequence[int]) -> list[TokenLogprobs]:
    """The rows of host-side columns as values; row i shows its best wanted[i] alternatives."""
    tokens, logprobs, ranks, top_tokens, top_logprobs = (column.tolist() for column in columns)
    return [
        TokenLogprobs(token, logprob, rank, tuple(zip(ids[:n], values[:n], strict=True)))
        for token, logprob, rank, ids, values, n in zip(
            tokens, logprobs, ranks, top_tokens, top_logprobs, wanted, strict=True
        )
    ]
