"""What the backend calls passes torch_npu's own shape functions, and is all in the committed comparison of versions."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from ssd_ascend.backends.base import Backend
from ssd_ascend.parity.ops import Bench, cases

ROOT = Path(__file__).resolve().parents[2]
COMMITTED = json.loads((ROOT / "docs" / "npu-contracts.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def contracts() -> ModuleType:
    spec = importlib.util.spec_from_file_location("npu_contracts", ROOT / "scripts" / "npu_contracts.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["npu_contracts"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def calls(backend: Backend, contracts: ModuleType) -> dict[str, Any]:
    device, dtype = backend.device(0), torch.bfloat16
    with contracts.watching() as watch, torch.inference_mode():
        for _, run in cases():
            run(Bench(backend, device, dtype, dtype, 128))
    return dict(watch.calls)


def test_shape_functions_agree(contracts: ModuleType, calls: dict[str, Any]) -> None:
    assert len(calls) >= 6
    assert {name: contracts.meta_verdict(own) for name, own in calls.items()} == dict.fromkeys(calls, "ok")


def test_a_wrong_call_is_noticed(contracts: ModuleType, calls: dict[str, Any]) -> None:
    own = contracts.Calls(calls["npu.npu_rms_norm.default"].operator)
    (args, kwargs, result), *_ = calls["npu.npu_rms_norm.default"].distinct.values()
    own.distinct["x"] = (args, kwargs, (result[0][:1], result[1]))
    assert "foreseen" in contracts.meta_verdict(own)


def test_the_committed_comparison_covers_them(contracts: ModuleType, calls: dict[str, Any]) -> None:
    """A new operator, or a new argument, must be held to the other versions before it is used."""
    for name, own in calls.items():
        assert name in COMMITTED["operators"], f"run scripts/npu_contracts.py: {name} is new"
        assert contracts.arguments_of(own) <= set(COMMITTED["operators"][name]["arguments"])
    assert contracts.problems(COMMITTED) == []
    assert "2.10.0" in COMMITTED["names"]


CHANGES: dict[str, tuple[Callable[[str], str | None], str]] = {
    "the same": (lambda text: text, "same"),
    "gone": (lambda text: None, "missing"),
    "renamed": (lambda text: text.replace("gamma", "weight"), "incompatible: no gamma"),
    "retyped": (lambda text: text.replace("float epsilon", "int epsilon").replace("=1e-06", "=1"), "epsilon was int"),
    "more": (
        lambda text: text.replace(") ->", ", bool fast=False) ->"),
        "compatible: differs in what we leave out (fast)",
    ),
}


@pytest.mark.parametrize("change", list(CHANGES))
def test_other_versions(contracts: ModuleType, calls: dict[str, Any], change: str) -> None:
    own = calls["npu.npu_rms_norm.default"]
    text = "npu_rms_norm(Tensor input, Tensor gamma, float epsilon=1e-06) -> (Tensor, Tensor)"
    alter, verdict = CHANGES[change]
    assert verdict in contracts.schema_verdict(own, alter(text))
