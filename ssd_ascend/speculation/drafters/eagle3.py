"""Drafter `eagle3`: a one-layer head that reads the target's features. An entry is a token with the feature before it.

Entry i pairs token i + 1 with the target's feature of position i, so N tokens make N - 1 entries. Entries of drafts
were made from the head's own features; once the drafts are accepted they are made again from the target's ("extend").
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from ssd_ascend.architectures.eagle3 import Eagle3Head
from ssd_ascend.config.model import ModelConfig
from ssd_ascend.distributed.collectives import SingleRank
from ssd_ascend.errors import ConfigError
from ssd_ascend.kv.blocks import BlockManager
from ssd_ascend.layers.context import BuildContext
from ssd_ascend.runtime.load import CacheSize, make_cache, make_context
from ssd_ascend.runtime.model_runner import ModelRunner
from ssd_ascend.runtime.pack import to_device
from ssd_ascend.speculation.base import Drafter, DraftSequence
from ssd_ascend.speculation.drafters.capture import capture
from ssd_ascend.speculation.drafters.feed import FeatureTable
from ssd_ascend.speculation.drafters.paged import PagedDrafter
from ssd_ascend.speculation.rope_choice import choose_rope
from ssd_ascend.speculation.setup import DrafterKind, DraftSetup, TargetRunner
from ssd_ascend.weights.eagle3 import load_eagle3, read_eagle3_config
from ssd_ascend.weights.loader import read_config


class FeatureEntries:
    """Entry i is token i + 1 and the target's feature of position i; entries of drafts are always made again."""

    shift = 1
    wants_features = True
    keeps_drafted = False

    def __init__(
        self, head: Eagle3Head, dtype: torch.dtype, device: torch.device, store: torch.Tensor | None = None
    ) -> None:
        """`store`: the target's features by slot, where sequences say slots."""
        self._head = head
        self._dtype = dtype
        self._device = device
        self._store = store

    def hidden(self, seq: DraftSequence, start: int, end: int) -> torch.Tensor:
        """The combined features of positions [start, end): [end - start, d]."""
        part = slice(start - seq.features_start, end - seq.features_start)
        if self._store is not None and seq.feature_slots is not None:
            slots = torch.from_numpy(seq.feature_slots[part])
            features = self._store.index_select(0, to_device(slots, self._store.device))
        else:
            assert seq.features is not None
            features = seq.features[part]
        return self._head.combine(to_device(features, self._device).to(self._dtype))


def capture_layers(path: Path | None, target: ModelConfig) -> tuple[int, ...]:
    """The target layers (their inputs) that the head conditions on."""
    if path is None:
        raise ConfigError("drafter 'eagle3' needs a head", remedy="give --draft, or set SSD_DRAFT_MODEL")
    if path.is_file():
        raise ConfigError(
            f"{path} is a model, not an EAGLE-3 head", remedy="give the head's directory, or use --drafter model"
        )
    return read_eagle3_config(path, target).capture_layers


def build(setup: DraftSetup) -> Drafter:
    """Load the head, checked against its target."""
    head, runner, ctx = _load(setup, setup.cache_size())
    to_target = _reduced_vocabulary(head, setup.target.vocab_size)
    table = FeatureTable(
        head.config.feature_size, head.config.layer.hidden_size, ctx.activation_dtype, head.combine, setup.feature_store
    )
    captured = capture(setup, runner, catch_up=setup.lookahead + 1, to_target=to_target, table=table)
    return PagedDrafter(
        runner,
        BlockManager(runner.kv.num_blocks, setup.block_size, prefix_cache=False),
        FeatureEntries(head, ctx.activation_dtype, setup.device, setup.feature_store),
        setup.sampler(ctx.dtype, to_target),
        max_positions=setup.max_positions,
        max_batched_tokens=setup.max_batched_tokens,
        max_backlog=setup.max_backlog,
        tree_mask=setup.tree_mask,
        captured=captured,
    )


def _load(setup: DraftSetup, size: CacheSize) -> tuple[Eagle3Head, ModelRunner, BuildContext]:
    path = setup.required_path()
    config = read_eagle3_config(path, read_config(setup.target.path), rope=setup.config.draft_rope)
    ctx = make_context(
        config.layer, setup.backend, setup.device, SingleRank(), dtype=setup.dtype(None), block_size=setup.block_size
    )
    head = load_eagle3(
        path, config, ctx, target=setup.target.path, max_positions=setup.max_positions, share=setup.share
    )
    kv = make_cache(setup.backend, ctx, 1, setup.block_size, size)
    return head, ModelRunner(head, kv, ctx.attention, setup.device), ctx


def settle(setup: DraftSetup, target: TargetRunner) -> DraftSetup:
    """Decide on a rope that was left to measurement."""
    if setup.config.draft_rope != "auto":
        return setup

    def load(setup: DraftSetup, num_blocks: int) -> tuple[Eagle3Head, ModelRunner, BuildContext]:
        return _load(setup, replace(setup.cache_size(), num_blocks=num_blocks))

    return setup.with_rope(choose_rope(setup, target, load))


def _reduced_vocabulary(head: Eagle3Head, target_vocab: int) -> torch.Tensor | None:
    """The map of draft ids to target ids, or None when it is the identity."""
    is_identity = head.d2t.shape[0] == target_vocab and bool(
        (head.d2t == torch.arange(target_vocab).to(head.d2t.device)).all()
    )
    return None if is_identity else head.d2t


KIND = DrafterKind(build, capture_layers, is_free=False, settle=settle)
