"""What was built and compiled, as data that prints itself."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from lora_compile.adapters.pool import AdapterPool
from lora_compile.passes.select_kernels import site_kernel
from lora_compile.planning.plan import Plan

if TYPE_CHECKING:
    from lora_compile.runtime.backend import Backend


@dataclass(frozen=True)
class GraphLine:
    """One compiled graph: how long Inductor took, how often it ran, what the passes did."""

    name: str
    sites: int
    seconds: float
    calls: int
    passes: dict[str, int]


@dataclass(frozen=True)
class Report:
    """The state of one model. `str()` is for people, `as_dict()` for machines."""

    architecture: str
    sites: int
    parts: int
    schemes: dict[str, int]
    """Scheme -> sites that use it."""
    kernels: dict[str, int]
    """Kernel family -> sites that use it."""
    scope: str
    graphs: tuple[GraphLine, ...]
    graph_breaks: int
    adapters: tuple[str, ...]

    @property
    def calls(self) -> int:
        """Calls of our graphs, all together."""
        return sum(graph.calls for graph in self.graphs)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        schemes = ", ".join(f"{count} {name}" for name, count in self.schemes.items())
        kernels = ", ".join(f"{count} {name}" for name, count in self.kernels.items())
        lines = [
            f"architecture  {self.architecture}",
            f"sites         {self.sites} over {self.parts} projections ({schemes})",
            f"kernels       {kernels}",
            f"compiled      {self.scope}: {len(self.graphs)} graphs, "
            f"{self.graph_breaks} graph breaks",
        ]
        for graph in self.graphs:
            lines.append(
                f"              {graph.name}: {graph.sites} sites, {graph.calls} calls, "
                f"lowered in {graph.seconds:.1f} s"
            )
        lines.append(f"adapters      {', '.join(self.adapters) or 'none'}")
        return "\n".join(lines)


def make_report(
    plan: Plan, backend: Backend, pool: AdapterPool, scope: str, graph_breaks: int
) -> Report:
    """Collect the report from the rooms that know."""
    device = torch.device(plan.device).type
    return Report(
        architecture=plan.architecture,
        sites=len(plan.sites),
        parts=len(plan.targets),
        schemes=dict(Counter(site.quant.scheme for site in plan.sites)),
        kernels=dict(Counter(site_kernel(site, device) for site in plan.sites)),
        scope=scope,
        graphs=tuple(
            GraphLine(
                name=graph.name,
                sites=len(graph.sites),
                seconds=graph.seconds,
                calls=graph.calls,
                passes={p.name: p.matched for p in graph.report.passes},
            )
            for graph in backend.graphs
        ),
        graph_breaks=graph_breaks,
        adapters=tuple(f"{a.name} (rank {a.rank}, slot {a.slot})" for a in pool.list()),
    )
