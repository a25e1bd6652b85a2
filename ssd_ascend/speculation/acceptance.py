"""The rules of exact verification as pure functions of tensors: how a row of target logits judges a draft.

Greedy rows, declined rows and point masses need one rule: the target's own token at each position (arg-max, or drawn
from its law) decides, and a draft is kept while it equals that token. So the answer of a seeded request is the very one
plain decoding gives, and a point mass is accepted with probability p(token), as it must be. Drafts drawn from a law q
take the ratio test of speculative sampling (Leviathan et al. 2023, Chen et al. 2023), which accepts more.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ssd_ascend.runtime.sampler import draw_weights


class LawVerdict(NamedTuple):
    """Per row: how many drafts were kept, and the token the target put after them. int64 [L] each."""

    accepted: torch.Tensor
    token: torch.Tensor


def judge_drawn(
    weights: torch.Tensor,
    totals: torch.Tensor,
    rows: torch.Tensor,
    draft_law: torch.Tensor,
    drafts: torch.Tensor,
    num_drafts: torch.Tensor,
    accept: torch.Tensor,
    recover: torch.Tensor,
) -> LawVerdict:
    """The ratio test for L sequences whose drafts were drawn from softmax(draft_law).

    weights: [R, V] the target's law, unnormalised, with row sums `totals` [R]. rows: int64 [L, K+1], which of the R
    rows judges draft j, then the one after the last draft. draft_law: [L, K, V]. drafts: int64 [L, K], of which
    num_drafts [L] count. accept: numbers in [0, 1) [L, K]; recover: [L, K+1].

    Draft s is kept iff accept * q(s) < p(s), strictly: a token outside the target's support is refused even by a zero.
    After a refusal the token comes from (p - q)+, after none from p. Where the draft law is no law (NaN, inf, no mass)
    or could not have given its token, the row counts as declined from there on. Drawing from p at that position is
    exact, as whether a law is broken depends on earlier tokens only; dropping the drafts before it would not be.
    """
    num_rows, lookahead = drafts.shape
    vocab = weights.shape[-1]
    each = torch.arange(num_rows, device=drafts.device)
    in_vocab = (drafts >= 0) & (drafts < vocab)
    token = drafts.clamp(0, vocab - 1)
    q_log = draft_law.to(torch.float32)  # a law sent in half precision is the law of its exact values
    q = torch.sub(q_log, q_log.amax(-1, keepdim=True)).exp_()
    q_totals = q.sum(-1)
    q_token = q.gather(-1, token.unsqueeze(-1)).squeeze(-1)
    offered = torch.arange(lookahead, device=drafts.device) < num_drafts.unsqueeze(1)
    sound = offered & in_vocab & torch.isfinite(q_totals) & (q_token > 0)
    p_token = weights[rows[:, :-1], token] / totals[rows[:, :-1]]
    keep = sound & (accept * (q_token / q_totals) < p_token)
    accepted = keep.to(torch.int64).cumprod(-1).sum(-1)

    last = accepted.clamp(max=lookahead - 1)
    refused = (accepted < num_drafts) & sound[each, last]
    row = rows[each, accepted]
    p = weights[row] / totals[row].unsqueeze(1)
    rest = (p - q[each, last] / q_totals[each, last].unsqueeze(1)).clamp_(min=0.0)
    # p = q up to rounding is refused with probability ~1e-7 and leaves nothing: p itself is then right to that order
    use_rest = refused & (rest.sum(-1) > 0)
    left = torch.where(use_rest.unsqueeze(1), rest, p)
    return LawVerdict(accepted, draw_weights(left, recover[each, accepted]))


def count_equal(drafts: list[int], targets: list[int]) -> int:
    """How many leading drafts equal the target's own tokens."""
    for count, (draft, target) in enumerate(zip(drafts, targets, strict=True)):
        if draft != target:
            return count
    return len(drafts)
