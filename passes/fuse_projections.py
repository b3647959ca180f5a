"""Turn the markers of one group on one input into one fused marker and a split."""

from __future__ import annotations

import operator
from collections import defaultdict

import torch
from torch import fx

from lora_compile.errors import FaultList, GraphInvalid
from lora_compile.passes import markers
from lora_compile.passes.base import SITE_META, GraphContext, GraphPass, calls, insert_call, value
from lora_compile.planning.plan import SitePlan


def run(gm: fx.GraphModule, ctx: GraphContext) -> tuple[int, tuple[str, ...]]:
    groups: dict[str, list[fx.Node]] = defaultdict(list)
    for node in calls(gm.graph, torch.ops.lora_compile.site_linear):
        if len(node.meta[SITE_META].parts) > 1:
            groups[node.meta[SITE_META].name].append(node)

    faults = FaultList()
    details = []
    for name, nodes in groups.items():
        site: SitePlan = nodes[0].meta[SITE_META]
        nodes = sorted(nodes, key=markers.part_of)
        if len({node.args[0] for node in nodes}) > 1 or len(nodes) != len(site.parts):
            faults.add(
                GraphInvalid(
                    f"the parts of site {name} cannot run as one GEMM",
                    file=site.source.file,
                    line=site.source.line,
                    expected=f"{len(site.parts)} projections that read the same tensor",
                    found=", ".join(
                        f"{site.parts[markers.part_of(n)].name}({n.args[0]})" for n in nodes
                    ),
                    fix="set `fuse: false` for this site in the schema",
                )
            )
            continue
        _fuse(gm.graph, nodes, site)
        details.append(f"{name}: {' + '.join(part.name for part in site.parts)}")
    faults.raise_if_any()
    return len(details), tuple(details)


def _fuse(graph: fx.Graph, nodes: list[fx.Node], site: SitePlan) -> None:
    first = next(node for node in graph.nodes if node in set(nodes))
    with graph.inserting_before(first):
        args = markers.with_part(nodes[0], markers.ALL_PARTS)
        example = value(nodes[0])
        whole = example.new_empty((*example.shape[:-1], site.out_features))
        fused = insert_call(graph, torch.ops.lora_compile.site_linear.default, args, site, whole)
        widths = [part.out_features for part in site.parts]
        split = insert_call(graph, torch.split, (fused, widths, -1), site)
        outputs = [
            # With its example value: AOTAutograd caches no graph that calls a method on a node
            # without one.
            insert_call(graph, operator.getitem, (split, index), site, value(node))
            for index, node in enumerate(nodes)
        ]
    for node, output in zip(nodes, outputs, strict=True):
        node.replace_all_uses_with(output)
        graph.erase_node(node)


fuse_projections = GraphPass(
    name="fuse_projections",
    requires=frozenset({"sites_resolved"}),
    ensures=frozenset({"projections_fused"}),
    run=run,
)
