"""The device seam. Everything above `backends/` names only this module; concrete backends arrive through the registry.

Shaped by the hardest device: the NPU's attention takes sequence lengths as host integers, freezes them into a captured
graph, and must have them re-issued before each replay (`AttentionBackend.replan`). On other devices that is a no-op.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch

from ssd_ascend.core.advance import Advance
from ssd_ascend.core.attention import AttentionMetadata


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a device can do. Code above asks these; it never asks which backend it is on.

    graphs: captured graphs are available. tree_mask: attention honours `AttentionMetadata.tree_mask`.
    device_lengths: attention reads lengths from device tensors, so a step can be prepared without the host.
    peer_transfer: device tensors can be sent to another process directly. block_sizes: legal KV block sizes, the
    preferred one first. dtypes: serving dtypes, the preferred one first. max_verify_tokens: most query tokens of one
    row in a verify batch (lookahead + 1), None when unlimited. row_invariant: a token's logits are bitwise the same
    whatever the number of rows beside it. host_memory: the device's memory is the host's, which others need too.
    wide_activations: with 16-bit weights everything else is float32, at no cost: linears take float32 beside them.
    streams_overlap: two streams of one process run side by side, where two processes take turns.
    padded_graphs: padding costs next to nothing, so one graph serves many sizes; else each size has its own.
    """

    graphs: bool
    tree_mask: bool
    device_lengths: bool
    peer_transfer: bool
    block_sizes: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]
    max_verify_tokens: int | None
    row_invariant: bool
    host_memory: bool = False
    wide_activations: bool = False
    streams_overlap: bool = False
    padded_graphs: bool = True


class AttentionSpec(NamedTuple):
    """The shape of one model's attention on one rank (heads after tensor-parallel division)."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    scale: float


class Memory(NamedTuple):
    """Bytes."""

    free: int
    total: int


Linear = Callable[[torch.Tensor], torch.Tensor]
"""A weight made ready for the device: maps [T, in] to [T, out]."""


@runtime_checkable
class Ops(Protocol):
    """The small operators a model is made of. `backends/cpu/ops.py` is the reference for each.

    T is the number of packed tokens. Every op returns its result; the ones that say "in place" may also overwrite.
    """

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        """Prepare weight [out, in] (and bias [out]) once, at load; the caller drops its own reference to them."""

    def vocab_head(self, weight: torch.Tensor) -> Linear:
        """`linear` for a weight [V, H] that gives logits: the result is float32, as 16 bits round logits into ties."""

    def embedding(self, weight: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Rows of weight [V, H] for ids int64 [T] -> [T, H]."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """RMSNorm over the last dimension in float32, result in x.dtype. x: [..., H]."""

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """s = x + residual; returns (rms_norm(s), s). `residual` may be overwritten with s."""

    def silu_and_mul(self, x: torch.Tensor) -> torch.Tensor:
        """[T, 2*I] -> silu(first half) * second half, [T, I]."""

    def rotary(
        self, q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotate halves (NeoX style). q: [T, Hq, D]; k: [T, Hkv, D]; cos_sin: float32 [P, rotary_dim] (cos | sin).

        Dimensions beyond rotary_dim pass through. May work in place.
        """


@runtime_checkable
class GatedOps(Protocol):
    """Operators that also activate, where a device does both in one launch."""

    def gated_linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        """`Ops.linear` and then `Ops.silu_and_mul`: weight [2*I, in] prepared to map [T, in] to [T, I]."""


@runtime_checkable
class ChoosingOps(Protocol):
    """Operators with an arg-max of their own, where torch's takes many launches."""

    def top_tokens(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """float32 [R, V] -> the arg-max of each row (the first of equals, int64 [R]) and its value.

        NaN counts as the largest; its row's value is then no finite number, its token any below V.
        """


@runtime_checkable
class RankingOps(Protocol):
    """Operators with a top-k of their own for a few of many, where torch's takes long."""

    def top_few(self, logits: torch.Tensor, count: int) -> torch.Tensor:
        """float32 [R, V] -> the `count` likeliest tokens of each row, best first (the first of equals), int64."""


@runtime_checkable
class AdvancingOps(Protocol):
    """Operators that work out the next round's numbers in one launch."""

    def advance(self, to: Advance) -> None:
        """See `runtime.advance.advance`: the very same numbers."""


Experts = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Experts made ready for the device: maps x [T, H] and the experts chosen by each token, int64 [T, k], to [T, k, H]."""


@runtime_checkable
class ExpertOps(Protocol):
    """Operators for many small feed-forward parts, where a device runs those that are chosen by itself."""

    def experts(self, gate_up: torch.Tensor, down: torch.Tensor) -> Experts | None:
        """down(silu(gate(x)) * up(x)) of each chosen expert: weights [E, 2*I, H] and [E, H, I], prepared once.

        A token's answers must not depend, in any bit, on the tokens beside it; None where that cannot be had.
        """


@runtime_checkable
class AttentionBackend(Protocol):
    """Paged attention of one model on one device."""

    def kv_shape(self, num_blocks: int) -> tuple[int, ...]:
        """Shape of one layer's KV tensor (keys and values together), so that the cache can be allocated as one."""

    def plan(self, meta: AttentionMetadata) -> None:
        """Prepare for a step's layers; called once before each forward that is not a replay.

        Where a forward is captured, so is what this launches; a replay has `replan` instead.
        """

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv: torch.Tensor, meta: AttentionMetadata, layer: int
    ) -> torch.Tensor:
        """Store k, v [T, Hkv, D] at meta.slot_mapping in `kv`, then attend with q [T, Hq, D] -> [T, Hq * D]."""

    def replan(self, meta: AttentionMetadata, bucket: int) -> None:
        """Re-issue host-side arguments to the graph captured for `bucket` tokens, around its replay."""


@runtime_checkable
class StepwiseAttention(Protocol):
    """Attention with host lengths whose graphs may nevertheless hold several steps, each with lengths of its own."""

    def replan_step(self, meta: AttentionMetadata, bucket: int, step: int) -> None:
        """`AttentionBackend.replan` for the step-th forward (from 0) of the graph that replays next."""


@runtime_checkable
class RotatingAttention(Protocol):
    """Attention that also applies the rotation, where a device does both (and the cache write) in one launch."""

    def forward_rotated(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        positions: torch.Tensor,
        cos_sin: torch.Tensor,
        kv: torch.Tensor,
        meta: AttentionMetadata,
        layer: int,
    ) -> torch.Tensor:
        """`Ops.rotary` and then `AttentionBackend.forward`; q, k and v may be overwritten."""


class Finding(NamedTuple):
    """One answer of a device about itself, for `doctor --probe`.

    state: "ok", "failed", "skipped", or "measured" for a number that is neither right nor wrong. remedy: what to switch
    off, or to do, after a failure.
    """

    name: str
    state: str
    detail: str
    remedy: str = ""


@runtime_checkable
class Examinable(Protocol):
    """A backend with questions of its own: forms of operators it relies on or avoids, costs that only it has."""

    def examine(self, device: torch.device) -> Iterator[Finding]:
        """Ask them all; what fails is a finding, never an exception."""


@runtime_checkable
class MeetingBackend(Protocol):
    """A backend whose devices can carry the line between a target and its draft worker.

    meeting: "module:function", called in both processes as (store, rank, device index, timeout_s); it blocks until both
    are there and gives a `transport.device.Exchange`. A name, because the worker is not there yet when it is chosen.
    """

    meeting: str


@runtime_checkable
class WorkingAttention(Protocol):
    """Attention that needs memory of its own for partial results."""

    def workspace_bytes(self, tokens: int, max_len: int) -> int:
        """What a step of so many tokens holds at most, when no row has more than `max_len` keys."""


class Graph(Protocol):
    """A captured forward."""

    def replay(self) -> None:
        """Run it again over the same addresses."""


class GraphCapture(Protocol):
    """Captures callables into graphs that share one memory pool."""

    def capture(self, fn: Callable[[], None]) -> Graph:
        """Warm `fn` up, then record it."""


@runtime_checkable
class CompilingBackend(Protocol):
    """A device whose kernels are compiled at their first call, which takes a moment each: one may ask for it before."""

    def compiling(self) -> AbstractContextManager[None]:
        """Forwards inside compute nothing; when this ends, all kernels that they call are compiled, side by side."""


class Collectives(Protocol):
    """The ranks of one model."""

    rank: int
    size: int

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over ranks; may work in place."""

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Concatenate the ranks' tensors along `dim`."""

    def broadcast(self, x: torch.Tensor, src: int = 0) -> torch.Tensor:
        """Rank `src`'s tensor on every rank; works in place elsewhere."""

    def barrier(self) -> None:
        """Wait for all ranks."""


@runtime_checkable
class StoppingBackend(Protocol):
    """A backend whose collectives wait for a rank that is lost, also when their group has ended."""

    def stop(self, device: torch.device) -> None:
        """Drop all that the device was given, from any thread; whoever waits for it gets a RuntimeError. Raises that,
        too, where it cannot be done."""


@runtime_checkable
class SharingBackend(Protocol):
    """A backend whose devices read one another's memory: a draft worker finds its target's features where they are."""

    def share(self, tensor: torch.Tensor) -> str:
        """What another process of this host needs to open it. The tensor must outlive all who do."""

    def open_shared(self, text: str, device: torch.device) -> torch.Tensor:
        """The tensor, as `device` addresses it; TransportError where it cannot."""


class SmallSums(Protocol):
    """Sums over the ranks of one model that are too small for the link's bandwidth to matter."""

    def fits(self, x: torch.Tensor) -> bool:
        """Whether `x` is one; the same on all ranks."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """See `Collectives.all_reduce`."""

    def abort(self) -> None:
        """A rank is lost: end all waiting for it, from any thread."""


@runtime_checkable
class SummingBackend(Protocol):
    """A backend with a faster way to small sums than its library of collectives."""

    def small_sums(self, collectives: Collectives, device: torch.device) -> SmallSums | None:
        """Called by all ranks together, once; None where it is not there, or not faster."""


class Backend(Protocol):
    """One kind of device."""

    name: str
    """Registry key and flag value."""
    device_type: str
    """What torch.device() takes."""
    collective: str
    """torch.distributed's backend name."""
    capabilities: Capabilities
    ops: Ops

    def num_devices(self) -> int | None:
        """How many devices this machine has; None where there are as many as one likes."""

    def device(self, index: int) -> torch.device:
        """The index-th device, ConfigError when there is none; made current where the runtime has such a notion."""

    def describe(self, device: torch.device) -> str:
        """Human-readable name for banners and result files; says "(emulated)" where it is."""

    def memory(self, device: torch.device) -> Memory:
        """Free and total bytes."""

    def attention(self, spec: AttentionSpec, device: torch.device) -> AttentionBackend:
        """The attention of one model."""

    def graphs(self, device: torch.device) -> GraphCapture | None:
        """Graph capture, or None where there is none."""

    def stream(self) -> AbstractContextManager[Any]:
        """A context in which work goes to a stream of its own (nothing, where there are no streams)."""

    def synchronize(self, device: torch.device) -> None:
        """Wait for everything queued; never called on the hot path."""

    def to_host(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The step's one device-to-host copy: all tensors together, complete when it returns."""
