"""The canonical JSON of a `QuantInfo`, as ops take it, and its meaning in plain fp32."""

from __future__ import annotations

from functools import cache

import torch
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


# Blocks and groups below are expanded over whole blocks, and the ragged rest is handled apart. Do
# not expand over padded blocks and slice: Inductor's C++ backend (2.13) splits a loop over
# `k // 128` into 128 x (K // 128) steps without looking at the remainder, and so leaves the last
# columns of a sliced expansion unwritten.


def expand_block_rows(scale: Tensor, part_rows: list[int], block_rows: int) -> Tensor:
    """Block scales, one line per row of the weight.

    Args:
        scale: (sum over parts of ceil(N_p / bn), C); rows restart at each part.
        part_rows: [0, N_0, N_0 + N_1, …, N].
        block_rows: bn.

    Returns:
        (N, C).
    """
    pieces = []
    start = first = 0
    for end in part_rows[1:]:
        rest = (end - start) % block_rows
        if rest == 0 and end != part_rows[-1]:
            continue  # Its blocks are whole, so the next part's rows simply follow.
        blocks = (end - start) // block_rows
        if blocks:
            whole = scale[first : first + blocks].unsqueeze(1)
            whole = whole.expand(blocks, block_rows, scale.shape[1])
            pieces.append(whole.reshape(blocks * block_rows, scale.shape[1]))
        if rest:
            pieces.append(scale[first + blocks : first + blocks + 1].expand(rest, scale.shape[1]))
        start, first = end, first + blocks + (rest > 0)
    return torch.cat(pieces) if len(pieces) > 1 else pieces[0]


def multiply_groups(values: Tensor, scale: Tensor, group: int) -> Tensor:
    """values (..., K) times scale (..., ceil(K / group)), one scale per `group` columns."""
    columns = values.shape[-1]
    blocks = columns // group
    pieces = []
    if blocks:
        whole = torch.unflatten(values[..., : blocks * group], -1, (blocks, group))
        pieces.append((whole * scale[..., :blocks].unsqueeze(-1)).flatten(-2))
    if columns % group:
        pieces.append(values[..., blocks * group :] * scale[..., blocks:])
    return torch.cat(pieces, -1) if len(pieces) > 1 else pieces[0]


def dequantize_blocks(
    weight: Tensor, scale: Tensor, part_rows: list[int], block_shape: list[int]
) -> Tensor:
    """weight (N, K) codes times its block scales: (N, K) float32.

    `scale` is (sum over parts of ceil(N_p / bn), ceil(K / bk)); its rows restart at each part.
    """
    rows = expand_block_rows(scale.float(), part_rows, block_shape[0])
    return multiply_groups(weight.float(), rows, block_shape[1])


def dequantize_weight(weight: Tensor, aux: list[Tensor], info: QuantInfo) -> Tensor:
    """Q(W): the weight's values.

    Args:
        weight: (N, K) codes.
        aux: the tensors of `info.aux_names`.

    Returns:
        (N, K) float32.
    """
    if info.scale.granularity == "none":
        return weight.float()
    assert info.scale.block_shape is not None
    return dequantize_blocks(weight, aux[0], boundaries(info), list(info.scale.block_shape))


def dequantize_part(weight: Tensor, aux: list[Tensor], info: QuantInfo, part: int) -> Tensor:
    """Q(W) of one part: (N_p, K) float32. Arguments as in `dequantize_weight`."""
    low, high = info.parts[part].rows
    if info.scale.granularity == "none":
        return weight[low:high].float()
    scale_rows = info.parts[part].scale_rows
    assert info.scale.block_shape is not None
    assert scale_rows is not None
    scale = aux[0][slice(*scale_rows)]
    block_shape = list(info.scale.block_shape)
    return dequantize_blocks(weight[low:high], scale, [0, high - low], block_shape)


def quantize_groups(x: Tensor, group: int, min_scale: float) -> tuple[Tensor, Tensor]:
    """x (..., K) -> FP8 codes (..., K) and scales (..., ceil(K / group)) float32.

    scale = max(amax / 448, min_scale) over each `group` consecutive columns (the last group may
    have fewer); code = x / scale rounded to the nearest float8_e4m3fn. The scheme of DeepSeek-V3's
    checkpoints (`activation_scheme: dynamic`).
    """
    columns = x.shape[-1]
    blocks = columns // group
    codes, scales = [], []
    if blocks:
        whole = torch.unflatten(x[..., : blocks * group], -1, (blocks, group))
        code, scale = _quantize_last(whole, min_scale)
        codes.append(code.flatten(-2))
        scales.append(scale)
    if columns % group:
        code, scale = _quantize_last(x[..., blocks * group :].unsqueeze(-2), min_scale)
        codes.append(code.flatten(-2))
        scales.append(scale)
    if len(codes) == 1:
        return codes[0], scales[0]
    return torch.cat(codes, -1), torch.cat(scales, -1)


def _quantize_last(values: Tensor, min_scale: float) -> tuple[Tensor, Tensor]:
    """One scale over the last dimension: codes (..., c) and scales (...)."""
    values = values.float()
    # Divided by a tensor: CUDA turns a division by a number into a product with its reciprocal.
    largest = torch.full((), FP8_MAX, dtype=torch.float32, device=values.device)
    scale = (values.abs().amax(-1) / largest).clamp(min=min_scale)
    codes = (values / scale.unsqueeze(-1)).clamp(-FP8_MAX, FP8_MAX)
    return codes.to(torch.float8_e4m3fn), scale


def quantize_activation(x: Tensor, info: QuantInfo) -> Tensor:
    """q(x): x as the scheme's base GEMM sees it, in fp32."""
    if info.activation.handling == "none":
        return x.float()
    assert info.activation.group is not None
    assert info.activation.min_scale is not None
    codes, scale = quantize_groups(x, info.activation.group, info.activation.min_scale)
    return multiply_groups(codes.float(), scale, info.activation.group)
