"""What a site computes, in float64 with loops over rows, blocks and groups.

Written from the definition y = Q(W) q(x) + b + s_row s_slot B (A x) and with nothing of
lora_compile.ops but the tensors of a `SampleSite`.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from lora_compile.ops.sample import SampleSite


def decode_weight(site: SampleSite) -> Tensor:
    """(N, K) float64. Rows of block scales restart at each part."""
    if not site.aux:
        return site.weight.double()
    decoded = site.weight.float().double()
    if site.quant.scale.block_shape is None:
        for row in range(decoded.shape[0]):
            decoded[row] *= site.aux[0][row].double()
        return decoded
    block_rows, block_columns = site.quant.scale.block_shape
    scale_row = 0
    for low, high in pairwise(site.part_rows):
        for top in range(low, high, block_rows):
            bottom = min(top + block_rows, high)
            for column, left in enumerate(range(0, decoded.shape[1], block_columns)):
                block = decoded[top:bottom, left : left + block_columns]
                block *= site.aux[0][scale_row, column].double()
            scale_row += 1
    return decoded


def round_trip(values: Tensor, scale: Tensor, dtype: str) -> Tensor:
    """float32 values to codes and back, in float64: nearest code, ties to even, saturating."""
    quotient = values / scale
    if dtype == "int8":
        return quotient.round().clamp(-127, 127).double() * scale.double()
    return quotient.clamp(-448, 448).to(torch.float8_e4m3fn).double() * scale.double()


def decode_activation(site: SampleSite, x: Tensor, part: int) -> Tensor:
    """q(x) (L, K) float64, as one part reads it."""
    activation = site.quant.activation
    if activation.handling == "none":
        return x.double()
    assert activation.dtype is not None
    if activation.handling == "static":
        index = site.quant.parts[part].input_scale
        assert index is not None
        return round_trip(x.float(), site.aux[1][index], activation.dtype)
    decoded = torch.empty(x.shape, dtype=torch.float64)
    step = activation.group or x.shape[1]
    for left in range(0, x.shape[1], step):
        values = x[:, left : left + step].float()
        largest = 127 if activation.dtype == "int8" else 448
        scale = torch.clamp(values.abs().amax(1, keepdim=True) / largest, min=1e-12)
        decoded[:, left : left + step] = round_trip(values, scale, activation.dtype)
    return decoded


def site_output(site: SampleSite, x: Tensor, slots: list[int], scales: list[float]) -> Tensor:
    """(L, N) float64 for x (..., K); one slot and one scale per flattened row."""
    flat = x.reshape(-1, x.shape[-1])
    weight = decode_weight(site)
    y = torch.cat(
        [
            decode_activation(site, flat, part) @ weight[low:high].T
            for part, (low, high) in enumerate(pairwise(site.part_rows))
        ],
        1,
    )
    if site.bias is not None:
        y = y + site.bias.double()
    for row, (slot, scale) in enumerate(zip(slots, scales, strict=True)):
        if slot < 0:
            continue
        rank = int(site.lora_rank[slot])
        for part, (low, high) in enumerate(pairwise(site.part_rows)):
            down = site.lora_a[slot, part, :rank].double() @ flat[row].double()
            up = site.lora_b[slot, low:high, :rank].double() @ down
            y[row, low:high] += scale * float(site.lora_scale[slot, part]) * up
    return y
