"""A tensor of one process that another reads in place, from the same GPU or from its neighbour over the link.

Under it lies CUDA's memory shared between processes, as torch uses it for its own queues. Opened on the reader's device
it is an ordinary tensor there, in graphs too. Used by `backend.py`.
"""

from __future__ import annotations

import base64
import json
from typing import Any, Final

import torch

from ssd_ascend.errors import TransportError, first_line

_DTYPES: Final = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def share(tensor: torch.Tensor) -> str:
    """See `base.SharingBackend`."""
    storage: Any = tensor.untyped_storage()
    parts = [base64.b64encode(part).decode() if isinstance(part, bytes) else part for part in storage._share_cuda_()]
    names = {dtype: name for name, dtype in _DTYPES.items()}
    return json.dumps([parts, names[tensor.dtype], tensor.storage_offset(), list(tensor.shape), list(tensor.stride())])


def open_shared(text: str, device: torch.device) -> torch.Tensor:
    """See `base.SharingBackend`."""
    (_, *parts), dtype, offset, shape, stride = json.loads(text)
    own: Any = torch.UntypedStorage
    try:
        # asked for on the reader's device: the address is one that its kernels may use
        storage = own._new_shared_cuda(
            device.index or 0, *(base64.b64decode(part) if isinstance(part, str) else part for part in parts)
        )
        tensor = torch.empty(0, dtype=_DTYPES[dtype], device=device).set_(storage, offset, shape, stride)
        tensor[:1].sum().item()
    except RuntimeError as error:
        raise TransportError(f"device {device} cannot read the other's memory: {first_line(error)}") from error
    return tensor
