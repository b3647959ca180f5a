"""The typer application; one file per command."""

from __future__ import annotations

import typer

from lora_compile.cli import check, explain, run, schema, verify

app = typer.Typer(
    name="lora-compile",
    help="Serve many LoRA adapters over a quantised model under torch.compile.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("check")(check.check)
app.command("explain")(explain.explain)
app.command("run")(run.run)
app.command("verify")(verify.verify)
app.add_typer(schema.app, name="schema")
