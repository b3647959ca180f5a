"""Unquantised weights: (N, K) in bfloat16, float16 or float32."""

from __future__ import annotations

from lora_compile.checkpoints.readers.part import PartWeights
from lora_compile.checkpoints.source import WeightSource
from lora_compile.checkpoints.survey import ModuleFormat


def read_part(source: WeightSource, fmt: ModuleFormat) -> PartWeights:
    """The weight as stored; for a tied module, the other module's weight."""
    return PartWeights(source.tensor(fmt.weight_key), None)
