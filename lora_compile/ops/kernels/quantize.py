# Triton's language has no types that mypy can check.
# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False
# mypy: disallow-incomplete-defs=False, disallow-untyped-calls=False
"""Quantise activations: one scale per row and group of columns."""

import triton
import triton.language as tl


@triton.jit
def quantize_kernel(
    x,  # (rows, K)
    codes,  # (rows, K) float8_e4m3fn
    scales,  # (rows, ceil(K / GROUP)) float32
    rows,
    min_scale,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_TILE: tl.constexpr,  # GROUP, up to a power of two
    ROWS: tl.constexpr,
):
    group = tl.program_id(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, GROUP_TILE)
    mask = (row < rows)[:, None] & ((column < GROUP) & (group * GROUP + column < K))[None, :]
    place = row.to(tl.int64)[:, None] * K + (group * GROUP + column)[None, :]
    values = tl.load(x + place, mask=mask, other=0.0).to(tl.float32)
    # div_rn: the default division is approximate, and one ulp can move a code. 16-bit inputs often
    # lie just between two codes.
    peak = tl.max(tl.abs(values), 1)
    scale = tl.div_rn(peak, tl.full((ROWS,), 448.0, tl.float32))
    # Under torch.compile `min_scale` arrives as float64.
    scale = tl.maximum(scale, min_scale).to(tl.float32)
    code = tl.div_rn(values, tl.broadcast_to(scale[:, None], (ROWS, GROUP_TILE)))
    code = tl.minimum(tl.maximum(code, -448.0), 448.0)
    tl.store(codes + place, code.to(codes.dtype.element_ty), mask=mask)
    tl.store(scales + row * tl.cdiv(K, GROUP) + group, scale, mask=row < rows)
