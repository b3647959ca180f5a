"""The low-rank path: shrink (h = s * A x) as an op, expand (B h) as a part of the GEMM ops.

`kernel` picks the body: `torch…` is plain PyTorch that Inductor compiles, `triton…` the Triton
kernels. The choice is by this string, never by the device, so that Triton's interpreter can be
given CPU tensors.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor
from torch.library import triton_op

from lora_compile.ops.kernels import launch_shrink, require_triton
from lora_compile.ops.rows import Rows, active_rows, check_fits, leading_rows
from lora_compile.ops.source_digest import kernel_kind


@triton_op("lora_compile::lora_shrink", mutates_args=())
def lora_shrink(
    x: Tensor,
    lora_A: Tensor,
    lora_scale: Tensor,
    lora_rank: Tensor,
    slot: Tensor,
    row_scale: Tensor,
    per_token: bool,
    kernel: str,
) -> Tensor:
    """h = s_row * s_slot * A_slot x, for every part of a site.

    Args:
        x: (..., K).
        lora_A: (S, P, R, K), zero beyond each slot's rank.
        lora_scale: (S, P) float32.
        lora_rank: (S,) int32.
        slot: the whole sequence map, or the whole token map if `per_token`; int32.
        row_scale: the map of scales that belongs to `slot`; float32.
        per_token: row i of the flattened x uses slot[i].
        kernel: see `source_digest.kernel_name`.

    Returns:
        (L, P, R) float32: exactly zero on rows of slot -1 and of slots without a delta here, NaN on
        rows that are bound to no slot.

    Raises:
        ValueError: L exceeds the map.
    """
    rows = leading_rows(x, per_token)
    check_fits(rows, slot)
    if kernel_kind(kernel) == "triton":
        require_triton()
        return launch_shrink(x, lora_A, lora_scale, lora_rank, slot, row_scale, rows, kernel)
    parts, rank, columns = lora_A.shape[1:]
    flat = x.reshape(rows.total, columns)
    if rows.per_token:
        return _shrink_tokens(flat, lora_A, lora_scale, lora_rank, slot, row_scale, rows)
    index, active, fill = active_rows(slot[: rows.batch], lora_rank)
    scale = lora_scale[index] * row_scale[: rows.batch].unsqueeze(1)
    a = lora_A[index].reshape(rows.batch, parts * rank, columns).float()
    h = _batched_matmul(flat.reshape(rows.batch, rows.tokens, columns).float(), a)
    h = h.reshape(rows.batch, rows.tokens, parts, rank) * scale.reshape(rows.batch, 1, parts, 1)
    h = torch.where(_per_row(active, 4), h, _per_row(fill, 4))
    return h.reshape(rows.total, parts, rank)


def _shrink_tokens(
    x: Tensor,
    lora_A: Tensor,
    lora_scale: Tensor,
    lora_rank: Tensor,
    slot: Tensor,
    row_scale: Tensor,
    rows: Rows,
) -> Tensor:
    slots, parts, rank, columns = lora_A.shape
    index, active, fill = active_rows(slot[: rows.total], lora_rank)
    # Every slot's A on every token, then the token's own: columns of a product are independent, so
    # what a foreign slot holds cannot reach a row.
    every = x.float() @ lora_A.reshape(slots * parts * rank, columns).float().T
    every = every.reshape(rows.total, slots, parts * rank)
    own = index.reshape(rows.total, 1, 1).expand(rows.total, 1, parts * rank)
    h = torch.gather(every, 1, own).reshape(rows.total, parts, rank)
    scale = lora_scale[index] * row_scale[: rows.total].unsqueeze(1)
    return torch.where(_per_row(active, 3), h * scale.unsqueeze(2), _per_row(fill, 3))


def expand(
    h: Tensor,
    lora_B: Tensor,
    lora_rank: Tensor,
    slot: Tensor,
    part_rows: list[int],
    rows: Rows,
) -> Tensor:
    """The PyTorch form of B h: (L, N) float32, to be added to the base before the one rounding.

    Args:
        h: (L, P, R) float32, as `lora_shrink` returns it.
        lora_B: (S, N, R); rows of a part hold that part's B.
        lora_rank: (S,) int32.
        slot: the whole map.
        part_rows: [0, N_0, N_0 + N_1, …].
        rows: leading sizes of the activation.
    """
    index, active, fill = active_rows(slot[: rows.batch], lora_rank)
    if rows.per_token:
        delta = torch.zeros_like(h[:, 0, :1]).expand(rows.total, lora_B.shape[1])
        for number in range(lora_B.shape[0]):
            own = (index == number).unsqueeze(1)
            delta = torch.where(own, _expand_parts(h, lora_B[number], part_rows), delta)
        return torch.where(_per_row(active, 2), delta, _per_row(fill, 2))
    b = lora_B[index]
    h = h.reshape(rows.batch, rows.tokens, *h.shape[1:])
    if isinstance(rows.tokens, int) and rows.tokens == 1:
        # One token per sequence: a fused multiply and sum reads B as it is stored; a batched GEMM
        # would first write a gathered fp32 copy of it.
        delta = (h[:, 0][:, _part_of_row(part_rows, h.device)] * b.float()).sum(-1).unsqueeze(1)
    else:
        delta = _expand_parts(h, b, part_rows)
    delta = torch.where(_per_row(active, 3), delta, _per_row(fill, 3))
    return delta.reshape(rows.total, lora_B.shape[1])


def _expand_parts(h: Tensor, b: Tensor, part_rows: list[int]) -> Tensor:
    """(…, P, R) x (…, N, R) -> (…, N), each part's rows with that part's h."""
    pieces = []
    for part, (low, high) in enumerate(pairwise(part_rows)):
        pieces.append(torch.matmul(h[..., part, :], b[..., low:high, :].float().mT))
    return torch.cat(pieces, -1) if len(pieces) > 1 else pieces[0]


def _part_of_row(part_rows: list[int], device: torch.device) -> Tensor:
    """(N,) int64: which part a row of the fused weight belongs to."""
    row = torch.arange(part_rows[-1], device=device)
    part = torch.zeros_like(row)
    for boundary in part_rows[1:-1]:
        part = part + (row >= boundary)
    return part


def _batched_matmul(x: Tensor, weight: Tensor) -> Tensor:
    """(B, n, K) x (B, M, K) -> (B, n, M)."""
    if isinstance(x.shape[1], int) and x.shape[1] == 1:
        return (x * weight).sum(-1).unsqueeze(1)
    return torch.bmm(x, weight.mT)


def _per_row(values: Tensor, dim: int) -> Tensor:
    return values.reshape(-1, *([1] * (dim - 1)))
