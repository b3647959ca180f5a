"""q(x): how the input of a quantised linear becomes codes and scales.

Three ways: one scale per row and group of columns, one per row ("token"), or fixed ones out of the
checkpoint. All divisions are exact and by a tensor: CUDA turns a division by a Python number into
a product with its reciprocal, and one ulp of a scale moves the codes of 16-bit inputs that lie just
between two codes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

CODE_MAX = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
"""Largest code of a dtype; codes are symmetric, so int8's -128 is not used."""


def code_max(dtype: torch.dtype) -> float:
    """Largest code of a dtype of codes.

    Raises:
        ValueError: activations are not quantised to this dtype.
    """
    if dtype not in CODE_MAX:
        raise ValueError(f"expected codes of {' or '.join(map(str, CODE_MAX))}, found {dtype}")
    return CODE_MAX[dtype]


def encode(values: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """values / scale, clamped to the codes and rounded to the nearest, ties to even."""
    largest = code_max(dtype)
    quotient = (values / scale).clamp(-largest, largest)
    return (quotient if dtype.is_floating_point else quotient.round()).to(dtype)


def peak_scale(values: Tensor, min_scale: float, dtype: torch.dtype) -> Tensor:
    """max(amax / largest code, min_scale) over the last dimension of float32 values."""
    largest = torch.full((), code_max(dtype), dtype=torch.float32, device=values.device)
    return (values.abs().amax(-1) / largest).clamp(min=min_scale)


def quantize_groups(x: Tensor, group: int, min_scale: float) -> tuple[Tensor, Tensor]:
    """x (..., K) -> FP8 codes (..., K) and scales (..., ceil(K / group)) float32.

    scale = max(amax / 448, min_scale) over each `group` consecutive columns (the last group may
    have fewer); code = x / scale rounded to the nearest float8_e4m3fn. The scheme of DeepSeek-V3's
    checkpoints (`activation_scheme: dynamic`).
    """
    columns = x.shape[-1]
    blocks = columns // group
    codes, scales = [], []
    if blocks:
        whole = torch.unflatten(x[..., : blocks * group], -1, (blocks, group))
        code, scale = _quantize_last(whole, min_scale, torch.float8_e4m3fn)
        codes.append(code.flatten(-2))
        scales.append(scale)
    if columns % group:
        rest = x[..., blocks * group :].unsqueeze(-2)
        code, scale = _quantize_last(rest, min_scale, torch.float8_e4m3fn)
        codes.append(code.flatten(-2))
        scales.append(scale)
    if len(codes) == 1:
        return codes[0], scales[0]
    return torch.cat(codes, -1), torch.cat(scales, -1)


def quantize_tokens(x: Tensor, dtype: torch.dtype, min_scale: float) -> tuple[Tensor, Tensor]:
    """One scale per row: x (..., K) -> codes (1, ..., K) and scales (1, ...) float32.

    scale = max(amax / Q, min_scale), Q the largest code; code = x / scale, nearest, ties to even.
    """
    codes, scale = _quantize_last(x, min_scale, dtype)
    return codes.unsqueeze(0), scale.unsqueeze(0)


def quantize_planes(x: Tensor, input_scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Fixed scales: x (..., K) and input_scale (X,) float32 -> codes (X, ..., K), scales (X, ...).

    Plane i is x / input_scale[i], clamped to the codes, nearest, ties to even; its scales are all
    input_scale[i]. The results are fresh tensors, never views of `input_scale`.
    """
    planes = input_scale.float().reshape(-1, *([1] * x.dim()))
    codes = encode(x.float().unsqueeze(0), planes, dtype)
    scales = planes.squeeze(-1).expand(codes.shape[:-1])
    return codes, scales.clone(memory_format=torch.contiguous_format)


def plane_runs(part_rows: Sequence[int], planes: Sequence[int]) -> list[tuple[int, int, int]]:
    """(plane, low, high): rows of a fused weight, in order, that read the same quantised x.

    Args:
        part_rows: [0, N_0, N_0 + N_1, …, N].
        planes: the plane that each part reads.
    """
    runs: list[tuple[int, int, int]] = []
    for plane, (low, high) in zip(planes, pairwise(part_rows), strict=True):
        if runs and runs[-1][0] == plane:
            runs[-1] = (plane, runs[-1][1], high)
        else:
            runs.append((plane, low, high))
    return runs


def _quantize_last(values: Tensor, min_scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """One scale over the last dimension: codes (..., c) and scales (...)."""
    values = values.float()
    scale = peak_scale(values, min_scale, dtype)
    return encode(values, scale.unsqueeze(-1), dtype), scale
