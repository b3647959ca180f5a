"""The ATen form of the shrink."""

from __future__ import annotations

import torch
from torch import Tensor

from lora_compile.ops.aten.shared import UNBOUND, rows_by_slot
from lora_compile.ops.rows import check_fits, leading_rows


@torch.library.custom_op("lora_compile::aten_lora_shrink", mutates_args=())
def aten_lora_shrink(
    x: Tensor,
    lora_A: Tensor,
    lora_scale: Tensor,
    lora_rank: Tensor,
    slot: Tensor,
    row_scale: Tensor,
    per_token: bool,
) -> Tensor:
    """As `lora_shrink`."""
    rows = leading_rows(x, per_token)
    check_fits(rows, slot)
    flat = x.reshape(rows.total, x.shape[-1])
    h = torch.zeros(rows.total, *lora_A.shape[1:3], dtype=torch.float32, device=x.device)
    per_row = row_scale[: rows.batch].repeat_interleave(rows.tokens)
    for index, where in rows_by_slot(slot, lora_rank.shape[0], rows).items():
        if index == UNBOUND:
            h[where] = float("nan")
            continue
        rank = int(lora_rank[index])
        if rank == 0:
            continue
        a = lora_A[index, :, :rank].float()
        down = torch.matmul(flat[where].float(), a.mT)  # (P, rows, rank)
        scale = per_row[where].unsqueeze(0) * lora_scale[index].unsqueeze(1)
        h[where, :, :rank] = (down * scale.unsqueeze(2)).transpose(0, 1)
    return h


@aten_lora_shrink.register_fake
def _(
    x: Tensor,
    lora_A: Tensor,
    lora_scale: Tensor,
    lora_rank: Tensor,
    slot: Tensor,
    row_scale: Tensor,
    per_token: bool,
) -> Tensor:
    rows = leading_rows(x, per_token)
    check_fits(rows, slot)
    return x.new_empty((rows.total, *lora_A.shape[1:3]), dtype=torch.float32)
