"""The marker ops: what a rewritten model calls, and what the passes look for.

A marker is functional and opaque to Dynamo. Its eager kernel is the reference, so a model is right
before any compile; in a compiled graph a pass replaces each marker by lowered ops.

Letters: L leading size of x, K in_features, N rows of the whole group, N_p rows of part p, P parts,
S slots, R padded rank, E experts, H hidden size, I intermediate size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lora_compile.ops import reference
from lora_compile.ops.quant import parse_quant
from lora_compile.ops.rows import check_fits, leading_rows, uses_token_map

ALL_PARTS = -1
"""`part` of a fused marker: every part of the group, in the order of their rows."""


def _check_rows(x: Tensor, rows: list[Tensor], packed: bool) -> None:
    """The fake kernels' share of `resolve_rows`: sizes, no values."""
    per_token = uses_token_map(x.dim(), packed)
    check_fits(leading_rows(x, per_token), rows[2 if per_token else 0])


@torch.library.custom_op("lora_compile::site_linear", mutates_args=())
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
    """One part of a linear site: y = Q(W) q(x) + b + s_row * s_slot * B_slot (A_slot x).

    Args:
        x: (..., K), float32 or 16 bit.
        weight: (N, K), all parts of the group.
        aux: the tensors that `QuantInfo.aux_names` lists, of the whole group.
        bias: (N,) or None.
        adapter: [] or [lora_A (S, P, R, K), lora_B (S, N, R), lora_scale (S, P) float32,
            lora_rank (S,) int32].
        rows: [seq_slot, seq_scale, token_slot, token_scale], see `rows`; not read without adapter.
        part: which part of the group to compute, or ALL_PARTS.
        quant: `QuantInfo.model_dump_json()` of the group.
        packed: rows are packed into one sequence, so the token map holds.

    Returns:
        (..., N_p), or (..., N) for ALL_PARTS; x.dtype, rounded once.

    Raises:
        RequestInvalid: more rows than the map holds, or a row bound to no slot.
    """
    parts = range(len(parse_quant(quant).parts)) if part == ALL_PARTS else (part,)
    outputs = [
        reference.site_linear(x, weight, aux, bias, adapter, rows, index, quant, packed)
        for index in parts
    ]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)


@site_linear.register_fake
def _(
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
    info = parse_quant(quant)
    low, high = (0, info.out_features) if part == ALL_PARTS else info.parts[part].rows
    if adapter:
        _check_rows(x, rows, packed)
    return x.new_empty((*x.shape[:-1], high - low))


@torch.library.custom_op("lora_compile::site_embedding", mutates_args=())
def site_embedding(
    ids: Tensor, table: Tensor, adapter: list[Tensor], rows: list[Tensor], packed: bool
) -> Tensor:
    """An embedding with deltas: row `id` of E + s_row * s_slot * (B A)^T.

    Args:
        ids: (...) integer; (B, n) is mapped per sequence, (T,) per token.
        table: (V, D).
        adapter: [] or [emb_A (S, R, V), emb_B (S, D, R), lora_scale (S, 1) float32,
            lora_rank (S,) int32]. The orientation is PEFT's `lora_embedding_A` and `_B`.
        rows: as in `site_linear`.
        packed: as in `site_linear`.

    Returns:
        (..., D), table.dtype, rounded once.

    Raises:
        RequestInvalid: as in `site_linear`.
    """
    return reference.site_embedding(ids, table, adapter, rows, packed)


@site_embedding.register_fake
def _(
    ids: Tensor, table: Tensor, adapter: list[Tensor], rows: list[Tensor], packed: bool
) -> Tensor:
    if adapter:
        _check_rows(ids.unsqueeze(-1), rows, packed)
    return table.new_empty((*ids.shape, table.shape[1]))


@torch.library.custom_op("lora_compile::site_experts", mutates_args=())
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
    """A fused experts module, after routing.

    gate and up from q(x), each with its delta from x; h = act(gate) * up rounded to x.dtype; down
    from q(h), with its delta from h; times the routing weight (the delta too); summed over top-k.

    Args:
        x: (T, H).
        topk_index: (T, k) integer. An id of -1, or of E and above, contributes exactly zero.
        topk_weight: (T, k).
        w13: (E, 2I, H), gate and up.
        w13_aux: the tensors of quant13's `aux_names`, each with a leading E.
        w13_bias: (E, 2I) or None.
        w2: (E, H, I), down.
        w2_aux: as w13_aux, for quant2.
        w2_bias: (E, H) or None.
        adapter: [] or [gate_A (S, E, R, H), gate_B (S, E, I, R), up_A, up_B, down_A (S, E, R, I),
            down_B (S, E, H, R), lora_scale (S, 3) float32, lora_rank (S,) int32].
        rows: as in `site_linear`; x has two dimensions, so the token map holds.
        quant13: `QuantInfo.model_dump_json()` of one expert's w13.
        quant2: the same of w2.
        layout: `halves` ([gate; up]) or `interleaved`, of w13's rows.
        activation: `silu`.
        packed: as in `site_linear`.

    Returns:
        (T, H), x.dtype, rounded once.

    Raises:
        FeatureUnsupported: another layout or activation; static input scales that differ between
            gate and up where the layout is `interleaved`.
        RequestInvalid: as in `site_linear`.
    """
    return reference.site_experts(
        x,
        topk_index,
        topk_weight,
        w13,
        w13_aux,
        w13_bias,
        w2,
        w2_aux,
        w2_bias,
        adapter,
        rows,
        quant13,
        quant2,
        layout,
        activation,
        packed,
    )


@site_experts.register_fake
def _(
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
    reference.refuse_experts(layout, activation, parse_quant(quant13))
    if adapter:
        _check_rows(x, rows, packed)
    return torch.empty_like(x, memory_format=torch.contiguous_format)
