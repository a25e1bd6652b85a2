"""How many KV blocks a device gets, and what captured steps take of it."""

from __future__ import annotations

from collections.abc import Sequence

from ssd_ascend.backends.base import AttentionBackend, Memory, WorkingAttention
from ssd_ascend.errors import ConfigError

_DEVICE_SHARE = 0.90
"""Of a device's free memory after the weights are loaded; the rest is activations and the allocator's slack."""
_HOST_SHARE = 0.25
_HOST_COMFORT = 384 << 20
"""Host memory is shared with everything else, so a default stops here unless one sequence needs more."""


def num_kv_blocks(
    *,
    block_bytes: int,
    block_size: int,
    max_model_len: int,
    max_num_seqs: int,
    memory: Memory,
    host_memory: bool,
    wanted_gb: float | None = None,
    reserved: int = 0,
) -> int:
    """Blocks that fit: what was asked for, else what the sequences can use, bounded by free memory (all in bytes).

    reserved: what a device will need for captured steps (`graph_bytes`).
    """
    per_sequence = -(-max_model_len // block_size)
    useful = per_sequence * max_num_seqs
    if wanted_gb is not None:
        blocks = int(wanted_gb * 1e9) // block_bytes
    elif host_memory:
        comfort = max(_HOST_COMFORT // block_bytes, per_sequence)
        blocks = min(useful, comfort, int(memory.free * _HOST_SHARE) // block_bytes)
    else:
        blocks = min(useful, int(memory.free * _DEVICE_SHARE - reserved) // block_bytes)
    if blocks < 2 and wanted_gb is not None:
        raise ConfigError(
            f"kv_cache_gb {wanted_gb:g} holds {blocks} blocks of {block_size} tokens ({block_bytes / 1e6:.1f} MB each)",
            remedy=f"a sequence of full length needs {per_sequence * block_bytes / 1e9:.3f}",
        )
    if blocks < 2:
        raise ConfigError(
            f"a KV cache of {blocks} blocks ({block_bytes / 1e6:.1f} MB each) holds no sequence; "
            f"{memory.free / 1e9:.2f} of {memory.total / 1e9:.2f} GB are free"
            + (f", {reserved / 1e9:.2f} of them reserved for captured steps" if reserved else ""),
            remedy="free memory, raise kv_cache_gb, or choose a smaller model",
        )
    return blocks


def must_fit(blocks: int, *, block_bytes: int, memory: Memory) -> None:
    """ConfigError for a cache, asked for as such, that is larger than the device."""
    if blocks * block_bytes > memory.total:
        raise ConfigError(
            f"a KV cache of {blocks} blocks takes {blocks * block_bytes / 1e9:.1f} GB, and this device has "
            f"{memory.total / 1e9:.1f}",
            remedy="lower kv_cache_gb or num_kv_blocks, or leave it out",
        )


def graph_bytes(steps: Sequence[int], *, vocab_size: int, attention: AttentionBackend, max_len: int) -> int:
    """What captured steps of these numbers of tokens hold: the logits of each, and one workspace, which they share."""
    if not steps:
        return 0
    workspace = attention.workspace_bytes(max(steps), max_len) if isinstance(attention, WorkingAttention) else 0
    return 4 * vocab_size * sum(steps) + workspace
