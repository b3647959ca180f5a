"""Lowered linears of unquantised weights (float32, float16, bfloat16)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.library import triton_op

from lora_compile.ops.kernels import Expand, launch_gemm, require_triton
from lora_compile.ops.lora import expand
from lora_compile.ops.rows import check_fits, leading_rows
from lora_compile.ops.source_digest import kernel_kind

UPCAST_ELEMENTS = 2**22
"""Elements of a 16-bit weight that are upcast at a time: 16 MiB of fp32, which stays in cache."""
MAX_CHUNKS = 8
"""Bound on the number of pieces, since each is compiled by itself."""


@triton_op("lora_compile::linear", mutates_args=())
def linear(x: Tensor, weight: Tensor, bias: Tensor | None, kernel: str) -> Tensor:
    """y = W x + b.

    Args:
        x: (..., K).
        weight: (N, K), same dtype as x.
        bias: (N,) or None.
        kernel: see `source_digest.kernel_name`.

    Returns:
        (..., N), x.dtype, rounded once.
    """
    if kernel_kind(kernel) == "triton":
        require_triton()
        return launch_gemm(x, weight, bias, [0, weight.shape[0]], x.dtype, kernel)
    # The backends' 16-bit GEMMs accumulate in fp32 and round once.
    return F.linear(x, weight, bias)


@triton_op("lora_compile::linear_lora", mutates_args=())
def linear_lora(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    h: Tensor,
    lora_B: Tensor,
    lora_rank: Tensor,
    slot: Tensor,
    part_rows: list[int],
    per_token: bool,
    kernel: str,
) -> Tensor:
    """y = W x + b + B_slot h, part by part.

    Args:
        x: (..., K).
        weight: (N, K).
        bias: (N,) or None.
        h: (L, P, R) float32, from `lora_shrink` of the same x.
        lora_B: (S, N, R).
        lora_rank: (S,) int32.
        slot: the whole sequence map, or the whole token map if `per_token`; int32.
        part_rows: [0, N_0, N_0 + N_1, …, N].
        per_token: as for `lora_shrink`.
        kernel: see `source_digest.kernel_name`.

    Returns:
        (..., N), x.dtype, rounded once. Rows of slot -1 have the bits of the base alone; rows that
        are bound to no slot are NaN.

    Raises:
        ValueError: L exceeds the map.
    """
    rows = leading_rows(x, per_token)
    check_fits(rows, slot)
    if kernel_kind(kernel) == "triton":
        require_triton()
        delta = Expand(h, lora_B, lora_rank, slot, rows)
        return launch_gemm(x, weight, bias, part_rows, x.dtype, kernel, delta=delta)
    base = _linear_fp32(x.reshape(rows.total, x.shape[-1]).float(), weight)
    if bias is not None:
        base = base + bias.float()
    y = base + expand(h, lora_B, lora_rank, slot, part_rows, rows)
    return y.to(x.dtype).reshape(*x.shape[:-1], weight.shape[0])


def _linear_fp32(x: Tensor, weight: Tensor) -> Tensor:
    """x W^T in fp32 for a weight of any float dtype."""
    rows, columns = weight.shape
    if weight.dtype == torch.float32 or rows * columns <= 2 * UPCAST_ELEMENTS:
        return x @ weight.float().T
    # A head of 50 000 rows upcast at once costs four times as much as in pieces that stay in cache.
    step = max(UPCAST_ELEMENTS // columns, -(-rows // MAX_CHUNKS))
    pieces = [x @ weight[low : low + step].float().T for low in range(0, rows, step)]
    return torch.cat(pieces, -1)
