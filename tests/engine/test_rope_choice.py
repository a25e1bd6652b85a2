"""`--draft-rope auto` keeps the rule under which the head really foresees more, by an independent count."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ssd_ascend.speculation import rope_choice
from ssd_ascend.speculation.rope_choice import Text
from ssd_ascend.weights.loader import load_model, read_config
from tests.engine.eagle3_reference import Dialect, combine, head_forward
from tests.engine.harness import drive, greedy, make_engine, prompts_of, run, speculation
from tests.toys import build_context, eagle3_config, eagle3_tensors, llama_config, prefill_batch, write_checkpoint
from tests.toys import run as forward

TARGET = llama_config(vocab_size=24, eos_token_id=2, max_position_embeddings=512)
THETA = {"draft": 10.0, "target": TARGET["rope_theta"]}


def head_at(directory: Path, *, seed: int, theta: float = THETA["draft"]) -> Path:
    config = eagle3_config(TARGET, max_position_embeddings=512, rope_theta=theta)
    return write_checkpoint(directory, config, eagle3_tensors(config, TARGET, seed=seed))


def count(pair: Path, head: Path, text: Text, theta: float) -> int:
    """Tokens foreseen by the reference head, from the target's features and choices in one dense forward."""
    config = read_config(pair / "target")
    ctx = build_context(config)
    model, _ = load_model(pair / "target", ctx, max_positions=512, capture_layers=(1, 2, 3))
    output = forward(model, ctx, config.num_layers, prefill_batch(text.tokens))
    assert output.features is not None
    torch.testing.assert_close(text.features.cpu(), output.features, atol=1e-4, rtol=0)
    assert text.best.tolist() == output.logits.argmax(-1).tolist()
    w = load_file(head / "model.safetensors")
    w["embed_tokens.weight"] = load_file(pair / "target" / "model.safetensors")["model.embed_tokens.weight"]
    features = combine(w, output.features[:-1], 1e-5)
    logits, _ = head_forward(w, torch.tensor(text.tokens[1:]), features, Dialect(theta=theta))
    ids = torch.arange(w["d2t"].shape[0]) + w["d2t"]
    return int((ids[logits.argmax(-1)] == output.logits.argmax(-1)[1:]).sum())


@pytest.fixture
def texts(monkeypatch: pytest.MonkeyPatch) -> list[Text]:
    """The texts that targets wrote to decide."""
    written: list[Text] = []
    own = rope_choice.write_text

    def write_text(*args: Any) -> Text:
        written.append(own(*args))
        return written[-1]

    monkeypatch.setattr(rope_choice, "write_text", write_text)
    return written


def theta_of(engine: Any) -> float:
    return float(engine._speculator._drafter.runner.model.config.layer.rope.theta)


def test_the_better_rule_is_kept(pair: Path, tmp_path: Path, texts: list[Text]) -> None:
    chosen = set()
    for seed in range(4):
        head = head_at(tmp_path / str(seed), seed=seed)
        config = speculation(pair, "sd", "eagle3", draft=str(head), draft_rope="auto")
        engine = make_engine(pair, config, dtype="float32")  # the independent count rounds nothing
        right = {rule: count(pair, head, texts[-1], theta) for rule, theta in THETA.items()}
        expected = "target" if right["target"] > right["draft"] else "draft"
        assert theta_of(engine) == THETA[expected], right
        chosen.add(expected)
        engine.close()
    assert chosen == {"draft", "target"}
    assert len(texts[0].tokens) == 128


def test_nothing_is_measured_where_both_are_the_same_or_one_was_ordered(
    pair: Path, tmp_path: Path, texts: list[Text]
) -> None:
    same = head_at(tmp_path / "same", seed=1, theta=THETA["target"])
    make_engine(pair, speculation(pair, "sd", "eagle3", draft=str(same), draft_rope="auto")).close()
    other = head_at(tmp_path / "other", seed=1)
    for rule, theta in THETA.items():
        engine = make_engine(pair, speculation(pair, "sd", "eagle3", draft=str(other), draft_rope=rule))
        assert theta_of(engine) == theta
        engine.close()
    assert texts == []


def test_the_text_leaves_no_trace(pair: Path, tmp_path: Path, texts: list[Text]) -> None:
    """It was written into the front of the target's cache; answers are the same as ever."""
    prompts = prompts_of([5, 40, 17])
    head = head_at(tmp_path / "head", seed=2)
    engine = make_engine(pair, speculation(pair, "ssd", "eagle3", draft=str(head), draft_rope="auto"))
    assert drive(engine, prompts, greedy()).tokens == run(pair, prompts, greedy()).tokens
    assert len(texts) == 1
    engine.close()
