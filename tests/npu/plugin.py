"""A pytest plugin of the NPU lane (`-p tests.npu.plugin`): the emulator comes before whoever else imports torch_npu.

transformers does, as soon as it finds it, and finds no CANN.
"""

from ssd_ascend.backends.registry import load_backend

load_backend("npu")
