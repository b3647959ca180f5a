"""The identity of an adapter: a hash of its content."""

from __future__ import annotations

import ctypes
import hashlib
import json
from collections.abc import Mapping

import torch

from lora_compile.adapters.canonical import PartDelta


def digest_of(deltas: Mapping[str, PartDelta]) -> str:
    """SHA-256, in hex, over (module path, scale, dtypes, shapes, bytes of A and B), sorted by path.

    The same delta has the same digest whatever layout, key prefix or name its file had.
    """
    total = hashlib.sha256()
    for module, delta in sorted(deltas.items()):
        head = [
            module,
            delta.scale.hex(),
            *(item for t in (delta.A, delta.B) for item in (str(t.dtype), list(t.shape))),
        ]
        total.update(json.dumps(head).encode())
        for tensor in (delta.A, delta.B):
            _update(total, tensor)
    return total.hexdigest()


def _update(total: hashlib._Hash, tensor: torch.Tensor) -> None:
    data = tensor.detach().cpu().contiguous()
    if data.numel():
        # The tensor's own memory, without a copy and without numpy.
        view = (ctypes.c_char * data.nbytes).from_address(data.data_ptr())
        total.update(view)
