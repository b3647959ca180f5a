"""The CPU path: each lowered op as one opaque call that runs ATen.

The arguments are those of the lowered op without `kernel`. Inductor could compile the plain PyTorch
bodies too (the `torch` kernels), but it takes seconds of code generation for each layer of a model.
Behind an opaque op a model compiles in the time of its norms and attention, and the op may look at
the row map: a batch without adapters pays nothing for its slots.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from lora_compile.ops.quant import expand_block_rows, quantize_groups
from lora_compile.ops.rows import Rows, check_fits, leading_rows

CHUNK = 2**21
"""Elements of a 16-bit weight that are upcast at a time: 8 MiB of fp32, which stays in cache."""


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


def scale_groups_(values: Tensor, scale: Tensor, group: int) -> None:
    """values (..., K) *= scale (..., ceil(K / group)), in place."""
    whole = values.shape[-1] // group
    blocks = torch.unflatten(values[..., : whole * group], -1, (whole, group))
    blocks.mul_(scale[..., :whole, None])
    if values.shape[-1] % group:
        values[..., whole * group :].mul_(scale[..., whole:])


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


@torch.library.custom_op("lora_compile::aten_quantize_fp8_group", mutates_args=())
def aten_quantize_fp8_group(x: Tensor, group: int, min_scale: float) -> tuple[Tensor, Tensor]:
    """As `quantize_fp8_group`."""
    return quantize_groups(x, group, min_scale)


@aten_quantize_fp8_group.register_fake
def _(x: Tensor, group: int, min_scale: float) -> tuple[Tensor, Tensor]:
    codes = x.new_empty(x.shape, dtype=torch.float8_e4m3fn)
    groups = -(-x.shape[-1] // group)
    return codes, x.new_empty((*x.shape[:-1], groups), dtype=torch.float32)


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
    y = _upcast_matmul(x.reshape(rows.total, x.shape[-1]).float(), weight)
    _add_bias_and_delta(y, bias, h, lora_B, lora_rank, slot, part_rows, rows)
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


@torch.library.custom_op("lora_compile::aten_fp8_block_linear", mutates_args=())
def aten_fp8_block_linear(
    xq: Tensor,
    xs: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    part_rows: list[int],
    block_shape: list[int],
    group: int,
    out_dtype: torch.dtype,
) -> Tensor:
    """As `fp8_block_linear`."""
    y = _fp8_matmul(xq, xs, weight, weight_scale, part_rows, block_shape, group)
    if bias is not None:
        y += bias.float()
    return y.to(out_dtype).reshape(*xq.shape[:-1], weight.shape[0])


@aten_fp8_block_linear.register_fake
def _(
    xq: Tensor,
    xs: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    part_rows: list[int],
    block_shape: list[int],
    group: int,
    out_dtype: torch.dtype,
) -> Tensor:
    return xq.new_empty((*xq.shape[:-1], weight.shape[0]), dtype=out_dtype)


@torch.library.custom_op("lora_compile::aten_fp8_block_linear_lora", mutates_args=())
def aten_fp8_block_linear_lora(
    xq: Tensor,
    xs: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    part_rows: list[int],
    block_shape: list[int],
    group: int,
    h: Tensor,
    lora_B: Tensor,
    lora_rank: Tensor,
    slot: Tensor,
    per_token: bool,
    out_dtype: torch.dtype,
) -> Tensor:
    """As `fp8_block_linear_lora`."""
    rows = leading_rows(xq, per_token)
    check_fits(rows, slot)
    y = _fp8_matmul(xq, xs, weight, weight_scale, part_rows, block_shape, group)
    _add_bias_and_delta(y, bias, h, lora_B, lora_rank, slot, part_rows, rows)
    return y.to(out_dtype).reshape(*xq.shape[:-1], weight.shape[0])


@aten_fp8_block_linear_lora.register_fake
def _(
    xq: Tensor,
    xs: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    part_rows: list[int],
    block_shape: list[int],
    group: int,
    h: Tensor,
    lora_B: Tensor,
    lora_rank: Tensor,
    slot: Tensor,
    per_token: bool,
    out_dtype: torch.dtype,
) -> Tensor:
    return xq.new_empty((*xq.shape[:-1], weight.shape[0]), dtype=out_dtype)


def _fp8_matmul(
    xq: Tensor,
    xs: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    part_rows: list[int],
    block_shape: list[int],
    group: int,
) -> Tensor:
    """Q(W) q(x) in float32: (L, N)."""
    x, w = decode_e4m3(xq), decode_e4m3(weight)
    scale_groups_(x, xs * E4M3_UNIT, group)
    rows = expand_block_rows(weight_scale * E4M3_UNIT, part_rows, block_shape[0])
    scale_groups_(w, rows, block_shape[1])
    return x.reshape(-1, x.shape[-1]) @ w.T


def _upcast_matmul(x: Tensor, weight: Tensor) -> Tensor:
    """x (L, K) float32 times W^T for a weight of any float dtype: (L, N) float32.

    A 16-bit weight goes through one buffer piece by piece, so that its fp32 form stays in cache.
    """
    if weight.dtype == torch.float32:
        return x @ weight.T
    rows, columns = weight.shape
    step = max(1, CHUNK // columns)
    buffer = torch.empty(min(step, rows), columns, dtype=torch.float32, device=x.device)
    y = torch.empty(x.shape[0], rows, dtype=torch.float32, device=x.device)
    for low in range(0, rows, step):
        piece = buffer[: min(step, rows - low)]
        piece.copy_(weight[low : low + step])
        y[:, low : low + step] = x @ piece.T
    return y


def _add_bias_and_delta(
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
