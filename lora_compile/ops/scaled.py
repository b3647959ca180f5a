"""Lowered linears of weights with one scale per row, FP8 or INT8, and quantised activations.

W[n, k] = code[n, k] * weight_scale[n]; a weight with one scale per tensor has it repeated over its
rows. The scales leave the sum over k, so they are applied after it:

    y = ((acc * xs) * weight_scale) + b + delta,   acc = sum over k of code_w * code_x

in float32 and in this order. For INT8 acc is exact and rounded once to float32, so the rows of a
base model have the same bits in every implementation; for FP8 acc is a float32 sum.

q(x) comes in X planes, each a whole quantised form of x: one with dynamic scales, and one for each
distinct scale with static ones. A part of a fused weight reads plane `planes[part]`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.library import triton_op

from lora_compile.ops.activations import plane_runs, quantize_planes, quantize_tokens
from lora_compile.ops.kernels import (
    Expand,
    RowScales,
    launch_gemm,
    launch_quantize_static,
    launch_quantize_token,
    require_triton,
)
from lora_compile.ops.lora import expand
from lora_compile.ops.quant import scaled_product
from lora_compile.ops.rows import check_fits, leading_rows
from lora_compile.ops.source_digest import kernel_kind


@triton_op("lora_compile::quantize_token", mutates_args=())
def quantize_token(
    x: Tensor, dtype: torch.dtype, min_scale: float, kernel: str
) -> tuple[Tensor, Tensor]:
    """q(x) with one scale per row of x, computed from it.

    Args:
        x: (..., K).
        dtype: of the codes, float8_e4m3fn or int8.
        min_scale: lower bound of a scale.
        kernel: see `source_digest.kernel_name`.

    Returns:
        codes (1, ..., K), x / scale rounded to the nearest code, ties to even; scales (1, ...)
        float32 = max(amax / Q, min_scale), Q the largest code (448 or 127). Where x holds a NaN
        the row's scale is NaN.
    """
    if kernel_kind(kernel) == "triton":
        require_triton()
        return launch_quantize_token(x, dtype, min_scale)
    return quantize_tokens(x, dtype, min_scale)


@triton_op("lora_compile::quantize_static", mutates_args=())
def quantize_static(
    x: Tensor, input_scale: Tensor, dtype: torch.dtype, kernel: str
) -> tuple[Tensor, Tensor]:
    """q(x) with fixed scales, one plane for each.

    Args:
        x: (..., K).
        input_scale: (X,) float32, above 0.
        dtype: of the codes, float8_e4m3fn or int8.
        kernel: see `source_digest.kernel_name`.

    Returns:
        codes (X, ..., K), x / input_scale[i] clamped to the codes and rounded to the nearest, ties
        to even; scales (X, ...) float32, all input_scale[i]. A NaN in x is a NaN among FP8 codes;
        INT8 has no code for it.
    """
    if kernel_kind(kernel) == "triton":
        require_triton()
        return launch_quantize_static(x, input_scale, dtype)
    return quantize_planes(x, input_scale, dtype)


@triton_op("lora_compile::scaled_linear", mutates_args=())
def scaled_linear(
    xq: Tensor,
    xs: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    part_rows: list[int],
    planes: list[int],
    out_dtype: torch.dtype,
    kernel: str,
) -> Tensor:
    """y = Q(W) q(x) + b.

    Args:
        xq: (X, ..., K) codes, from `quantize_token` or `quantize_static`.
        xs: (X, ...) float32.
        weight: (N, K), of the same dtype as xq.
        weight_scale: (N,) float32, multipliers.
        bias: (N,) or None.
        part_rows: [0, N_0, N_0 + N_1, …, N].
        planes: for each part, which of the X forms of x it reads.
        out_dtype: dtype of the result.
        kernel: see `source_digest.kernel_name`.

    Returns:
        (..., N), out_dtype, rounded once; see the module's text for the order of operations.

    Raises:
        FeatureUnsupported: more parts than the Triton kernel takes; the PyTorch body takes any.
    """
    if kernel_kind(kernel) == "triton":
        require_triton()
        scales = RowScales(xs, weight_scale, planes)
        return launch_gemm(xq, weight, bias, part_rows, out_dtype, kernel, scales=scales)
    base = _linear_fp32(xq, xs, weight, weight_scale, bias, part_rows, planes)
    return base.to(out_dtype).reshape(*xq.shape[1:-1], weight.shape[0])


@triton_op("lora_compile::scaled_linear_lora", mutates_args=())
def scaled_linear_lora(
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
    kernel: str,
) -> Tensor:
    """y = Q(W) q(x) + b + B_slot h; the delta was computed from the unquantised x.

    Arguments as in `scaled_linear`, and `h`, `lora_B`, `lora_rank`, `slot`, `per_token` as in
    `linear_lora`; the same promises about rows without adapter and rows bound to no slot.

    Returns:
        (..., N), out_dtype, rounded once.

    Raises:
        ValueError: L exceeds the map.
        FeatureUnsupported: as in `scaled_linear`.
    """
    rows = leading_rows(xq[0], per_token)
    check_fits(rows, slot)
    if kernel_kind(kernel) == "triton":
        require_triton()
        scales = RowScales(xs, weight_scale, planes)
        delta = Expand(h, lora_B, lora_rank, slot, rows)
        return launch_gemm(
            xq, weight, bias, part_rows, out_dtype, kernel, scales=scales, delta=delta
        )
    base = _linear_fp32(xq, xs, weight, weight_scale, bias, part_rows, planes)
    y = base + expand(h, lora_B, lora_rank, slot, part_rows, rows)
    return y.to(out_dtype).reshape(*xq.shape[1:-1], weight.shape[0])


def _linear_fp32(
    xq: Tensor,
    xs: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    part_rows: list[int],
    planes: list[int],
) -> Tensor:
    """(L, N) float32."""
    pieces = []
    for plane, low, high in plane_runs(part_rows, planes):
        x, scale = xq[plane].reshape(-1, weight.shape[1]), xs[plane].reshape(-1)
        pieces.append(scaled_product(x, scale, weight[low:high], weight_scale[low:high]))
    base = torch.cat(pieces, -1) if len(pieces) > 1 else pieces[0]
    return base if bias is None else base + bias.float()
