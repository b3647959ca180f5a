# Triton's language has no types that mypy can check.
# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False
# mypy: disallow-incomplete-defs=False, disallow-untyped-calls=False
"""One GEMM for all linears: plain, block-scaled or row-scaled, with or without the delta.

A program computes BN rows of W by BM rows of x, with W on the M side of the dot, so that few rows
of x still fill the tensor cores. A tile of W's rows never crosses a part, so the part, its rows of
scales, its quantised form of x and its slice of h are scalars of the program, whatever the parts'
sizes.
"""

import triton
import triton.language as tl


@triton.jit
def _rounded_product(a, b):
    """a * b in float32, which the compiler does not melt into an addition that follows.

    A fused multiply-add rounds once where PyTorch rounds twice.
    """
    return tl.inline_asm_elementwise(
        "mul.rn.f32 $0, $1, $2;", "=f,f,f", [a, b], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def gemm_kernel(
    x,  # (rows, K); with row scales (X, rows, K)
    w,  # (N, K)
    bias,  # (N,)
    xs,  # (rows, ceil(K / GROUP)) float32; with row scales (X, rows)
    ws,  # (sum of ceil(N_p / BLOCK_N), ceil(K / BLOCK_K)) float32; with row scales (N,)
    h,  # (rows, P, R) float32
    lora_b,  # (S, N, R)
    lora_rank,  # (S,) int32
    slot,  # map of sequences or of rows, int32
    y,  # (rows, N)
    rows,
    tokens,  # rows per entry of the map
    N: tl.constexpr,
    K: tl.constexpr,
    END0: tl.constexpr,  # ends of the first three parts; the fourth ends at N
    END1: tl.constexpr,
    END2: tl.constexpr,
    PLANE0: tl.constexpr,  # which of the X forms of x each part reads
    PLANE1: tl.constexpr,
    PLANE2: tl.constexpr,
    PLANE3: tl.constexpr,
    TILES: tl.constexpr,  # tiles of W's rows, over all parts
    GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    S: tl.constexpr,
    P: tl.constexpr,
    R: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK_SCALED: tl.constexpr,
    ROW_SCALED: tl.constexpr,
    LORA: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    # Eight row tiles share a tile of W while it is in L2.
    row_tiles = tl.cdiv(rows, BM)
    band = tl.program_id(0) // (8 * TILES)
    in_band = min(row_tiles - band * 8, 8)
    row_tile = band * 8 + (tl.program_id(0) % (8 * TILES)) % in_band
    tile = (tl.program_id(0) % (8 * TILES)) // in_band

    part = 0
    low = 0
    high = END0
    first_tile = 0
    scale_row = 0
    plane = PLANE0
    tiles0: tl.constexpr = (END0 + BN - 1) // BN
    tiles1: tl.constexpr = tiles0 + (END1 - END0 + BN - 1) // BN
    tiles2: tl.constexpr = tiles1 + (END2 - END1 + BN - 1) // BN
    blocks0: tl.constexpr = (END0 + BLOCK_N - 1) // BLOCK_N
    blocks1: tl.constexpr = blocks0 + (END1 - END0 + BLOCK_N - 1) // BLOCK_N
    blocks2: tl.constexpr = blocks1 + (END2 - END1 + BLOCK_N - 1) // BLOCK_N
    if P > 1:
        after = tile >= tiles0
        part = tl.where(after, 1, part)
        low = tl.where(after, END0, low)
        high = tl.where(after, END1, high)
        first_tile = tl.where(after, tiles0, first_tile)
        scale_row = tl.where(after, blocks0, scale_row)
        plane = tl.where(after, PLANE1, plane)
    if P > 2:
        after = tile >= tiles1
        part = tl.where(after, 2, part)
        low = tl.where(after, END1, low)
        high = tl.where(after, END2, high)
        first_tile = tl.where(after, tiles1, first_tile)
        scale_row = tl.where(after, blocks1, scale_row)
        plane = tl.where(after, PLANE2, plane)
    if P > 3:
        after = tile >= tiles2
        part = tl.where(after, 3, part)
        low = tl.where(after, END2, low)
        high = tl.where(after, N, high)
        first_tile = tl.where(after, tiles2, first_tile)
        scale_row = tl.where(after, blocks2, scale_row)
        plane = tl.where(after, PLANE3, plane)

    local = (tile - first_tile) * BN + tl.arange(0, BN)
    n = low + local
    n_live = n < high
    row = row_tile * BM + tl.arange(0, BM)
    live = row < rows
    column = tl.arange(0, BK)
    source = row.to(tl.int64) + plane * rows
    x_row = x + source[None, :] * K
    w_row = w + n.to(tl.int64)[:, None] * K
    xs_row = xs + row.to(tl.int64) * ((K + GROUP - 1) // GROUP)
    ws_row = ws + (scale_row + local // BLOCK_N) * ((K + BLOCK_K - 1) // BLOCK_K)

    WHOLE: tl.constexpr = w.dtype.element_ty == tl.int8
    FP8: tl.constexpr = w.dtype.element_ty == tl.float8e4nv
    acc = tl.zeros((BN, BM), tl.int32 if WHOLE else tl.float32)
    for k in range(0, K, BK):
        # A ragged K is masked; where BK divides K the compiler drops the comparison.
        inside = k + column < K
        a = tl.load(
            w_row + (k + column)[None, :], mask=n_live[:, None] & inside[None, :], other=0.0
        )
        b = tl.load(x_row + (k + column)[:, None], mask=live[None, :] & inside[:, None], other=0.0)
        if INTERPRET and not WHOLE:
            a = a.to(tl.float32)
            b = b.to(tl.float32)
        if BLOCK_SCALED:
            sx = tl.load(xs_row + k // GROUP, mask=live, other=0.0)
            sw = tl.load(ws_row + k // BLOCK_K, mask=n_live, other=0.0)
            acc += tl.dot(a, b) * (sw[:, None] * sx[None, :])
        elif FP8:
            # Hopper adds FP8 products with about 14 bits: out of the tensor core after each step.
            acc = tl.dot(a, b, acc, max_num_imprecise_acc=BK)
        elif WHOLE:
            acc = tl.dot(a, b, acc, out_dtype=tl.int32)
        else:
            acc = tl.dot(a, b, acc, input_precision="ieee")

    if ROW_SCALED:
        sx = tl.load(xs + source, mask=live, other=0.0)[None, :]
        sw = tl.load(ws + n, mask=n_live, other=0.0)[:, None]
        if INTERPRET:
            acc = acc.to(tl.float32) * sx * sw
        else:
            acc = _rounded_product(acc.to(tl.float32), tl.broadcast_to(sx, (BN, BM)))
            acc = _rounded_product(acc, tl.broadcast_to(sw, (BN, BM)))
    if BIAS:
        acc += tl.load(bias + n, mask=n_live, other=0.0).to(tl.float32)[:, None]
    if LORA:
        entry = row if PER_TOKEN else row // tokens
        own = tl.load(slot + entry, mask=live, other=-1)
        bound = (own >= 0) & (own < S)
        nothing = tl.where(bound | (own == -1), 0.0, float("nan"))
        delta = tl.broadcast_to(nothing[None, :], (BN, BM))
        r = tl.arange(0, 16)
        h_row = h + row.to(tl.int64)[None, :] * (P * R) + part * R
        # The distinct slots of this tile, in ascending order.
        current = tl.min(tl.where(bound, own, S))
        while current < S:
            rank = tl.load(lora_rank + current)
            b_row = lora_b + (current.to(tl.int64) * N + n)[:, None] * R
            product = tl.zeros((BN, BM), tl.float32)
            for r0 in range(0, rank, 16):
                up = tl.load(b_row + (r0 + r)[None, :], mask=n_live[:, None], other=0.0)
                down = tl.load(h_row + (r0 + r)[:, None], mask=live[None, :], other=0.0)
                if INTERPRET or lora_b.dtype.element_ty != tl.bfloat16:
                    product = tl.dot(up.to(tl.float32), down, product, input_precision="ieee")
                else:
                    # Two bf16 halves keep 16 bits of h.
                    coarse = down.to(tl.bfloat16)
                    fine = (down - coarse.to(tl.float32)).to(tl.bfloat16)
                    product = tl.dot(up, coarse, product)
                    product = tl.dot(up, fine, product)
            # Selected, never multiplied by zero: a foreign slot may hold NaN.
            delta = tl.where(((own == current) & (rank > 0))[None, :], product, delta)
            current = tl.min(tl.where(bound & (own > current), own, S))
        acc += delta

    place = row.to(tl.int64)[None, :] * N + n[:, None]
    tl.store(y + place, acc.to(y.dtype.element_ty), mask=live[None, :] & n_live[:, None])
