"""Resolve every marker of the graph to a site of the plan.

A marker is identified by the tensor that carries its weight, never by a name or a pattern, so it
cannot be missed in silence: a marker of an unknown tensor, a part met twice, and, in a graph of
the whole model, a part not met at all are errors.
"""

from __future__ import annotations

import math

from torch import fx

from lora_compile.errors import CompileIncomplete, FaultList, GraphInvalid
from lora_compile.passes import markers
from lora_compile.passes.base import SITE_META, GraphContext, GraphPass, calls, value
from lora_compile.planning.plan import SitePlan


def run(gm: fx.GraphModule, ctx: GraphContext) -> tuple[int, tuple[str, ...]]:
    faults = FaultList()
    seen: dict[tuple[str, int], fx.Node] = {}
    rows: list[tuple[SitePlan, fx.Node]] = []
    for target in markers.MARKERS:
        for node in calls(gm.graph, target):
            weight = node.args[1]
            site = ctx.placeholder_sites.get(weight.name) if isinstance(weight, fx.Node) else None
            if site is None:
                faults.add(
                    CompileIncomplete(
                        f"marker {node.name} carries a weight that is no site of the plan",
                        expected="the buffer that attach registered",
                        found=weight,
                        fix="do not replace or copy the buffers of a module after lora_compile "
                        "has attached to it",
                    )
                )
                continue
            index = markers.part_of(node)
            if (site.name, index) in seen:
                faults.add(
                    CompileIncomplete(
                        f"part {index} of site {site.name} occurs twice in one graph",
                        where=site.parts[index].module,
                        expected="one call of each projection in a forward",
                        found=f"{seen[site.name, index].name} and {node.name}",
                        fix="a model that calls a projection twice needs a site for each call",
                    )
                )
            seen[site.name, index] = node
            node.meta[SITE_META] = site
            rows.append((site, node))
    if ctx.whole:
        for site in ctx.plan.sites:
            for number, part in enumerate(site.parts):
                if (site.name, number) not in seen:
                    faults.add(
                        CompileIncomplete(
                            f"site {site.name} is in the plan but not in the compiled graph",
                            file=site.source.file,
                            line=site.source.line,
                            where=part.module,
                            expected="one marker for each projection of the plan",
                            found="none",
                            fix="the model's forward does not call this module: remove the site "
                            "from the schema, or compile with runtime.compile: layers",
                        )
                    )
    _check_rows(rows, ctx.plan.packed, faults)
    faults.raise_if_any()
    return len(seen), ()


def _input(node: fx.Node) -> fx.Node:
    x = node.args[0]
    assert isinstance(x, fx.Node)
    return x


def _check_rows(rows: list[tuple[SitePlan, fx.Node]], packed: bool, faults: FaultList) -> None:
    """One row map serves every site: each input must hold the whole batch, as the map does.

    Sizes are compared as symbols; evaluating an equality would add a guard to the graph.
    """
    expected: dict[str, tuple[SitePlan, str]] = {}
    for site, node in rows:
        x = value(_input(node))
        shape = x.shape if site.kind == "embedding" else x.shape[:-1]
        kind = "tokens" if packed or len(shape) == 1 else "rows"
        for what, size in (("tokens", math.prod(shape)), ("rows", shape[0])):
            # An embedding sees the batch as it is, so it says both.
            if what != kind and site.kind != "embedding":
                continue
            first, wanted = expected.setdefault(what, (site, str(size)))
            if str(size) != wanted:
                faults.add(
                    GraphInvalid(
                        f"site {site.name} sees another batch dimension than {first.name}",
                        file=site.source.file,
                        line=site.source.line,
                        expected=f"{wanted} {what}",
                        found=f"{size} {what}",
                        fix="this module folds or slices rows in a way that the row map does not "
                        "cover; leave it out of the schema",
                    )
                )


collect_sites = GraphPass(
    name="collect_sites",
    requires=frozenset(),
    ensures=frozenset({"sites_resolved"}),
    run=run,
)
