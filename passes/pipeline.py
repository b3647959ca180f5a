"""The order of the passes, and the runner that holds each of them to its contract."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import fx

from lora_compile.errors import GraphInvalid
from lora_compile.passes.base import GraphContext, GraphPass, PassReport
from lora_compile.passes.collect_sites import collect_sites
from lora_compile.passes.fuse_projections import fuse_projections
from lora_compile.passes.insert_lora import insert_lora
from lora_compile.passes.select_kernels import select_kernels
from lora_compile.passes.share_quantisation import share_quantisation
from lora_compile.passes.verify_graph import verify_graph

PIPELINE: tuple[GraphPass, ...] = (
    collect_sites,
    fuse_projections,
    insert_lora,
    share_quantisation,
    select_kernels,
    verify_graph,
)

Observer = Callable[[str, fx.GraphModule], None]
"""Called with ("traced" or the name of the pass that just ran, the graph)."""


@dataclass(frozen=True)
class PipelineReport:
    """What the pipeline did to one graph."""

    passes: tuple[PassReport, ...]


def run_pipeline(
    gm: fx.GraphModule,
    ctx: GraphContext,
    *,
    passes: Sequence[GraphPass] = PIPELINE,
    observe: Observer | None = None,
) -> PipelineReport:
    """Run the passes over `gm` in place.

    Raises:
        GraphInvalid: a pass needs a fact that no earlier pass established, or a pass failed.
        CompileIncomplete: the graph does not hold exactly the sites it must.
    """
    facts: set[str] = set()
    reports = []
    if observe is not None:
        observe("traced", gm)
    for step in passes:
        missing = step.requires - facts
        if missing:
            raise GraphInvalid(
                f"pass {step.name} runs too early",
                expected=f"a pass before it that ensures {', '.join(sorted(missing))}",
                found=" -> ".join(p.name for p in passes),
            )
        before = len(gm.graph.nodes)
        matched, details = step.run(gm, ctx)
        reports.append(PassReport(step.name, matched, before, len(gm.graph.nodes), details))
        facts |= step.ensures
        if observe is not None:
            observe(step.name, gm)
    gm.recompile()
    return PipelineReport(tuple(reports))
