"""The Dynamo backend: passes first, then Inductor.

The graph is rewritten before AOTAutograd computes its cache key, so the rewritten graph is the
key and both compile caches work without any extra bookkeeping. There is one backend object per
model and it is compared by identity: Dynamo reuses compiled code between equal backends, and two
models must never share their adapters.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from lora_compile import torch_compat
from lora_compile.passes.base import GraphContext
from lora_compile.passes.pipeline import Observer, PipelineReport, run_pipeline
from lora_compile.planning.plan import Plan, SitePlan
from lora_compile.runtime.taps import Taps


@dataclass
class GraphRecord:
    """One compiled graph."""

    name: str
    report: PipelineReport
    sites: tuple[str, ...]
    lowered: fx.GraphModule = field(repr=False)
    """The graph after the passes, executable op by op with the same arguments."""
    seconds: float = 0.0
    calls: int = 0


CPU_OPTIONS = {"pattern_matcher": False}
"""The sites are opaque calls on a CPU, so Inductor's patterns find nothing; looking for them costs
a seventh of the compile time of a 30-layer model."""

Interceptor = Callable[[GraphRecord, tuple[Any, ...]], None]
"""Called with each graph's arguments before it runs; see the site gate."""


class Backend:
    """`torch.compile(model, backend=Backend(...))`."""

    def __init__(
        self,
        plan: Plan,
        sites_by_tensor: Mapping[int, SitePlan],
        *,
        whole: bool,
        observe: Observer | None = None,
    ) -> None:
        self.plan = plan
        self.whole = whole
        self.graphs: list[GraphRecord] = []
        self.intercept: Interceptor | None = None
        self.taps: Taps | None = None
        """Set before compiling: keeps the codes of every call's quantised inputs."""
        self._sites = sites_by_tensor
        self._observe = observe

    def __call__(
        self,
        gm: fx.GraphModule,
        inputs: list[Any],
        *,
        options: Mapping[str, Any] | None = None,
    ) -> Callable[..., Any]:
        record = self.rewrite(gm, inputs)
        tapped = None if self.taps is None else self.taps.add_outputs(gm)
        patches = {
            **(CPU_OPTIONS if torch.device(self.plan.device).type == "cpu" else {}),
            **(options or {}),
        }
        started = time.perf_counter()
        compiled = torch_compat.compile_fx(gm, inputs, patches)
        record.seconds = time.perf_counter() - started

        def call(*args: Any) -> Any:
            record.calls += 1
            if self.intercept is not None:
                self.intercept(record, args)
            outputs = compiled(*args)
            return outputs if tapped is None else tapped.take(outputs)

        return call

    def rewrite(self, gm: fx.GraphModule, inputs: list[Any]) -> GraphRecord:
        """Run the passes over `gm` in place and keep a record of the result."""
        context = self.context(gm, inputs)
        report = run_pipeline(gm, context, observe=self._observe)
        # compile_fx may edit the graph it is given.
        lowered = fx.GraphModule(gm, copy.deepcopy(gm.graph))
        record = GraphRecord(
            name=f"graph {len(self.graphs)}",
            report=report,
            sites=tuple(sorted(site.name for site in context.placeholder_sites.values())),
            lowered=lowered,
        )
        self.graphs.append(record)
        return record

    def context(self, gm: fx.GraphModule, inputs: list[Any]) -> GraphContext:
        """Find each site's weight among the graph's inputs, by identity."""
        placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
        found = {
            node.name: self._sites[id(tensor)]
            for node, tensor in zip(placeholders, inputs, strict=True)
            if isinstance(tensor, torch.Tensor) and id(tensor) in self._sites
        }
        return GraphContext(plan=self.plan, placeholder_sites=found, whole=self.whole)
