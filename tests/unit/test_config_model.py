"""Model configs as they are found in the wild, and the sentences for those that cannot be served."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest

from ssd_ascend.config.model import model_config_from_gguf, model_config_from_hf, rope_from_hf
from ssd_ascend.errors import ConfigError

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 100,
}
GGUF = {
    "general.architecture": "llama",
    "llama.embedding_length": 64,
    "llama.block_count": 2,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.feed_forward_length": 128,
    "llama.vocab_size": 100,
    "llama.context_length": 512,
    "llama.rope.freq_base": 5e5,
}


def test_defaults_of_an_old_llama() -> None:
    config = model_config_from_hf(LLAMA, where="config.json")
    assert (config.num_kv_heads, config.head_dim, config.tie_word_embeddings) == (4, 16, False)
    assert (config.rope.type, config.rope.theta, config.attention_scale) == ("default", 10000.0, 0.25)


def test_unknown_keys_are_ignored_and_null_means_absent() -> None:
    config = model_config_from_hf({**LLAMA, "head_dim": None, "pretraining_tp": 1, "rope_scaling": None}, where="x")
    assert config.head_dim == 16


@pytest.mark.parametrize(("value", "ids"), [(2, (2,)), ([7, 8, 7], (7, 8, 7)), (None, ()), (-1, ())])
def test_eos_is_a_number_a_list_or_null(value: object, ids: tuple[int, ...]) -> None:
    assert model_config_from_hf({**LLAMA, "eos_token_id": value}, where="x").eos_token_ids == ids


def test_both_spellings_of_rope_mean_the_same() -> None:
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    old = {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **scaling}, "max_position_embeddings": 512}
    older = {**old, "rope_scaling": {"type": "llama3", **scaling}}
    new = {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **scaling}, "max_position_embeddings": 512}
    assert rope_from_hf(old, where="x") == rope_from_hf(new, where="x") == rope_from_hf(older, where="x")
    assert rope_from_hf(new, where="x").theta == 5e5


def test_a_yarn_factor_left_out_is_how_far_the_context_was_stretched() -> None:
    data = {
        "max_position_embeddings": 131072,
        "rope_scaling": {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 32768},
    }
    assert rope_from_hf(data, where="x").factor == 4.0


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": None}, "config.json has no 'model_type'"),
        ({"hidden_size": None}, "config.json has no 'hidden_size'"),
        ({"num_hidden_layers": "two"}, "'num_hidden_layers' is 'two'"),
        ({"intermediate_size": float("nan")}, "'intermediate_size' is nan"),
        ({"num_attention_heads": True}, "'num_attention_heads' is True"),
        ({"rms_norm_eps": float("inf")}, "'rms_norm_eps' is inf"),
        ({"tie_word_embeddings": "yes"}, "'tie_word_embeddings' is 'yes'"),
        ({"num_key_value_heads": 3}, "4 attention heads are no multiple of 3"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2}}, "rope type 'dynamic' is not supported"),
        ({"rope_scaling": {"rope_type": "linear"}}, "(rope) has no 'factor'"),
        ({"rope_scaling": 2}, "'rope_scaling' is 2, expected a table"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"quantization_config": {"bits": 4}}, "'quantization_config'"),
        ({"use_sliding_window": True}, "sliding-window"),
        ({"sliding_window": 4096}, "sliding-window"),
    ],
)
def test_what_cannot_be_served_is_one_sentence(changes: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        model_config_from_hf({**LLAMA, **changes}, where="/models/x/config.json")
    assert said in str(caught.value)
    assert "/models/x/config.json" in str(caught.value)


def test_gguf_metadata() -> None:
    factors = (1.0,) * 8
    config = model_config_from_gguf(
        {**GGUF, "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.eot_token_id": 9},
        where="x.gguf",
        tensors={"token_embd.weight", "blk.0.attn_q.bias"},
        frequency_factors=factors,
    )
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.vocab_size) == (4, 2, 16, 100)
    assert config.tie_word_embeddings
    assert config.attention_bias
    assert config.eos_token_ids == (2, 9)
    assert (config.rope.theta, config.rope.frequency_factors) == (5e5, factors)
    assert not model_config_from_gguf(GGUF, where="x", tensors={"output.weight"}).tie_word_embeddings


def test_gguf_yarn_and_what_is_not_supported() -> None:
    yarn = {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}
    rope = model_config_from_gguf(
        {**GGUF, **yarn, "llama.rope.scaling.original_context_length": 128}, where="x", tensors=()
    ).rope
    assert (rope.type, rope.factor, rope.original_max_positions, rope.attention_factor) == ("yarn", 4.0, 128, None)
    scaled = model_config_from_gguf({**GGUF, **yarn, "llama.rope.scaling.attn_factor": 2.0}, where="x", tensors=()).rope
    assert scaled.attention_factor == pytest.approx(2.0 * (1 + 0.1 * math.log(4.0)))
    with pytest.raises(ConfigError, match="rope scaling 'longrope'"):
        model_config_from_gguf({**GGUF, "llama.rope.scaling.type": "longrope"}, where="x", tensors=())
    with pytest.raises(ConfigError, match="are not supported"):
        model_config_from_gguf({**GGUF, "llama.expert_count": 8}, where="x", tensors=())
    with pytest.raises(ConfigError, match=r"x\.gguf has no 'general\.architecture'"):
        model_config_from_gguf({}, where="x.gguf", tensors=())


def test_configs_need_no_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; import ssd_ascend.config.model, ssd_ascend.config.eagle3"
    subprocess.run([sys.executable, "-c", code], check=True)
