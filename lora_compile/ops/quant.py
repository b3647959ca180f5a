"""The canonical JSON of a `QuantInfo`, as ops take it, and its meaning in plain fp32."""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from lora_compile.errors import FeatureUnsupported
from lora_compile.schemas.quant_info import QuantInfo

FP8_MAX = 448.0
"""Largest finite float8_e4m3fn."""


@cache
def parse_quant(quant: str) -> QuantInfo:
    """The QuantInfo whose `model_dump_json()` is `quant`.

    Raises:
        FeatureUnsupported: it declares an input transform, which no op here applies.
    """
    info = QuantInfo.model_validate_json(quant)
    if info.input_transforms:
        raise FeatureUnsupported(
            f"scheme {info.scheme!r} transforms the input of its linears",
            expected="no input transforms",
            found=", ".join(info.input_transforms),
            fix="use a checkpoint without them",
        )
    return info


def boundaries(info: QuantInfo) -> list[int]:
    """Row boundaries of the parts, [0, N_0, N_0 + N_1, …], as the lowered ops take them."""
    return [0, *(part.rows[1] for part in info.parts)]


def expand_block_scales(
    scale: Tensor, part_rows: list[int], block_shape: list[int], in_features: int
) -> Tensor:
    """Block scales, element by element.

    Args:
        scale: (sum over parts of ceil(N_p / bn), ceil(K / bk)) float32; rows restart at each part.
        part_rows: [0, N_0, N_0 + N_1, …].
        block_shape: (bn, bk).
        in_features: K.

    Returns:
        (N, K) float32.
    """
    block_rows, block_columns = block_shape
    whole = all(row % block_rows == 0 for row in part_rows[:-1])
    if whole:
        rows = scale.repeat_interleave(block_rows, 0)[: part_rows[-1]]
    else:
        pieces, first = [], 0
        for low, high in pairwise(part_rows):
            count = -(-(high - low) // block_rows)
            piece = scale[first : first + count].repeat_interleave(block_rows, 0)
            pieces.append(piece[: high - low])
            first += count
        rows = torch.cat(pieces)
    count = rows.shape[1]
    columns = rows.unsqueeze(-1).expand(rows.shape[0], count, block_columns)
    return columns.reshape(rows.shape[0], count * block_columns)[:, :in_features]


def dequantize_weight(weight: Tensor, aux: list[Tensor], info: QuantInfo) -> Tensor:
    """Q(W): the weight's values.

    Args:
        weight: (N, K) codes.
        aux: the tensors of `info.aux_names`.

    Returns:
        (N, K) float32.
    """
    values = weight.float()
    if info.scale.granularity == "none":
        return values
    assert info.scale.block_shape is not None
    return values * expand_block_scales(
        aux[0].float(), boundaries(info), list(info.scale.block_shape), info.in_features
    )


def dequantize_part(weight: Tensor, aux: list[Tensor], info: QuantInfo, part: int) -> Tensor:
    """Q(W) of one part: (N_p, K) float32. Arguments as in `dequantize_weight`."""
    low, high = info.parts[part].rows
    values = weight[low:high].float()
    if info.scale.granularity == "none":
        return values
    scale_rows = info.parts[part].scale_rows
    assert info.scale.block_shape is not None
    assert scale_rows is not None
    scale = aux[0][slice(*scale_rows)].float()
    block_shape = list(info.scale.block_shape)
    return values * expand_block_scales(scale, [0, high - low], block_shape, info.in_features)


def quantize_groups(x: Tensor, group: int, min_scale: float) -> tuple[Tensor, Tensor]:
    """x (..., K) -> FP8 codes (..., K) and scales (..., ceil(K / group)) float32.

    scale = max(amax / 448, min_scale) over each `group` consecutive columns (the last group may
    have fewer); code = x / scale rounded to the nearest float8_e4m3fn. The scheme of DeepSeek-V3's
    checkpoints (`activation_scheme: dynamic`).
    """
    columns = x.shape[-1]
    count = -(-columns // group)
    values = x.float()
    if columns % group:
        values = F.pad(values, (0, count * group - columns))
    values = values.reshape(*x.shape[:-1], count, group)
    scale = (values.abs().amax(-1) / FP8_MAX).clamp(min=min_scale)
    codes = (values / scale.unsqueeze(-1)).clamp(-FP8_MAX, FP8_MAX)
    codes = codes.reshape(*x.shape[:-1], count * group)[..., :columns]
    return codes.to(torch.float8_e4m3fn).contiguous(), scale


def dequantize_groups(codes: Tensor, scale: Tensor, group: int) -> Tensor:
    """Inverse of `quantize_groups`: (..., K) float32."""
    columns = codes.shape[-1]
    count = scale.shape[-1]
    factors = scale.unsqueeze(-1).expand(*scale.shape, group)
    factors = factors.reshape(*scale.shape[:-1], count * group)[..., :columns]
    return codes.float() * factors


def quantize_activation(x: Tensor, info: QuantInfo) -> Tensor:
    """q(x): x as the scheme's base GEMM sees it, in fp32."""
    if info.activation.handling == "none":
        return x.float()
    assert info.activation.group is not None
    assert info.activation.min_scale is not None
    codes, scale = quantize_groups(x, info.activation.group, info.activation.min_scale)
    return dequantize_groups(codes, scale, info.activation.group)
