"""The ATen forms of linears whose weights have one scale per row."""

from __future__ import annotations

import torch
from torch import Tensor

from lora_compile.ops.activations import plane_runs, quantize_planes, quantize_tokens
from lora_compile.ops.aten.shared import (
    E4M3_UNIT,
    add_bias_and_delta,
    decode_e4m3,
    upcast_matmul,
)
from lora_compile.ops.rows import check_fits, leading_rows

EXACT_COLUMNS = 1024
"""So many products of INT8 codes have an exact float32 sum, in any order: 1024 * 127 * 128 < 2**24.

ATen's own INT8 GEMM is no use here: on a CPU without VNNI it saturates 16-bit sums on the way.
"""


@torch.library.custom_op("lora_compile::aten_quantize_token", mutates_args=())
def aten_quantize_token(x: Tensor, dtype: torch.dtype, min_scale: float) -> tuple[Tensor, Tensor]:
    """As `quantize_token`."""
    return quantize_tokens(x, dtype, min_scale)


@aten_quantize_token.register_fake
def _(x: Tensor, dtype: torch.dtype, min_scale: float) -> tuple[Tensor, Tensor]:
    codes = x.new_empty((1, *x.shape), dtype=dtype)
    return codes, x.new_empty((1, *x.shape[:-1]), dtype=torch.float32)


@torch.library.custom_op("lora_compile::aten_quantize_static", mutates_args=())
def aten_quantize_static(
    x: Tensor, input_scale: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """As `quantize_static`."""
    return quantize_planes(x, input_scale, dtype)


@aten_quantize_static.register_fake
def _(x: Tensor, input_scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    planes = input_scale.shape[0]
    codes = x.new_empty((planes, *x.shape), dtype=dtype)
    return codes, x.new_empty((planes, *x.shape[:-1]), dtype=torch.float32)


@torch.library.custom_op("lora_compile::aten_scaled_linear", mutates_args=())
def aten_scaled_linear(
    xq: Tensor,
    xs: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    part_rows: list[int],
    planes: list[int],
    out_dtype: torch.dtype,
) -> Tensor:
    """As `scaled_linear`."""
    y = _scaled_matmul(xq, xs, weight, weight_scale, part_rows, planes)
    if bias is not None:
        y += bias.float()
    return y.to(out_dtype).reshape(*xq.shape[1:-1], weight.shape[0])


@aten_scaled_linear.register_fake
def _(
    xq: Tensor,
    xs: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    part_rows: list[int],
    planes: list[int],
    out_dtype: torch.dtype,
) -> Tensor:
    return xq.new_empty((*xq.shape[1:-1], weight.shape[0]), dtype=out_dtype)


@torch.library.custom_op("lora_compile::aten_scaled_linear_lora", mutates_args=())
def aten_scaled_linear_lora(
    xq: Tensor,
    xs: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    part_rows: list[int],
    planes: list[int],
    h: Tensor,
    lora_B: Tensor,
    lora_rank: Tensor,
    slot: Tensor,
    per_token: bool,
    out_dtype: torch.dtype,
) -> Tensor:
    """As `scaled_linear_lora`."""
    rows = leading_rows(xq[0], per_token)
    check_fits(rows, slot)
    y = _scaled_matmul(xq, xs, weight, weight_scale, part_rows, planes)
    add_bias_and_delta(y, bias, h, lora_B, lora_rank, slot, part_rows, rows)
    return y.to(out_dtype).reshape(*xq.shape[1:-1], weight.shape[0])


@aten_scaled_linear_lora.register_fake
def _(
    xq: Tensor,
    xs: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    part_rows: list[int],
    planes: list[int],
    h: Tensor,
    lora_B: Tensor,
    lora_rank: Tensor,
    slot: Tensor,
    per_token: bool,
    out_dtype: torch.dtype,
) -> Tensor:
    return xq.new_empty((*xq.shape[1:-1], weight.shape[0]), dtype=out_dtype)


def _scaled_matmul(
    xq: Tensor,
    xs: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    part_rows: list[int],
    planes: list[int],
) -> Tensor:
    """Q(W) q(x) in float32: (L, N)."""
    matmul = _int_matmul if weight.dtype == torch.int8 else _fp8_matmul
    pieces = []
    for plane, low, high in plane_runs(part_rows, planes):
        y = matmul(xq[plane].reshape(-1, weight.shape[1]), weight[low:high])
        pieces.append(y.mul_(xs[plane].reshape(-1, 1)).mul_(weight_scale[low:high]))
    return torch.cat(pieces, -1) if len(pieces) > 1 else pieces[0]


def _int_matmul(x: Tensor, weight: Tensor) -> Tensor:
    """int8 (L, K) times int8 (N, K) transposed: the exact sum, rounded once to float32."""
    columns = x.shape[1]
    if columns <= EXACT_COLUMNS:
        return upcast_matmul(x.float(), weight)
    total = torch.zeros(x.shape[0], weight.shape[0], dtype=torch.int32, device=x.device)
    for left in range(0, columns, EXACT_COLUMNS):
        here = slice(left, left + EXACT_COLUMNS)
        total += upcast_matmul(x[:, here].float(), weight[:, here]).to(torch.int32)
    return total.float()


def _fp8_matmul(x: Tensor, weight: Tensor) -> Tensor:
    """float8_e4m3fn (L, K) times (N, K) transposed, in float32."""
    # Both decoded forms lack E4M3_UNIT; x gets it twice.
    values = decode_e4m3(x).mul_(E4M3_UNIT**2)
    values.masked_fill_((x.view(torch.int8) & 0x7F) == 0x7F, float("nan"))
    return upcast_matmul(values, weight)
