# Triton's language has no types that mypy can check.
# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False
# mypy: disallow-incomplete-defs=False, disallow-untyped-calls=False
"""h = s * A x, for rows of any slots in any order."""

import triton
import triton.language as tl


@triton.jit
def shrink_kernel(
    x,  # (rows, K)
    lora_a,  # (S, P, R, K)
    lora_scale,  # (S, P) float32
    lora_rank,  # (S,) int32
    slot,  # map of sequences or of rows, int32
    row_scale,  # the same map, float32
    planes,  # (SPLITS, rows, P, R) float32
    rows,
    tokens,  # rows per entry of the map
    S: tl.constexpr,
    P: tl.constexpr,
    R: tl.constexpr,
    K: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLIT_COLUMNS: tl.constexpr,  # columns per split, a multiple of BK
    PER_TOKEN: tl.constexpr,
    BM: tl.constexpr,
    BR: tl.constexpr,
    BK: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    split = tl.program_id(0) % SPLITS
    part = tl.program_id(1)
    row = (tl.program_id(0) // SPLITS) * BM + tl.arange(0, BM)
    live = row < rows
    r = tl.program_id(2) * BR + tl.arange(0, BR)
    entry = row if PER_TOKEN else row // tokens
    own = tl.load(slot + entry, mask=live, other=-1)
    scale = tl.load(row_scale + entry, mask=live, other=0.0)
    bound = (own >= 0) & (own < S)
    nothing = tl.where(bound | (own == -1), 0.0, float("nan"))
    h = tl.broadcast_to(nothing[:, None], (BM, BR))

    first = split * SPLIT_COLUMNS
    column = tl.arange(0, BK)
    x_row = x + row.to(tl.int64)[:, None] * K
    # The distinct slots of this tile, in ascending order.
    current = tl.min(tl.where(bound, own, S))
    while current < S:
        rank = tl.load(lora_rank + current)
        stored = tl.cdiv(rank, 16) * 16
        a_row = lora_a + ((current.to(tl.int64) * P + part) * R + r)[None, :] * K
        product = tl.zeros((BM, BR), tl.float32)
        last = tl.where(tl.program_id(2) * BR < stored, min(first + SPLIT_COLUMNS, K), first)
        for k in range(first, last, BK):
            inside = k + column < K
            values = tl.load(
                x_row + (k + column)[None, :], mask=live[:, None] & inside[None, :], other=0.0
            )
            a = tl.load(
                a_row + (k + column)[:, None],
                mask=(r < stored)[None, :] & inside[:, None],
                other=0.0,
            )
            if INTERPRET:
                values = values.to(tl.float32)
                a = a.to(tl.float32)
            product = tl.dot(values, a, product, input_precision="ieee")
        product = product * (scale * tl.load(lora_scale + current * P + part))[:, None]
        # Selected, never multiplied by zero: a foreign slot may hold NaN.
        h = tl.where(((own == current) & (rank > 0))[:, None], product, h)
        current = tl.min(tl.where(bound & (own > current), own, S))

    # `rows` is a plain int where it is specialised, so the cast is on the program's own number.
    place = (split.to(tl.int64) * rows + row) * (P * R) + part * R
    tl.store(planes + place[:, None] + r[None, :], h, mask=live[:, None] & (r < R)[None, :])
