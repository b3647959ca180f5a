"""What the ops mean, in plain fp32 PyTorch, one slot and one expert after the other.

This is the eager kernel of the markers and the measure of every faster path. Nothing here is
fast. All products and sums are fp32; each function rounds its result once, to x.dtype.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lora_compile.errors import FeatureUnsupported
from lora_compile.ops.quant import base_product, parse_quant
from lora_compile.ops.rows import resolve_rows
from lora_compile.schemas.quant_info import QuantInfo


def live_slots(slot: Tensor, rank: Tensor) -> list[tuple[int, int, Tensor]]:
    """(slot, its rank, indices of its rows) for each slot that is in use and has a delta."""
    found = []
    for value in torch.unique(slot[slot >= 0]).tolist():
        if (true_rank := int(rank[value])) > 0:
            found.append((int(value), true_rank, torch.nonzero(slot == value).flatten()))
    return found


def site_linear(
    x: Tensor,
    weight: Tensor,
    aux: list[Tensor],
    bias: Tensor | None,
    adapter: list[Tensor],
    rows: list[Tensor],
    part: int,
    quant: str,
    packed: bool,
) -> Tensor:
    """y = Q(W) q(x) + b + s_row * s_slot * B (A x), for one part. See `markers.site_linear`."""
    info = parse_quant(quant)
    low, high = info.parts[part].rows
    flat = x.reshape(-1, x.shape[-1])
    base = base_product(flat, weight, aux, info, part)
    if bias is not None:
        base = base + bias[low:high].float()
    if adapter:
        lora_a, lora_b, lora_scale, rank = adapter
        slot, row_scale, _ = resolve_rows(x, rows, packed, rank.shape[0])
        for index, true_rank, where in live_slots(slot, rank):
            down = flat[where].float() @ lora_a[index, part, :true_rank].float().T
            down = down * (row_scale[where] * lora_scale[index, part]).unsqueeze(1)
            base[where] += down @ lora_b[index, low:high, :true_rank].float().T
    return base.to(x.dtype).reshape(*x.shape[:-1], high - low)


def site_embedding(
    ids: Tensor, table: Tensor, adapter: list[Tensor], rows: list[Tensor], packed: bool
) -> Tensor:
    """E' = E + s_row * s_slot * (B A)^T, rows `ids`. See `markers.site_embedding`."""
    flat = ids.reshape(-1)
    out = F.embedding(flat, table).float()
    if adapter:
        emb_a, emb_b, lora_scale, rank = adapter
        slot, row_scale, _ = resolve_rows(ids.unsqueeze(-1), rows, packed, rank.shape[0])
        for index, true_rank, where in live_slots(slot, rank):
            down = emb_a[index, :true_rank].float().T[flat[where]]
            down = down * (row_scale[where] * lora_scale[index, 0]).unsqueeze(1)
            out[where] += down @ emb_b[index, :, :true_rank].float().T
    return out.to(table.dtype).reshape(*ids.shape, table.shape[1])


def site_experts(
    x: Tensor,
    topk_index: Tensor,
    topk_weight: Tensor,
    w13: Tensor,
    w13_aux: list[Tensor],
    w13_bias: Tensor | None,
    w2: Tensor,
    w2_aux: list[Tensor],
    w2_bias: Tensor | None,
    adapter: list[Tensor],
    rows: list[Tensor],
    quant13: str,
    quant2: str,
    layout: str,
    activation: str,
    packed: bool,
) -> Tensor:
    """Gate/up, activation, down, times the routing weight. See `markers.site_experts`."""
    info13, info2 = parse_quant(quant13), parse_quant(quant2)
    refuse_experts(layout, activation, info13)
    experts = w13.shape[0]
    out = torch.zeros(*topk_index.shape, x.shape[1], dtype=torch.float32, device=x.device)
    if adapter:
        slot, row_scale, _ = resolve_rows(x, rows, packed, adapter[-1].shape[0])
    for expert in torch.unique(topk_index).tolist():
        if not 0 <= expert < experts:
            continue
        token, choice = torch.nonzero(topk_index == expert, as_tuple=True)
        gate_up = _all_parts(x[token], w13[expert], [aux[expert] for aux in w13_aux], info13)
        if w13_bias is not None:
            gate_up = gate_up + w13_bias[expert].float()
        gate, up = split_gate_up(gate_up, layout)
        if adapter:
            gate_a, gate_b, up_a, up_b, down_a, down_b, lora_scale, rank = adapter
            here = (slot[token], row_scale[token], lora_scale, rank)
            gate = gate + expert_delta(x[token], gate_a, gate_b, 0, expert, *here)
            up = up + expert_delta(x[token], up_a, up_b, 1, expert, *here)
        # The down delta reads the 16-bit h that the base GEMM's quantisation also starts from.
        hidden = (F.silu(gate) * up).to(x.dtype)
        down = _all_parts(hidden, w2[expert], [aux[expert] for aux in w2_aux], info2)
        if w2_bias is not None:
            down = down + w2_bias[expert].float()
        if adapter:
            down = down + expert_delta(hidden, down_a, down_b, 2, expert, *here)
        out[token, choice] = down * topk_weight[token, choice].float().unsqueeze(1)
    return out.sum(1).to(x.dtype)


def _all_parts(x: Tensor, weight: Tensor, aux: list[Tensor], info: QuantInfo) -> Tensor:
    """Q(W) q(x) of every part: (T, N) float32."""
    return torch.cat(
        [base_product(x, weight, aux, info, part) for part in range(len(info.parts))], dim=-1
    )


def refuse_experts(layout: str, activation: str, info13: QuantInfo) -> None:
    """Raise FeatureUnsupported for what has no kernel yet.

    That is a layout or an activation, or static input scales that differ between gate and up in a
    layout where the rows of the two alternate, so that no range of rows has one scale.
    """
    for what, value, known in (
        ("gate/up layout", layout, ("halves", "interleaved")),
        ("expert activation", activation, ("silu",)),
    ):
        if value not in known:
            raise FeatureUnsupported(
                f"{what} {value!r} is not supported",
                expected=" or ".join(known),
                found=value,
                fix="leave the experts of this model without adapters",
            )
    if layout == "interleaved" and len(set(info13.planes)) > 1:
        raise FeatureUnsupported(
            f"scheme {info13.scheme!r} with input scales that differ between gate and up is not "
            "supported where their rows alternate",
            expected="one input scale for gate and up, or layout 'halves'",
            found=f"{len(set(info13.planes))} input scales, layout {layout!r}",
            fix="leave the experts of this model without adapters",
        )


def split_gate_up(gate_up: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    """`halves`: [gate; up]; `interleaved`: gate, up, gate, up, …"""
    if layout == "interleaved":
        return gate_up[..., 0::2], gate_up[..., 1::2]
    gate, up = gate_up.chunk(2, dim=-1)
    return gate, up


def expert_delta(
    x: Tensor,
    lora_a: Tensor,
    lora_b: Tensor,
    projection: int,
    expert: int,
    slot: Tensor,
    row_scale: Tensor,
    lora_scale: Tensor,
    rank: Tensor,
) -> Tensor:
    """Delta of one projection of one expert. x (T, in) -> (T, out) float32.

    lora_a (S, E, R, in), lora_b (S, E, out, R), lora_scale (S, 3) for gate, up and down.
    """
    delta = torch.zeros(x.shape[0], lora_b.shape[2], dtype=torch.float32, device=x.device)
    for index, true_rank, where in live_slots(slot, rank):
        down = x[where].float() @ lora_a[index, expert, :true_rank].float().T
        down = down * (row_scale[where] * lora_scale[index, projection]).unsqueeze(1)
        delta[where] = down @ lora_b[index, expert, :, :true_rank].float().T
    return delta
