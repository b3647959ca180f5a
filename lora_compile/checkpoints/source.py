"""Where weights come from: one small protocol, so that files and live models look alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from lora_compile.errors import CheckpointInvalid, TensorMissing

# Names of the safetensors format, used in every header and message.
DTYPE_NAMES: Mapping[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True)
class TensorHeader:
    """What is known of a tensor without reading its data."""

    file: str
    """Path of the file that holds it, or the source's name for a live model."""
    dtype: str
    """As safetensors spells it, e.g. `F8_E4M3`."""
    shape: tuple[int, ...]


class WeightSource(Protocol):
    """Named tensors whose headers are known and whose data is read one at a time."""

    @property
    def name(self) -> str:
        """Where the tensors come from, for messages."""

    @property
    def headers(self) -> Mapping[str, TensorHeader]: ...

    def tensor(self, key: str) -> torch.Tensor:
        """Read one tensor as it is stored. Raises TensorMissing."""


class ModuleWeights:
    """The state dict of a live model, e.g. one that is about to be wrapped.

    Tensors are returned as they are (no copy, same device). A model with tensors on the meta
    device has no weights to take: CheckpointInvalid.
    """

    def __init__(self, module: nn.Module) -> None:
        self._name = f"<{type(module).__name__}>"
        # A tied weight counts once, under the name that comes first, as in a checkpoint.
        every = {name for name, _ in module.named_parameters(remove_duplicate=False)}
        tied = every - {name for name, _ in module.named_parameters()}
        state = module.state_dict()
        self._tensors: dict[str, torch.Tensor] = {k: t for k, t in state.items() if k not in tied}
        meta = [key for key, tensor in self._tensors.items() if tensor.is_meta]
        if meta:
            raise CheckpointInvalid(
                f"{len(meta)} tensors of the model have no data (meta device)",
                file=self._name,
                tensor=meta[0],
                fix="load the model's weights before it is wrapped",
            )
        self._headers = {
            key: TensorHeader(
                self._name, DTYPE_NAMES.get(tensor.dtype, str(tensor.dtype)), tuple(tensor.shape)
            )
            for key, tensor in self._tensors.items()
        }

    @property
    def name(self) -> str:
        return self._name

    @property
    def headers(self) -> Mapping[str, TensorHeader]:
        return self._headers

    def tensor(self, key: str) -> torch.Tensor:
        if key not in self._tensors:
            raise TensorMissing("the model has no such tensor", file=self._name, tensor=key)
        return self._tensors[key]
