"""An own, small CANN under the unmodified torch_npu, computing on the CPU: `load()` before torch_npu is imported.

`src/runtime` is libascendcl (memory, streams, events, graphs), `src/opapi` is libopapi (the operators, over libtorch).
It is strict: what hardware documents as an error is one here, and what is not emulated says so by name.
"""

from ssd_ascend.backends.npu.emulator.loader import count, counts, is_loaded, load

__all__ = ["count", "counts", "is_loaded", "load"]
