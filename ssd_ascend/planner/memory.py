"""What a device must hold: weights, KV cache, buffers. A plan may fill `USABLE` of it; the rest is for activations."""

from __future__ import annotations

from ssd_ascend.config.plan import Memory
from ssd_ascend.config.topology import Topology
from ssd_ascend.planner.shapes import Shape

USABLE = 0.9
_GB = 1e9
_COLLECTIVE_BUFFER = 2 * 200e6  # send and receive side of one communicator, at the default of HCCL_BUFFSIZE
_PEER_BUFFER = 2 * 20e6  # of each two-rank communicator, at the default of P2P_HCCL_BUFFSIZE


def target_memory(
    topology: Topology,
    target: Shape,
    *,
    tp: int,
    batch: int,
    context: int,
    beside: Shape | None = None,
    speculators: int = 0,
    processes: int = 1,
) -> Memory:
    """One rank of the target; `beside` is a draft that lives on the same device. KV heads are replicated beyond their
    number. `processes` share a host's memory."""
    weights = target.resident_params * target.dtype_bytes / tp
    kv = batch * context * target.kv_bytes_per_token / min(tp, target.kv_heads)
    if beside is not None:
        weights += beside.resident_params * beside.dtype_bytes
        kv += batch * context * beside.kv_bytes_per_token
    buffers = (_COLLECTIVE_BUFFER if tp > 1 else 0.0) + speculators * _PEER_BUFFER
    return _memory(topology, weights, kv, buffers, processes)


def speculator_memory(topology: Topology, draft: Shape, *, sequences: int, context: int, processes: int = 1) -> Memory:
    """A speculator that serves `sequences`."""
    weights = draft.resident_params * draft.dtype_bytes
    kv = sequences * context * draft.kv_bytes_per_token
    return _memory(topology, weights, kv, _PEER_BUFFER, processes)


def _memory(topology: Topology, weights: float, kv: float, buffers: float, processes: int) -> Memory:
    shared_by = processes if topology.device.shares_host else 1
    return Memory(
        weights_gb=weights / _GB,
        kv_gb=kv / _GB,
        buffers_gb=buffers / _GB,
        capacity_gb=topology.device.memory_gb.value * USABLE / shared_by,
    )


def largest_context(memory: Memory, context: int) -> int:
    """The longest context per sequence that would fit, in steps of 256 tokens; 0 when the weights alone do not."""
    room = memory.capacity_gb - memory.weights_gb - memory.buffers_gb
    return max(0, int(room / (memory.kv_gb / context)) // 256 * 256)
