"""Drafter `model`: a small model of the target's own vocabulary. An entry is a token."""

from __future__ import annotations

from pathlib import Path

import torch

from ssd_ascend.config.model import ModelConfig
from ssd_ascend.errors import ConfigError
from ssd_ascend.speculation.base import Drafter, DraftSequence
from ssd_ascend.speculation.drafters.capture import capture
from ssd_ascend.speculation.drafters.paged import PagedDrafter
from ssd_ascend.speculation.setup import DrafterKind, DraftSetup
from ssd_ascend.weights.loader import CONFIG, read_config, read_json

_CATCH_UP = 2
"""Entries missing when drafting begins: the recovery token's, and the last draft's when all were accepted."""


class TokenEntries:
    """Entry i is token i; entries of drafts stay right when the drafts are accepted."""

    shift = 0
    wants_features = False
    keeps_drafted = True

    def hidden(self, seq: DraftSequence, start: int, end: int) -> torch.Tensor | None:
        """Tokens are all an ordinary model takes."""
        return None


def capture_layers(path: Path | None, target: ModelConfig) -> tuple[int, ...]:
    """None. Raises `ConfigError` with both sizes when the draft's vocabulary is not the target's."""
    if path is None:
        raise ConfigError("drafter 'model' needs a draft model", remedy="give --draft, or set SSD_DRAFT_MODEL")
    if path.is_dir() and "draft_vocab_size" in read_json(path / CONFIG):
        raise ConfigError(f"{path} is an EAGLE-3 head, not a model", remedy="use --drafter eagle3")
    draft = read_config(path)
    if draft.vocab_size != target.vocab_size:
        raise ConfigError(
            f"the draft model's vocabulary has {draft.vocab_size} tokens and the target's {target.vocab_size}",
            remedy="choose a draft model of the target's own family",
        )
    return ()


def build(setup: DraftSetup) -> Drafter:
    """Load the draft model."""
    loaded, blocks = setup.load_model()
    captured = capture(setup, loaded.runner, catch_up=_CATCH_UP, to_target=None)
    return PagedDrafter(
        loaded.runner,
        blocks,
        TokenEntries(),
        setup.sampler(loaded.dtype),
        max_positions=setup.max_positions,
        max_batched_tokens=setup.max_batched_tokens,
        max_backlog=setup.max_backlog,
        tree_mask=setup.tree_mask,
        captured=captured,
    )


KIND = DrafterKind(build, capture_layers, is_free=False)
