"""Counter-based numbers: uniform, independent along every axis, and a pure function of their key."""

from __future__ import annotations

import numpy as np
import pytest

from ssd_ascend.core.random import Stream, derive_seed, uniforms

N = 200_000


def test_a_number_depends_on_its_key_only() -> None:
    crowd = uniforms(np.arange(100), np.arange(100) + 5, Stream.RECOVER)
    alone = [float(uniforms([seed], [seed + 5], Stream.RECOVER)[0]) for seed in range(100)]
    assert crowd.tolist() == alone


def test_the_numbers_are_the_same_on_every_machine_and_release() -> None:
    """A seeded answer must not change with an upgrade: these are frozen."""
    bits = [int(x * 2**24) for x in uniforms([0, 1, 7, (1 << 64) - 1], [0, 1, 1000, 5], Stream.DRAFT)]
    assert bits == [15024748, 3452666, 15652758, 7147396]


@pytest.mark.parametrize("stream", list(Stream))
@pytest.mark.parametrize("axis", ["seed", "position"])
def test_numbers_are_uniform_along_seeds_and_along_positions(stream: Stream, axis: str) -> None:
    key = (np.arange(N), 17) if axis == "seed" else (17, np.arange(N))
    numbers = uniforms(*key, stream)
    assert numbers.dtype == np.float32
    assert numbers.min() >= 0.0
    assert numbers.max() < 1.0
    counts = np.histogram(numbers, bins=100, range=(0, 1))[0]
    chi = ((counts - N / 100) ** 2 / (N / 100)).sum()
    assert 99 - 5 * np.sqrt(198) < chi < 99 + 5 * np.sqrt(198)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((np.arange(N), 3, Stream.ACCEPT), (np.arange(N), 3, Stream.RECOVER)),
        ((np.arange(N), 3, Stream.DRAFT), (np.arange(N), 3, Stream.ACCEPT)),
        ((np.arange(N), 3, Stream.DRAFT), (np.arange(N), 4, Stream.DRAFT)),
        ((5, np.arange(N), Stream.DRAFT), (6, np.arange(N), Stream.DRAFT)),
    ],
    ids=["accept-recover", "draft-accept", "next-position", "next-seed"],
)
def test_neighbouring_numbers_are_independent(first: tuple, second: tuple) -> None:
    a, b = uniforms(*first), uniforms(*second)
    assert abs(np.corrcoef(a, b)[0, 1]) < 5 / np.sqrt(N)
    cells = np.histogram2d(a, b, bins=10, range=((0, 1), (0, 1)))[0]
    chi = ((cells - N / 100) ** 2 / (N / 100)).sum()
    assert chi < 99 + 5 * np.sqrt(198)


def test_answers_to_one_request_get_seeds_of_their_own() -> None:
    seeds = [derive_seed(123, i) for i in range(128)]
    assert seeds[0] == 123
    assert len(set(seeds)) == 128
    assert all(0 <= seed < 1 << 64 for seed in seeds)
    assert derive_seed(-1, 0) == (1 << 64) - 1
