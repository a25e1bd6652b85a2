"""C++ kernels for the CPU, compiled on the machine at first use and called through ctypes.

`load()` gives the library or None; `ops` and `attention` hold the classes that `CpuBackend` uses when there is one.
"""

from ssd_ascend.backends.cpu.native.library import Library, load

__all__ = ["Library", "load"]
