"""Rotary embedding as a table of cosines and sines, one table per model: target and draft may differ in every setting.

Scalings: linear (https://arxiv.org/abs/2306.15595), yarn (https://arxiv.org/abs/2309.00071), and the one of Llama 3.1
(https://huggingface.co/meta-llama/Llama-3.1-8B, `rope_scaling` of its config).
"""

from __future__ import annotations

import math

import torch

from ssd_ascend.config.model import RopeConfig
from ssd_ascend.errors import ConfigError


def rotary_table(rope: RopeConfig, head_dim: int, max_positions: int, device: torch.device) -> torch.Tensor:
    """float32 [max_positions, rotary_dim]: the cosines of each position, then its sines, yarn's factor included."""
    frequencies = inverse_frequencies(rope, head_dim)
    positions = torch.arange(max_positions, dtype=torch.float32)
    angles = torch.outer(positions, frequencies)
    return (torch.cat((angles.cos(), angles.sin()), dim=-1) * attention_factor(rope)).to(device)


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """float32 [rotary_dim / 2]: radians a position turns each pair by."""
    rotary_dim = int(head_dim * rope.partial_factor)
    plain = 1.0 / rope.theta ** (torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim)
    if rope.type == "linear":
        plain = plain / rope.factor
    elif rope.type == "llama3":
        plain = _llama3(plain, rope)
    elif rope.type == "yarn":
        plain = _yarn(plain, rope, rotary_dim)
    if rope.frequency_factors is None:
        return plain
    if len(rope.frequency_factors) != len(plain):
        raise ConfigError(f"{len(rope.frequency_factors)} rope frequency factors for {len(plain)} frequencies")
    return plain / torch.tensor(rope.frequency_factors)


def attention_factor(rope: RopeConfig) -> float:
    """What yarn multiplies cosines and sines by (section 3.4 of the paper); 1 for the others."""
    if rope.type != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return _magnitude(rope.factor, rope.mscale) / _magnitude(rope.factor, rope.mscale_all_dim)
    return _magnitude(rope.factor, 1.0)


def _magnitude(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _llama3(plain: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    """Long waves are stretched by `factor`, short ones kept, and those between mixed by where they lie."""
    turns = rope.original_max_positions * plain / (2 * math.pi)  # full turns within the original context
    kept = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)
    return kept * plain + (1 - kept) * plain / rope.factor


def _yarn(plain: torch.Tensor, rope: RopeConfig, rotary_dim: int) -> torch.Tensor:
    """As llama3, but mixed by a ramp over the index of the pair, between beta_fast and beta_slow full turns."""

    def index_at(turns: float) -> float:
        wavelength = rope.original_max_positions / turns
        return rotary_dim * math.log(wavelength / (2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = index_at(rope.beta_fast), index_at(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    width = max(high - low, 0.001)
    stretched = ((torch.arange(rotary_dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    return stretched * plain / rope.factor + (1 - stretched) * plain
