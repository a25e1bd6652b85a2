"""From conversations to packed batches, in an order that depends on nothing but the seed: what makes runs resumable."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from ssd_ascend.runtime.pack import to_device
from ssd_ascend.training.attention import Segments
from ssd_ascend.training.conversations import Conversations


@dataclass(frozen=True, slots=True)
class Batch:
    """N packed tokens of whole conversations, and padding at the end that counts for nothing.

    rows: which conversations, and how many tokens of each. index int64 [N]: where a token lies in `Conversations`
    (0 for padding). tokens, place int64 [N]: id and position. left int64 [N]: tokens that follow in its conversation.
    answer, forked bool [N].
    """

    rows: list[tuple[int, int]]
    index: torch.Tensor
    tokens: torch.Tensor
    place: torch.Tensor
    left: torch.Tensor
    answer: torch.Tensor
    forked: torch.Tensor
    segments: Segments

    @property
    def size(self) -> int:
        """N."""
        return len(self.tokens)


def epoch(lengths: np.ndarray, batch_tokens: int, *seed: int) -> list[list[int]]:
    """Every conversation once, shuffled: the indices of each batch, filled in order as far as they fit."""
    order = np.random.default_rng(seed).permutation(len(lengths))
    batches: list[list[int]] = [[]]
    room = batch_tokens
    for index in order.tolist():
        length = min(int(lengths[index]), batch_tokens)
        if length > room:
            batches.append([])
            room = batch_tokens
        batches[-1].append(index)
        room -= length
    return batches


def endless(lengths: np.ndarray, batch_tokens: int, seed: int, *, skip: int = 0) -> Iterator[list[int]]:
    """Batches of one epoch after another, without the first `skip`."""
    number = 0
    while True:
        for batch in epoch(lengths, batch_tokens, seed, number):
            if skip:
                skip -= 1
                continue
            yield batch
        number += 1


def make_batch(data: Conversations, chosen: list[int], batch_tokens: int, device: torch.device) -> Batch:
    """Pack the chosen conversations, cut to `batch_tokens`, and send them to the device."""
    starts = data.starts.numpy()
    firsts = starts[chosen]
    lengths = np.minimum(starts[np.array(chosen) + 1] - firsts, batch_tokens)
    ends = np.cumsum(lengths)
    total, pad = int(ends[-1]), batch_tokens - int(ends[-1])
    place = np.arange(total) - np.repeat(ends - lengths, lengths)
    index = place + np.repeat(firsts, lengths)
    left = np.repeat(lengths, lengths) - 1 - place
    owner = np.repeat(np.arange(len(chosen)), lengths)
    nobody = np.full(pad, -1)
    packed = np.stack([*(np.pad(part, (0, pad)) for part in (index, place, left)), np.concatenate((owner, nobody))])
    sent = to_device(torch.from_numpy(packed), device)
    borders = np.concatenate(([0], ends, [batch_tokens] if pad else [])).astype(np.int32)
    own = torch.from_numpy(index)

    def take(flat: torch.Tensor) -> torch.Tensor:
        return to_device(torch.nn.functional.pad(flat[own], (0, pad)), device)

    return Batch(
        rows=list(zip(chosen, lengths.tolist(), strict=True)),
        index=sent[0],
        tokens=take(data.tokens).long(),
        place=sent[1],
        left=sent[2],
        answer=take(data.answer),
        forked=take(data.forked),
        segments=Segments(to_device(torch.from_numpy(borders), device), int(np.diff(borders).max()), sent[3]),
    )
