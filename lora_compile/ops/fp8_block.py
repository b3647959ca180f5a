"""Lowered linears of block-scaled FP8 weights with dynamically quantised activations.

The scheme of DeepSeek-V3's checkpoints (`quant_method: fp8`, `weight_block_size`): W[n, k] =
code[n, k] * scale[n // bn, k // bk], where the rows of scales restart at each part of a fused
weight, and q(x) has one scale per row and `group` columns. Ragged last blocks and groups are the
normal case.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.library import triton_op

from lora_compile.ops.activations import quantize_groups
from lora_compile.ops.kernels import (
    BlockScales,
    Expand,
    launch_gemm,
    launch_quantize,
    require_triton,
)
from lora_compile.ops.lora import expand
from lora_compile.ops.quant import dequantize_blocks, multiply_groups
from lora_compile.ops.rows import check_fits, leading_rows
from lora_compile.ops.source_digest import kernel_kind


@triton_op("lora_compile::quantize_fp8_group", mutates_args=())
def quantize_fp8_group(
    x: Tensor, group: int, min_scale: float, kernel: str
) -> tuple[Tensor, Tensor]:
    """q(x): FP8 codes and one scale per row and `group` consecutive columns.

    Args:
        x: (..., K).
        group: columns per scale; the last group may have fewer.
        min_scale: lower bound of a scale.
        kernel: see `source_digest.kernel_name`.

    Returns:
        codes (..., K) float8_e4m3fn, scales (..., ceil(K / group)) float32 = max(amax / 448,
        min_scale). The scales of a row depend on that row alone.
    """
    if kernel_kind(kernel) == "triton":
        require_triton()
        return launch_quantize(x, group, min_scale)
    return quantize_groups(x, group, min_scale)


@triton_op("lora_compile::fp8_block_linear", mutates_args=())
def fp8_block_linear(
    xq: Tensor,
    xs: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    part_rows: list[int],
    block_shape: list[int],
    group: int,
    out_dtype: torch.dtype,
    kernel: str,
) -> Tensor:
    """y = Q(W) q(x) + b.

    Args:
        xq: (..., K) float8_e4m3fn, from `quantize_fp8_group`.
        xs: (..., ceil(K / group)) float32.
        weight: (N, K) float8_e4m3fn.
        weight_scale: (sum over parts of ceil(N_p / bn), ceil(K / bk)) float32, multipliers.
        bias: (N,) or None.
        part_rows: [0, N_0, N_0 + N_1, …, N].
        block_shape: (bn, bk).
        group: columns per activation scale.
        out_dtype: dtype of the result.
        kernel: see `source_digest.kernel_name`.

    Returns:
        (..., N), out_dtype; products and sums in fp32, rounded once.

    Raises:
        FeatureUnsupported: block columns and group that the Triton kernel cannot tile, or more
            parts than it takes; the PyTorch body takes any.
    """
    if kernel_kind(kernel) == "triton":
        require_triton()
        scales = BlockScales(xs, weight_scale, block_shape, group)
        return launch_gemm(xq, weight, bias, part_rows, out_dtype, kernel, scales=scales)
    base = _linear_fp32(xq, xs, weight, weight_scale, bias, part_rows, block_shape, group)
    return base.to(out_dtype).reshape(*xq.shape[:-1], weight.shape[0])


@triton_op("lora_compile::fp8_block_linear_lora", mutates_args=())
def fp8_block_linear_lora(
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
    kernel: str,
) -> Tensor:
    """y = Q(W) q(x) + b + B_slot h; the delta was computed from the unquantised x.

    Arguments as in `fp8_block_linear`, and `h`, `lora_B`, `lora_rank`, `slot`, `per_token` as in
    `linear_lora`; the same promises about rows without adapter and rows bound to no slot.

    Returns:
        (..., N), out_dtype, rounded once.

    Raises:
        ValueError: L exceeds the map.
        FeatureUnsupported: as in `fp8_block_linear`.
    """
    rows = leading_rows(xq, per_token)
    check_fits(rows, slot)
    if kernel_kind(kernel) == "triton":
        require_triton()
        scales = BlockScales(xs, weight_scale, block_shape, group)
        delta = Expand(h, lora_B, lora_rank, slot, rows)
        return launch_gemm(
            xq, weight, bias, part_rows, out_dtype, kernel, scales=scales, delta=delta
        )
    base = _linear_fp32(xq, xs, weight, weight_scale, bias, part_rows, block_shape, group)
    y = base + expand(h, lora_B, lora_rank, slot, part_rows, rows)
    return y.to(out_dtype).reshape(*xq.shape[:-1], weight.shape[0])


def _linear_fp32(
    xq: Tensor,
    xs: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    part_rows: list[int],
    block_shape: list[int],
    group: int,
) -> Tensor:
    """(L, N) float32. Values times scales first: one GEMM, and Inductor fuses the dequantising."""
    x = multiply_groups(xq.float(), xs, group).reshape(-1, weight.shape[1])
    base = x @ dequantize_blocks(weight, weight_scale, part_rows, block_shape).T
    return base if bias is None else base + bias.float()
