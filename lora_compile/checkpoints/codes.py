"""Scaled codes: W = code * scale, encoded and decoded in float32.

Scales are in the form that the ops take: `(N,)` with one per row (a scheme with one scale per
projection repeats it), or `(ceil(N / bn), ceil(K / bk))` with one per block. Codes are
float8_e4m3fn or int8. Every operation is correctly rounded, for devices to agree on the bits.
"""

from __future__ import annotations

import torch

from lora_compile.checkpoints.scales import scale_shape
from lora_compile.schemas.quant_info import QuantInfo, ScaleGranularity

LARGEST: dict[torch.dtype, float] = {
    torch.float8_e4m3fn: 448.0,  # the largest finite number
    torch.int8: 127.0,  # symmetric: -128 is left out
}
"""dtype of codes -> the largest code; scale = amax / it."""


def decode(
    codes: torch.Tensor, scale: torch.Tensor | None, block_shape: tuple[int, int] | None
) -> torch.Tensor:
    """W, float32 (N, K): each element is one float32 product. Needs only one weight's room more.

    Args:
        scale: None: the weight is not scaled.

    Raises ValueError for scales that do not fit.
    """
    rows, columns = int(codes.shape[0]), int(codes.shape[1])
    if scale is None:
        return codes.to(torch.float32)
    expected = (rows,) if block_shape is None else scale_shape((rows, columns), block_shape)
    if tuple(scale.shape) != expected:
        raise ValueError(
            f"scales {tuple(scale.shape)} do not fit ({rows}, {columns}) in {block_shape}"
        )
    dense = codes.to(torch.float32)
    if block_shape is None:
        return dense.mul_(scale.to(torch.float32).unsqueeze(1))
    high, wide = block_shape
    per_column = scale.to(torch.float32).repeat_interleave(wide, dim=1)[:, :columns]
    for block in range(scale.shape[0]):
        dense[block * high : (block + 1) * high] *= per_column[block]
    return dense


def encode_for(weight: torch.Tensor, quant: QuantInfo) -> tuple[torch.Tensor, torch.Tensor]:
    """Encode float32 (N, K) as a site's QuantInfo says: codes and scales."""
    dtype: torch.dtype = getattr(torch, quant.weight_dtype)
    return encode(weight, dtype, quant.scale.granularity, quant.scale.block_shape)


def encode(
    weight: torch.Tensor,
    dtype: torch.dtype,
    granularity: ScaleGranularity,
    block_shape: tuple[int, int] | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Encode float32 (N, K) with scale = amax / the largest code, over a tensor, row or block.

    Zeros alone get the smallest normal float32 as their scale, so that they stay zeros and no
    scale is 0. NaN or Inf makes its scale non-finite: the caller checks.

    Returns codes (N, K) of `dtype` and scales float32.
    """
    if weight.dtype != torch.float32:
        raise ValueError(f"float32 expected, not {weight.dtype}")
    if block_shape is not None:
        return _encode_blocks(weight, dtype, block_shape)
    peaks = weight.abs().amax(dim=1)
    if granularity == "tensor":
        peaks = peaks.amax().expand(weight.shape[0])
    scale = _scales(peaks, dtype).contiguous()
    return _codes(weight, scale.unsqueeze(1), dtype), scale


def _encode_blocks(
    weight: torch.Tensor, dtype: torch.dtype, block_shape: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns = int(weight.shape[0]), int(weight.shape[1])
    high, wide = block_shape
    shape = scale_shape((rows, columns), block_shape)
    codes = torch.empty(rows, columns, dtype=dtype, device=weight.device)
    scale = torch.empty(shape, dtype=torch.float32, device=weight.device)
    padding = shape[1] * wide - columns
    for block in range(shape[0]):
        band = weight[block * high : (block + 1) * high]
        # Zeros beyond the edge cannot raise the largest magnitude of a ragged block.
        peaks = torch.nn.functional.pad(band.abs().amax(dim=0), (0, padding))
        scale[block] = _scales(peaks.view(shape[1], wide).amax(dim=1), dtype)
        per_column = scale[block].repeat_interleave(wide)[:columns]
        codes[block * high : (block + 1) * high] = _codes(band, per_column, dtype)
    return codes, scale


def _scales(peaks: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    # A tensor on the device: division by a Python number may become a product with its reciprocal.
    largest = torch.tensor(LARGEST[dtype], dtype=torch.float32, device=peaks.device)
    return (peaks / largest).clamp_min(torch.finfo(torch.float32).tiny)


def _codes(weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    # Rounding of amax / s may exceed the largest code by an ulp; a denormal s by more.
    quotient = (weight / scale).clamp(-LARGEST[dtype], LARGEST[dtype])
    return (quotient.round() if dtype == torch.int8 else quotient).to(dtype)
