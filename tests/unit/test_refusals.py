"""Captures that a device refuses: a line for each reason, once."""

from __future__ import annotations

from typing import NoReturn

import pytest

from ssd_ascend.runtime.refusals import Refusals, rehearsing


def refuse() -> NoReturn:
    raise RuntimeError("no more memory\nand advice")


def test_a_rehearsal_leaves_the_telling_to_what_is_rehearsed(caplog: pytest.LogCaptureFixture) -> None:
    """A device whose kernels compile ahead goes through everything twice."""
    for turn in range(2):
        refusals = Refusals()
        assert refusals.attempt("8", refuse) is None
        assert refusals.attempt("4", lambda: "captured") == "captured"
        if turn:
            refusals.tell("chains of rows", "go step by step")
            continue
        with rehearsing():
            refusals.tell("chains of rows", "go step by step")
    assert caplog.messages == ["no graph for chains of rows 8 (no more memory): they go step by step, which is slower"]
