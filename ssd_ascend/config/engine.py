"""How one engine runs: sizes, budgets and devices. Built from flags by the doors, read by `engine/builder.py`.

Torch-free.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ssd_ascend.config.counts import check_count, check_threads
from ssd_ascend.config.speculation import SpeculationConfig
from ssd_ascend.errors import ConfigError

DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """One engine. Raises `ConfigError` when numbers cannot go together.

    `model` is whatever `--model` accepts. `kv_cache_gb` None sizes the cache from the device's free memory (on a CPU:
    what `max_num_seqs` sequences of a moderate length need). `max_batched_tokens` bounds the tokens of one forward.
    `seed` is where requests that bring none get theirs from, in the order they come in; None draws fresh ones.
    """

    model: str
    device: str | None = None
    dtype: str = "auto"
    tensor_parallel: int = 1
    max_model_len: int | None = None
    max_num_seqs: int = 32
    max_batched_tokens: int = 2048
    block_size: int | None = None
    kv_cache_gb: float | None = None
    num_kv_blocks: int | None = None
    prefix_cache: bool = True
    graphs: bool = True
    threads: int | None = None
    seed: int | None = None
    served_model_name: str | None = None
    chat_template: str | None = None
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype is {self.dtype!r}", remedy=f"choose one of {', '.join(DTYPES)}")
        for name in ("tensor_parallel", "max_num_seqs", "max_batched_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}: it must be at least 1", remedy=f"raise {name}")
        if self.max_model_len is not None and self.max_model_len < 2:
            raise ConfigError(f"max_model_len is {self.max_model_len}", remedy="a prompt and an answer need at least 2")
        if self.seed is not None and not -(2**63) <= self.seed < 2**64:
            raise ConfigError(f"seed is {self.seed}", remedy="give a number of 64 bits")
        if self.kv_cache_gb is not None and not 0.0 < self.kv_cache_gb < float("inf"):
            raise ConfigError(f"kv_cache_gb is {self.kv_cache_gb}", remedy="give a positive number of gigabytes")
        check_threads("threads", self.threads)
        for name in ("num_kv_blocks", "block_size"):
            check_count(name, getattr(self, name))
        if self.kv_cache_gb is not None and self.num_kv_blocks is not None:
            raise ConfigError(
                "kv_cache_gb and num_kv_blocks both say how large the cache is", remedy="give one of them"
            )
        self._check_thread()
        rows = self.max_num_seqs * (self.speculation.max_lookahead + 1)
        if rows > self.max_batched_tokens:
            raise ConfigError(
                f"max_batched_tokens is {self.max_batched_tokens}, but {self.max_num_seqs} sequences with lookahead "
                f"{self.speculation.max_lookahead} verify {rows} tokens a step",
                remedy=f"raise max_batched_tokens to {rows}, or lower max_num_seqs or lookahead",
            )

    def _check_thread(self) -> None:
        """A draft worker in a thread is on the target's device. Where nobody has named that yet, the engine asks."""
        kind, _ = self.speculation.draft_place
        if self.speculation.worker != "thread" or self.device is None or ":" in self.device:
            return
        if kind not in ("", self.device):
            raise ConfigError(
                f"draft_device is {self.speculation.draft_device!r}, but a worker in a thread is on the target's "
                f"device, {self.device!r}",
                remedy="leave draft_device out, or make worker 'process'",
            )
