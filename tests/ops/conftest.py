"""Row maps, and which kernels this process can run."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
from torch import Tensor

from lora_compile.ops import kernel_name

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
KINDS = ("triton",) if INTERPRETED else ("torch", "aten")
"""Triton runs on CPU tensors only in its interpreter, in a process of its own."""
SCHEMES = ["none", "fp8_block", "fp8_tensor_static", "fp8_channel", "int8_channel"]
"""One of each way to scale weights and inputs: fp8_tensor_dynamic runs as fp8_channel does."""
SCALED = SCHEMES[1:]
RANKS = [1, 3, 8, 16, 33, 64, 0]
"""Rank of each slot of a sample site; the last slot has no delta there."""
MAP_SIZE = 32


@dataclass
class RowMap:
    """One map of the runtime's; entries past the batch are unbound."""

    slot: Tensor
    scale: Tensor

    @staticmethod
    def of(slots: list[int], generator: torch.Generator) -> RowMap:
        slot = torch.full((MAP_SIZE,), -2, dtype=torch.int32)
        slot[: len(slots)] = torch.tensor(slots, dtype=torch.int32)
        return RowMap(slot, torch.rand(MAP_SIZE, generator=generator) + 0.5)

    def per_row(self, entries: int, tokens: int) -> tuple[list[int], list[float]]:
        """Slots and scales of the flattened rows."""
        slots = self.slot[:entries].repeat_interleave(tokens).tolist()
        return slots, self.scale[:entries].repeat_interleave(tokens).tolist()


def kernel_of(kind: str) -> str:
    """The `kernel` argument of `sample.call` for a kind of `KINDS`."""
    return "aten" if kind == "aten" else kernel_name(kind)  # type: ignore[arg-type]


def row_errors(y: Tensor, expected: Tensor) -> Tensor:
    """Largest error of each row, relative to the row's largest value. (L, N) -> (L,)."""
    expected = expected.double()
    return (y.double() - expected).abs().amax(1) / expected.abs().amax(1)


def bound(dtype: torch.dtype) -> float:
    """fp32: 1e-5. bf16: one rounding of the row's maximum; the interpreter truncates instead."""
    if dtype == torch.float32:
        return 1e-5
    return 2**-7 if INTERPRETED else 2**-8
