"""Every environment setting of torch_npu and CANN that we rely on, with its reason; applied before torch_npu loads.

What the user has set stays: these are defaults. `docs/npu.md` prints this table.
"""

from __future__ import annotations

from typing import NamedTuple

from ssd_ascend import env
from ssd_ascend.errors import ConfigError
from ssd_ascend.log import get_logger

log = get_logger(__name__)


class Setting(NamedTuple):
    """One variable, its value, and why."""

    name: str
    value: str
    reason: str
    emulated: bool = True


SETTINGS: tuple[Setting, ...] = (
    Setting(
        "TORCH_NPU_FALLBACK_CPU_DISABLE", "1",
        "an operator without an NPU kernel must be an error: run on the CPU it would stall the device at every step; "
        "unknown to torch_npu 2.10, which only warns",
    ),
    Setting("TASK_QUEUE_ENABLE", "1", "Python runs ahead of the launches; 2 is refused while a graph is captured"),
    Setting(
        "PYTORCH_NPU_ALLOC_CONF", "expandable_segments:True",
        "steps of many sizes fragment fixed segments; the emulator has no virtual address calls",
        emulated=False,
    ),
    Setting("HCCL_CONNECT_TIMEOUT", "300", "seconds; ranks load their weights before they first meet"),
    Setting(
        "HCCL_EXEC_TIMEOUT", "204",
        "seconds, 1836 by default; the last resort where a device cannot be stopped that waits for a lost rank",
    ),
    Setting("HCCL_BUFFSIZE", "64", "MB, twice for every communicator, 200 by default; a step's sums take a few"),
)  # fmt: skip

FORBIDDEN = {
    "ASCEND_LAUNCH_BLOCKING": ("1", "it forbids captured graphs and makes every launch synchronous"),
    "TASK_QUEUE_ENABLE": ("2", "torch_npu refuses it while a graph is captured"),
}
"""Values that are legal for torch_npu and wrong for us."""


def apply(*, emulated: bool) -> None:
    """Set the defaults; ConfigError for a value that cannot work."""
    settings = [setting for setting in SETTINGS if setting.emulated or not emulated]
    env.provide({setting.name: setting.value for setting in settings})
    log.info("NPU settings: %s", ", ".join(f"{s.name}={env.foreign(s.name)}" for s in settings))
    for name, (value, reason) in FORBIDDEN.items():
        if env.foreign(name) == value:
            raise ConfigError(f"{name}={value} does not work here: {reason}", remedy=f"unset {name}")
