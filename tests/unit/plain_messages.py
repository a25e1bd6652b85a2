"""Plain messages for tests on both ends of a line, and equality that looks into tensors. No hypothesis in here."""

from __future__ import annotations

import dataclasses

import torch

from ssd_ascend.core.speculation import VerificationOutcome
from ssd_ascend.transport.messages import Answer, Request, Update


def same(a: object, b: object) -> bool:
    """Equality of messages: tensors by dtype, shape and bits."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and bits(a) == bits(b)
    if type(a) is not type(b):
        return False
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    if dataclasses.is_dataclass(a):
        return all(same(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a))
    return a == b


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def answer(number: int = 1, *, rows: int = 1, payload_bytes: int = 0) -> Answer:
    """A greedy answer, or one whose law weighs about `payload_bytes`."""
    law = torch.arange(2 * max(1, payload_bytes // 8)).view(1, 2, -1).float() if payload_bytes else None
    has_law = [law is not None] + [False] * (rows - 1)
    return Answer(
        number=number,
        seq_ids=list(range(rows)),
        sources=[2] * rows,
        drafts=[[2 * row, 2 * row + 1] for row in range(rows)],
        has_law=has_law,
        law=law,
    )


def request(number: int = 1) -> Request:
    """A step of one sequence."""
    outcome = VerificationOutcome(7, 1, 30)
    return Request(number=number, updates=[Update(outcome=outcome, num_tokens_before=9, new_tokens=[20, 30])])
