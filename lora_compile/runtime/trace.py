"""The graphs of a plan without its weights: Dynamo and the passes on the meta device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn

from lora_compile.adapters.slots import allocate_slots
from lora_compile.passes.graph_text import graph_text
from lora_compile.planning.plan import Plan, SitePlan
from lora_compile.runtime.attach import SiteStorage, attach
from lora_compile.runtime.backend import Backend
from lora_compile.runtime.rows import RowMaps


def trace_graphs(
    plan: Plan, module: nn.Module, *, batch: int, tokens: int, only_sites: bool
) -> dict[str, str]:
    """Text of the graph as traced and after each pass, for a forward without a cache.

    Args:
        module: the model's tree on the meta device; it is attached to in place.
        batch, tokens: shape of the input ids.
        only_sites: leave out what serves no site.

    Returns:
        "traced" and each pass's name -> `graph_text`.
    """
    texts: dict[str, str] = {}

    def observe(step: str, gm: fx.GraphModule) -> None:
        texts[step] = graph_text(gm, only_sites=only_sites)

    module = module.to("meta")
    rows = RowMaps(plan.max_rows, plan.max_tokens, packed=plan.packed, device="meta")
    sites = attach(module, plan, meta_storages(plan), rows)
    backend = Backend(plan, sites, whole=True, observe=observe)

    def capture(gm: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        backend.rewrite(gm, inputs)
        (outputs,) = next(n for n in gm.graph.nodes if n.op == "output").args
        values = fx.node.map_arg(outputs, lambda node: node.meta["example_value"])
        return lambda *_: values

    ids = torch.zeros(batch, tokens, dtype=torch.int64, device="meta")
    with torch.no_grad():
        torch.compile(module.forward, backend=capture, fullgraph=True)(ids, use_cache=False)
    return texts


def meta_storages(plan: Plan) -> dict[str, SiteStorage]:
    """Storages of every site on the meta device: shapes and dtypes, no memory."""
    slots = allocate_slots(plan, "meta")
    return {
        site.name: SiteStorage(
            weight=_meta(site.quant.weight_dtype, site.out_features, site.in_features),
            aux=tuple(_meta("float32", *shape) for shape in site.quant.aux_shapes.values()),
            bias=_meta_bias(site, plan.dtype),
            slots=slots.get(site.name),
        )
        for site in plan.sites
    }


def _meta(dtype: str, *shape: int) -> torch.Tensor:
    return torch.empty(*shape, dtype=getattr(torch, dtype), device="meta")


def _meta_bias(site: SitePlan, dtype: str) -> torch.Tensor | None:
    return _meta(dtype, site.out_features) if site.quant.bias else None
