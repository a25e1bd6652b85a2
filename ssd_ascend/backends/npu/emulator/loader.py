"""Opens the emulator's libraries so that torch_npu, imported afterwards, finds them in the place of CANN's."""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from ssd_ascend import env
from ssd_ascend.backends.npu.emulator.build import COMPANIONS, build
from ssd_ascend.errors import ConfigError

_FIRST = ("ascendcl", "hccl", *COMPANIONS)


def is_loaded() -> bool:
    """Whether this process runs on the emulator."""
    return _open.cache_info().currsize > 0


def load() -> None:
    """Build if need be, then open. The dynamic linker takes a library that is open by its name, wherever it lies."""
    if "torch_npu" in sys.modules and not is_loaded():
        raise ConfigError(
            "torch_npu was imported before the NPU emulator was loaded",
            remedy="set TORCH_DEVICE_BACKEND_AUTOLOAD=0, so that torch does not import it by itself",
        )
    _open()


def count(name: str) -> int:
    """How often something was submitted to the emulated device: "aclnnMatmul", "graph", "copy", "synchronize", ..."""
    function = _open()[0].npuEmulatorCount
    function.restype = ctypes.c_int64
    return int(function(name.encode()))


def counts() -> dict[str, int]:
    """All that `count` can tell."""
    function = _open()[0].npuEmulatorCounts
    function.restype = ctypes.c_int64
    room = 1 << 20
    text = ctypes.create_string_buffer(room)
    written = function(text, ctypes.c_int64(room))
    lines = text.raw[:written].decode().splitlines()
    return {name: int(number) for name, _, number in (line.partition("\t") for line in lines)}


@cache
def _open() -> tuple[ctypes.CDLL, ...]:
    torch_folder, torch_npu_folder = (_folder_of(package) for package in ("torch", "torch_npu"))
    versions = f"torch {version('torch')}, torch_npu {version('torch_npu')}"
    folder = build(env.cache_home() / "ssd_ascend" / "npu_emulator", torch_folder, torch_npu_folder, versions)
    # without them torch_npu warns on standard output, which belongs to answers
    env.provide({"ASCEND_HOME_PATH": str(folder), "ASCEND_OPP_PATH": str(folder / "opp")})
    return tuple(ctypes.CDLL(str(folder / f"lib{name}.so"), ctypes.RTLD_GLOBAL) for name in _FIRST)


def _folder_of(package: str) -> Path:
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        raise ConfigError(
            f"the NPU emulator runs the real torch_npu, and {package} is not installed",
            remedy="pip install -r requirements/npu.txt, in an environment of its own",
        )
    return Path(spec.origin).parent
