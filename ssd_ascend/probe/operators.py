"""Every operator of a device against float32 arithmetic on the host: the same inputs that golden runs use.

An operator that fails does not keep the others from being asked. Called by `report`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ssd_ascend.backends.base import Backend, Finding
from ssd_ascend.errors import first_line
from ssd_ascend.parity.comparing import operator_error
from ssd_ascend.parity.ops import Bench, Tensors, cases

_REMEDIES = {
    "attention width 96": "serve models whose heads are 64 or 128 wide",
    "attention verify 16": "lower --lookahead until this passes",
    "vocab head": "logits may be rounded: expect more ties, nothing else",
}
_REMEDY = "do not serve on this device: its answers would be wrong; report the versions above"


def examine(backend: Backend, reference: Backend, device: torch.device) -> Iterator[Finding]:
    """One finding per operator, and how far it is from the reference."""
    dtype = backend.capabilities.dtypes[0]
    activations = torch.float32 if backend.capabilities.wide_activations else dtype
    size = backend.capabilities.block_sizes[0]
    asked = Bench(backend, device, dtype, activations, size)
    host = Bench(reference, reference.device(0), dtype, activations, size)
    for name, run in cases():
        remedy = _REMEDIES.get(name, _REMEDY)
        try:
            found, expected = run(asked), run(host)
        except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
            yield Finding(name, "failed", first_line(error), remedy)
            continue
        yield _judged(name, found, expected, dtype, remedy)


def _judged(name: str, found: Tensors, expected: Tensors, dtype: torch.dtype, remedy: str) -> Finding:
    error, allowed, where = operator_error(found, expected, str(dtype).removeprefix("torch."))
    detail = f"error {error:.2g} of {allowed:.2g} allowed" + (f" ({where})" if where else "")
    right = error <= allowed
    return Finding(name, "ok" if right else "failed", detail, "" if right else remedy)
