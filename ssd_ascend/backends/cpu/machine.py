"""What the machine is and how much of its memory is ours: a container's limit counts, not the host's size.

Called by `CpuBackend` only. Linux files are read where they exist; elsewhere the answer comes from sysconf.
"""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch

from ssd_ascend.backends.base import Memory

_MEMINFO = Path("/proc/meminfo")
_CPUINFO = Path("/proc/cpuinfo")


def memory() -> Memory:
    """Free and total bytes: the tightest of the host and every control group this process is in."""
    host = _host_memory()
    groups = [found for folder in _control_groups() if (found := _group_memory(folder, host.total)) is not None]
    return Memory(
        free=max(0, min([host.free, *(group.free for group in groups)])),
        total=min([host.total, *(group.total for group in groups)]),
    )


def description() -> str:
    """Such as "cpu: AMD EPYC, 2 threads, avx2"."""
    return f"cpu: {_model_name()}, {torch.get_num_threads()} threads, {instruction_set()}"


def instruction_set() -> str:
    """The vector instructions torch found, lower case ("avx2", "avx512", "default")."""
    return str(torch.backends.cpu.get_cpu_capability()).lower()


def _host_memory() -> Memory:
    if not _MEMINFO.exists():
        page = os.sysconf("SC_PAGE_SIZE")
        total = page * os.sysconf("SC_PHYS_PAGES")
        return Memory(free=total // 2, total=total)  # no portable way to ask what is free
    sizes = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines() if ":" in line)

    def size(key: str) -> int:
        return int(sizes[key].split()[0]) * 1024

    return Memory(free=size("MemAvailable"), total=size("MemTotal"))


def _control_groups() -> list[Path]:
    """Folders of the memory control groups of this process, innermost first (version 2, then version 1)."""
    table = Path("/proc/self/cgroup")
    if not table.exists():
        return []
    folders: list[Path] = []
    for line in table.read_text().splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0":
            root = Path("/sys/fs/cgroup")
        elif "memory" in controllers.split(","):
            root = Path("/sys/fs/cgroup/memory")
        else:
            continue
        inner = root / path.lstrip("/")
        # inside a container the path may name a folder of the host; its root is then the group itself
        folders += [folder for folder in (inner, *inner.parents) if folder.is_relative_to(root) and folder.is_dir()]
    return folders


def _group_memory(folder: Path, host_total: int) -> Memory | None:
    """Free and total bytes of one control group, None when it has no limit below the host's memory."""
    for limit_name, usage_name in (
        ("memory.max", "memory.current"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        try:
            limit, used = (folder / limit_name).read_text().strip(), int((folder / usage_name).read_text())
        except OSError:
            continue
        if limit == "max" or int(limit) >= host_total:
            return None
        return Memory(free=int(limit) - used + _reclaimable(folder), total=int(limit))
    return None


def _reclaimable(folder: Path) -> int:
    """Bytes of file cache the kernel gives back under pressure; they count as used, but are not."""
    try:
        lines = (folder / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    stat = dict(line.split(" ", 1) for line in lines if " " in line)
    return int(stat.get("inactive_file", 0))


def _model_name() -> str:
    if _CPUINFO.exists():
        for line in _CPUINFO.read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip().removesuffix(" Processor")
    return platform.processor() or platform.machine() or "unknown"
