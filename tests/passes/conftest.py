"""Plans and traced graphs of a tiny model on the meta device; nothing is computed here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import fx
from transformers import LlamaForCausalLM

from lora_compile import torch_compat
from lora_compile.checkpoints.survey import ModuleFormat
from lora_compile.passes.base import GraphContext
from lora_compile.planning.build import build_plan
from lora_compile.planning.plan import Plan
from lora_compile.planning.prepare import load_scheme_target, slot_plan
from lora_compile.planning.sites import find_sites
from lora_compile.runtime.attach import attach
from lora_compile.runtime.backend import Backend
from lora_compile.runtime.rows import RowMaps
from lora_compile.runtime.trace import meta_storages
from lora_compile.schemas.architecture import load_architecture
from lora_compile.schemas.quant_scheme import find_scheme
from tests.tiny import llama_config


@dataclass
class Traced:
    """A graph as Dynamo traced it, before any pass, and its context."""

    plan: Plan
    gm: fx.GraphModule
    context: GraphContext


def plan_of(module: torch.nn.Module, scheme: str, keep: Callable[[str], bool]) -> Plan:
    loaded = load_architecture("llama")
    found = find_sites(loaded, module.config, module)
    formats = {
        part.module: ModuleFormat("none", "BF16", None, (f"{part.module}.weight",), "as stored")
        for site in found
        for part in site.parts
    }
    return build_plan(
        loaded,
        found,
        formats,
        model_type="llama",
        dtype="bfloat16",
        device="cpu",
        quantise_to=load_scheme_target(scheme),
        keep=keep,
        slots=slot_plan(2, 16, "bfloat16"),
        max_rows=16,
        max_tokens=64,
        packed=False,
        has_slots=lambda module: True,
    )


def with_input_scales(plan: Plan) -> Plan:
    """fp8_tensor_dynamic turned into fp8_tensor_static, which is never made at load.

    The first part of a group has one input scale, the others share a second.
    """
    scheme = find_scheme("fp8_tensor_static")
    sites = []
    for site in plan.sites:
        if site.quant.scheme != "none":
            quant = scheme.info(
                weight_dtype=site.quant.weight_dtype,
                block_shape=None,
                in_features=site.in_features,
                part_widths=[(part.name, part.out_features) for part in site.parts],
                input_scales=[0.5, *[0.005] * (len(site.parts) - 1)],
                bias=site.quant.bias,
            )
            site = site.model_copy(update={"quant": quant})
        sites.append(site)
    return plan.model_copy(update={"sites": tuple(sites)})


@pytest.fixture
def traced() -> Callable[..., Traced]:
    """`traced(scheme, keep=…, forward=…)`: trace a one-layer model."""

    def trace(
        scheme: str,
        *,
        keep: Callable[[str], bool] = lambda module: False,
        change: Callable[[torch.nn.Module], None] = lambda module: None,
        whole: bool = True,
    ) -> Traced:
        with torch.device("meta"):
            module = LlamaForCausalLM(llama_config(num_hidden_layers=1)).eval().bfloat16()
        if scheme == "fp8_tensor_static":
            plan = with_input_scales(plan_of(module, "fp8_tensor_dynamic", keep))
        else:
            plan = plan_of(module, scheme, keep)
        rows = RowMaps(plan.max_rows, plan.max_tokens, packed=False, device="meta")
        sites = attach(module, plan, meta_storages(plan), rows)
        change(module)
        backend = Backend(plan, sites, whole=whole)
        found: list[Traced] = []

        def capture(gm: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
            found.append(Traced(plan, gm, backend.context(gm, inputs)))
            (outputs,) = next(n for n in gm.graph.nodes if n.op == "output").args
            values = fx.node.map_arg(outputs, lambda node: node.meta["example_value"])
            return lambda *_: values

        torch_compat.reset_dynamo()
        ids = torch.zeros(2, 5, dtype=torch.int64, device="meta")
        with torch.no_grad():
            torch.compile(module.forward, backend=capture, fullgraph=True)(ids, use_cache=False)
        return found[0]

    return trace
