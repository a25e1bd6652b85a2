"""The sampling law written down a second time, plainly, in float64 and row by row: what the sampler must equal."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch

from ssd_ascend.core.sampling import SamplingParams
from ssd_ascend.core.sequence import Sequence


def make_sequence(
    seq_id: int,
    params: SamplingParams,
    tokens: tuple[int, ...] = (0, 1),
    *,
    prompt: int = 1,
    stops: tuple[int, ...] = (),
    seed: int | None = None,
) -> Sequence:
    """A decoding sequence with its own seed."""
    return Sequence(
        id=seq_id,
        token_ids=list(tokens),
        num_prompt_tokens=prompt,
        sampling=params,
        stop_ids=frozenset(stops),
        max_total_tokens=100,
        seed=seq_id * 7919 + 13 if seed is None else seed,
    )


def reference_law(
    logits: list[float],
    params: SamplingParams,
    tokens: tuple[int, ...] = (0, 1),
    *,
    prompt: int = 1,
    stops: tuple[int, ...] = (),
) -> npt.NDArray[np.float64]:
    """Probabilities of the next token after `tokens`."""
    z = [float(x) for x in logits]
    output = tokens[prompt:]
    for token in set(tokens):
        z[token] = z[token] / params.repetition_penalty if z[token] > 0 else z[token] * params.repetition_penalty
    for token in output:
        z[token] -= params.frequency_penalty
    for token in set(output):
        z[token] -= params.presence_penalty
    for token, bias in params.logit_bias.items():
        z[token] += bias
    if len(output) < params.min_tokens:
        for token in stops:
            z[token] = -math.inf
    best = max(z)
    if params.temperature == 0:
        return np.eye(len(z))[z.index(best)]
    p = np.array([math.exp((x - best) / params.temperature) for x in z])
    if 0 < params.top_k < len(z):
        p[p < np.sort(p)[::-1][params.top_k - 1]] = 0.0
    p /= p.sum()
    if params.top_p < 1:
        order = np.sort(p)[::-1]
        kept, mass = 0, 0.0
        while mass < params.top_p and kept < len(z):
            mass += order[kept]
            kept += 1
        p[p < order[kept - 1]] = 0.0
        p /= p.sum()
    p[p < params.min_p * p.max()] = 0.0
    return p / p.sum()


def bias_of(samples: torch.Tensor, law: npt.NDArray[np.float64]) -> tuple[float, float]:
    """Total variation of samples [N] from a law [V], and the chi-square statistic as a standard normal score."""
    counts = torch.bincount(samples, minlength=len(law)).double().numpy()
    assert len(counts) == len(law), "a sample lies outside the vocabulary"
    assert counts[law == 0].sum() == 0, "a sample lies outside the support"
    total = counts.sum()
    distance = 0.5 * float(np.abs(counts / total - law).sum())
    inside = law > 0
    freedom = int(inside.sum()) - 1
    if freedom == 0:
        return distance, 0.0
    chi = float((((counts - total * law)[inside]) ** 2 / (total * law[inside])).sum())
    # Wilson and Hilferty 1931: the cube root of chi-square over its freedom is nearly normal
    score = ((chi / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
    return distance, score


def assert_follows(samples: torch.Tensor, law: npt.NDArray[np.float64], *, distance: float = 0.005) -> None:
    """Fail when samples depart from a law by more than chance allows."""
    measured, score = bias_of(samples, law)
    assert measured < distance, f"total variation {measured:.4f}"
    assert score < 4.0, f"chi-square score {score:.1f} (total variation {measured:.4f})"
