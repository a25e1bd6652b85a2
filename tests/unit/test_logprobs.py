"""Log-probabilities say the same of a token whoever else is in the batch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from ssd_ascend.runtime.logprobs import gather_logprobs


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Where one sum over a large vocabulary is shared out, if it is the only one."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_bits_do_not_depend_on_the_number_of_rows(two_threads: None) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(40):
        logits = 6.0 * torch.randn(6, 49152, generator=generator)
        tokens = logits.argmax(-1)
        together = gather_logprobs(logits, tokens, 3)
        for row in range(6):
            alone = gather_logprobs(logits[row : row + 1], tokens[row : row + 1], 3)
            for ours, theirs in zip(alone, together, strict=True):
                assert torch.equal(ours[0], theirs[row])


def test_values_are_those_of_the_law() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, -1.0]])
    columns = gather_logprobs(logits, torch.tensor([2]), 2)
    law = torch.log(torch.softmax(logits.double(), -1))[0]
    assert columns.rank.tolist() == [2]
    assert columns.top_token.tolist() == [[1, 2]]
    torch.testing.assert_close(columns.logprob.double(), law[2:3], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(columns.top_logprob[0].double(), law[[1, 2]], rtol=1e-5, atol=1e-6)
