"""`NpuBackend`: Ascend NPUs behind the device seam; loaded by name through `backends/registry.py`.

torch_npu is imported here and not by torch itself, so that the emulator can come first and what is missing is said in
one sentence.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed

from ssd_ascend import env
from ssd_ascend.backends.base import AttentionBackend, AttentionSpec, Capabilities, Finding, GraphCapture, Memory, Ops
from ssd_ascend.backends.npu import emulator, environment
from ssd_ascend.backends.npu.slots import Slots, slots_of
from ssd_ascend.backends.npu.soc import Soc, find_soc
from ssd_ascend.errors import ConfigError, TransportError, first_line
from ssd_ascend.transport.device import Exchange

if TYPE_CHECKING:
    from ssd_ascend.backends.npu.graphs import NpuGraphs

_VERDICT_BYTES = 1 << 16
_STOP_MS = 10_000
_EMULATE = "set SSD_NPU_EMULATOR=1 to run on the emulator"


class NpuBackend:
    """The NPUs torch_npu sees."""

    name: str = "npu"
    device_type: str = "npu"
    collective: str = "hccl"
    meeting: str = f"{__name__}:meet"

    def __init__(self) -> None:
        self._npu, self._soc = _start()
        # after torch_npu is there: these modules call it
        from ssd_ascend.backends.npu.graphs import Recorder, Waits
        from ssd_ascend.backends.npu.ops import NpuOps

        self._recorder = Recorder()
        self._waits = Waits()
        self._update_streams: dict[torch.device, Any] = {}
        self._staging: list[torch.Tensor] = []
        """Pinned buffers that no copy writes to."""
        self.ops: Ops = NpuOps()
        self.capabilities = Capabilities(
            graphs=True,
            tree_mask=False,
            device_lengths=False,
            peer_transfer=True,
            block_sizes=(128,),
            dtypes=(torch.bfloat16, torch.float16),
            max_verify_tokens=16,
            row_invariant=False,
        )

    def num_devices(self) -> int:
        """Those that this process may see. An A3 card is two devices."""
        count: int = self._npu.device_count()
        return count

    def device(self, index: int) -> torch.device:
        """The index-th NPU, made current; ConfigError when there are fewer."""
        if index >= self.num_devices():
            raise ConfigError(
                f"there is no NPU {index}: this machine has {self.num_devices()}",
                remedy="ask for fewer devices, or check ASCEND_RT_VISIBLE_DEVICES",
            )
        device = torch.device("npu", index)
        self._npu.set_device(device)
        return device

    def describe(self, device: torch.device) -> str:
        """Such as "npu: Ascend910_9392, Atlas A3 (910C) (emulated)"."""
        suffix = " (emulated)" if emulator.is_loaded() else ""
        return f"npu: {self._npu.get_device_name(device)}, {self._soc.name}{suffix}"

    def memory(self, device: torch.device) -> Memory:
        """Free and total bytes; what torch's allocator holds without using it counts as free."""
        from ssd_ascend.backends.npu.graphs import bury

        bury(device)
        free, total = self._npu.mem_get_info(device)
        idle = self._npu.memory_reserved(device) - self._npu.memory_allocated(device)
        return Memory(free=free + idle, total=total)

    def attention(self, spec: AttentionSpec, device: torch.device) -> AttentionBackend:
        """Paged attention of one model."""
        from ssd_ascend.backends.npu.attention import NpuAttention

        return NpuAttention(spec, device, self._recorder)

    def graphs(self, device: torch.device) -> GraphCapture | None:
        """ACL graphs; None where this chip keeps no more of them. Those who ask first have them: a target asks before
        its draft is loaded, and for its largest sizes first, where most is to be gained."""
        graphs = self._capturer(device)
        graphs.make_room()
        return graphs if graphs.may_capture() else None

    def _capturer(self, device: torch.device) -> NpuGraphs:
        from ssd_ascend.backends.npu.graphs import NpuGraphs

        if device not in self._update_streams:
            self._update_streams[device] = self._npu.Stream(device)
        slots = []
        if self._soc.max_graphs is not None:
            slots.append(slots_of(device, self._soc.max_graphs))
        if self._soc.max_collective_graphs is not None and _has_ranks():
            slots.append(Slots(self._soc.max_collective_graphs))  # one model's own: no other is spread over ranks
        return NpuGraphs(device, self._recorder, self._update_streams[device], self._waits, slots)

    def stream(self) -> AbstractContextManager[Any]:
        """A stream of its own for the work queued inside."""
        context: AbstractContextManager[Any] = self._npu.stream(self._npu.Stream())
        return context

    def synchronize(self, device: torch.device) -> None:
        """Wait for everything queued."""
        self._npu.synchronize(device)

    def stop(self, device: torch.device) -> None:
        """See `StoppingBackend`: HCCL waits for a lost rank until HCCL_EXEC_TIMEOUT.

        CANN is asked, and not `torch_npu.npu.stop_device`: that holds the interpreter while it asks the same without a
        limit of time, and every later error of the process then reads "FORCE STOP".
        """
        try:
            abort = ctypes.CDLL("libascendcl.so").aclrtDeviceTaskAbort
        except (OSError, AttributeError) as error:  # no such library, or one of a CANN that cannot do this
            raise RuntimeError(f"NPU {device.index} goes on waiting: {first_line(error)}") from error
        code = abort(device.index, _STOP_MS)
        if code != 0:
            raise RuntimeError(f"NPU {device.index} goes on waiting: aclrtDeviceTaskAbort answered {code}")

    def examine(self, device: torch.device) -> Iterator[Finding]:
        """See `Examinable`."""
        from ssd_ascend.backends.npu.examine import SPEC, examine

        graphs, attention = self._capturer(device), self.attention(SPEC, device)
        yield from examine(device, graphs, attention)  # type: ignore[arg-type]

    def to_host(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """All tensors into one pinned buffer, one after the other on the stream, then one wait.

        A verdict goes through a buffer that is kept: one that is given back costs an event.
        """
        # widest numbers first, so that every piece is aligned for its own type
        order = sorted(range(len(tensors)), key=lambda i: -tensors[i].element_size())
        sizes = [tensors[i].numel() * tensors[i].element_size() for i in order]
        is_small = sum(sizes) <= _VERDICT_BYTES
        kept = (self._staging.pop() if self._staging else _pinned(_VERDICT_BYTES)) if is_small else None
        staging = _pinned(sum(sizes)) if kept is None else kept[: sum(sizes)]
        arrived: list[torch.Tensor] = [staging] * len(tensors)
        for i, piece in zip(order, staging.split(sizes), strict=True):
            arrived[i] = piece.view(tensors[i].dtype).view(tensors[i].shape)
            arrived[i].copy_(tensors[i], non_blocking=True)
        self._waits.wait(self._npu.current_stream())
        if kept is None:
            return arrived
        copied = [piece.clone() for piece in arrived]
        self._staging.append(kept)
        return copied


def _has_ranks() -> bool:
    return distributed.is_initialized() and distributed.get_world_size() > 1


def _pinned(num_bytes: int) -> torch.Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)


def _start() -> tuple[Any, Soc]:
    """Settings, emulator, torch_npu, in this order; ConfigError says in one sentence what is missing."""
    emulated = env.npu_emulator() or emulator.is_loaded()
    if find_spec("torch_npu") is None:
        raise ConfigError(
            "device npu needs the package torch_npu, which is not installed",
            remedy=f"pip install -r requirements/npu.txt in an environment of its own; without an NPU also {_EMULATE}",
        )
    environment.apply(emulated=emulated)
    if emulated:
        emulator.load()
    try:
        import torch_npu
    except Exception as error:  # torch_npu reports what it misses as just that
        raise ConfigError(
            f"torch_npu does not load, so the CANN toolkit is missing or not set up ({first_line(error)})",
            remedy=f"source set_env.sh of the Ascend toolkit, see docs/npu.md; without an NPU {_EMULATE}",
        ) from error
    if torch_npu.npu.device_count() == 0:
        raise ConfigError(
            "no NPU is visible", remedy=f"check npu-smi info and ASCEND_RT_VISIBLE_DEVICES; without an NPU {_EMULATE}"
        )
    torch_npu.npu.set_compile_mode(jit_compile=False)  # operators from the binary packages: no compiling per shape
    torch_npu.npu.config.allow_internal_format = False
    return torch_npu.npu, find_soc(torch_npu.npu.get_soc_version())


def meet(store: Any, rank: int, index: int, timeout_s: float) -> Exchange:
    """See `MeetingBackend`. Loads what is needed: in a draft worker this comes before anything else of the device."""
    device = NpuBackend().device(index)
    from ssd_ascend.backends.npu.peer import HcclExchange

    try:
        return HcclExchange(store, rank, device, timeout_s)
    except RuntimeError as error:
        raise TransportError(f"no HCCL line to rank {1 - rank}: {first_line(error)}") from error
