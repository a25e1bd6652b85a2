"""Logits, rotary tables and captured features equal transformers' in float32, for every variant we claim to serve."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ssd_ascend.architectures.registry import ARCHITECTURES
from ssd_ascend.config.model import rope_from_hf
from ssd_ascend.errors import ConfigError
from ssd_ascend.layers.rotary import attention_factor, inverse_frequencies, rotary_table
from ssd_ascend.weights.loader import load_model, read_config
from tests.toys import (
    LLAMA3_ROPE,
    YARN_ROPE,
    build_context,
    llama_config,
    mistral_config,
    prefill_batch,
    qwen2_config,
    qwen3_config,
    qwen3_moe_config,
    run,
    write_checkpoint,
)

IDS = [(7 * i * i + 3 * i + 5) % 96 for i in range(41)]
VARIANTS: dict[str, dict[str, Any]] = {
    "llama": llama_config(),
    "llama-tied": llama_config(tie_word_embeddings=True),
    "llama-mha": llama_config(num_key_value_heads=4),
    "llama-mqa": llama_config(num_key_value_heads=1),
    "llama-bias": llama_config(attention_bias=True, mlp_bias=True),
    "llama-head-dim": llama_config(head_dim=16),
    "llama-llama3-rope": llama_config(rope_scaling=LLAMA3_ROPE, rope_theta=500.0),
    "llama-linear-rope": llama_config(rope_scaling={"rope_type": "linear", "factor": 2.0}),
    "llama-rope-parameters": llama_config(rope_parameters={"rope_theta": 500.0, **LLAMA3_ROPE}, rope_theta=None),
    "mistral": mistral_config(),
    "qwen2": qwen2_config(),
    "qwen2-tied": qwen2_config(tie_word_embeddings=True),
    "qwen2-yarn": qwen2_config(rope_scaling=YARN_ROPE, rope_theta=500.0),
    "qwen3": qwen3_config(),
    "qwen3-untied": qwen3_config(tie_word_embeddings=False),
    "qwen3-bias": qwen3_config(attention_bias=True),
    "qwen3-yarn": qwen3_config(rope_scaling=YARN_ROPE, rope_theta=500.0),
    "qwen3_moe": qwen3_moe_config(),
    "qwen3_moe-raw": qwen3_moe_config(norm_topk_prob=False, num_experts_per_tok=3),
    "qwen3_moe-every-second": qwen3_moe_config(decoder_sparse_step=2, mlp_only_layers=[]),
    "qwen3-yarn-parameters": qwen3_config(rope_parameters={"rope_theta": 500.0, **YARN_ROPE}, rope_theta=None),
}


def reference(directory: Path) -> Any:
    """What transformers makes of the same files."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()


def load(directory: Path, **options: Any) -> tuple[Any, Any, int]:
    config = read_config(directory)
    ctx = build_context(config)
    model, config = load_model(directory, ctx, max_positions=256, **options)
    return model, ctx, config.num_layers


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_transformers(variant: str, tmp_path: Path) -> None:
    config = {key: value for key, value in VARIANTS[variant].items() if value is not None}
    write_checkpoint(tmp_path, config)
    model, ctx, num_layers = load(tmp_path)
    ours = run(model, ctx, num_layers, prefill_batch(IDS)).logits
    with torch.inference_mode():
        theirs = reference(tmp_path)(torch.tensor([IDS])).logits[0]
    assert theirs.std() > 0.5  # the toy is no constant
    torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=0)


def test_every_family_has_a_variant() -> None:
    assert {variant.partition("-")[0] for variant in VARIANTS} == set(ARCHITECTURES)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 1e6},
        {"rope_theta": 500.0, "rope_scaling": LLAMA3_ROPE},
        {"rope_theta": 5e5, "rope_scaling": {**LLAMA3_ROPE, "original_max_position_embeddings": 8192}},
        {"rope_theta": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
        {"rope_theta": 1e6, "rope_scaling": {**YARN_ROPE, "original_max_position_embeddings": 32768}},
        {"rope_theta": 1e4, "rope_scaling": {**YARN_ROPE, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False}},
        {"rope_theta": 1e4, "rope_scaling": {**YARN_ROPE, "mscale": 0.7, "mscale_all_dim": 0.3}},
        {"rope_theta": 1e4, "rope_scaling": {**YARN_ROPE, "attention_factor": 1.5}},
    ],
)
def test_inverse_frequencies_equal_transformers(rope: dict[str, Any]) -> None:
    """B38: to 1e-6, yarn's attention factor included."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    data = {"max_position_embeddings": 4096, "head_dim": 128, **rope}
    theirs = LlamaRotaryEmbedding(LlamaConfig(hidden_size=512, num_attention_heads=4, **json.loads(json.dumps(data))))
    ours = rope_from_hf(data, where="x")
    torch.testing.assert_close(inverse_frequencies(ours, 128), theirs.inv_freq, atol=1e-6, rtol=1e-6)
    assert attention_factor(ours) == pytest.approx(theirs.attention_scaling, abs=1e-6)


def test_a_table_is_as_long_as_asked_and_holds_cosines_then_sines() -> None:
    table = rotary_table(rope_from_hf({"max_position_embeddings": 64}, where="x"), 8, 300, torch.device("cpu"))
    assert table.shape == (300, 8)
    assert table.dtype == torch.float32
    angle = 299 * 10000.0 ** (-2 / 8)
    torch.testing.assert_close(table[299, [1, 5]], torch.tensor([angle, angle - torch.pi / 2]).cos(), atol=1e-4, rtol=0)


@pytest.mark.parametrize("config", [llama_config(), qwen3_config()], ids=["llama", "qwen3"])
def test_a_capture_id_is_the_input_of_that_layer(config: dict[str, Any], tmp_path: Path) -> None:
    """B35: id i is what layer i-1 put out; id num_layers is before the final norm, which transformers does not give."""
    write_checkpoint(tmp_path, config)
    model, ctx, num_layers = load(tmp_path, capture_layers=(3, 0, 4, 1))
    output = run(model, ctx, num_layers, prefill_batch(IDS, logits_rows=[40, 2]))
    theirs = reference(tmp_path)
    with torch.inference_mode():
        states = theirs(torch.tensor([IDS]), output_hidden_states=True).hidden_states
    assert output.features is not None
    at_3, at_0, at_4, at_1 = output.features.split(config["hidden_size"], dim=-1)
    for ours, layer_input in ((at_3, 3), (at_0, 0), (at_1, 1)):
        torch.testing.assert_close(ours, states[layer_input][0], atol=2e-4, rtol=0)
    with torch.inference_mode():
        torch.testing.assert_close(theirs.model.norm(at_4), states[4][0], atol=2e-4, rtol=0)
    torch.testing.assert_close(output.hidden, at_4[[40, 2]])
    assert output.logits.shape == (2, 96)


def test_capturing_changes_nothing_and_wanted_rows_are_the_same_rows(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, llama_config())
    plain, ctx, num_layers = load(tmp_path)
    all_rows = run(plain, ctx, num_layers, prefill_batch(IDS))
    capturing, ctx, _ = load(tmp_path, capture_layers=(2,))
    some_rows = run(capturing, ctx, num_layers, prefill_batch(IDS, logits_rows=[5]))
    assert all_rows.features is None
    torch.testing.assert_close(some_rows.logits[0], all_rows.logits[5], atol=1e-5, rtol=0)


def test_a_capture_layer_beyond_the_model_is_named(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, llama_config())
    with pytest.raises(ConfigError, match="capture layer 5 does not exist: the model has 4 layers"):
        load(tmp_path, capture_layers=(5,))
