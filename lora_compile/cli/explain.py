"""`lora-compile explain`: what was decided for each site, and why."""

from __future__ import annotations

from typing import Annotated, Any

import torch
import typer
from rich.markup import escape
from rich.syntax import Syntax

from lora_compile.adapters.slots import site_slot_bytes
from lora_compile.cli.check import AsJson, DeploymentFile, show_summary, summary
from lora_compile.cli.output import Steps, console, print_json, table
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
        prepared = prepare(deployment, convert=False, progress=progress)
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
    """One row per part; equal layers are shown once."""
    made = table(
        "sites (equal layers together)",
        "site", "part", ">rows", ">scale rows", ">in", "scheme", "kernel", ">weights", ">slots",
        "why",
    )  # fmt: skip
    groups: dict[Any, list[SitePlan]] = {}
    for site in plan.sites:
        key = (site.role, site.quant.model_dump_json(), site.lora, site.tied_to, site.why)
        groups.setdefault(key, []).append(site)
    device = torch.device(plan.device).type
    for sites in groups.values():
        first = sites[0]
        name = first.name
        if first.layer is not None:
            layers = [site.layer for site in sites if site.layer is not None]
            at = first.name.replace(f".{first.layer}.", f".{_ranges(layers)}.", 1)
            name = f"{at}  x{len(sites)}"
        tied = f"; shares the weight of {first.tied_to}" if first.tied_to else ""
        for index, part in enumerate(first.quant.parts):
            scale_rows = "-" if part.scale_rows is None else "{}..{}".format(*part.scale_rows)
            head = index == 0
            made.add_row(
                escape(name) if head else "",
                part.name,
                "{}..{}".format(*part.rows),
                scale_rows,
                str(first.in_features) if head else "",
                first.quant.scheme if head else "",
                site_kernel(first, device) if head else "",
                mib(sum(weight_bytes(s, plan.dtype) for s in sites)) if head else "",
                mib(sum(site_slot_bytes(plan, s) for s in sites)) if head and first.lora else "",
                escape(first.why + tied) if head else "",
            )
    console.print(made)


def _ranges(layers: list[int]) -> str:
    """[0, 1, 2, 5] -> {0-2,5}."""
    runs: list[list[int]] = []
    for layer in sorted(layers):
        if runs and layer == runs[-1][1] + 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    text = ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
    return "{" + text + "}"


def _show_adapters(prepared: Prepared) -> None:
    """Each adapter's tensors -> sites, with rank and scale."""
    for adapter in prepared.adapters:
        made = table(
            f"adapter {adapter.name} -> sites", "site", "part", ">rank", ">scale", ">layers", "read"
        )
        groups: dict[Any, list[int | None]] = {}
        for tensor in adapter.report.tensors:
            if tensor.role != "lora_A":
                continue
            role = prepared.plan.by_name[tensor.site].role
            key = (role, ", ".join(tensor.parts), tensor.rank, tensor.scale, tensor.decided_by)
            groups.setdefault(key, []).append(tensor.layer)
        for (role, parts, rank, scale, how), layers in groups.items():
            numbers = [layer for layer in layers if layer is not None]
            where = _ranges(numbers) if numbers else "-"
            made.add_row(role, parts, str(rank), f"{scale:g}", where, escape(how))
        console.print(made)
