"""Laws of drafts: what a drafter remembers of a sequence is that sequence's alone."""

from __future__ import annotations

import torch

from ssd_ascend.core.sampling import SamplingParams
from ssd_ascend.speculation.base import DraftSequence
from ssd_ascend.speculation.draft_sampler import DraftSampler


def test_penalties_of_two_sequences_with_one_id_stay_apart() -> None:
    """The targets of a speculator each number their sequences from 0, and share its sampler."""
    sampling = SamplingParams(temperature=1.0, frequency_penalty=1.5)
    one, other = (DraftSequence(0, [3, 4] + [token] * 10, 2, sampling, 1, frozenset()) for token in (40, 41))
    laws = []
    for before in ([], [one]):
        sampler = DraftSampler(num_target_tokens=64, law_dtype=torch.float32)
        for seq in [*before, other]:
            law = sampler.draw(torch.zeros(1, 64), [sampler.context(seq, 0, None)]).law
        assert law is not None
        laws.append(law)
    assert laws[0][0, 41] < laws[0][0, 40]
    torch.testing.assert_close(laws[1], laws[0], rtol=0, atol=0)
