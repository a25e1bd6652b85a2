"""Sparse layers: who goes to which expert, and that nobody's answer depends on the company."""

from __future__ import annotations

import pytest
import torch

from ssd_ascend.config.model import ExpertsConfig, model_config_from_hf
from ssd_ascend.errors import ConfigError
from ssd_ascend.layers.moe import SparseMLP, is_host_driven, route
from ssd_ascend.layers.slots import collect_slots
from tests.toys import build_context, causal_lm_tensors, llama_config, qwen3_moe_config

EXPERTS = ExpertsConfig(count=4, per_token=2, intermediate_size=8, normalised=True)
LOGITS = torch.tensor([[0.0, 3.0, 1.0, 2.0], [5.0, 0.0, 4.0, 0.0], [0.0, 3.0, 2.0, 1.0]])


def layer(dtype: torch.dtype) -> SparseMLP:
    """The first layer of the toy, loaded."""
    data = qwen3_moe_config(num_hidden_layers=1, mlp_only_layers=[], num_experts=12, num_experts_per_tok=3)
    config = model_config_from_hf(data, where="toy")
    sparse = SparseMLP(config, build_context(config, dtype=dtype))
    tensors = causal_lm_tensors(data)
    for slot in collect_slots(sparse).values():
        slot.load(tensors[f"model.layers.0.mlp.{slot.name}"])
    return sparse


def test_pairs_are_ordered_by_expert_and_found_again() -> None:
    routing = route(LOGITS, EXPERTS)
    assert routing.counts == [1, 2, 2, 1]
    assert routing.tokens.tolist() == [1, 0, 2, 1, 2, 0]
    # each token's likelier expert first: token 0 went to experts 1 and 3, token 1 to 0 and 2, token 2 to 1 and 2
    assert routing.places.tolist() == [[1, 5], [0, 3], [2, 4]]


def test_weights_of_the_chosen_add_up_to_one_only_where_the_model_says_so() -> None:
    normalised = route(LOGITS, EXPERTS).weights
    raw = route(LOGITS, ExpertsConfig(count=4, per_token=2, intermediate_size=8, normalised=False)).weights
    torch.testing.assert_close(normalised.sum(-1), torch.ones(3))
    torch.testing.assert_close(raw[0], LOGITS[0].softmax(-1)[[1, 3]])
    torch.testing.assert_close(normalised, raw / raw.sum(-1, keepdim=True))


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
