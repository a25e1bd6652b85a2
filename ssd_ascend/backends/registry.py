"""Which backend answers to which name, and which one a machine should use when nobody says."""

from __future__ import annotations

from ssd_ascend import env
from ssd_ascend.backends.base import Backend
from ssd_ascend.registry import Registry

BACKENDS: Registry[type[Backend]] = Registry(
    "device",
    {
        "cpu": "ssd_ascend.backends.cpu.backend:CpuBackend",
        "cuda": "ssd_ascend.backends.cuda.backend:CudaBackend",
    },
)


def load_backend(name: str | None) -> Backend:
    """The backend called `name`; without a name, `SSD_DEVICE`, else the CPU. `ConfigError` says what is missing."""
    return BACKENDS.get(name or env.device() or "cpu")()
