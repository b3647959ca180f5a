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
    """(N, K) float64. Rows of scales restart at each part."""
    if not site.aux:
        return site.weight.double()
    assert site.quant.scale.block_shape is not None
    block_rows, block_columns = site.quant.scale.block_shape
    decoded = site.weight.float().double()
    scale_row = 0
    for low, high in pairwise(site.part_rows):
        for top in range(low, high, block_rows):
            bottom = min(top + block_rows, high)
            for column, left in enumerate(range(0, decoded.shape[1], block_columns)):
                block = decoded[top:bottom, left : left + block_columns]
                block *= site.aux[0][scale_row, column].double()
            scale_row += 1
    return decoded


def decode_activation(site: SampleSite, x: Tensor) -> Tensor:
    """q(x) (L, K) float64."""
    group = site.quant.activation.group
    if group is None:
        return x.double()
    decoded = torch.empty(x.shape, dtype=torch.float64)
    for left in range(0, x.shape[1], group):
        values = x[:, left : left + group].float()
        scale = torch.clamp(values.abs().max(1, keepdim=True).values / 448, min=1e-12)
        codes = (values / scale).to(torch.float8_e4m3fn)
        decoded[:, left : left + group] = codes.double() * scale.double()
    return decoded


def site_output(site: SampleSite, x: Tensor, slots: list[int], scales: list[float]) -> Tensor:
    """(L, N) float64 for x (..., K); one slot and one scale per flattened row."""
    flat = x.reshape(-1, x.shape[-1])
    y = decode_activation(site, flat) @ decode_weight(site).T
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
