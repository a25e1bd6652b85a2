"""Sparse layers: who goes to which expert, and that nobody's answer depends on the company."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from ssd_ascend.backends.base import Experts
from ssd_ascend.backends.cuda.experts import grouped_experts, is_exact
from ssd_ascend.backends.registry import load_backend
from ssd_ascend.config.engine import EngineConfig
from ssd_ascend.config.model import ExpertsConfig, model_config_from_hf
from ssd_ascend.engine.gather import gather_ranks
from ssd_ascend.errors import ConfigError
from ssd_ascend.layers.moe import SparseMLP, choose, is_host_driven, sort_pairs
from ssd_ascend.layers.slots import collect_slots
from ssd_ascend.speculation.identity import identity_of
from tests.toys import build_context, causal_lm_tensors, llama_config, qwen3_moe_config

EXPERTS = ExpertsConfig(count=4, per_token=2, intermediate_size=8, normalised=True)
LOGITS = torch.tensor([[0.0, 3.0, 1.0, 2.0], [5.0, 0.0, 4.0, 0.0], [0.0, 3.0, 2.0, 1.0]])


def layer(dtype: torch.dtype, ops: Any = None) -> SparseMLP:
    """The first layer of the toy, loaded."""
    data = qwen3_moe_config(num_hidden_layers=1, mlp_only_layers=[], num_experts=12, num_experts_per_tok=3)
    config = model_config_from_hf(data, where="toy")
    ctx = build_context(config, dtype=dtype)
    sparse = SparseMLP(config, ctx if ops is None else replace(ctx, ops=ops))
    tensors = causal_lm_tensors(data)
    for slot in collect_slots(sparse).values():
        slot.load(tensors[f"model.layers.0.mlp.{slot.name}"])
    return sparse


def test_pairs_are_ordered_by_expert_and_found_again() -> None:
    chosen, _ = choose(LOGITS, EXPERTS)
    assert chosen.tolist() == [[1, 3], [0, 2], [1, 2]]
    pairs = sort_pairs(chosen, 4)
    assert pairs.counts == [1, 2, 2, 1]
    assert pairs.tokens.tolist() == [1, 0, 2, 1, 2, 0]
    assert pairs.places.tolist() == [[1, 5], [0, 3], [2, 4]]


def test_weights_of_the_chosen_add_up_to_one_only_where_the_model_says_so() -> None:
    _, normalised = choose(LOGITS, EXPERTS)
    _, raw = choose(LOGITS, ExpertsConfig(count=4, per_token=2, intermediate_size=8, normalised=False))
    torch.testing.assert_close(normalised.sum(-1), torch.ones(3))
    torch.testing.assert_close(raw[0], LOGITS[0].softmax(-1)[[1, 3]])
    torch.testing.assert_close(normalised, raw / raw.sum(-1, keepdim=True))


@pytest.mark.skipif(not load_backend("cpu").capabilities.row_invariant, reason="plain torch promises no such thing")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tokens_answer_does_not_depend_on_the_tokens_beside_it(dtype: torch.dtype) -> None:
    """Bit by bit, and whatever order they come in: exactness of speculation rests on it."""
    sparse = layer(dtype)
    x = torch.randn(37, 32, generator=torch.Generator().manual_seed(3))
    with torch.inference_mode():
        together = sparse(x)
        assert together.std() > 0.1
        for rows in ([0], [5, 4, 3], list(range(36, 20, -1))):
            assert torch.equal(sparse(x[rows]), together[rows])


class GroupedOps:
    """This machine's operators, with experts by torch's grouped product where `able`."""

    def __init__(self, *, able: bool) -> None:
        self._ops, self._able = load_backend("cpu").ops, able

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def experts(self, gate_up: torch.Tensor, down: torch.Tensor) -> Experts | None:
        return grouped_experts(gate_up, down, self._ops.silu_and_mul) if self._able else None


@pytest.mark.parametrize("able", [True, False])
def test_experts_together_say_what_they_say_one_by_one(*, able: bool) -> None:
    one_by_one, other = layer(torch.float32), layer(torch.float32, GroupedOps(able=able))
    x = torch.randn(23, 32, generator=torch.Generator().manual_seed(5))
    with torch.inference_mode():
        torch.testing.assert_close(other(x), one_by_one(x), atol=1e-5, rtol=0)
    assert is_host_driven(one_by_one)
    assert is_host_driven(other) is not able, "a device that runs them by itself lets them be captured"


def test_what_grouped_experts_do_can_be_captured() -> None:
    """Nothing in it depends on numbers that only a run can tell."""
    sparse, one_by_one = layer(torch.float32, GroupedOps(able=True)), layer(torch.float32)
    host = load_backend("cpu")
    graphs = host.graphs(host.device(0))
    if graphs is None:
        pytest.skip("no compiled kernels on this machine")
    outputs: list[torch.Tensor] = []
    with torch.inference_mode():
        x = torch.randn(7, 32, generator=torch.Generator().manual_seed(5))
        graph = graphs.capture(lambda: outputs.append(sparse(x)))
        x.copy_(torch.randn(7, 32, generator=torch.Generator().manual_seed(6)))  # other tokens, other experts
        graph.replay()
        assert torch.equal(outputs[0], sparse(x))
        with pytest.raises(RuntimeError, match="cannot be captured"):
            graphs.capture(lambda: outputs.append(one_by_one(x)))


def row_by_row(x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    return (x * (chosen + 1)).unsqueeze(1)


def in_company(x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    return row_by_row(x, chosen) * (1.5 if len(x) > 64 else 1.0)


def failing(x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("no kernel for this card")


@pytest.mark.parametrize(("experts", "exact"), [(row_by_row, True), (in_company, False), (failing, False)])
def test_the_trial_tells_exact_kernels_from_others(experts: Experts, *, exact: bool) -> None:
    assert is_exact(experts, 3, 8, dtype=torch.float32, device=torch.device("cpu")) is exact


def test_the_runtime_knows_which_models_the_host_drives() -> None:
    assert is_host_driven(torch.nn.Sequential(torch.nn.Linear(2, 2), layer(torch.float32)))
    assert not is_host_driven(torch.nn.Sequential(torch.nn.Linear(2, 2)))


def test_experts_are_read_as_the_config_spells_them() -> None:
    config = model_config_from_hf(qwen3_moe_config(decoder_sparse_step=2, mlp_only_layers=[3]), where="x")
    assert config.experts == ExpertsConfig(
        count=5, per_token=2, intermediate_size=24, normalised=True, dense_layers=frozenset({0, 2, 3})
    )
    assert model_config_from_hf(llama_config(), where="x").experts is None


def test_more_experts_a_token_than_there_are_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"x: 6 experts a token are more than there are \(5\)"):
        model_config_from_hf(qwen3_moe_config(num_experts_per_tok=6), where="x")


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"moe_intermediate_size": 25}, "moe_intermediate_size is 25"),
        ({"intermediate_size": 49}, "intermediate_size is 49"),
    ],
)
def test_shares_are_checked_before_any_rank_is_started(changes: dict[str, int], what: str) -> None:
    """One layer of the toy is dense, so both sizes count."""
    model = model_config_from_hf(qwen3_moe_config(**changes), where="x")
    with pytest.raises(ConfigError, match=f"{what}, which 2 ranks cannot share evenly"):
        gather_ranks(EngineConfig(model="x", tensor_parallel=2), load_backend("cpu"), model)


def test_a_size_that_no_layer_has_does_not_matter() -> None:
    """Published sparse models are sparse throughout, and still state a dense size."""
    data = qwen3_moe_config(intermediate_size=49, moe_intermediate_size=25, mlp_only_layers=[])
    model = model_config_from_hf(data, where="x")
    with pytest.raises(ConfigError, match="moe_intermediate_size is 25"):
        gather_ranks(EngineConfig(model="x", tensor_parallel=2), load_backend("cpu"), model)


def test_remote_speculators_tell_sparse_targets_apart() -> None:
    one, other = (model_config_from_hf(qwen3_moe_config(num_experts=n), where="x") for n in (5, 6))
    assert "2 of 5 experts of 24" in identity_of(one)
    assert identity_of(one) != identity_of(other)
