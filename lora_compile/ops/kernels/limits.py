"""What the Triton kernels can take, as numbers that planning knows without Triton."""

from __future__ import annotations

import math

MAX_PARTS = 4
"""Parts that the GEMM kernel takes; their boundaries are scalar arguments of it."""
MIN_COLUMN_STEP = 32
"""Least columns per step of the block-FP8 GEMM: the least K of an FP8 dot."""


def common_step(block_columns: int, group: int) -> int:
    """Largest power of two that divides both; Triton's steps are powers of two.

    A step of so many columns stays within one block of the weight's scales and within one group of
    the activation's.
    """
    common = math.gcd(block_columns, group)
    return common & -common
