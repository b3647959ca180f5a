"""`lora-compile explain`: what was decided for each site, and why."""

from __future__ import annotations

from typing import Annotated, Any

import torch
import typer
from rich.markup import escape
from rich.syntax import Syntax

from lora_compile.adapters.report import TensorReport
from lora_compile.adapters.slots import site_slot_bytes
from lora_compile.cli.check import AsJson, DeploymentFile, show_summary, summary
from lora_compile.cli.output import Steps, console, print_json
from lora_compile.passes.select_kernels import site_kernel
from lora_compile.planning.plan import Plan, SitePlan
from lora_compile.planning.prepare import Prepared, prepare
from lora_compile.planning.sizes import mib, weight_bytes

Graphs = Annotated[bool, typer.Option("--graphs", help="Trace the model and show its graphs.")]
Full = Annotated[bool, typer.Option("--full", help="With --graphs: every node, not sites alone.")]


def explain(
    deployment: DeploymentFile, graphs: Graphs = False, full: Full = False, as_json: AsJson = False
) -> None:
    """Explain a deployment: what is fused, which scheme and kernel, bytes, adapters -> sites."""
    with Steps(quiet=as_json).running() as progress:
        prepared = prepare(deployment, make=False, progress=progress)
        texts = {}
        if graphs:
            from lora_compile.runtime.trace import trace_graphs

            progress("tracing the model on the meta device")
            texts = trace_graphs(
                prepared.plan, prepared.module, batch=2, tokens=8, only_sites=not full
            )
    if as_json:
        print_json(
            {
                "ok": True,
                **summary(prepared),
                "plan": prepared.plan.model_dump(mode="json"),
                "adapter_reports": {
                    a.name: a.report.model_dump(mode="json") for a in prepared.adapters
                },
                "graphs": texts,
            }
        )
        return
    show_summary(prepared)
    _show_sites(prepared.plan)
    _show_adapters(prepared)
    for step in ("traced", "verify_graph"):
        if step in texts:
            console.print(f"\n[bold]{'as traced' if step == 'traced' else 'after the passes'}[/]")
            console.print(Syntax(texts[step], "python", word_wrap=True, background_color="default"))


def _show_sites(plan: Plan) -> None:
    """A block per site, with a line per part; equal layers are shown once."""
    groups: dict[Any, list[SitePlan]] = {}
    for site in plan.sites:
        key = (_role(site), site.quant.model_dump_json(), site.lora, site.tied_to, site.why)
        groups.setdefault(key, []).append(site)
    device = torch.device(plan.device).type
    console.print("\n[bold]sites[/] (equal layers together)")
    for sites in groups.values():
        first = sites[0]
        weights = sum(weight_bytes(site, plan.dtype) for site in sites)
        slots = sum(site_slot_bytes(plan, site) for site in sites if site.lora)
        facts = [first.quant.scheme, f"{site_kernel(first, device)} kernel", mib(weights)]
        facts.append(f"slots {mib(slots)}" if first.lora else "no slots")
        console.print(f"\n[bold]{escape(_site_name(sites))}[/]  {', '.join(facts)}")
        tied = f"; shares the weight of {first.tied_to}" if first.tied_to else ""
        console.print(f"    [dim]{escape(first.why + tied)}[/]")
        width = max(14, *(len(part.name) + 2 for part in first.quant.parts))
        for part in first.quant.parts:
            low, high = part.rows
            line = f"    {part.name:<{width}}rows {low:>6} to {high:<6} of {first.in_features}"
            if part.scale_rows is not None:
                line += "   scale rows {:>3} to {}".format(*part.scale_rows)
            console.print(line)
    for kept in plan.kept:
        if kept.modules:
            count = len(kept.modules)
            console.print(f"\n[bold]{escape(kept.modules[0])}[/] and alike, {count} in all")
            console.print(f"    [dim]{escape(kept.what)}: as transformers runs them[/]")


def _role(site: SitePlan) -> str:
    """The site's path without the number of its layer: a name may stand at several places."""
    return site.name.replace(f".{site.layer}.", ".*.", 1)


def _site_name(sites: list[SitePlan]) -> str:
    first = sites[0]
    if first.layer is None or len(sites) == 1:
        return first.name
    layers = [site.layer for site in sites if site.layer is not None]
    name = first.name.replace(f".{first.layer}.", f".{_ranges(layers)}.", 1)
    return f"{name} x {len(sites)}"


def _ranges(layers: list[int]) -> str:
    """[0, 1, 2, 5] -> {0-2,5}."""
    runs: list[list[int]] = []
    for layer in sorted(layers):
        if runs and layer == runs[-1][1] + 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    return "{" + ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs) + "}"


def _show_adapters(prepared: Prepared) -> None:
    """Per adapter and site, the output rows that each B writes, its rank and its scale."""
    plan = prepared.plan
    for adapter in prepared.adapters:
        console.print(f"\n[bold]adapter {escape(adapter.name)}[/] (equal layers together)")
        deltas: dict[str, list[tuple[int, str]]] = {}
        for tensor in adapter.report.tensors:
            if tensor.role == "lora_B":
                line = _delta_line(plan, tensor, adapter.scale)
                deltas.setdefault(tensor.site, []).append(line)
        groups: dict[Any, list[SitePlan]] = {}
        for site in plan.sites:
            if site.name in deltas:
                lines = tuple(line for _, line in sorted(deltas[site.name]))
                groups.setdefault((_role(site), lines), []).append(site)
        for (_, lines), sites in groups.items():
            console.print(f"\n{escape(_site_name(sites))}")
            for line in lines:
                console.print(escape(line), soft_wrap=True)
        ways = dict.fromkeys(tensor.decided_by for tensor in adapter.report.tensors)
        console.print(f"[dim]keys read by: {escape(', '.join(ways))}[/]")


def _delta_line(plan: Plan, tensor: TensorReport, own_scale: float) -> tuple[int, str]:
    """The first of the rows of the site's (fused) output that B is added to, and the line."""
    parts = [part for part in plan.by_name[tensor.site].quant.parts if part.name in tensor.parts]
    rows = ", ".join("{:>6} to {:<6}".format(*part.rows) for part in parts)
    name = " + ".join(part.name for part in parts)
    line = f"    {name:<20}rows {rows} rank {tensor.rank:>3}   scale {tensor.scale * own_scale:g}"
    if own_scale != 1.0:
        line += f" (the file's {tensor.scale:g} x {own_scale:g})"
    return parts[0].rows[0], line
