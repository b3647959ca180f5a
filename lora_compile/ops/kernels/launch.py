"""Allocate, choose tiles, launch.

Two rules of torch hold here. `wrap_triton(kernel)` must name the kernel by a bare name: the scan
that puts kernel sources into the compile cache's key finds no other form. And the number of rows
may be symbolic: nothing may branch on it.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise

import torch
from torch import Tensor
from torch.library import wrap_triton

from lora_compile.errors import FeatureUnsupported
from lora_compile.ops.activations import code_max
from lora_compile.ops.kernels.limits import MAX_PARTS, MIN_COLUMN_STEP, common_step
from lora_compile.ops.rows import Rows
from lora_compile.ops.source_digest import kernel_row_tile

HAS_TRITON = find_spec("triton") is not None

if HAS_TRITON:
    import triton

    from lora_compile.ops.kernels.gemm import gemm_kernel
    from lora_compile.ops.kernels.quantize import (
        quantize_kernel,
        quantize_static_kernel,
        quantize_token_kernel,
    )
    from lora_compile.ops.kernels.shrink import shrink_kernel

GEMM_ROWS = 64
"""Rows of W per program: the least that wgmma takes on its M side."""
SHRINK_SPLIT = 1024
"""Columns of x per program of the shrink."""
MAX_SPLITS = 8
RANK_STEP = 16
"""Ranks are stored padded to a multiple of this; loops over a rank take steps of it."""


def require_triton() -> None:
    """Raise FeatureUnsupported where a Triton kernel is asked for and Triton is not installed."""
    if not HAS_TRITON:
        raise FeatureUnsupported(
            "a Triton kernel was selected, but Triton is not installed",
            expected="the package `triton`",
            found="none",
            fix="install triton, or run on the CPU",
        )


@dataclass(frozen=True)
class BlockScales:
    """What makes a GEMM a block-FP8 one. See `fp8_block.fp8_block_linear`."""

    xs: Tensor
    weight_scale: Tensor
    block_shape: list[int]
    group: int


@dataclass(frozen=True)
class RowScales:
    """What makes a GEMM one of row-scaled codes. See `scaled.scaled_linear`."""

    xs: Tensor
    weight_scale: Tensor
    planes: list[int]


@dataclass(frozen=True)
class Expand:
    """The delta that rides in a GEMM's epilogue. See `dense.linear_lora`."""

    h: Tensor
    lora_B: Tensor
    lora_rank: Tensor
    slot: Tensor
    rows: Rows


def interpreting() -> bool:
    """Whether Triton's interpreter is active. Its dots on 16-bit operands are wrong (3.7)."""
    return bool(triton.knobs.runtime.interpret)


def ceil_div(a: int, b: int) -> int:
    return (a + b - 1) // b


def row_tile(kernel: str, rows: int) -> int:
    """Rows of x per program. `rows` may be symbolic; then 64, unless `kernel` says otherwise."""
    asked = kernel_row_tile(kernel)
    if asked is not None:
        return asked
    if not isinstance(rows, int) or rows > 32:
        return 64
    return 16 if rows <= 16 else 32


def launch_quantize(x: Tensor, group: int, min_scale: float) -> tuple[Tensor, Tensor]:
    """Body of `quantize_fp8_group`."""
    columns = x.shape[-1]
    groups = ceil_div(columns, group)
    flat = x.reshape(-1, columns).contiguous()
    rows = flat.shape[0]
    codes = torch.empty_like(flat, dtype=torch.float8_e4m3fn)
    scales = torch.empty((rows, groups), dtype=torch.float32, device=x.device)
    tile = 4
    wrap_triton(quantize_kernel)[(ceil_div(rows, tile), groups)](
        flat,
        codes,
        scales,
        rows,
        min_scale,
        K=columns,
        GROUP=group,
        GROUP_TILE=max(16, 1 << (group - 1).bit_length()),
        ROWS=tile,
    )
    return codes.reshape(x.shape), scales.reshape(*x.shape[:-1], groups)


def launch_quantize_token(x: Tensor, dtype: torch.dtype, min_scale: float) -> tuple[Tensor, Tensor]:
    """Body of `quantize_token`. A program reads its row twice: for the scale, for the codes."""
    columns = x.shape[-1]
    flat = x.reshape(-1, columns).contiguous()
    rows = flat.shape[0]
    codes = torch.empty_like(flat, dtype=dtype)
    scales = torch.empty((rows,), dtype=torch.float32, device=x.device)
    wrap_triton(quantize_token_kernel)[(rows,)](
        flat,
        codes,
        scales,
        min_scale,
        K=columns,
        LARGEST=code_max(dtype),
        WHOLE=not dtype.is_floating_point,
        TILE=min(4096, max(128, 1 << (columns - 1).bit_length())),
    )
    return codes.reshape(1, *x.shape), scales.reshape(1, *x.shape[:-1])


def launch_quantize_static(
    x: Tensor, input_scale: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Body of `quantize_static`."""
    columns, planes = x.shape[-1], input_scale.shape[0]
    flat = x.reshape(-1, columns).contiguous()
    rows = flat.shape[0]
    codes = torch.empty((planes, rows, columns), dtype=dtype, device=x.device)
    scales = torch.empty((planes, rows), dtype=torch.float32, device=x.device)
    row_step, step = 4, 512
    wrap_triton(quantize_static_kernel)[
        (ceil_div(rows, row_step), ceil_div(columns, step), planes)
    ](
        flat,
        input_scale.contiguous(),
        codes,
        scales,
        rows,
        K=columns,
        LARGEST=code_max(dtype),
        WHOLE=not dtype.is_floating_point,
        ROWS=row_step,
        TILE=step,
    )
    return codes.reshape(planes, *x.shape), scales.reshape(planes, *x.shape[:-1])


def launch_shrink(
    x: Tensor,
    lora_A: Tensor,
    lora_scale: Tensor,
    lora_rank: Tensor,
    slot: Tensor,
    row_scale: Tensor,
    rows: Rows,
    kernel: str,
) -> Tensor:
    """Body of `lora_shrink`. K is split over programs; the planes are added in order."""
    slots, parts, rank, columns = lora_A.shape
    total = rows.total
    flat = x.reshape(total, columns).contiguous()
    splits = max(1, min(MAX_SPLITS, columns // SHRINK_SPLIT))
    planes = torch.empty((splits, total, parts, rank), dtype=torch.float32, device=x.device)
    tile = row_tile(kernel, total)
    rank_tile = RANK_STEP if rank == RANK_STEP else 2 * RANK_STEP
    step = 128 if x.element_size() <= 2 else 64
    grid = (ceil_div(total, tile) * splits, parts, ceil_div(rank, rank_tile))
    wrap_triton(shrink_kernel)[grid](
        flat,
        lora_A.contiguous(),
        lora_scale,
        lora_rank,
        slot,
        row_scale,
        planes,
        total,
        rows.tokens,
        S=slots,
        P=parts,
        R=rank,
        K=columns,
        SPLITS=splits,
        SPLIT_COLUMNS=ceil_div(ceil_div(columns, splits), step) * step,
        PER_TOKEN=rows.per_token,
        BM=tile,
        BR=rank_tile,
        BK=step,
        INTERPRET=interpreting(),
    )
    return planes[0] if splits == 1 else planes.sum(0)


def launch_gemm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    part_rows: list[int],
    out_dtype: torch.dtype,
    kernel: str,
    *,
    scales: BlockScales | RowScales | None = None,
    delta: Expand | None = None,
) -> Tensor:
    """Body of the linears. Absent tensors are replaced by ones that the kernel won't read.

    x is (..., K), with RowScales (X, ..., K).
    """
    out_features, columns = weight.shape
    blocks = scales if isinstance(scales, BlockScales) else None
    by_row = scales if isinstance(scales, RowScales) else None
    if len(part_rows) - 1 > MAX_PARTS:
        raise FeatureUnsupported(
            "too many projections are fused into one GEMM",
            expected=f"at most {MAX_PARTS}",
            found=len(part_rows) - 1,
            fix="split the group in the architecture's schema",
        )
    one = x if by_row is None else x[0]
    rows = one.reshape(-1, columns).shape[0]
    planes = [0] * (len(part_rows) - 1) if by_row is None else by_row.planes
    planes = [*planes, *([0] * (MAX_PARTS - len(planes)))]
    y = torch.empty((rows, out_features), dtype=out_dtype, device=x.device)
    ends = [*part_rows[1:], *([out_features] * (MAX_PARTS + 1 - len(part_rows)))]
    tile = row_tile(kernel, rows)
    tiles = sum(ceil_div(high - low, GEMM_ROWS) for low, high in pairwise(part_rows))
    wrap_triton(gemm_kernel)[(ceil_div(rows, tile) * tiles,)](
        x.contiguous(),
        weight.contiguous(),
        weight if bias is None else bias,
        weight if scales is None else scales.xs.contiguous(),
        weight if scales is None else scales.weight_scale.contiguous(),
        weight if delta is None else delta.h.contiguous(),
        weight if delta is None else delta.lora_B.contiguous(),
        weight if delta is None else delta.lora_rank,
        weight if delta is None else delta.slot,
        y,
        rows,
        1 if delta is None else delta.rows.tokens,
        N=out_features,
        K=columns,
        END0=ends[0],
        END1=ends[1],
        END2=ends[2],
        PLANE0=planes[0],
        PLANE1=planes[1],
        PLANE2=planes[2],
        PLANE3=planes[3],
        TILES=tiles,
        GROUP=1 if blocks is None else blocks.group,
        BLOCK_N=1 if blocks is None else blocks.block_shape[0],
        BLOCK_K=1 if blocks is None else blocks.block_shape[1],
        S=1 if delta is None else delta.lora_B.shape[0],
        P=len(part_rows) - 1,
        R=RANK_STEP if delta is None else delta.lora_B.shape[2],
        BIAS=bias is not None,
        BLOCK_SCALED=blocks is not None,
        ROW_SCALED=by_row is not None,
        LORA=delta is not None,
        PER_TOKEN=delta is not None and delta.rows.per_token,
        BM=tile,
        BN=GEMM_ROWS,
        BK=_column_step(x, blocks) if by_row is None else _code_step(columns),
        INTERPRET=interpreting(),
    )
    return y.reshape(*one.shape[:-1], out_features)


def _code_step(columns: int) -> int:
    """Columns of 8-bit codes per step; the shorter one where the last step would be half empty."""
    return 128 if columns % 128 == 0 or columns > 1024 else 64


def _column_step(x: Tensor, scales: BlockScales | None) -> int:
    """Columns per step of the GEMM's loop; with scales, within one block and one group."""
    if scales is None:
        return 64 if x.element_size() <= 2 else 32
    step = common_step(scales.block_shape[1], scales.group)
    if step < MIN_COLUMN_STEP:
        raise FeatureUnsupported(
            "the Triton block-FP8 kernel cannot tile these scales",
            expected="block columns and activation group with a common power of two >= "
            f"{MIN_COLUMN_STEP}",
            found=f"block columns {scales.block_shape[1]}, group {scales.group}",
            fix="select the PyTorch kernel",
        )
    return min(step, 128)
