"""`lora-compile check`: all that can be known without loading a weight."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from lora_compile.adapters.slots import slot_bytes
from lora_compile.cli.output import Steps, console, print_json, table
from lora_compile.planning.prepare import Prepared, prepare
from lora_compile.planning.sizes import mib, weight_bytes

DeploymentFile = Annotated[Path, typer.Argument(help="A deployment's YAML file.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


def check(deployment: DeploymentFile, as_json: AsJson = False) -> None:
    """Check a deployment: files, architecture, scheme, widths, adapters. Loads nothing."""
    with Steps(quiet=as_json).running() as progress:
        prepared = prepare(deployment, make=False, progress=progress)
    if as_json:
        print_json({"ok": True, **summary(prepared)})
        return
    show_summary(prepared)
    console.print("[bold green]ok[/]: nothing was found that would fail")


def summary(prepared: Prepared) -> dict[str, Any]:
    """What `check` knows, as plain data."""
    plan = prepared.plan
    return {
        "deployment": prepared.deployment.source.file,
        "model": str(prepared.model_path),
        "architecture": plan.architecture,
        "device": plan.device,
        "dtype": plan.dtype,
        "sites": len(plan.sites),
        "projections": len(plan.targets),
        "schemes": dict(Counter(site.quant.scheme for site in plan.sites)),
        "weight_bytes": sum(weight_bytes(site, plan.dtype) for site in plan.sites),
        "slots": plan.slots.slots,
        "max_rank": plan.slots.max_rank,
        "slot_bytes": slot_bytes(plan),
        "adapters": [
            {
                "name": adapter.name,
                "path": str(adapter.path),
                "rank": adapter.report.max_rank,
                "modules": adapter.report.modules,
                "bytes": adapter.report.bytes,
                "warnings": list(adapter.report.warnings),
            }
            for adapter in prepared.adapters
        ],
        "notes": list(prepared.notes),
    }


def show_summary(prepared: Prepared) -> None:
    """The same for people."""
    data = summary(prepared)
    schemes = ", ".join(f"{count} {name}" for name, count in data["schemes"].items())
    made = table(f"{prepared.deployment.source.file}", "what", "value")
    made.show_header = False
    for name, value in (
        ("model", data["model"]),
        ("architecture", f"{data['architecture']} ({prepared.plan.model_type})"),
        ("device", f"{data['device']}, {data['dtype']}"),
        ("sites", f"{data['sites']} over {data['projections']} projections: {schemes}"),
        ("weights", f"{mib(data['weight_bytes'])} at the sites"),
        (
            "slots",
            f"{prepared.plan.slots.max_adapters} + 1 spare, rank {data['max_rank']}: "
            f"{mib(data['slot_bytes'])}",
        ),
    ):
        made.add_row(name, escape(str(value)))
    console.print(made)
    if prepared.adapters:
        adapters = table("adapters", "name", ">rank", ">modules", ">size", "path")
        for adapter in data["adapters"]:
            adapters.add_row(
                adapter["name"],
                str(adapter["rank"]),
                str(adapter["modules"]),
                mib(adapter["bytes"]),
                escape(adapter["path"]),
            )
        console.print(adapters)
    for adapter in data["adapters"]:
        for warning in adapter["warnings"]:
            console.print(f"[yellow]warning[/]: {escape(adapter['name'])}: {escape(warning)}")
    for note in data["notes"]:
        console.print(f"[dim]note: {escape(note)}[/]")
