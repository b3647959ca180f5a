"""Lower each marker to the scheme's base op and the quant-aware LoRA ops.

The base GEMM reads the quantised activation; the delta reads the unquantised one. Every
quantisation and LoRA op enters the graph here and nowhere else. How a family of schemes is lowered
is a table (`LOWERINGS`) by the base op that a scheme's file names; a scheme whose op has no entry
is refused.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import fx

from lora_compile.errors import GraphInvalid, SchemeUnsupported
from lora_compile.ops.quant import CODE_DTYPES
from lora_compile.ops.rows import uses_token_map
from lora_compile.passes import markers
from lora_compile.passes.base import (
    SITE_INPUT_META,
    SITE_META,
    UNSELECTED,
    GraphContext,
    GraphPass,
    calls,
    insert_call,
    value,
)
from lora_compile.planning.plan import SitePlan
from lora_compile.schemas.quant_scheme import find_scheme

_ops = torch.ops.lora_compile


def run(gm: fx.GraphModule, ctx: GraphContext) -> tuple[int, tuple[str, ...]]:
    graph = gm.graph
    nodes = calls(graph, _ops.site_linear)
    for node in nodes:
        site: SitePlan = node.meta[SITE_META]
        lower = _lowering(site)
        marker = markers.LinearMarker.of(node)
        with graph.inserting_before(node):
            delta = _shrink(graph, marker, site) if marker.adapter else None
            output = lower(graph, marker, delta, site)
        output.meta[SITE_INPUT_META] = marker.x.name
        output.meta["example_value"] = value(node)
        node.replace_all_uses_with(output)
        graph.erase_node(node)

    embeddings = calls(graph, _ops.site_embedding)
    for node in embeddings:
        if node.args[2]:
            raise GraphInvalid(
                f"site {node.meta[SITE_META].name} has adapter slots, but embeddings have no "
                "lowering for them",
                found=node.args[2],
            )
        ids, table = cast(tuple[fx.Node, fx.Node], node.args[:2])
        with graph.inserting_before(node):
            args = (ids, table)
            site = node.meta[SITE_META]
            output = insert_call(graph, torch.nn.functional.embedding, args, site, value(node))
        output.meta[SITE_INPUT_META] = ids.name
        node.replace_all_uses_with(output)
        graph.erase_node(node)
    return len(nodes) + len(embeddings), ()


def _lowering(site: SitePlan) -> Lowering:
    base = find_scheme(site.quant.scheme).ops.base
    if base not in LOWERINGS:
        raise SchemeUnsupported(
            f"scheme {site.quant.scheme} of site {site.name} has no lowering",
            expected=f"a scheme of one of the base ops {', '.join(sorted(LOWERINGS))}",
            found=base,
        )
    return LOWERINGS[base]


@dataclass(frozen=True)
class Delta:
    """The low-rank path of one site: h = s * A x, and what the expand in the GEMM needs."""

    h: fx.Node
    lora_B: fx.Node
    lora_rank: fx.Node
    slot: fx.Node
    per_token: bool


def _shrink(graph: fx.Graph, marker: markers.LinearMarker, site: SitePlan) -> Delta:
    lora_A, lora_B, lora_scale, lora_rank = marker.adapter
    seq_slot, seq_scale, token_slot, token_scale = marker.rows
    per_token = uses_token_map(value(marker.x).dim(), marker.packed)
    slot, row_scale = (token_slot, token_scale) if per_token else (seq_slot, seq_scale)
    args = (marker.x, lora_A, lora_scale, lora_rank, slot, row_scale, per_token, UNSELECTED)
    h = insert_call(graph, _ops.lora_shrink.default, args, site)
    return Delta(h, lora_B, lora_rank, slot, per_token)


def _lower_plain(
    graph: fx.Graph, marker: markers.LinearMarker, delta: Delta | None, site: SitePlan
) -> fx.Node:
    base = (marker.x, marker.weight, marker.bias)
    if delta is None:
        return insert_call(graph, _ops.linear.default, (*base, UNSELECTED), site)
    low_rank = (delta.h, delta.lora_B, delta.lora_rank, delta.slot)
    args = (*base, *low_rank, site.quant.part_rows, delta.per_token, UNSELECTED)
    return insert_call(graph, _ops.linear_lora.default, args, site)


def _lower_fp8_block(
    graph: fx.Graph, marker: markers.LinearMarker, delta: Delta | None, site: SitePlan
) -> fx.Node:
    activation, block_shape = site.quant.activation, site.quant.scale.block_shape
    assert block_shape is not None
    quantise = (marker.x, activation.group, activation.min_scale, UNSELECTED)
    quantised = insert_call(graph, _ops.quantize_fp8_group.default, quantise, site)
    layout = (site.quant.part_rows, list(block_shape), activation.group)
    ops = (_ops.fp8_block_linear.default, _ops.fp8_block_linear_lora.default)
    return _scaled_linear(graph, marker, delta, site, quantised, layout, ops)


def _lower_scaled(
    graph: fx.Graph, marker: markers.LinearMarker, delta: Delta | None, site: SitePlan
) -> fx.Node:
    activation = site.quant.activation
    assert activation.dtype is not None
    dtype = CODE_DTYPES[activation.dtype]
    if activation.handling == "static":
        input_scale = marker.aux[site.quant.aux_names.index("input_scale")]
        quantise: tuple[Any, ...] = (marker.x, input_scale, dtype, UNSELECTED)
        quantised = insert_call(graph, _ops.quantize_static.default, quantise, site)
    else:
        quantise = (marker.x, dtype, activation.min_scale, UNSELECTED)
        quantised = insert_call(graph, _ops.quantize_token.default, quantise, site)
    layout = (site.quant.part_rows, site.quant.planes)
    ops = (_ops.scaled_linear.default, _ops.scaled_linear_lora.default)
    return _scaled_linear(graph, marker, delta, site, quantised, layout, ops)


def _scaled_linear(
    graph: fx.Graph,
    marker: markers.LinearMarker,
    delta: Delta | None,
    site: SitePlan,
    quantised: fx.Node,
    layout: tuple[Any, ...],
    ops: tuple[Any, Any],
) -> fx.Node:
    """The GEMM on codes and scales; `ops` are its base form and that with a delta."""
    xq = insert_call(graph, operator.getitem, (quantised, 0), site)
    xs = insert_call(graph, operator.getitem, (quantised, 1), site)
    weight_scale = marker.aux[site.quant.aux_names.index("weight_scale")]
    base = (xq, xs, marker.weight, weight_scale, marker.bias, *layout)
    out_dtype = value(marker.x).dtype
    if delta is None:
        return insert_call(graph, ops[0], (*base, out_dtype, UNSELECTED), site)
    low_rank = (delta.h, delta.lora_B, delta.lora_rank, delta.slot, delta.per_token)
    return insert_call(graph, ops[1], (*base, *low_rank, out_dtype, UNSELECTED), site)


Lowering = Callable[[fx.Graph, markers.LinearMarker, Delta | None, SitePlan], fx.Node]

LOWERINGS: dict[str, Lowering] = {
    "lora_compile::linear": _lower_plain,
    "lora_compile::fp8_block_linear": _lower_fp8_block,
    "lora_compile::scaled_linear": _lower_scaled,
}
"""Base op of a scheme (`ops.base` in its file) -> how its sites are lowered."""

insert_lora = GraphPass(
    name="insert_lora",
    requires=frozenset({"sites_resolved", "projections_fused"}),
    ensures=frozenset({"markers_lowered"}),
    run=run,
)
