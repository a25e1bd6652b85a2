"""Drafter `model`: a small model of the target's own vocabulary. An entry is a token."""

from __future__ import annotations

import torch

from ssd_ascend.errors import ConfigError
from ssd_ascend.speculation.base import Drafter, DraftSequence
from ssd_ascend.speculation.drafters.paged import PagedDrafter
from ssd_ascend.speculation.setup import DrafterKind, DraftSetup, no_layers


class TokenEntries:
    """Entry i is token i; entries of drafts stay right when the drafts are accepted."""

    shift = 0
    wants_features = False
    keeps_drafted = True

    def hidden(self, seq: DraftSequence, start: int, end: int) -> torch.Tensor | None:
        """Tokens are all an ordinary model takes."""
        return None


def build(setup: DraftSetup) -> Drafter:
    """Load the draft model. Raises `ConfigError` with both sizes when its vocabulary is not the target's."""
    loaded, blocks = setup.load_model()
    if loaded.config.vocab_size != setup.target.vocab_size:
        raise ConfigError(
            f"the draft model's vocabulary has {loaded.config.vocab_size} tokens and the target's "
            f"{setup.target.vocab_size}",
            remedy="choose a draft model of the target's own family",
        )
    return PagedDrafter(
        loaded.runner,
        blocks,
        TokenEntries(),
        setup.sampler(loaded.dtype),
        max_positions=setup.max_positions,
        max_batched_tokens=setup.max_batched_tokens,
        tree_mask=setup.tree_mask,
    )


KIND = DrafterKind(build, no_layers, is_free=False)
