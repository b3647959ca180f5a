"""The last look: the graph is well formed, no marker is left and each site was lowered once."""

from __future__ import annotations

from collections import Counter

import torch
from torch import fx

from lora_compile.errors import FaultList, GraphInvalid
from lora_compile.ops import forms
from lora_compile.passes import markers
from lora_compile.passes.base import SITE_META, UNSELECTED, GraphContext, GraphPass, calls
from lora_compile.torch_compat import op_packet

OUTPUT_OPS = (*forms.OUTPUT_OPS, torch.nn.functional.embedding)
"""The ops that produce a site's output: one of them per site."""


def run(gm: fx.GraphModule, ctx: GraphContext) -> tuple[int, tuple[str, ...]]:
    gm.graph.lint()
    faults = FaultList()
    for target in markers.MARKERS:
        for node in calls(gm.graph, target):
            faults.add(
                GraphInvalid(f"marker {node.name} was not lowered", found=node.format_node())
            )
    outputs: Counter[str] = Counter()
    for node in gm.graph.nodes:
        site = node.meta.get(SITE_META)
        if site is None:
            continue
        if node.args and node.args[-1] == UNSELECTED:
            faults.add(GraphInvalid(f"{node.name} of site {site.name} has no kernel"))
        if op_packet(node.target) in OUTPUT_OPS:
            outputs[site.name] += 1
    expected = {site.name for site in ctx.plan.sites} if ctx.whole else set(outputs)
    for name in sorted(expected):
        if outputs[name] != 1:
            faults.add(
                GraphInvalid(
                    f"site {name} has {outputs[name]} output ops in the graph", expected="1"
                )
            )
    faults.raise_if_any()
    return sum(outputs.values()), ()


verify_graph = GraphPass(
    name="verify_graph",
    requires=frozenset({"markers_lowered", "kernels_selected"}),
    ensures=frozenset({"verified"}),
    run=run,
)
