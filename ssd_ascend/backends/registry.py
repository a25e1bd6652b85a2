"""Which backend answers to which name, and which one a machine should use when nobody says."""

from __future__ import annotations

from ssd_ascend import env
from ssd_ascend.backends.base import Backend
from ssd_ascend.errors import ConfigError
from ssd_ascend.log import get_logger
from ssd_ascend.registry import Registry

BACKENDS: Registry[type[Backend]] = Registry(
    "device",
    {
        "cpu": "ssd_ascend.backends.cpu.backend:CpuBackend",
        "cuda": "ssd_ascend.backends.cuda.backend:CudaBackend",
        "npu": "ssd_ascend.backends.npu.backend:NpuBackend",
    },
)


_BEST_FIRST = ("npu", "cuda")
_log = get_logger(__name__)


def load_backend(name: str | None) -> Backend:
    """The backend called `name`, else `SSD_DEVICE`, else the best there is. `ConfigError` says what is missing."""
    wanted = name or env.device()
    if wanted is not None:
        if wanted.partition(":")[2].isdecimal():  # else it may be module:name, one's own
            raise ConfigError(
                f"the device is {wanted!r}, and should be a kind without a number: {', '.join(BACKENDS)}",
                remedy="among several of a kind, CUDA_VISIBLE_DEVICES or ASCEND_RT_VISIBLE_DEVICES choose",
            )
        return BACKENDS.get(wanted)()
    for candidate in _BEST_FIRST:
        try:
            return BACKENDS.get(candidate)()
        except ConfigError as reason:
            _log.debug("not on %s: %s", candidate, reason)
    return BACKENDS.get("cpu")()
