"""The compiled kernels as typed Python callables: a mirror of the `SSD_API` functions and structures in `src/`.

Pointers travel as integers (`Tensor.data_ptr()`); a call costs about a microsecond.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import POINTER, c_float, c_int64, c_void_p
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import torch

from ssd_ascend import env
from ssd_ascend.backends.cpu.native.build import COMPILERS, BuildError, build
from ssd_ascend.log import fields, get_logger

log = get_logger(__name__)

DTYPES: dict[torch.dtype, int] = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Storage types the kernels know, and their numbers."""


class LinearArgs(ctypes.Structure):
    """A packed weight: panels, bias (float32 or null) and their sizes."""

    _fields_ = (
        ("panels", c_void_p), ("bias", c_void_p), ("outputs", c_int64), ("inputs", c_int64), ("dtype", c_int64),
    )  # fmt: skip


class StepArgs(ctypes.Structure):
    """What attention needs to know of a step, the same for all layers."""

    _fields_ = (
        ("query_start", c_void_p), ("kv_lens", c_void_p), ("block_table", c_void_p), ("slots", c_void_p),
        ("tree_mask", c_void_p), ("rows", c_int64), ("tokens", c_int64), ("table_stride", c_int64),
        ("mask_stride", c_int64),
    )  # fmt: skip


class ShapeArgs(ctypes.Structure):
    """What attention needs to know of a model, the same for all steps."""

    _fields_ = (
        ("heads", c_int64), ("kv_heads", c_int64), ("dim", c_int64), ("block_size", c_int64), ("dtype", c_int64),
        ("scale", c_float),
    )  # fmt: skip


_P, _N, _F = c_void_p, c_int64, c_float
_SIGNATURES: dict[str, tuple[type, ...]] = {
    "pack": (_P, _N, _N, _N, _P, _N),
    "linear": (_P, _P, _P, _N, _N, _N),
    "rms_norm": (_P, _P, _P, _N, _N, _N, _N, _F, _N, _N),
    "add_rms_norm": (_P, _P, _P, _P, _N, _N, _F, _N, _N),
    "silu_and_mul": (_P, _P, _N, _N, _N, _N),
    "rotary": (_P, _P, _P, _P, _N, _N, _N, _N, _N, _N, _N, _N, _N),
    "top_tokens": (_P, _P, _P, _N, _N, _N),
    "attention": (POINTER(StepArgs), POINTER(ShapeArgs), _P, _P, _P, _P, _P, _N, _N, _N, _N, _N, _N),
}

Kernel = Callable[..., object]


class Library:
    """The functions of one compiled library; see `src/` for what each does."""

    __slots__ = ("_handle", "add_rms_norm", "attention", "linear", "pack", "packed_size", "path", "rms_norm", "rotary",
                 "silu_and_mul", "tape_free", "tape_new", "tape_play", "tape_record", "tape_size",
                 "top_tokens")  # fmt: skip

    def __init__(self, path: Path) -> None:
        """Load the library at `path`; OSError when it cannot be."""
        # PyDLL would keep the interpreter locked; CDLL lets other threads (the server's) run during a kernel
        self._handle = ctypes.CDLL(str(path))
        self.path = path
        self.packed_size: Callable[[int, int], int] = self._function("packed_size", (_N, _N), c_int64)
        self.pack: Kernel = self._function("pack", _SIGNATURES["pack"])
        self.linear: Kernel = self._function("linear", _SIGNATURES["linear"])
        self.rms_norm: Kernel = self._function("rms_norm", _SIGNATURES["rms_norm"])
        self.add_rms_norm: Kernel = self._function("add_rms_norm", _SIGNATURES["add_rms_norm"])
        self.silu_and_mul: Kernel = self._function("silu_and_mul", _SIGNATURES["silu_and_mul"])
        self.rotary: Kernel = self._function("rotary", _SIGNATURES["rotary"])
        self.top_tokens: Kernel = self._function("top_tokens", _SIGNATURES["top_tokens"])
        self.attention: Kernel = self._function("attention", _SIGNATURES["attention"])
        self.tape_new: Callable[[], int] = self._function("tape_new", (), c_void_p)
        self.tape_free: Kernel = self._function("tape_free", (_P,))
        self.tape_record: Kernel = self._function("tape_record", (_P,))
        self.tape_size: Callable[[int], int] = self._function("tape_size", (_P,), c_int64)
        self.tape_play: Kernel = self._function("tape_play", (_P, _N, _N))

    def _function(self, name: str, arguments: tuple[type, ...], result: type | None = None) -> Callable[..., Any]:
        function = getattr(self._handle, f"ssd_{name}")
        function.argtypes, function.restype = arguments, result
        return cast("Callable[..., Any]", function)


def load_from(folder: Path, compilers: tuple[str, ...] = COMPILERS) -> Library | None:
    """The kernels compiled into `folder`, or None after one log line that says why not."""
    try:
        return Library(build(folder, compilers))
    except (BuildError, OSError) as error:
        log.warning("CPU kernels unavailable, using plain torch (several times slower): %s", error)
        return None


def load() -> Library | None:
    """The kernels of this machine, compiled at first use; None when switched off or impossible."""
    if not env.cpu_kernels():
        log.info("CPU kernels switched off %s", fields(SSD_CPU_KERNELS=0))
        return None
    return _load_once(env.cache_home() / "ssd_ascend" / "kernels")


@lru_cache(maxsize=1)
def _load_once(folder: Path) -> Library | None:
    return load_from(folder)
