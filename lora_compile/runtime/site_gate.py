"""The site gate: each site's own recorded input goes to an fp32 reference.

The gate runs a compiled graph's lowered form op by op, with the graph's own arguments, and at
each site compares what the op gives with `W·q(x) + b + s·B(A x)` in float32, where W is decoded
from the checkpoint and A, B, s come from the adapter's file, not from the packed storage.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from lora_compile.adapters.canonical import CanonicalAdapter
from lora_compile.checkpoints.packing import DensePart
from lora_compile.passes.base import SITE_INPUT_META, SITE_META
from lora_compile.passes.verify_graph import OUTPUT_OPS
from lora_compile.planning.plan import Plan, SitePlan
from lora_compile.runtime.backend import GraphRecord
from lora_compile.runtime.rows import NO_ADAPTER
from lora_compile.torch_compat import op_packet
from lora_compile.verification.activation import quantised_activation

OUTPUT_LIMIT = 4e-3
"""Most relative error (L2 over a row) of a site's output in 16 bit."""
DELTA_LIMIT = 1e-2
"""Most relative error (L2 over a row) of a site's delta."""

PartReader = Callable[[SitePlan, int], DensePart]
"""(site, part) -> what the reference needs of it, on the device of the model."""


@dataclass(frozen=True)
class GateRow:
    """What one row of the batch was asked to use."""

    adapter: CanonicalAdapter | None
    scale: float


@dataclass(frozen=True)
class GateFigure:
    """One comparison: a site, a row and a phase."""

    site: str
    row: int
    phase: str
    error: float


@dataclass
class GateResult:
    """The worst figures and how many comparisons they are the worst of."""

    expected: frozenset[str]
    """Every site of the plan: each must be compared in every phase that occurred."""
    output: GateFigure | None = None
    delta: GateFigure | None = None
    comparisons: int = 0
    sites: dict[str, set[str]] = field(default_factory=dict)
    """Phase -> the sites that were compared in it."""
    rows: dict[int, dict[str, GateFigure]] = field(default_factory=dict)
    """Row -> kind (`output` or `delta`) -> its worst figure."""

    @property
    def passed(self) -> bool:
        """Whether every site was compared, in every phase, within the limits."""
        return (
            self.output is not None
            and all(sites == self.expected for sites in self.sites.values())
            and self.output.error <= OUTPUT_LIMIT
            and (self.delta is None or self.delta.error <= DELTA_LIMIT)
        )

    def add(self, kind: str, figure: GateFigure) -> None:
        worst: GateFigure | None = getattr(self, kind)
        self.comparisons += 1
        self.sites.setdefault(figure.phase, set()).add(figure.site)
        # `not (a <= b)`: a NaN is the worst of all.
        if worst is None or not (figure.error <= worst.error):
            setattr(self, kind, figure)
        own = self.rows.setdefault(figure.row, {})
        if kind not in own or not (figure.error <= own[kind].error):
            own[kind] = figure

    def gaps(self, phases: Sequence[str]) -> list[str]:
        """What was not compared, in words."""
        return [
            f"{len(missing)} sites were not compared in {phase}, e.g. {min(missing)}"
            for phase in phases
            if (missing := self.expected - self.sites.get(phase, set()))
        ]

    def beyond(self, output_limit: float, delta_limit: float, rows: Sequence[bool]) -> bool:
        """Whether some of these rows are past a limit."""
        limits = {"output": output_limit, "delta": delta_limit}
        return any(
            not (figure.error <= limits[kind])
            for row, figures in self.rows.items()
            if rows[row]
            for kind, figure in figures.items()
        )

    def merged(self, other: GateResult) -> GateResult:
        """The worst of two batches; the figures keep the rows of their own batch."""
        result = GateResult(self.expected, comparisons=self.comparisons + other.comparisons)
        for one in (self, other):
            for phase, sites in one.sites.items():
                result.sites.setdefault(phase, set()).update(sites)
            for kind in ("output", "delta"):
                figure, worst = getattr(one, kind), getattr(result, kind)
                if worst is None or (figure is not None and not (figure.error <= worst.error)):
                    setattr(result, kind, figure)
        return result

    def as_dict(self) -> dict[str, Any]:
        def figure(found: GateFigure | None) -> dict[str, Any] | None:
            return None if found is None else vars(found)

        return {
            "passed": self.passed,
            "worst_output": figure(self.output),
            "worst_delta": figure(self.delta),
            "output_limit": OUTPUT_LIMIT,
            "delta_limit": DELTA_LIMIT,
            "comparisons": self.comparisons,
            "sites": len(self.expected),
            "compared": {phase: len(sites) for phase, sites in self.sites.items()},
        }


class SiteGate:
    """An interceptor for `Backend.intercept`: checks the first call of every graph."""

    def __init__(
        self, plan: Plan, module: nn.Module, read_part: PartReader, rows: Sequence[GateRow]
    ) -> None:
        self.result = GateResult(frozenset(site.name for site in plan.sites))
        self._read_part = read_part
        self._rows = rows
        self._done: set[str] = set()
        self._phase = ""
        self._kept = {id(t) for t in (*module.parameters(), *module.buffers())}

    def __call__(self, record: GraphRecord, args: tuple[Any, ...]) -> None:
        if record.name in self._done:
            return
        self._done.add(record.name)
        self._phase = ""
        # The graph writes its KV cache in place; the real call must still find it as it was.
        private = [
            a.clone() if isinstance(a, torch.Tensor) and id(a) not in self._kept else a
            for a in args
        ]
        with torch.no_grad():
            _Recorder(record.lowered, self._compare).run(*private)

    def _compare(self, node: fx.Node, site: SitePlan, x: torch.Tensor, args: tuple[Any, ...],
                 output: torch.Tensor) -> None:  # fmt: skip
        # The graph's first site says it: a head that keeps one token of a prompt sees one, too.
        self._phase = self._phase or ("decode" if x.shape[1] == 1 else "prefill")
        phase = self._phase
        if site.kind == "embedding":
            table = self._read_part(site, 0).weight
            self._figures("output", site, phase, output.float() - table[x], table[x])
            return
        base, delta = self._reference(site, x)
        reference = base + delta
        self._figures("output", site, phase, output.float() - reference, reference)
        if "lora" in str(node.target):
            found = _delta(node.target, args)
            self._figures("delta", site, phase, found - delta, delta)

    def _figures(
        self,
        kind: str,
        site: SitePlan,
        phase: str,
        error: torch.Tensor,
        reference: torch.Tensor,
    ) -> None:
        errors, sizes = (t.flatten(1).norm(dim=1).tolist() for t in (error, reference))
        for row, (wrong, size) in enumerate(zip(errors, sizes, strict=True)):
            # Where the reference is zero (a row without a delta), nothing but zero is right.
            relative = 0.0 if wrong == 0 else wrong / size if size else float("inf")
            self.result.add(kind, GateFigure(site.name, row, phase, relative))

    def _reference(self, site: SitePlan, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = x.float()
        base, deltas = [], []
        for index, part in enumerate(site.parts):
            read = self._read_part(site, index)
            y = quantised_activation(site.quant.activation, x, read.input_scale) @ read.weight.T
            base.append(y if read.bias is None else y + read.bias)
            delta = torch.zeros_like(base[-1])
            for i, row in enumerate(self._rows):
                found = row.adapter.deltas.get(part.module) if row.adapter else None
                if found is not None:
                    hidden = x[i] @ found.A.float().to(x.device).T
                    delta[i] = row.scale * found.scale * (hidden @ found.B.float().to(x.device).T)
            deltas.append(delta)
        return torch.cat(base, dim=-1), torch.cat(deltas, dim=-1)


def _delta(target: Any, args: tuple[Any, ...]) -> Any:
    """The delta that a lowered op adds, before the output is rounded: the op in float32, minus
    itself on rows without adapter."""
    full = dict(zip(argument_names(target), args, strict=True))
    if "out_dtype" in full:
        full["out_dtype"] = torch.float32
    else:  # the result has x's dtype
        for name in ("x", "weight", "bias"):
            full[name] = None if full[name] is None else full[name].float()
    base = {**full, "slot": torch.full_like(full["slot"], NO_ADAPTER)}
    return target(**full) - target(**base)


def argument_names(target: Any) -> list[str]:
    """Names of an op's arguments, in order, out of its schema."""
    return [argument.name for argument in target._schema.arguments]


Compare = Callable[[fx.Node, SitePlan, torch.Tensor, tuple[Any, ...], torch.Tensor], None]


class _Recorder(fx.Interpreter):
    """Runs a lowered graph op by op and shows each site's input and output to `compare`."""

    def __init__(self, gm: fx.GraphModule, compare: Compare) -> None:
        super().__init__(gm, garbage_collect_values=True)
        self._compare = compare
        self._inputs: dict[str, torch.Tensor] = {}
        self._wanted = {
            n.meta[SITE_INPUT_META] for n in gm.graph.nodes if SITE_INPUT_META in n.meta
        }

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if n.name in self._wanted:
            self._inputs[n.name] = result
        if SITE_INPUT_META in n.meta and op_packet(n.target) in OUTPUT_OPS:
            args, _ = self.fetch_args_kwargs_from_env(n)
            x = self._inputs[n.meta[SITE_INPUT_META]]
            self._compare(n, n.meta[SITE_META], x, args, result)
        return result
