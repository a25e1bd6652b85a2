"""Runs: broken off and taken up, begun twice, out of room; and what comes out of them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ssd_ascend import train as door
from ssd_ascend.config.model import ModelConfig, RopeConfig, rope_from_hf
from ssd_ascend.config.speculation import SpeculationConfig
from ssd_ascend.config.training import Run, SynthesisConfig, TrainingConfig
from ssd_ascend.core.sampling import SamplingParams
from ssd_ascend.errors import ConfigError
from ssd_ascend.llm import LLM
from ssd_ascend.training import run_folder
from ssd_ascend.training.batches import make_batch
from ssd_ascend.training.export import head_config
from ssd_ascend.training.head import HeadShape
from ssd_ascend.training.optimizer import schedule
from ssd_ascend.training.run_folder import CHECKPOINT, RunFolder
from ssd_ascend.training.target import FreshReadings
from ssd_ascend.training.trainer import Material, train
from ssd_ascend.training.unroll import outcomes, unrolled_loss
from tests.training.chatty import write_chatty
from tests.training.toys import World, make_world, nothing

SMALL = TrainingConfig(steps=6, batch_tokens=96, unroll=3, evaluate_every=3, save_every=3, draft_vocab=40, lr=1e-2)


class StoppedError(Exception):
    """What breaks a run off."""


def material(world: World) -> Material:
    return Material(world.text, world.source, world.text, world.source, frozenset({2}))


def test_a_run_taken_up_again_equals_an_unbroken_one(tmp_path: Path) -> None:
    """Weights, optimizer and log, bit by bit."""
    whole, broken = make_world(tmp_path / "a"), make_world(tmp_path / "b")
    run = Run(target="t", training=SMALL)
    expected = train(whole.weights, whole.lesson, material(whole), SMALL, folder=None, progress=nothing)

    def stop(done: int, total: int) -> None:
        if done == 5:
            raise StoppedError

    folder = RunFolder(tmp_path / "out", run)
    with pytest.raises(StoppedError):
        train(broken.weights, broken.lesson, material(broken), SMALL, folder=folder, progress=stop)
    again = make_world(tmp_path / "c")
    steps: list[int] = []
    found = train(
        again.weights, again.lesson, material(again), SMALL, folder=RunFolder(tmp_path / "out", run),
        progress=lambda done, total: steps.append(done),
    )  # fmt: skip
    assert steps == [4, 5, 6]
    for name, weight in whole.weights.items():
        assert torch.equal(weight, again.weights[name]), name
    assert [timeless(record) for record in expected] == [timeless(record) for record in found]


def timeless(record: dict[str, Any]) -> dict[str, Any]:
    """What of a record does not depend on the machine."""
    return {name: value for name, value in record.items() if name not in ("seconds", "tokens_per_s")}


def test_a_run_that_diverges_ends_and_saves_nothing_of_it(tmp_path: Path) -> None:
    """Loss or weights: a checkpoint of either would be taken up again, and a verdict on either means nothing."""
    world = make_world(tmp_path / "a")
    wild = TrainingConfig(**{**SMALL_VALUES, "steps": 4, "evaluate_every": 2, "save_every": 1, "lr": 1e30})
    run = Run(target="t", training=wild)
    with pytest.raises(ConfigError, match=r"diverged by step \d.*lower --lr"):
        train(
            world.weights, world.lesson, material(world), wild, folder=RunFolder(tmp_path / "out", run),
            progress=nothing,
        )  # fmt: skip
    kept = RunFolder(tmp_path / "out", run).load()
    assert kept is None or all(bool(torch.isfinite(tensor).all()) for tensor in kept[1].values())


def test_a_head_that_says_nan_has_guessed_nothing(tmp_path: Path) -> None:
    world = make_world(tmp_path)
    batch = make_batch(world.text, list(range(2)), 96, world.target.device)
    for weight in world.weights.values():
        weight.data.fill_(float("nan"))
    result = outcomes(world.weights, world.lesson, batch, world.source.fetch(batch), 2)
    assert int(result.rank.min()) > 0


def test_learning_lowers_the_loss_and_finds_the_targets_words(tmp_path: Path) -> None:
    """On one batch, over and over: from guessing to knowing."""
    world = make_world(tmp_path, draft_vocab=64)
    config = TrainingConfig(**{**SMALL_VALUES, "steps": 60, "evaluate_every": 20, "draft_vocab": 64})
    records = train(world.weights, world.lesson, material(world), config, folder=None, progress=nothing)
    assert records[-1]["loss"] < records[0]["loss"]
    assert records[-1]["accuracy"][0] > 2 * records[0]["accuracy"][0]


SMALL_VALUES: dict[str, Any] = {"batch_tokens": 192, "unroll": 2, "save_every": 1000, "lr": 3e-3, "step_decay": 1.0}


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_the_first_weights_are_the_targets_last_layer(tmp_path: Path, family: str) -> None:
    """Its feature half, its feed-forward, its vocabulary rows; and one step from there goes through."""
    world = make_world(tmp_path, family)
    tensors = load_file(world.path / "model.safetensors")
    hidden, prefix = world.shape.target.hidden_size, f"model.layers.{world.shape.target.num_layers - 1}."
    own = world.weights["midlayer.self_attn.q_proj.weight"]
    assert torch.equal(own[:, hidden:], tensors[f"{prefix}self_attn.q_proj.weight"])
    assert torch.equal(world.weights["midlayer.mlp.up_proj.weight"], tensors[f"{prefix}mlp.up_proj.weight"])
    rows = tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"])
    assert torch.equal(world.weights["lm_head.weight"], rows[world.vocabulary.to_target])
    batch = make_batch(world.text, [0, 1], 64, world.target.device)
    losses = unrolled_loss(world.weights, world.lesson, batch, world.source.fetch(batch), SMALL)
    losses.loss.backward()
    assert all(w.grad is not None and bool(torch.isfinite(w.grad).all()) for w in world.weights.values())


def test_a_rotation_that_no_config_can_hold_is_refused_before_the_work(tmp_path: Path) -> None:
    config = ModelConfig(
        family="llama", hidden_size=8, num_layers=4, num_heads=2, num_kv_heads=2, head_dim=4, intermediate_size=8,
        vocab_size=9, rope=RopeConfig(frequency_factors=(1.0, 2.0)),
    )  # fmt: skip
    with pytest.raises(ConfigError, match="table of factors"):
        head_config(HeadShape(config, 9, (1, 2, 3)), torch.bfloat16)
    scaled = ModelConfig(**{f: getattr(config, f) for f in config.__slots__ if f != "rope"}, rope=RopeConfig(
        type="llama3", theta=5e5, factor=8.0, original_max_positions=64, low_freq_factor=1.0, high_freq_factor=4.0
    ))  # fmt: skip
    written = head_config(HeadShape(scaled, 9, (1, 2, 3)), torch.bfloat16)
    assert rope_from_hf(written, where="the head") == scaled.rope


def test_readings_kept_and_fresh_are_the_same(tmp_path: Path) -> None:
    world = make_world(tmp_path)
    batch = make_batch(world.text, [2, 0, 5], 64, world.target.device)
    kept, fresh = world.source.fetch(batch), FreshReadings(world.target, world.text).fetch(batch)
    real = sum(count for _, count in batch.rows)
    for ours, theirs in zip(kept, fresh, strict=True):
        torch.testing.assert_close(ours[:real], theirs[:real], atol=1e-5, rtol=1e-5)


def test_forks_weigh_more_only_after_they_were_fed(tmp_path: Path) -> None:
    """With a weight of 1 for chains after a fork, a text without forks gives the loss of weight 0."""
    world = make_world(tmp_path)
    batch = make_batch(world.text, [0, 1, 2], 96, world.target.device)
    read = world.source.fetch(batch)

    def loss(weight: float, *, forks: bool) -> float:
        forked = batch.forked if forks else torch.zeros_like(batch.forked)
        changed = type(batch)(**{**{f: getattr(batch, f) for f in batch.__slots__}, "forked": forked})
        config = TrainingConfig(unroll=3, draft_vocab=40, fork_weight=weight)
        return float(unrolled_loss(world.weights, world.lesson, changed, read, config).loss.detach())

    assert loss(0.0, forks=True) == loss(0.0, forks=False) == loss(3.0, forks=False)
    assert loss(3.0, forks=True) != loss(0.0, forks=True)


def test_a_folder_belongs_to_one_run(tmp_path: Path) -> None:
    run = Run(target="t", synthesis=SynthesisConfig(conversations=5), training=SMALL)
    RunFolder(tmp_path / "out", run)
    RunFolder(tmp_path / "out", run)
    other = Run(target="t", synthesis=SynthesisConfig(conversations=6), training=SMALL)
    with pytest.raises(ConfigError, match=r"holds another run: synthesis\.conversations was 5, now 6"):
        RunFolder(tmp_path / "out", other)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("mine")
    with pytest.raises(ConfigError, match="is not empty and holds no run"):
        RunFolder(tmp_path / "full", run)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is a file"):
        RunFolder(tmp_path / "file", run)


def test_a_full_disk_costs_nothing_but_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunFolder(tmp_path / "out", Run(target="t", training=SMALL))
    folder.save(3, {"w": torch.ones(2)}, [{"step": 3}])

    def full(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(run_folder, "save_file", full)
    with pytest.raises(ConfigError, match=f"cannot write .*{CHECKPOINT}.*: No space left on device .*go"):
        folder.save(6, {"w": torch.zeros(2)}, [])
    step, tensors, log = folder.load() or (0, {}, [])
    assert (step, tensors["w"].tolist(), log) == (3, [1.0, 1.0], [{"step": 3}])


def test_the_learning_rate_rises_and_falls() -> None:
    config = TrainingConfig(steps=100, warmup=0.1, final_lr=0.05)
    rates = [schedule(step, config) for step in range(101)]
    assert rates[:10] == sorted(rates[:10])
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert (max(rates), rates[100]) == (pytest.approx(1.0), pytest.approx(0.05))


def test_the_door_makes_judges_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From a model that chats to a head that the engine drafts with, and a verdict on it."""
    path, _ = write_chatty(tmp_path / "target")
    (tmp_path / "openings").write_text("ask...\nsay it\n")
    out = tmp_path / "head"
    make = [
        *("--target", str(path), "--out", str(out), "--device", "cpu", "--dtype", "float32", "--synthesize", "10"),
        *("--openings", str(tmp_path / "openings"), "--slots", "5", "--max-length", "64", "--steps", "4"),
        *("--batch-tokens", "128", "--ttt", "2", "--draft-vocab", "100", "--evaluate-every", "2", "--save-every", "2"),
    ]
    assert door.main(make) == 0
    made = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert made["step"] == 4
    written = (out / "model.safetensors").read_bytes()
    assert door.main(make) == 0, "a finished run is found finished"
    assert (out / "model.safetensors").read_bytes() == written
    capsys.readouterr()

    (tmp_path / "prompts").write_text('{"text": "den"}\n{"messages": [{"role": "user", "content": "hen"}]}\n"ten"\n')
    judge = ["--evaluate", "--target", str(path), "--head", str(out), "--prompts", str(tmp_path / "prompts")]
    options = ["--device", "cpu", "--dtype", "float32", "--max-tokens", "12", "--lookaheads", "2,3", "--seeds", "2"]
    assert door.main([*judge, *options, "--json", str(tmp_path / "verdict.json")]) == 0
    verdict = json.loads((tmp_path / "verdict.json").read_text())
    assert set(verdict) == {"greedy", "T=1"}
    assert (verdict["greedy"]["answers"], verdict["T=1"]["answers"]) == (3, 6)
    counted = verdict["greedy"]["tokens_per_round"]["3"]["all"]
    assert f"| {counted:.2f} |" in capsys.readouterr().out

    speculation = SpeculationConfig(speculator="sd", drafter="eagle3", draft=str(out), lookahead=3)
    with LLM(str(path), dtype="float32", device="cpu", max_num_seqs=4, speculation=speculation) as llm:
        outputs = llm.generate(["the den"], SamplingParams(temperature=0.0, max_tokens=12))
        assert int(llm.stats_of(outputs[0].answers[0])["drafted"]) > 0


_MAKE = ("--target", "{target}", "--out", "{out}", "--synthesize", "4")
_JUDGE = ("--target", "{target}", "--evaluate", "--head", "{target}", "--prompts", "{prompts}")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "no target is named"),
        (["--target", "{target}"], "no place for the head is named"),
        (["--target", "{target}", "--out", "{out}"], "give --data FILE or --synthesize N"),
        (["--target", "{target}", "--out", "{out}", "--data", "{missing}"], "cannot read .*nowhere"),
        (["--target", "{target}", "--out", "{out}", "--data", "{empty}"], "holds no answers"),
        (["--target", "{target}", "--out", "{out}", "--synthesize", "0"], "conversations is 0"),
        (["--target", "{target}", "--out", "{out}", "--synthesize", "4", "--draft-vocab", "999"], "draft_vocab is 999"),
        (["--target", "{target}", "--out", "{out}", "--synthesize", "4", "--lk", "2"], "overlap_weight is 2"),
        ([*_MAKE, "--lr", "nan"], "lr is nan"),
        ([*_MAKE, "--muon-lr", "inf"], "muon_lr is inf"),
        ([*_MAKE, "--step-decay", "nan"], "step_decay is nan"),
        ([*_MAKE, "--fork-weight", "-1"], "fork_weight is -1"),
        ([*_MAKE, "--seed", "-1"], "seed is -1"),
        ([*_MAKE, "--seed", "99999999999999999999999"], "seed is 9999"),
        (["--target", "{target}", "--out", "{out}", "--data", "{deep}"], "line 1 is no JSON"),
        ([*_JUDGE, "--seeds", "0"], "need a seed"),
        ([*_JUDGE, "--temperature", "nan"], "temperature is nan"),
        (["--target", "{strange}", "--out", "{out}", "--synthesize", "4"], "unknown model family 'martian'"),
        (["--target", "{target}", "--evaluate"], "--evaluate needs --head"),
        (["--plot", "{out}"], "cannot read .*training.json"),
    ],
)
def test_what_the_door_refuses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    path, _ = write_chatty(tmp_path / "target")
    strange, _ = write_chatty(tmp_path / "strange")
    config = json.loads((strange / "config.json").read_text())
    (strange / "config.json").write_text(json.dumps({**config, "model_type": "martian"}))
    (tmp_path / "empty").write_text("")
    (tmp_path / "deep").write_text("[" * 100_000)
    (tmp_path / "prompts").write_text('"the den"\n')
    names = {
        "target": path, "strange": strange, "out": tmp_path / "out", "missing": tmp_path / "nowhere",
        "empty": tmp_path / "empty", "deep": tmp_path / "deep", "prompts": tmp_path / "prompts",
    }  # fmt: skip
    assert door.main([flag.format(**names) for flag in flags] + ([] if "--plot" in flags else ["--device", "cpu"])) == 2
    assert re.search(message, capsys.readouterr().err)
    assert not (tmp_path / "out").exists(), "what is wrong is found before anything is written"
