"""The kernel for few rows gives `linear`'s bits, whatever the shape, or is not used. Skipped off Hopper."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch

HOPPER = (9, 0)
if not torch.cuda.is_available() or torch.cuda.get_device_capability() != HOPPER:
    pytest.skip("its instructions are Hopper's", allow_module_level=True)

from ssd_ascend.backends.cuda.kernels import few_rows as kernel  # noqa: E402
from ssd_ascend.backends.cuda.kernels.linear import MOST_FEW, FewRows, linear  # noqa: E402  Triton may be missing
from ssd_ascend.backends.cuda.ops import few_rows_on  # noqa: E402

Draw = Callable[..., torch.Tensor]


@pytest.fixture(scope="module")
def few_rows() -> FewRows:
    run = few_rows_on(torch.device("cuda", 0), overlap=True)
    assert run is not None, "it is tried out, and was found wanting"
    return run


@pytest.fixture
def draw() -> Draw:
    generator = torch.Generator("cuda").manual_seed(5)
    return lambda *shape, dtype=torch.bfloat16: torch.randn(shape, generator=generator, device="cuda", dtype=dtype)


@pytest.mark.parametrize("rows", [1, 2, 7, 8, 9, 16, 17, 32])
@pytest.mark.parametrize(
    ("columns", "depth"),
    [(64, 256), (200, 96), (8, 8), (576, 1536), (4096, 1024), (4500, 520), (28672, 512), (50, 14336)],
)
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
def test_bits_are_those_of_the_common_kernel(
    few_rows: FewRows, draw: Draw, rows: int, columns: int, depth: int, gated: bool
) -> None:
    """Matrices narrower and shorter than a tile, odd edges, more tiles than the device has processors."""
    x, weight, bias = draw(rows, depth), draw(columns, depth), draw(columns)
    for one in (bias, None):
        got = linear(x, weight, one, overlap=True, bulk=True, gated=gated, few_rows=few_rows)
        assert torch.equal(got, linear(x, weight, one, overlap=True, bulk=True, gated=gated))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_other_numbers_and_rows_of_a_wider_matrix(few_rows: FewRows, draw: Draw, dtype: torch.dtype) -> None:
    x, weight = draw(11, 600, dtype=dtype)[:, 64:320], draw(300, 256, dtype=dtype)
    for kept in (None, torch.float32):
        got = linear(x, weight, None, overlap=True, bulk=True, dtype=kept, few_rows=few_rows)
        assert torch.equal(got, linear(x, weight, None, overlap=True, bulk=True, dtype=kept))


def test_a_chain_of_products_sees_what_the_one_before_wrote(few_rows: FewRows, draw: Draw) -> None:
    """Each starts long before the one it depends on has ended; captured, as they are served."""
    weights = [draw(1024, 1024) / 32 for _ in range(24)]
    start = draw(5, 1024)

    def chain(run: FewRows | None) -> torch.Tensor:
        x = start
        for weight in weights:
            x = linear(x, weight, None, overlap=True, bulk=True, few_rows=run)
        return x

    expected = chain(None)
    graph, _ = torch.cuda.CUDAGraph(), chain(few_rows)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        got = chain(few_rows)
    for turn in range(200):
        got.fill_(turn)
        graph.replay()
        assert torch.equal(got, expected)


def test_more_rows_go_the_common_way(draw: Draw) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("for few rows only")

    x, weight = draw(MOST_FEW + 1, 64), draw(32, 64)
    assert torch.equal(
        linear(x, weight, None, overlap=True, bulk=True, few_rows=never), linear(x, weight, None, overlap=True)
    )


def test_where_it_does_not_run_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AttributeError("no such call in this version")

    monkeypatch.setattr(kernel, "few_rows", refuse)
    with caplog.at_level(logging.INFO):
        assert few_rows_on(torch.device("cuda", 0), overlap=True) is None
    assert [record.message for record in caplog.records] == [
        f"{what} not used: no such call in this version"
        for what in ("narrow tiles for few rows are", "the kernel for few rows is")
    ]


def test_without_narrow_tiles_it_goes_on_with_wide_ones(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, draw: Draw
) -> None:
    own = kernel.few_rows

    def refuse(*given: Any, narrow: bool, **options: Any) -> None:
        if narrow:
            raise TypeError("no such view in this version")
        own(*given, narrow=narrow, **options)

    monkeypatch.setattr(kernel, "few_rows", refuse)
    with caplog.at_level(logging.INFO):
        run = few_rows_on(torch.device("cuda", 0), overlap=True)
    assert [record.message for record in caplog.records] == [
        "narrow tiles for few rows are not used: no such view in this version"
    ]
    assert run is not None
    x, weight = draw(5, 256), draw(96, 256)
    got = linear(x, weight, None, overlap=True, bulk=True, few_rows=run)
    assert torch.equal(got, linear(x, weight, None, overlap=True, bulk=True))
