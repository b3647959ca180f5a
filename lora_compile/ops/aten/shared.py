"""What the ATen forms of the lowered ops share: decoding, matmuls in float32, bias and delta."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from lora_compile.ops.rows import Rows

CHUNK = 2**21
"""Elements of a narrow weight that are upcast at a time: 8 MiB of fp32, which stays in cache."""

E4M3_UNIT = 256.0
"""What `decode_e4m3` leaves to be multiplied, with the scales."""


def decode_e4m3(codes: Tensor) -> Tensor:
    """float8_e4m3fn -> float32 / E4M3_UNIT, exactly, for finite codes.

    A code's bits moved to the top of a float16 are its value times 2^-8 (the exponent biases are 7
    and 15), subnormals included. ATen's own conversion goes element by element and takes seven
    times as long.
    """
    bits = codes.view(torch.int8).to(torch.int16)
    bits.bitwise_left_shift_(7).bitwise_and_(~0x4000)  # the sign was extended into bit 14
    return bits.view(torch.float16).float()


UNBOUND = -2


def rows_by_slot(slot: Tensor, slots: int, rows: Rows) -> dict[int, Tensor]:
    """Slot in use -> indices of its flattened rows; UNBOUND -> those of rows bound to no slot.

    Rows without an adapter (slot -1) are in none of them. The map is short and on the CPU, so it
    is read in Python: ATen would take ten small calls for each op.
    """
    found: dict[int, list[int]] = {}
    for entry, value in enumerate(slot[: rows.batch].tolist()):
        if value != -1:
            found.setdefault(value if 0 <= value < slots else UNBOUND, []).append(entry)
    tokens = torch.arange(rows.tokens, device=slot.device)
    return {
        value: (torch.tensor(entries, device=slot.device)[:, None] * rows.tokens + tokens).flatten()
        for value, entries in found.items()
    }


def upcast_matmul(x: Tensor, weight: Tensor) -> Tensor:
    """x (L, K) float32 times W^T for a weight of any dtype: (L, N) float32.

    A narrow weight goes through one buffer piece by piece, so that its fp32 form stays in cache.
    float8_e4m3fn counts as `decode_e4m3` reads it: the result is to be multiplied by E4M3_UNIT.
    """
    if weight.dtype == torch.float32:
        return x @ weight.T
    rows, columns = weight.shape
    step = max(1, CHUNK // columns)
    y = torch.empty(x.shape[0], rows, dtype=torch.float32, device=x.device)
    if weight.dtype == torch.float8_e4m3fn:
        for low in range(0, rows, step):
            y[:, low : low + step] = x @ decode_e4m3(weight[low : low + step]).T
        return y
    buffer = torch.empty(min(step, rows), columns, dtype=torch.float32, device=x.device)
    for low in range(0, rows, step):
        piece = buffer[: min(step, rows - low)]
        piece.copy_(weight[low : low + step])
        y[:, low : low + step] = x @ piece.T
    return y


def add_bias_and_delta(
    y: Tensor,
    bias: Tensor | None,
    h: Tensor,
    lora_B: Tensor,
    lora_rank: Tensor,
    slot: Tensor,
    part_rows: list[int],
    rows: Rows,
) -> None:
    """y (L, N) float32 += b + B_slot h, in place; NaN where a row is bound to no slot."""
    if bias is not None:
        y += bias.float()
    for index, where in rows_by_slot(slot, lora_rank.shape[0], rows).items():
        if index == UNBOUND:
            y[where] = float("nan")
            continue
        rank = int(lora_rank[index])
        if rank == 0:
            continue
        for part, (low, high) in enumerate(pairwise(part_rows)):
            y[where, low:high] += h[where, part, :rank] @ lora_B[index, low:high, :rank].float().T
