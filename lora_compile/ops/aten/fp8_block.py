"""The ATen forms of block-FP8 linears."""

from __future__ import annotations

import torch
from torch import Tensor

from lora_compile.ops.activations import quantize_groups
from lora_compile.ops.aten.shared import E4M3_UNIT, add_bias_and_delta, decode_e4m3
from lora_compile.ops.quant import expand_block_rows
from lora_compile.ops.rows import check_fits, leading_rows


def scale_groups_(values: Tensor, scale: Tensor, group: int) -> None:
    """values (..., K) *= scale (..., ceil(K / group)), in place."""
    whole = values.shape[-1] // group
    blocks = torch.unflatten(values[..., : whole * group], -1, (whole, group))
    blocks.mul_(scale[..., :whole, None])
    if values.shape[-1] % group:
        values[..., whole * group :].mul_(scale[..., whole:])


@torch.library.custom_op("lora_compile::aten_quantize_fp8_group", mutates_args=())
def aten_quantize_fp8_group(x: Tensor, group: int, min_scale: float) -> tuple[Tensor, Tensor]:
    """As `quantize_fp8_group`."""
    return quantize_groups(x, group, min_scale)


@aten_quantize_fp8_group.register_fake
def _(x: Tensor, group: int, min_scale: float) -> tuple[Tensor, Tensor]:
    codes = x.new_empty(x.shape, dtype=torch.float8_e4m3fn)
    groups = -(-x.shape[-1] // group)
    return codes, x.new_empty((*x.shape[:-1], groups), dtype=torch.float32)


@torch.library.custom_op("lora_compile::aten_fp8_block_linear", mutates_args=())
def aten_fp8_block_linear(
    xq: Tensor,
    xs: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    part_rows: list[int],
    block_shape: list[int],
    group: int,
    out_dtype: torch.dtype,
) -> Tensor:
    """As `fp8_block_linear`."""
    y = _fp8_matmul(xq, xs, weight, weight_scale, part_rows, block_shape, group)
    if bias is not None:
        y += bias.float()
    return y.to(out_dtype).reshape(*xq.shape[:-1], weight.shape[0])


@aten_fp8_block_linear.register_fake
def _(
    xq: Tensor,
    xs: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    part_rows: list[int],
    block_shape: list[int],
    group: int,
    out_dtype: torch.dtype,
) -> Tensor:
    return xq.new_empty((*xq.shape[:-1], weight.shape[0]), dtype=out_dtype)


@torch.library.custom_op("lora_compile::aten_fp8_block_linear_lora", mutates_args=())
def aten_fp8_block_linear_lora(
    xq: Tensor,
    xs: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    part_rows: list[int],
    block_shape: list[int],
    group: int,
    h: Tensor,
    lora_B: Tensor,
    lora_rank: Tensor,
    slot: Tensor,
    per_token: bool,
    out_dtype: torch.dtype,
) -> Tensor:
    """As `fp8_block_linear_lora`."""
    rows = leading_rows(xq, per_token)
    check_fits(rows, slot)
    y = _fp8_matmul(xq, xs, weight, weight_scale, part_rows, block_shape, group)
    add_bias_and_delta(y, bias, h, lora_B, lora_rank, slot, part_rows, rows)
    return y.to(out_dtype).reshape(*xq.shape[:-1], weight.shape[0])


@aten_fp8_block_linear_lora.register_fake
def _(
    xq: Tensor,
    xs: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    part_rows: list[int],
    block_shape: list[int],
    group: int,
    h: Tensor,
    lora_B: Tensor,
    lora_rank: Tensor,
    slot: Tensor,
    per_token: bool,
    out_dtype: torch.dtype,
) -> Tensor:
    return xq.new_empty((*xq.shape[:-1], weight.shape[0]), dtype=out_dtype)


def _fp8_matmul(
    xq: Tensor,
    xs: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    part_rows: list[int],
    block_shape: list[int],
    group: int,
) -> Tensor:
    """Q(W) q(x) in float32: (L, N)."""
    x, w = decode_e4m3(xq), decode_e4m3(weight)
    scale_groups_(x, xs * E4M3_UNIT, group)
    rows = expand_block_rows(weight_scale * E4M3_UNIT, part_rows, block_shape[0])
    scale_groups_(w, rows, block_shape[1])
    return x.reshape(-1, x.shape[-1]) @ w.T
