"""`lora-compile schema`: write and check schema files."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from lora_compile.cli.check import AsJson
from lora_compile.cli.output import console, print_json, show_faults
from lora_compile.errors import Faults
from lora_compile.schemas.json_schema import write_json_schemas
from lora_compile.schemas.lint import lint

app = typer.Typer(help="Write and check architecture, scheme and deployment files.",
                  no_args_is_help=True)  # fmt: skip


@app.command("lint")
def lint_files(
    paths: Annotated[list[Path], typer.Argument(help="YAML files of any of the three kinds.")],
    as_json: AsJson = False,
) -> None:
    """Check YAML files on their own, without a model."""
    faults = [fault for path in paths for fault in lint(path)]
    if faults:
        show_faults(Faults(faults), as_json=as_json)
        sys.exit(1)
    if as_json:
        print_json({"ok": True, "files": [str(path) for path in paths]})
    else:
        console.print(f"[bold green]ok[/]: {len(paths)} {'file' if len(paths) == 1 else 'files'}")


@app.command("json")
def write_json(
    folder: Annotated[Path, typer.Argument(help="Folder to write the JSON Schema files to.")],
    as_json: AsJson = False,
) -> None:
    """Write JSON Schema for deployments, architectures and schemes, for editors."""
    written = write_json_schemas(folder)
    if as_json:
        print_json({"ok": True, "files": [str(path) for path in written]})
    else:
        for path in written:
            console.print(str(path))
