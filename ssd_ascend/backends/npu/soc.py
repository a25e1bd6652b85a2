"""What each generation of Ascend chips can do; asked by `NpuBackend`, never guessed from a name elsewhere.

Numbers of `torch.npu.get_soc_version()` and limits as read in vllm-ascend (device/hardware.py, platform.py), the CANN
runtime guide (api_ref/06_stream_management) and the HCCL guide (HCCL_OP_EXPANSION_MODE); none measured by us.
"""

from __future__ import annotations

from dataclasses import dataclass

from ssd_ascend.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Soc:
    """One generation.

    versions: the numbers the driver reports. refusal: why we do not run on it, or None. max_graphs: captured graphs
    a process should keep, None where streams alone bound them. max_collective_graphs: the same for graphs that hold
    collectives, which are expanded on the AI CPU there unless told otherwise.
    """

    name: str
    versions: range
    refusal: str | None = None
    max_graphs: int | None = None
    max_collective_graphs: int | None = None


SOCS: tuple[Soc, ...] = (
    Soc(
        "Atlas 300I Duo (310P)",
        range(200, 206),
        refusal="it has no fused attention over paged caches of plain layout, and no bfloat16",
    ),
    Soc("Atlas A2 (910B)", range(220, 226)),
    Soc("Atlas A3 (910C)", range(250, 256), max_collective_graphs=6),
    Soc("Atlas A5 (950)", range(260, 280), max_graphs=4, max_collective_graphs=6),
)


def find_soc(version: int) -> Soc:
    """The generation with this number; ConfigError when it is unknown or cannot serve."""
    found = next((soc for soc in SOCS if version in soc.versions), None)
    known = ", ".join(soc.name for soc in SOCS if soc.refusal is None)
    if found is None:
        raise ConfigError(f"NPU generation {version} is not known here", remedy=f"use one of {known}")
    if found.refusal is not None:
        raise ConfigError(f"{found.name} cannot serve: {found.refusal}", remedy=f"use one of {known}")
    return found
