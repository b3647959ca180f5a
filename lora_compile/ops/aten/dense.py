"""The ATen form of unquantised linears."""

from __future__ import annotations

import torch
from torch import Tensor

from lora_compile.ops.aten.shared import add_bias_and_delta, upcast_matmul
from lora_compile.ops.rows import check_fits, leading_rows


@torch.library.custom_op("lora_compile::aten_linear_lora", mutates_args=())
def aten_linear_lora(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    h: Tensor,
    lora_B: Tensor,
    lora_rank: Tensor,
    slot: Tensor,
    part_rows: list[int],
    per_token: bool,
) -> Tensor:
    """As `linear_lora`."""
    rows = leading_rows(x, per_token)
    check_fits(rows, slot)
    y = upcast_matmul(x.reshape(rows.total, x.shape[-1]).float(), weight)
    add_bias_and_delta(y, bias, h, lora_B, lora_rank, slot, part_rows, rows)
    return y.to(x.dtype).reshape(*x.shape[:-1], weight.shape[0])


@aten_linear_lora.register_fake
def _(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    h: Tensor,
    lora_B: Tensor,
    lora_rank: Tensor,
    slot: Tensor,
    part_rows: list[int],
    per_token: bool,
) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))
