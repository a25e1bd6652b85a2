"""`python -m ssd_ascend.doctor [--json]`: what this machine has, what is missing, what to install.

`--probe [--device D] [--out DIR]` also asks one device what it really does, and writes the answers down.
Collects facts with functions that only look, then prints them as a table or as JSON; exit status 0 when this machine
can serve on some device. Works without torch, because a missing torch is one of the things it reports.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ssd_ascend import catalogue, env
from ssd_ascend.errors import ConfigError

EMBEDDED_PRESET = "smollm2-135m"
CORE = ("torch", "transformers", "safetensors", "numpy", "jinja2", "rich")
# extra -> the modules it brings; pyproject.toml names the distributions, a test keeps the two in step
EXTRAS: Mapping[str, tuple[str, ...]] = {
    "serve": ("fastapi", "uvicorn", "httptools", "pydantic", "msgspec", "prometheus_client"),
    "gguf": ("gguf",),
    "cuda": ("triton",),
    "npu": ("torch_npu",),
}
# what decides the speed of a CPU: vector width, and bf16 in hardware
_ISA = ("avx2", "fma", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "sve", "bf16", "i8mm")
_GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One kind of device: whether it is there and can serve, and what to do when it cannot."""

    name: str
    found: bool
    usable: bool
    detail: str
    remedy: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Everything `doctor` knows; `missing` maps what is absent to the command that installs it."""

    python: str
    platform: str
    versions: dict[str, str | None]
    devices: tuple[Device, ...]
    compiler: str | None
    embedded_model: str | None
    environment: dict[str, str]
    missing: dict[str, str]

    @property
    def can_serve(self) -> bool:
        """Whether some device, the one of `SSD_DEVICE` where it is set, can serve with what is installed."""
        return bool(self.usable) and not any(name in CORE for name in self.missing)

    @property
    def wanted(self) -> str | None:
        """The device that `SSD_DEVICE` asks for."""
        return self.environment.get("SSD_DEVICE")

    @property
    def usable(self) -> list[str]:
        """Devices that can serve, of those that may."""
        return [device.name for device in self.devices if device.usable and self.wanted in (None, device.name)]


def has_module(name: str) -> bool:
    """Whether a top-level module can be imported, without importing it."""
    return importlib.util.find_spec(name) is not None


def version(distribution: str) -> str | None:
    """The installed version of a distribution, or None."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def isa_flags(cpuinfo: str) -> tuple[str, ...]:
    """The instruction sets that matter to us, out of the text of /proc/cpuinfo (x86 `flags`, Arm `Features`)."""
    line = re.search(r"^(?:flags|Features)\s*:(.*)$", cpuinfo, flags=re.MULTILINE)
    present = set(line[1].split()) if line else set()
    return tuple(flag for flag in _ISA if flag in present)


def memory_bytes(meminfo: str) -> tuple[int, int]:
    """(available, total) bytes, out of the text of /proc/meminfo; zero where it does not say."""
    found = {key: int(kib) * 1024 for key, kib in re.findall(r"^(\w+):\s+(\d+) kB", meminfo, flags=re.MULTILINE)}
    return found.get("MemAvailable", 0), found.get("MemTotal", 0)


def _read(path: str) -> str:
    """The text of a file of the kernel's, empty on systems without it."""
    file = Path(path)
    return file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""


def backends() -> tuple[str, ...]:
    """The backends this installation has; none without torch."""
    if not has_module("torch"):
        return ()
    from ssd_ascend.backends.registry import BACKENDS

    return BACKENDS.names()


def cpu(available: Sequence[str]) -> Device:
    """The processor: cores we may use, memory, vector instructions."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    free, total = memory_bytes(_read("/proc/meminfo"))
    flags = " ".join(isa_flags(_read("/proc/cpuinfo"))) or "unknown instruction sets"
    detail = f"{cores} cores, {free / _GIB:.1f} of {total / _GIB:.1f} GiB free, {flags}"
    return Device(name="cpu", found=True, usable="cpu" in available, detail=detail)


def cuda(available: Sequence[str]) -> Device:
    """NVIDIA GPUs, as torch sees them; without torch, as the driver's device files show them."""
    driver = Path("/proc/driver/nvidia/version").exists()
    if not has_module("torch"):
        return Device(name="cuda", found=driver, usable=False, detail="seen by the driver" if driver else "none found")
    import torch

    if not torch.cuda.is_available():
        remedy = "this torch is a CPU build: install one for your driver's CUDA release" if driver else None
        return Device(name="cuda", found=driver, usable=False, detail="none usable by torch", remedy=remedy)
    cards = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    detail = "; ".join(f"{card.name}, {card.total_memory / _GIB:.0f} GiB" for card in cards)
    return _accelerator("cuda", detail, available)


def npu(available: Sequence[str]) -> Device:
    """Ascend NPUs: the driver's device files first, because torch_npu cannot be asked when CANN is not set up."""
    chips = sorted(Path("/dev").glob("davinci[0-9]*"))
    if env.npu_emulator():
        return _accelerator("npu", "emulated on the CPU (SSD_NPU_EMULATOR)", available)
    if not chips:
        return Device(name="npu", found=False, usable=False, detail="none found (no /dev/davinci*)")
    detail = f"{len(chips)} chips ({chips[0].name}..{chips[-1].name})"
    if not has_module("torch_npu"):
        return Device(name="npu", found=True, usable=False, detail=detail, remedy=install_command("npu"))
    return _accelerator("npu", detail, available)


def _accelerator(name: str, detail: str, available: Sequence[str]) -> Device:
    usable = name in available
    remedy = None if usable else "found, but this installation has no backend for it; serve with --device cpu"
    return Device(name=name, found=True, usable=usable, detail=detail, remedy=remedy)


def install_command(extra: str) -> str:
    """The exact pip command for an extra: in the checkout when we run from one."""
    checkout = Path(__file__).resolve().parent.parent
    target = f"-e '{checkout}[{extra}]'" if (checkout / "pyproject.toml").is_file() else f"'ssd-ascend[{extra}]'"
    return f"{sys.executable} -m pip install {target}"


def missing_packages(devices: Sequence[Device]) -> dict[str, str]:
    """What is absent -> how to get it: core packages, and the extras this machine has a use for."""
    missing = {name: f"{sys.executable} -m pip install {name}" for name in CORE if not has_module(name)}
    present = {device.name for device in devices if device.found}
    for extra, modules in EXTRAS.items():
        wanted = extra in present or extra not in ("cuda", "npu")
        if wanted and not all(has_module(module) for module in modules):
            missing[f"extra {extra!r}"] = install_command(extra)
    return missing


def embedded_model() -> tuple[str | None, str | None]:
    """(where the weights of the embedded model lie, None) or (None, the command that installs them)."""
    try:
        return str(catalogue.resolve_model(EMBEDDED_PRESET)), None
    except ConfigError:
        requirement = catalogue.find_preset(EMBEDDED_PRESET).target.source.requirement
        return None, f"{sys.executable} -m {catalogue.install_command(requirement or EMBEDDED_PRESET)}"


def examine() -> Report:
    """Look at this machine; changes nothing."""
    available = backends()
    devices = (cpu(available), cuda(available), npu(available))
    missing = missing_packages(devices)
    embedded, remedy = embedded_model()
    if remedy:
        missing["embedded model"] = remedy
    return Report(
        python=platform.python_version(),
        platform=f"{platform.system()} {platform.machine()}",
        versions={name: version(name) for name in ("ssd-ascend", *CORE, "torch_npu", "triton")},
        devices=devices,
        compiler=shutil.which("g++"),
        embedded_model=embedded,
        environment=env.report(),
        missing=missing,
    )


def rows(report: Report) -> list[tuple[str, str, str]]:
    """The report as (mark, what, detail); marks are ok, -- (absent, not needed) and !! (act on it)."""
    table = [("ok", "python", f"{report.python} on {report.platform}")]
    for name, found in report.versions.items():
        table.append(("ok" if found else "!!" if name in CORE else "--", name, found or "not installed"))
    for device in report.devices:
        mark = "ok" if device.usable else "!!" if device.found else "--"
        table.append((mark, f"device {device.name}", device.detail))
        if device.remedy:
            table.append(("", "", device.remedy))
    compiler = report.compiler or "no g++: the native kernels of the CPU backend stay off (Debian: apt install g++)"
    table.append(("ok" if report.compiler else "--", "compiler", compiler))
    table.append(("ok" if report.embedded_model else "!!", "embedded model", report.embedded_model or "not installed"))
    table += [("ok", name, value) for name, value in report.environment.items()]
    table += [("!!", f"missing {what}", command) for what, command in report.missing.items()]
    nowhere = "on any device" if report.wanted is None else f"on {report.wanted}, which SSD_DEVICE asks for,"
    verdict = f"ready: can serve on {', '.join(report.usable)}" if report.can_serve else f"cannot serve {nowhere} yet"
    return [*table, ("ok" if report.can_serve else "!!", "verdict", verdict)]


def render(table: Sequence[tuple[str, str, str]]) -> str:
    """Rows as aligned text: plain, so that it can be pasted into an issue."""
    width = max(len(what) for _, what, _ in table)
    return "\n".join(f"{mark:2}  {what:<{width}}  {detail}".rstrip() for mark, what, detail in table)


def run_probe(device: str | None, out: Path, report: Report) -> int:
    """Ask a device everything, write probe.json and probe.md; 0 when nothing failed."""
    from ssd_ascend.probe.report import as_markdown, probe, write

    versions = {name: found for name, found in report.versions.items() if found}
    try:
        found = probe(device, versions, lambda title: print(f"asking: {title}", file=sys.stderr))
    except ConfigError as error:
        print(f"ssd-ascend doctor: {error}", file=sys.stderr)
        return 2
    files = write(found, out)
    print(as_markdown(found))
    print(f"{len(found.failures)} of {sum(len(s.findings) for s in found.sections)} answers are failures")
    print("written: " + ", ".join(map(str, files)))
    return 1 if found.failures else 0


def main(argv: Sequence[str] | None = None) -> int:
    """Print the report; 0 when this machine can serve on some device, else 1."""
    parser = argparse.ArgumentParser(
        prog="ssd-ascend doctor", description="What this machine has and what is missing.", allow_abbrev=False
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.add_argument("--probe", action="store_true", help="ask a device what it really does: minutes, and two files")
    parser.add_argument(
        "--device", metavar="D", help="the device to probe (default: SSD_DEVICE, else the best there is)"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("probe"), metavar="DIR", help="where probe.json and probe.md go"
    )
    arguments = parser.parse_args(argv)
    report = examine()
    if arguments.probe:
        return run_probe(arguments.device, arguments.out, report)
    if arguments.json:
        print(json.dumps({**asdict(report), "can_serve": report.can_serve}, indent=2))
    else:
        print(render(rows(report)))
    return 0 if report.can_serve else 1


if __name__ == "__main__":
    raise SystemExit(main())
