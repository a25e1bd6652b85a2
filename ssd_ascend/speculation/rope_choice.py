"""Whose rotary settings an EAGLE-3 head should use (`--draft-rope auto`): both are tried, the better one is kept.

Published heads often say nothing, or something else than they were trained with, and the wrong rule costs acceptance in
silence. So the target writes a short text of its own, and the head says under either rule what the target's next token
is. Needs no tokenizer, takes one decode step per token. Called once, before the drafter is built.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from ssd_ascend.architectures.eagle3 import Eagle3Head
from ssd_ascend.core.batch import Mode
from ssd_ascend.layers.context import BuildContext
from ssd_ascend.log import fields, get_logger
from ssd_ascend.runtime.inputs import Row, build_batch
from ssd_ascend.runtime.model_runner import ModelRunner
from ssd_ascend.speculation.setup import DraftSetup, TargetRunner
from ssd_ascend.weights.eagle3 import read_eagle3_config
from ssd_ascend.weights.loader import read_config

RULES = ("draft", "target")
_TEXT_TOKENS = 128
"""Rules that differ by a factor of 10 in theta are told apart by their larger angles well before that."""
_log = get_logger(__name__)

LoadHead = Callable[[DraftSetup, int], tuple[Eagle3Head, ModelRunner, BuildContext]]
"""Loads the head as `setup.config.draft_rope` says, with a cache of that many blocks."""


class Text(NamedTuple):
    """tokens: x_0 .. x_(n-1). features: [n, F] of their positions. best: the target's likeliest token after each."""

    tokens: list[int]
    features: torch.Tensor
    best: torch.Tensor


def choose_rope(setup: DraftSetup, target: TargetRunner, load: LoadHead) -> str:
    """The rule under which the head foresees more of the target's tokens: "draft" (also in a tie) or "target"."""
    path: Path = setup.required_path()
    config = read_config(setup.target.path)
    own, lent = (read_eagle3_config(path, config, rope=rule).layer.rope for rule in RULES)  # type: ignore[arg-type]
    if own == lent:
        return "draft"
    text = write_text(target, min(_TEXT_TOKENS, setup.target.max_model_len), config.bos_token_id or 0)
    right = {rule: foreseen(setup.with_rope(rule), text, load) for rule in RULES}
    chosen = max(RULES, key=lambda rule: right[rule])
    _log.info("rope of the EAGLE-3 head: %s %s", chosen, fields(**right, of=len(text.tokens) - 1))
    return chosen


@torch.inference_mode()
def write_text(target: TargetRunner, count: int, first: int) -> Text:
    """`count` tokens sampled from the target, seeded. Uses the front of its KV cache, which nobody owns yet."""
    size = target.block_size
    count = min(count, (target.kv.num_blocks - 1) * size)
    table = list(range(1, 1 + (count + size - 1) // size))
    generator = torch.Generator().manual_seed(0)
    tokens, best = [first], []
    for place in range(count):
        logits = target.run(Mode.DECODE, [Row([tokens[-1]], place, table, 1)]).logits[0].float().cpu()
        best.append(int(logits.argmax()))
        tokens.append(int(torch.multinomial(torch.softmax(logits, -1), 1, generator=generator)))
    return Text(tokens[:count], target.kv.read_features(table, 0, count), torch.tensor(best))


@torch.inference_mode()
def foreseen(setup: DraftSetup, text: Text, load: LoadHead) -> int:
    """How many of the target's likeliest tokens the head foresees, from true features at every position."""
    size, count = setup.block_size, len(text.tokens) - 1
    table = list(range(1, 1 + (count + size - 1) // size))
    head, runner, ctx = load(setup, 1 + len(table))
    features = text.features[:count].to(device=setup.device, dtype=ctx.activation_dtype)
    batch = build_batch(
        Mode.PREFILL,
        [Row(text.tokens[1:], 0, table, count)],
        block_size=size,
        device=setup.device,
        hidden_states=head.combine(features),
    )
    guesses = head.d2t[runner.forward(batch).logits.argmax(-1)].cpu()
    return int((guesses == text.best[1:]).sum())
