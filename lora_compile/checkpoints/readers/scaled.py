"""Codes of one element each, with scales that multiply: FP8 and INT8 in all their dialects.

`weight` (N, K) holds the codes; the scales are one per projection, one per row, or one per block.
Scales are used as stored, also where a config says `scale_fmt: ue8m0`: published files under that
flag hold scales that are no powers of two, and rounding them is wrong by up to a factor of sqrt(2).
"""

from __future__ import annotations

import torch

from lora_compile.checkpoints.readers.part import PartWeights
from lora_compile.checkpoints.source import WeightSource
from lora_compile.checkpoints.survey import ModuleFormat


def read_part(source: WeightSource, fmt: ModuleFormat) -> PartWeights:
    """Codes as stored; scales in float32, one per row or per block."""
    weight = source.tensor(fmt.weight_key)
    scale = source.tensor(fmt.aux["weight_scale"]).to(torch.float32)
    if fmt.block_shape is None:
        scale = scale.reshape(-1).expand(weight.shape[0]).contiguous()
    return PartWeights(weight, scale)
