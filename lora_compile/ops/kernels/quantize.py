# Triton's language has no types that mypy can check.
# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False
# mypy: disallow-incomplete-defs=False, disallow-untyped-calls=False
"""Quantise activations: one scale per row and group of columns, one per row, or fixed scales.

`div_rn` everywhere: the default division is approximate, and one ulp can move a code. 16-bit inputs
often lie just between two codes.
"""

import triton
import triton.language as tl


@triton.jit
def _encode(values, scale, LARGEST: tl.constexpr, WHOLE: tl.constexpr):
    """values / scale within +-LARGEST, as float32; rounded, ties to even, if codes are WHOLE."""
    quotient = tl.div_rn(values, scale)
    # tl.maximum drops a NaN, and a NaN must not pass for a number.
    code = tl.where(
        quotient != quotient, quotient, tl.minimum(tl.maximum(quotient, -LARGEST), LARGEST)
    )
    if WHOLE:
        # In [2**23, 2**24) neighbouring floats are 1 apart, so the sum is rounded to a whole.
        code = (code + 12582912.0) - 12582912.0
    return code


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
    peak = tl.max(tl.abs(values), 1)
    scale = tl.div_rn(peak, tl.full((ROWS,), 448.0, tl.float32))
    # Under torch.compile `min_scale` arrives as float64.
    scale = tl.maximum(scale, min_scale).to(tl.float32)
    # tl.max drops a NaN.
    strange = tl.max((values != values).to(tl.int32), 1) > 0
    scale = tl.where(strange, float("nan"), scale)
    code = _encode(values, tl.broadcast_to(scale[:, None], (ROWS, GROUP_TILE)), 448.0, False)
    tl.store(codes + place, code.to(codes.dtype.element_ty), mask=mask)
    tl.store(scales + row * tl.cdiv(K, GROUP) + group, scale, mask=row < rows)


@triton.jit
def quantize_token_kernel(
    x,  # (rows, K)
    codes,  # (rows, K)
    scales,  # (rows,) float32
    min_scale,
    K: tl.constexpr,
    LARGEST: tl.constexpr,  # largest code
    WHOLE: tl.constexpr,  # codes are whole numbers
    TILE: tl.constexpr,
):
    row = tl.program_id(0)
    column = tl.arange(0, TILE)
    place = row.to(tl.int64) * K
    peaks = tl.zeros((TILE,), tl.float32)
    strange = tl.zeros((TILE,), tl.int32)
    for k in range(0, K, TILE):
        values = tl.load(x + place + k + column, mask=k + column < K, other=0.0).to(tl.float32)
        peaks = tl.maximum(peaks, tl.abs(values))
        strange = tl.where(values != values, 1, strange)
    peak = tl.broadcast_to(tl.max(peaks, 0), (TILE,))
    # Under torch.compile `min_scale` arrives as float64.
    scale = tl.maximum(tl.div_rn(peak, tl.full((TILE,), LARGEST, tl.float32)), min_scale)
    scale = tl.where(tl.max(strange, 0) > 0, float("nan"), scale.to(tl.float32))
    for k in range(0, K, TILE):
        values = tl.load(x + place + k + column, mask=k + column < K, other=0.0).to(tl.float32)
        code = _encode(values, scale, LARGEST, WHOLE)
        tl.store(codes + place + k + column, code.to(codes.dtype.element_ty), mask=k + column < K)
    tl.store(scales + row + column, scale, mask=column < 1)


@triton.jit
def quantize_static_kernel(
    x,  # (rows, K)
    input_scale,  # (X,) float32
    codes,  # (X, rows, K)
    scales,  # (X, rows) float32
    rows,
    K: tl.constexpr,
    LARGEST: tl.constexpr,
    WHOLE: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
):
    plane = tl.program_id(2)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    live = row < rows
    mask = live[:, None] & (column < K)[None, :]
    values = tl.load(x + row.to(tl.int64)[:, None] * K + column[None, :], mask=mask, other=0.0)
    scale = tl.load(input_scale + plane)
    code = _encode(values.to(tl.float32), tl.full((ROWS, TILE), scale, tl.float32), LARGEST, WHOLE)
    # `rows` is a plain int where it is specialised, so the cast is on the program's own number.
    place = plane.to(tl.int64) * rows + row
    tl.store(
        codes + place[:, None] * K + column[None, :], code.to(codes.dtype.element_ty), mask=mask
    )
    tl.store(
        scales + place, tl.full((ROWS,), scale, tl.float32), mask=live & (tl.program_id(1) == 0)
    )
