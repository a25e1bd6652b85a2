"""EAGLE-3 heads of every producer give the numbers of an independent reimplementation, and wrong pairs are refused."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ssd_ascend.architectures.eagle3 import Eagle3Head
from ssd_ascend.config.eagle3 import Eagle3Config
from ssd_ascend.errors import ConfigError
from ssd_ascend.layers.context import BuildContext
from ssd_ascend.layers.rotary import inverse_frequencies
from ssd_ascend.weights.eagle3 import canonical_name, load_eagle3, read_eagle3_config
from ssd_ascend.weights.loader import load_model, read_config
from tests.engine.eagle3_dialects import (
    CASES,
    TARGET,
    Case,
    flat,
    identity,
    plus,
    silent,
    tensors_of,
    without,
    write_head,
)
from tests.engine.eagle3_reference import combine, head_forward
from tests.toys import (
    LLAMA3_ROPE,
    Tensors,
    build_context,
    causal_lm_tensors,
    eagle3_config,
    eagle3_tensors,
    llama_config,
    prefill_batch,
    run,
    write_checkpoint,
    write_gguf,
)

IDS = [(11 * i * i + 3) % 96 for i in range(19)]


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "target", TARGET)


def load(head: Path, target: Path, **options: Any) -> tuple[Eagle3Head, Eagle3Config, BuildContext]:
    reading = {key: options.pop(key) for key in ("rope", "capture_layers") if key in options}
    config = read_eagle3_config(head, read_config(target), **reading)
    ctx = build_context(config.layer, dtype=options.pop("dtype", torch.float32))
    return load_eagle3(head, config, ctx, target=target, max_positions=64, **options), config, ctx


def complaint(head: Path, target: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        load(head, target)
    return str(caught.value)


@pytest.mark.parametrize("name", CASES)
def test_numbers_equal_the_reference(name: str, tmp_path: Path, target: Path) -> None:
    case = CASES[name]
    written = write_head(tmp_path / "head", case)
    head, config, ctx = load(written, target)
    lent = causal_lm_tensors(TARGET)
    w = {"embed_tokens.weight": lent["model.embed_tokens.weight"], "lm_head.weight": lent["lm_head.weight"]}
    w |= {canonical_name(key): tensor for key, tensor in tensors_of(case).items()}
    features = torch.randn(len(IDS), 96)
    with torch.inference_mode():
        combined = head.combine(features)
    torch.testing.assert_close(combined, combine(w, features, 1e-5), atol=1e-4, rtol=0)
    before = combined.clone()
    batch = prefill_batch(IDS, hidden_states=combined)
    output = run(head, ctx, 1, batch)
    logits, recycled = head_forward(w, torch.tensor(IDS), before, case.means)
    assert logits.std() > 0.5
    assert output.logits.dtype == torch.float32
    assert output.hidden is not None
    torch.testing.assert_close(output.logits, logits, atol=2e-4, rtol=0)
    torch.testing.assert_close(output.hidden, recycled, atol=2e-4, rtol=0)
    assert torch.equal(combined, before), "the caller's features were overwritten"
    assert config.capture_layers == case.capture
    assert head.d2t.tolist() == (list(range(96)) if name == "whole-vocabulary" else list(range(0, 96, 2)))


def test_wanted_rows_are_the_same_rows(tmp_path: Path, target: Path) -> None:
    head, _, ctx = load(write_head(tmp_path / "head", CASES["specforge"]), target)
    features = torch.randn(len(IDS), 32)
    whole = run(head, ctx, 1, prefill_batch(IDS, hidden_states=features))
    some = run(head, ctx, 1, prefill_batch(IDS, hidden_states=features, logits_rows=[18, 4]))
    assert whole.hidden is not None
    assert some.hidden is not None
    torch.testing.assert_close(some.logits, whole.logits[[18, 4]], atol=1e-5, rtol=0)
    torch.testing.assert_close(some.hidden, whole.hidden[[18, 4]], atol=1e-5, rtol=0)


def test_a_target_in_the_same_process_shares_its_layers(tmp_path: Path, target: Path) -> None:
    target_config = read_config(target)
    model, _ = load_model(target, build_context(target_config), max_positions=64)
    written = write_head(tmp_path / "head", CASES["whole-vocabulary"])
    shared, _, _ = load(written, target, share=model)
    copied, _, ctx = load(written, target)
    assert shared.embed_tokens is model.model.embed_tokens
    assert shared.lm_head is model.lm_head
    assert copied.embed_tokens is not model.model.embed_tokens
    batch = prefill_batch(IDS, hidden_states=torch.randn(len(IDS), 32))
    assert torch.equal(run(shared, ctx, 1, batch).logits, run(copied, ctx, 1, batch).logits)
    other_dtype, _, _ = load(written, target, share=model, dtype=torch.bfloat16)
    assert other_dtype.embed_tokens is not model.model.embed_tokens


def test_a_tied_target_in_a_gguf_lends_its_embedding_as_head(tmp_path: Path) -> None:
    tied = {**TARGET, "tie_word_embeddings": True}
    target = write_gguf(tmp_path / "target.gguf", tied, causal_lm_tensors(tied))
    head = load(write_head(tmp_path / "head", CASES["whole-vocabulary"]), target)[0]
    x = torch.randn(3, 32)
    table = causal_lm_tensors(tied)["model.embed_tokens.weight"]
    torch.testing.assert_close(head.lm_head(x), x @ table.T, atol=1e-4, rtol=0)
    assert head.embed_tokens.weight is not None
    torch.testing.assert_close(head.embed_tokens.weight, table)


def test_capture_layers_are_guessed_aloud_and_can_be_overruled(
    tmp_path: Path, target: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """B35."""
    written = write_head(tmp_path / "head", Case(silent(flat(), "eagle_config")))
    with caplog.at_level(logging.WARNING):
        assert load(written, target)[1].capture_layers == (2, 3, 3)
    assert [record for record in caplog.messages if "no capture layers" in record]
    caplog.clear()
    stated = write_head(tmp_path / "stated", CASES["specforge"])
    with caplog.at_level(logging.WARNING):
        assert load(stated, target)[1].capture_layers == (1, 2, 3)
    assert not caplog.messages
    assert load(written, target, capture_layers=(0, 1, 6))[1].capture_layers == (0, 1, 6)


@pytest.mark.parametrize(
    ("config", "edit", "said"),
    [
        (flat(eagle_config={"use_aux_hidden_state": False}), identity, "'use_aux_hidden_state' is false"),
        (flat(eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 6, 4]}), identity, "[2, 7, 5]"),
        (
            flat(eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 2]}),
            identity,
            "takes 96 features, but 2 captured",
        ),
        (flat(target_hidden_size=48), identity, "hidden size 48, this one has 32"),
        (flat(num_hidden_layers=2), identity, "head of 2 layers"),
        (flat(vocab_size=128), identity, "vocabulary of 128, the target's has 96"),
        (flat(), without("d2t"), "draft vocabulary of 48 is smaller than the target's 96, but there is no 'd2t'"),
        (flat(), without("lm_head.weight"), "the target's gives 96 logits, not 48"),
        (flat(hidden_size=16), identity, "there is no embed_tokens, and the target's does not fit"),
        (flat(num_attention_heads=3), identity, "do not fit q_proj and k_proj"),
        (flat(), without("midlayer.hidden_norm.weight"), "lacks tensor 'midlayer.hidden_norm.weight'"),
        (flat(), plus(mask_hidden=(32,)), "holds tensor 'mask_hidden'"),
        (flat(norm_before_fc=True), identity, "lacks tensor 'input_norm.weight'"),
    ],
)
def test_wrong_pairs_are_refused(
    config: dict[str, Any], edit: Callable[[Tensors], Tensors], said: str, tmp_path: Path, target: Path
) -> None:
    tensors = edit(eagle3_tensors(flat(), TARGET))
    assert said in complaint(write_checkpoint(tmp_path / "head", config, tensors), target)


def test_a_head_for_another_width_names_both(tmp_path: Path, target: Path) -> None:
    wide = {**eagle3_tensors(flat(), TARGET), "fc.weight": torch.ones(32, 3 * 40)}
    said = complaint(write_checkpoint(tmp_path / "head", flat(), wide), target)
    assert "fc takes 120 features" in said
    assert "3 captured layers of a target of hidden size 32 give 96" in said


@pytest.mark.parametrize(
    ("d2t", "t2d", "vocab", "ids"),
    [
        ([0, 0, 3, 3], None, 8, [0, 1, 5, 6]),
        ([0, 0, 0, 0], None, 4, [0, 1, 2, 3]),
        ([0, 0, 0, 0], None, 8, [0, 1, 2, 3]),
        ([0, 2, 5, 7], [0, 2, 5, 7], 12, [0, 2, 5, 7]),
        ([0, 2, 5, 7], [0, 3, 7, 10], 12, [0, 3, 7, 10]),
        ([0, 0, 3, 3], [], 8, [0, 1, 5, 6]),
    ],
    ids=["offsets", "identity", "first-ids", "absolute-by-t2d", "offsets-by-t2d", "t2d-of-zeros"],
)
def test_d2t(d2t: list[int], t2d: list[int] | None, vocab: int, ids: list[int], tmp_path: Path) -> None:
    """B36: offsets, unless only target ids make sense and t2d says so."""
    assert head_with_map(d2t, t2d, vocab, tmp_path).d2t.tolist() == ids


@pytest.mark.parametrize(
    ("d2t", "t2d", "said"),
    [
        ([0, 0, 3, 5], None, "ids run from 0 to 8"),
        ([0, -1, 0, 0], None, "does not map 4 draft ids into the target's 8"),
        ([-1, 0, 0, 0], None, "ids run from -1 to 3"),
        ([0, 0, 3, 3], [0, 1, 2, 3], "'t2d' disagrees"),
        ([0, 0, 3], None, "has shape [3], the draft vocabulary 4"),
    ],
    ids=["too-large", "twice", "negative", "t2d", "short"],
)
def test_a_map_that_leads_astray_is_refused(d2t: list[int], t2d: list[int] | None, said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        head_with_map(d2t, t2d, 8, tmp_path)
    assert said in str(caught.value)


def head_with_map(d2t: list[int], t2d: list[int] | None, vocab: int, tmp_path: Path) -> Eagle3Head:
    small = llama_config(num_hidden_layers=6, vocab_size=vocab)
    config = eagle3_config(small, draft_vocab_size=4)
    tensors = {**without("t2d")(eagle3_tensors(config, small)), "d2t": torch.tensor(d2t)}
    if t2d is not None:
        tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill_(0, torch.tensor(t2d, dtype=torch.long), True)
    target = write_checkpoint(tmp_path / "target", small)
    return load(write_checkpoint(tmp_path / "head", config, tensors), target)[0]


def test_rope_is_the_heads_own_with_a_word_when_it_differs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """B38, B32: two tables, each with its own settings; the head's is as long as the target needs."""
    scaled = llama_config(num_hidden_layers=6, rope_theta=1e6, rope_scaling=LLAMA3_ROPE)
    target = write_checkpoint(tmp_path / "target", scaled)
    own = write_head(tmp_path / "own", Case(flat(rope_theta=1e4)))
    mute = write_head(tmp_path / "mute", Case(silent(flat(), "rope_theta")))
    same = write_head(tmp_path / "same", Case(flat(rope_theta=1e6, rope_scaling=LLAMA3_ROPE)))
    plain = 1e4 ** -(torch.arange(4) / 4)
    with caplog.at_level(logging.WARNING):
        torch.testing.assert_close(inverse_frequencies(load(own, target)[1].layer.rope, 8), plain)
        assert "head and target rotate differently" in caplog.text
        caplog.clear()
        torch.testing.assert_close(inverse_frequencies(load(mute, target)[1].layer.rope, 8), plain)
        assert "has no rope_theta" in caplog.text
        caplog.clear()
        load(same, target)
        assert not caplog.messages
    theirs = read_config(target).rope
    assert load(own, target, rope="target")[1].layer.rope == theirs
    assert load(mute, target, rope="auto")[1].layer.rope == theirs
    assert load(own, target, rope="auto")[1].layer.rope.theta == 1e4
    _, config, ctx = load(own, target)
    assert config.layer.max_position_embeddings == 64
    longer = load_eagle3(own, config, ctx, target=target, max_positions=200)
    batch = prefill_batch([i % 96 for i in range(150)], hidden_states=torch.randn(150, 32))
    assert run(longer, ctx, 1, batch).logits.isfinite().all()


def test_a_float16_head_is_cast_aloud(tmp_path: Path, target: Path, caplog: pytest.LogCaptureFixture) -> None:
    """B22: served in the target's bfloat16, never in float16."""
    written = write_head(tmp_path / "head", CASES["specforge"], dtype=torch.float16)
    with caplog.at_level(logging.WARNING):
        head, _, ctx = load(written, target, dtype=torch.bfloat16)
    assert "saved in float16 and is served in bfloat16" in caplog.text
    features = (torch.randn(len(IDS), 32) * 1e5).bfloat16()  # beyond what float16 can hold
    assert run(head, ctx, 1, prefill_batch(IDS, hidden_states=features)).logits.isfinite().all()


def test_pickles_hold_tensors_only(tmp_path: Path, target: Path) -> None:
    written = write_head(tmp_path / "head", CASES["safeailab"])
    torch.save({"fc.weight": Path("not a tensor")}, written / "pytorch_model.bin")
    assert "is not a readable file of plain tensors" in complaint(written, target)
    torch.save([torch.ones(2)], written / "pytorch_model.bin")
    assert "does not hold a table of tensors" in complaint(written, target)
    (written / "pytorch_model.bin").write_bytes(b"PK\3\4")
    assert "is not a readable file of plain tensors" in complaint(written, target)


def test_a_head_that_is_not_there(tmp_path: Path, target: Path) -> None:
    assert "no config.json" in complaint(tmp_path, target)
    assert "missing weights file" in complaint(_config_only(tmp_path / "empty"), target)


def _config_only(directory: Path) -> Path:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(flat()))
    return directory
