"""Unquantised weights: (N, K) in bfloat16, float16 or float32."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from lora_compile.checkpoints.readers.part import PartWeights
from lora_compile.checkpoints.source import WeightSource
from lora_compile.checkpoints.survey import ModuleFormat


def read_part(source: WeightSource, module: str, fmt: ModuleFormat) -> PartWeights:
    """The weight as stored; for a tied module, the other module's weight."""
    return PartWeights(source.tensor(fmt.weight_key), {})


def dequantise(
    weight: torch.Tensor,
    aux: Mapping[str, torch.Tensor],
    block_shape: tuple[int, int] | None,
) -> torch.Tensor:
    """W, float32 (N, K): exact, since every dtype read here is a subset of float32."""
    return weight.to(torch.float32)
