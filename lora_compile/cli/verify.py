"""`lora-compile verify`: log-prob parity with a float32 reference, site by site and end to end."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from lora_compile.cli.check import AsJson, DeploymentFile
from lora_compile.cli.output import Steps, console, print_json, table
from lora_compile.runtime.site_gate import GateFigure
from lora_compile.verification.figures import Figures
from lora_compile.verification.result import Result, Run
from lora_compile.verification.verify import verify as run_verify

Plot = Annotated[
    Path | None, typer.Option(help="Also draw reference against product into this .png or .svg.")
]


def verify(deployment: DeploymentFile, plot: Plot = None, as_json: AsJson = False) -> None:
    """Compare a deployment with a float32 reference; exit 1 past the limits."""
    if plot is not None:
        from lora_compile.verification.plot import check_plot

        check_plot(plot)
    with Steps(quiet=as_json).running() as progress:
        result = run_verify(deployment, progress=progress)
        if plot is not None:
            from lora_compile.verification.plot import draw

            progress(f"drawing {plot}")
            draw(result, plot)
    if as_json:
        print_json({"deployment": str(deployment), **result.as_dict()})
    else:
        _show(result, plot)
    if result.failures:
        sys.exit(1)


def _show(result: Result, plot: Path | None) -> None:
    for run in (result.float32, result.low):
        if run is not None:
            _show_run(run)
    if result.controls:
        _show_controls(result)
    gate, limits = result.site_gate, result.limits
    console.print(
        f"site gate     {gate.comparisons} comparisons at {len(gate.expected)} sites; worst output "
        f"{_figure(gate.output)} of {limits.site_output:.0e}, worst delta {_figure(gate.delta)} of "
        f"{limits.site_delta:.0e}",
        soft_wrap=True,
    )
    worst = max(f.half_mean_square for f in result.float32.figures().values())
    line = f"float32       worst ½ mean Δ² {worst:.1e} of {limits.float32:.0e}"
    followed = result.float32.followed
    if followed.codes:
        line += (
            f"; of {followed.codes} input codes {followed.ambiguous} lay between two codes and "
            f"were followed, {followed.wrong} were wrong"
        )
    console.print(line, soft_wrap=True)
    if result.low is not None:
        base = result.low.of(None).figures.half_mean_square
        plain = result.plain_ratios
        ratios = ", ".join(f"{n} {r:.2f} (plain {plain[n]:.2f})" for n, r in result.ratios.items())
        console.print(
            f"{result.low.dtype:<14}base rows {base:.1e}; adapters over base rows: "
            f"{ratios or 'none'}; limit {limits.ratio_16bit:g}, or {limits.ratio_16bit:g} times "
            f"that of plain {result.low.dtype} transformers",
            soft_wrap=True,
        )
    if plot is not None:
        console.print(f"plot          {escape(str(plot))}", soft_wrap=True)
    for text in limits.loosened:
        console.print(f"[yellow]loosened[/]      {escape(text)}", soft_wrap=True)
    for text in result.failures:
        console.print(f"[bold red]past a limit[/]  {escape(text)}", soft_wrap=True)
    verdict = "[bold red]FAILED[/]" if result.failures else "[bold green]verified[/]"
    console.print(verdict + (" (loosened)" if limits.loosened else ""))


def _figure(figure: GateFigure | None) -> str:
    if figure is None:
        return "none"
    return f"{figure.error:.1e} ({figure.site}, row {figure.row}, {figure.phase})"


_COLUMNS = (">tokens", ">max |Δ|", ">mean |Δ|", ">½ mean Δ²", ">KL", ">top-1")


def _cells(figures: Figures) -> list[str]:
    return [
        str(figures.tokens),
        f"{figures.max_abs:.1e}",
        f"{figures.mean_abs:.1e}",
        f"{figures.half_mean_square:.1e}",
        f"{figures.kl:.1e}",
        f"{figures.top1:.2%}",
    ]


def _show_run(run: Run) -> None:
    title = f"Δ = log p of the product - log p of the reference, {run.dtype}"
    made = table(title, "adapter", "phase", *_COLUMNS, compact=True)
    figures = run.figures()
    for name in run.adapters:
        for (owner, phase), found in figures.items():
            if owner == name:
                made.add_row(escape(name or "(base)"), phase, *_cells(found))
    console.print(made)


_SEEN_BY = {
    (True, True): "both gates",
    (True, False): "end to end",
    (False, True): "site gate",
    (False, False): "[bold red]neither gate[/]",
}


def _show_controls(result: Result) -> None:
    made = table(
        "controls: faults built in on purpose, float32",
        "adapter",
        "fault",
        ">½ mean Δ²",
        ">top-1",
        "seen by",
        compact=True,
    )
    for control in result.controls:
        seen = _SEEN_BY[control.end_to_end_caught, control.site_gate_caught]
        made.add_row(
            escape(control.adapter),
            escape(control.fault),
            f"{control.figures.half_mean_square:.1e}",
            f"{control.figures.top1:.2%}",
            seen,
        )
    console.print(made)
