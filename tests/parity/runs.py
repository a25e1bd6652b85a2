"""A golden run made by hand, and changed copies of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ssd_ascend.parity.engines import Trace
from ssd_ascend.parity.golden import Golden, Model

ABOUT = {"device": "a card", "dtype": "bfloat16", "activations": "bfloat16", "date": "2026-01-01"}


def golden(**changes: Any) -> Golden:
    """Two operators, logits, one kind of verdict, plain decoding and one way of speculating."""
    g = torch.Generator().manual_seed(0)
    tensors = {
        "op linear": {"y": torch.randn(50, generator=g).bfloat16()},
        "op attention": {"out": torch.randn(50, generator=g).bfloat16(), "stored": torch.arange(6).bfloat16()},
        "logits": {"decode": torch.randn(2, 8, generator=g)},
    }
    trace = Trace([5, 6, 7, 8], [(1, 2.0), (2, 0.01), (3, 1.5), (4, 3.0)], [(4, 2, 0)])
    made = Golden(
        about=dict(ABOUT),
        model=Model("abc"),
        tensors=tensors,
        verdicts={"greedy": [[1, 2], [3]]},
        traces={"plain": [trace], "ssd model": [trace]},
    )
    return replace(made, **changes)


def nudged(run: Golden, section: str, name: str, by: float) -> Golden:
    """One output, moved in one place."""
    moved = run.tensors[section][name].clone().float()
    moved.view(-1)[0] += by
    tensors = {key: dict(own) for key, own in run.tensors.items()}
    tensors[section][name] = moved.to(run.tensors[section][name].dtype)
    return replace(run, tensors=tensors)


def retold(run: Golden, way: str, **changes: Any) -> Golden:
    """One answer, changed."""
    return replace(run, traces={**run.traces, way: [replace(run.traces[way][0], **changes)]})
