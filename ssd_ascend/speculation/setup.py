"""All that is known when a drafter or a speculator is built: the target's facts, the configuration, and the device."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Rows
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, Protocol

import torch

from ssd_ascend.architectures.registry import CausalLM
from ssd_ascend.backends.base import Backend
from ssd_ascend.config.model import ModelConfig
from ssd_ascend.config.speculation import SpeculationConfig
from ssd_ascend.core.batch import Mode, ModelOutput
from ssd_ascend.distributed.collectives import SingleRank
from ssd_ascend.errors import ConfigError
from ssd_ascend.kv.blocks import BlockManager
from ssd_ascend.kv.cache import KVCache
from ssd_ascend.runtime.graphs import StaticInputs
from ssd_ascend.runtime.inputs import Row
from ssd_ascend.runtime.load import CacheSize, LoadedModel, choose_block_size, choose_dtype, load_runner
from ssd_ascend.runtime.token_masks import TokenMasks
from ssd_ascend.speculation.base import Drafter, FeatureReader, Speculator
from ssd_ascend.speculation.draft_sampler import DraftSampler
from ssd_ascend.structured.compiler import GrammarCompiler
from ssd_ascend.text import Tokenizer
from ssd_ascend.weights.loader import read_config

_BACKLOG, _DEVICE_BACKLOG = 256, 2048
"""A device reads the larger number in the time of a round or two, less than its target took over them; in smaller
portions sequences that came together would go without drafts for many rounds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetFacts:
    """What a drafter must know of the target; plain values, so that they reach a worker in another process."""

    path: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    max_model_len: int
    max_num_seqs: int
    max_batched_tokens: int
    feature_width: int
    """Width of the captured features, 0 when none are."""
    kv_tokens: int
    """Tokens that the target's KV cache holds; a drafter needs about as many."""
    dtype: str
    eos_ids: tuple[int, ...] = ()
    graphs: bool = True
    """Whether to capture device graphs, where there are any."""

    def grammars(self) -> GrammarCompiler:
        """A compiler of grammars for the target's vocabulary, which its own directory tells."""
        return GrammarCompiler(lambda: Tokenizer.load(self.path), vocab_size=self.vocab_size, eos_ids=self.eos_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSetup:
    """How to build one drafter. `path` is where its weights lie, None for drafters without any."""

    backend: Backend
    device: torch.device
    config: SpeculationConfig
    target: TargetFacts
    path: Path | None
    width: int
    """The most branches per sequence, 0 when none are ever drafted (`sd`)."""
    share: CausalLM | None = None
    """The target's model, where the drafter lives in its process and may borrow its embedding and head."""
    feature_store: torch.Tensor | None = None
    """The target's features by slot, where the drafter lives beside it and reads them there."""
    verifications: StaticInputs | None = None
    """Of the target's captured verifications, where a drafter beside it may write the next one's."""
    grammars: GrammarCompiler | None = None
    """The target's compiler of grammars, likewise; a drafter elsewhere makes one of its own."""

    @property
    def max_batched_tokens(self) -> int:
        """The most tokens of one forward."""
        return self.target.max_batched_tokens

    @property
    def max_backlog(self) -> int | None:
        """Prompt tokens that a worker digests per round: it answers for everybody else in between. None for `sd`."""
        most = _BACKLOG if self.backend.capabilities.host_memory else _DEVICE_BACKLOG
        return min(most, self.max_batched_tokens) if self.width else None

    @property
    def lookahead(self) -> int:
        """The most drafts of a speculation."""
        return self.config.max_lookahead

    @property
    def max_positions(self) -> int:
        """Positions a draft may reach: the target's, and a branch beyond its end."""
        return self.target.max_model_len + 2 * self.lookahead + 2

    @property
    def tree_mask(self) -> bool:
        """Whether branches share a row per sequence. Raises `ConfigError` when the device cannot do what was asked."""
        able = self.backend.capabilities.tree_mask
        if self.config.branch_lowering == "tree_mask" and not able:
            raise ConfigError("this device has no tree masks", remedy="use --branch-lowering rows")
        return able and self.config.branch_lowering != "rows"

    def with_rope(self, rule: str) -> DraftSetup:
        """The same, with that rule for the rotary settings of an EAGLE-3 head."""
        return replace(self, config=replace(self.config, draft_rope=rule))  # type: ignore[arg-type]

    def required_path(self) -> Path:
        """The weights. Raises `ConfigError` when none were named."""
        if self.path is None:
            raise ConfigError(
                f"drafter {self.config.drafter!r} needs weights", remedy="give --draft, or set SSD_DRAFT_MODEL"
            )
        return self.path

    @property
    def block_size(self) -> int:
        """KV block size of the draft's cache."""
        return choose_block_size(None, self.backend.capabilities)

    def dtype(self, saved: str | None) -> torch.dtype:
        """The draft's dtype: what was asked for, else the target's."""
        wanted = self.config.draft_dtype
        return choose_dtype(wanted if wanted != "auto" else self.target.dtype, saved, self.backend.capabilities)

    def cache_size(self) -> CacheSize:
        """Room for every token of the target's cache, and for the branches of every sequence."""
        blocks = self.config.draft_kv_blocks
        if blocks is None:
            scratch = self.width * (self.lookahead // self.block_size + 2)
            blocks = self.target.kv_tokens // self.block_size + self.target.max_num_seqs * (scratch + 1) + 1
        return CacheSize(max_model_len=self.max_positions, max_num_seqs=self.target.max_num_seqs, num_blocks=blocks)

    def load_model(self) -> tuple[LoadedModel, BlockManager]:
        """Load an ordinary draft model with a cache of its own."""
        path = self.required_path()
        loaded = load_runner(
            path,
            self.backend,
            self.device,
            SingleRank(),
            dtype=self.dtype(read_config(path).dtype),
            block_size=self.block_size,
            size=self.cache_size(),
        )
        return loaded, BlockManager(loaded.runner.kv.num_blocks, self.block_size, prefix_cache=False)

    def sampler(self, law_dtype: torch.dtype, to_target: torch.Tensor | None = None) -> DraftSampler:
        """How this drafter draws."""
        grammars = self.grammars
        if grammars is None:  # a process of its own: the first answer with a grammar should find drafts there
            grammars = self.target.grammars()
            grammars.warm_beside()
        return DraftSampler(
            num_target_tokens=self.target.vocab_size,
            law_dtype=law_dtype,
            to_target=to_target,
            temperature=self.config.draft_temperature,
            cache_bias=self.config.cache_bias,
            cache_width=max(1, self.width // (self.lookahead + 1)),
            masks=TokenMasks(grammars, keeps_alive=True),
        )


class TargetRunner(Protocol):
    """The target as something to try drafts on, whatever number of ranks it has."""

    block_size: int
    device: torch.device
    kv: KVCache

    def run(self, mode: Mode, rows: Rows[Row]) -> ModelOutput:
        """One forward of these rows."""
        ...


class DrafterKind(NamedTuple):
    """What the registry holds for a drafter.

    capture_layers: which target layers it conditions on, () for none. Given its weights and the target's config, it
        also refuses a pair that cannot work, before anything large is loaded.
    is_free: drafting costs next to nothing, so it is left out, row by row, where it does not pay.
    settle: replaces what the configuration leaves to measurement, with the target there to measure on.
    """

    build: Callable[[DraftSetup], Drafter]
    capture_layers: Callable[[Path | None, ModelConfig], tuple[int, ...]]
    is_free: bool
    settle: Callable[[DraftSetup, TargetRunner], DraftSetup] = lambda setup, target: setup


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetSide:
    """What a speculator is built from.

    `features` reads the target's captured hidden states, None when there are none. verifications: the inputs of its
    captured ones, where rounds may be queued ahead.
    """

    kind: DrafterKind
    setup: DraftSetup
    features: FeatureReader | None
    verifications: StaticInputs | None = None


SpeculatorKind = Callable[[TargetSide], Speculator]
"""What the registry holds for a speculator."""
