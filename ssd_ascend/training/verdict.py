"""A verdict on any head for any target: the target answers prompts, and every draft of the head is counted."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ssd_ascend.config.eagle3 import Eagle3Config
from ssd_ascend.errors import ConfigError, RequestError
from ssd_ascend.text import Tokenizer
from ssd_ascend.training.evaluation import Answer, report
from ssd_ascend.training.head import LM_HEAD, Weights
from ssd_ascend.training.judge import answer_prompts, answers_of
from ssd_ascend.training.pipeline import Means
from ssd_ascend.training.prompts import turn_marks
from ssd_ascend.training.target import Target, readings
from ssd_ascend.training.unroll import Lesson, make_lesson
from ssd_ascend.training.vocabulary import vocabulary_of
from ssd_ascend.weights.eagle3 import draft_to_target, open_head, read_eagle3_config
from ssd_ascend.weights.loader import read_config

_BATCH_TOKENS, _BATCH_TOKENS_HOST = 16_384, 2_048


@dataclass(frozen=True, slots=True, kw_only=True)
class Questions:
    """What is asked: lookaheads of chains, the one of branches, answers' length, and sampled answers by seed."""

    lookaheads: tuple[int, ...] = (3, 5, 7)
    branch_lookahead: int = 5
    max_tokens: int = 512
    temperature: float = 1.0
    seeds: tuple[int, ...] = (0, 1, 2)

    def __post_init__(self) -> None:
        if not self.seeds:
            raise ConfigError("sampled answers need a seed", remedy="give --seeds 1 or more")
        if not 0.0 <= self.temperature < math.inf:
            raise ConfigError(f"temperature is {self.temperature}", remedy="give a finite number, 0 or more")

    @property
    def depth(self) -> int:
        """Steps of self-conditioning that a chain, or a branch after the longest chain, can reach."""
        return max(*self.lookaheads, 2 * self.branch_lookahead + 1)


def read_prompts(file: Path, tokenizer: Tokenizer) -> list[list[int]]:
    """Prompts ready to be answered, one a line: `{"text": ...}`, `{"prompt": ...}`, `{"messages": [...]}` or a plain
    string; ConfigError names file and line."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {file}: {error}") from error
    prompts = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            prompts.append(tokenizer.chat.render(_messages(line), add_generation_prompt=True))
        except (ValueError, RecursionError, RequestError) as error:
            raise ConfigError(f"{file}, line {number}: {error}") from error
    if not prompts:
        raise ConfigError(f"{file} holds no prompts")
    return prompts


def _messages(line: str) -> list[dict[str, Any]]:
    value = json.loads(line)
    if isinstance(value, dict) and isinstance(value.get("messages"), list):
        return list(value["messages"])
    text = value.get("text", value.get("prompt")) if isinstance(value, dict) else value
    if not isinstance(text, str):
        raise ValueError("neither a text nor messages")
    return [{"role": "user", "content": text}]


def evaluate(
    head: Path, path: Path, prompts: Sequence[list[int]], tokenizer: Tokenizer, means: Means, questions: Questions
) -> dict[str, Any]:
    """`prompts`: token ids, ready to be answered. Greedy answers, and at the temperature once for each seed; see
    `evaluation.report` for what comes back. ConfigError for heads of a build that is not evaluated here."""
    config = read_eagle3_config(head, read_config(path))
    longest = max(map(len, prompts)) + questions.max_tokens + 1
    target = means.target(path, longest, config.capture_layers)
    weights, lesson = load_head(head, config, target, means, max_positions=longest + questions.depth + 8)
    marks, host = turn_marks(tokenizer), means.backend.capabilities.host_memory
    found: dict[str, list[Answer]] = {}
    kinds = {"greedy": (0.0, (0,)), f"T={questions.temperature:g}": (questions.temperature, questions.seeds)}
    for kind, (heat, seeds) in kinds.items():
        with means.bar(f"answering, {kind}") as progress:
            text = answer_prompts(
                target,
                marks,
                prompts,
                temperature=heat,
                seeds=seeds,
                max_tokens=questions.max_tokens,
                progress=progress,
            )
        with means.bar(f"drafting, {kind}") as progress:
            source = readings(target, text, workspace=0, progress=progress)
            found[kind] = answers_of(
                weights, lesson, source, text, batch_tokens=_BATCH_TOKENS_HOST if host else _BATCH_TOKENS,
                depth=questions.depth, sampled=heat > 0.0, ends=tokenizer.eos_ids,
            )  # fmt: skip
    return report(found, questions.lookaheads, questions.branch_lookahead)


def load_head(
    head: Path, config: Eagle3Config, target: Target, means: Means, *, max_positions: int
) -> tuple[Weights, Lesson]:
    """An exported head as float32 weights, and what it is judged with."""
    _check_build(head, config)
    with open_head(head) as source:
        weights = {
            name: source.read(name).to(target.device, torch.float32)
            for name in source.tensors
            if name not in ("d2t", "t2d", "embed_tokens.weight")
        }
        own = source.read("embed_tokens.weight").to(target.device) if config.own_embedding else None
        vocabulary = vocabulary_of(draft_to_target(source, config), target.loaded.config.vocab_size)
    if not config.own_lm_head:
        weights[LM_HEAD] = target.lm_head.float()
    lesson = make_lesson(
        target, vocabulary, max_positions=max_positions, compiled=means.compiled is True, dtype=target.activations,
        layer=config.layer, embedding=own, normed_residual=config.norm_before_residual,
    )  # fmt: skip
    return weights, lesson


def _check_build(head: Path, config: Eagle3Config) -> None:
    extras = {
        "norms before fc": config.norm_before_fc or config.fc_norm,
        "a bias of fc": config.fc_bias,
        "norms of queries and keys": config.qk_norm,
        "a recycled feature after the norm": config.recycle_normed,
        "logits before the norm": not config.logits_from_normed,
        "biases": config.layer.attention_bias or config.layer.mlp_bias,
    }
    if found := [name for name, there in extras.items() if there]:
        raise ConfigError(
            f"the head at {head} has {', '.join(found)}, which evaluation does not compute",
            remedy="the engine serves it all the same: measure it with bench/bench.py",
        )


def table(result: dict[str, Any]) -> str:
    """The verdict as Markdown: tokens per round, right guesses by depth, branches."""
    lines = ["| answers | lookahead | tokens per round | ended with an end token |", "|---|---|---|---|"]
    for kind, found in result.items():
        for lookahead, value in found["tokens_per_round"].items():
            count = f"{kind} ({found['answers']}, {found['ended']} ended)"
            lines.append(f"| {count} | {lookahead} | {value['all']:.2f} | {value['ended']:.2f} |")
    for kind, found in result.items():
        depths = " / ".join(f"{share:.3f}" for share in found["by_depth"])
        lines += ["", f"Right guesses by step of self-conditioning, {kind}: {depths}."]
    lines += [
        "",
        "| answers | accepted before | outcomes | cached branch | fresh draft | ratio |",
        "|---|---|---|---|---|---|",
    ]
    for kind, found in result.items():
        for name, rows in ((kind, found["branches"]), (f"{kind}, foreseen", found["branches_foreseen"])):
            for row in rows:
                numbers = f"{row['outcomes']} | {row['branch']:.2f} | {row['fresh']:.2f} | {row['ratio']:.3f}"
                lines.append(f"| {name} | {row['depth']} | {numbers} |")
    return "\n".join(lines)
