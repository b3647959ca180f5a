"""FP8 e4m3 weights with one float32 scale per block, as DeepSeek-V3 checkpoints store them.

`weight` is float8_e4m3fn (N, K); `weight_scale_inv` is float32 (ceil(N/bn), ceil(K/bk)). Despite
its name it multiplies: W[n, k] = w[n, k] * s[n // bn, k // bk]. Scales are used as stored, also
where the config says `scale_fmt: ue8m0`: published files under that flag hold scales that are no
powers of two, and rounding them is wrong by up to a factor of sqrt(2).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from lora_compile.checkpoints.block_scales import scale_shape
from lora_compile.checkpoints.readers.part import PartWeights
from lora_compile.checkpoints.source import WeightSource
from lora_compile.checkpoints.survey import ModuleFormat

SCALE = "weight_scale_inv"
FP8_MAX = 448.0  # largest finite float8_e4m3fn


def read_part(source: WeightSource, module: str, fmt: ModuleFormat) -> PartWeights:
    """Codes and scales as stored."""
    return PartWeights(source.tensor(fmt.weight_key), {SCALE: source.tensor(f"{module}.{SCALE}")})


def dequantise(
    weight: torch.Tensor,
    aux: Mapping[str, torch.Tensor],
    block_shape: tuple[int, int] | None,
) -> torch.Tensor:
    """W, float32 (N, K): each element is one float32 product. Needs only one weight's room more.

    Raises ValueError for scales that do not fit `block_shape`.
    """
    rows, columns = int(weight.shape[0]), int(weight.shape[1])
    scale = aux[SCALE]
    if block_shape is None or tuple(scale.shape) != scale_shape((rows, columns), block_shape):
        raise ValueError(
            f"scales {tuple(scale.shape)} do not fit ({rows}, {columns}) in {block_shape}"
        )
    high, wide = block_shape
    per_column = scale.to(torch.float32).repeat_interleave(wide, dim=1)[:, :columns]
    dense = weight.to(torch.float32)
    for block in range(scale.shape[0]):
        dense[block * high : (block + 1) * high] *= per_column[block]
    return dense


def quantise(
    weight: torch.Tensor, block_shape: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Encode float32 (N, K) with s = amax(block) / 448, the scheme's own encoder.

    A block of zeros gets the smallest normal float32 as its scale, so that its zeros stay zeros
    and no scale is 0. NaN or Inf in a block makes its scale non-finite: the caller checks. Every
    operation is correctly rounded, for devices to agree on the bits.

    Returns codes float8_e4m3fn (N, K) and scales float32 (ceil(N/bn), ceil(K/bk)).
    """
    if weight.dtype != torch.float32:
        raise ValueError(f"float32 expected, not {weight.dtype}")
    rows, columns = int(weight.shape[0]), int(weight.shape[1])
    high, wide = block_shape
    shape = scale_shape((rows, columns), block_shape)
    codes = torch.empty(rows, columns, dtype=torch.float8_e4m3fn, device=weight.device)
    scale = torch.empty(shape, dtype=torch.float32, device=weight.device)
    # A tensor on the device: division by a Python number may become a product with its reciprocal.
    fp8_max = torch.tensor(FP8_MAX, dtype=torch.float32, device=weight.device)
    smallest = torch.finfo(torch.float32).tiny
    padding = shape[1] * wide - columns
    for block in range(shape[0]):
        band = weight[block * high : (block + 1) * high]
        # Zeros beyond the edge cannot raise the largest magnitude of a ragged block.
        peaks = torch.nn.functional.pad(band.abs().amax(dim=0), (0, padding))
        scale[block] = (peaks.view(shape[1], wide).amax(dim=1) / fp8_max).clamp_min(smallest)
        per_column = scale[block].repeat_interleave(wide)[:columns]
        # Rounding of amax / s may exceed 448 by an ulp; a denormal s by more.
        quotient = (band / per_column).clamp(-FP8_MAX, FP8_MAX)
        codes[block * high : (block + 1) * high] = quotient.to(torch.float8_e4m3fn)
    return codes, scale
