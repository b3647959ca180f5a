"""What all commands print alike: faults, tables, progress, JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lora_compile.errors import Faults, LoraCompileError

console = Console(highlight=False)
errors = Console(stderr=True, highlight=False, soft_wrap=True)


def print_json(data: Any) -> None:
    """Data for machines, on standard output."""
    json.dump(data, sys.stdout, indent=2, default=str)
    sys.stdout.write("\n")


def show_faults(error: LoraCompileError, *, as_json: bool) -> None:
    """Every fault of `error`: as text on standard error, or as JSON on standard output."""
    faults = error.faults if isinstance(error, Faults) else (error,)
    if as_json:
        print_json({"ok": False, "faults": [fault.as_dict() for fault in faults]})
        return
    for fault in faults:
        head, _, rest = fault.render().partition("\n")
        errors.print(f"[bold red]error[/]: {escape(head)}")
        if rest:
            errors.print(escape(rest))
    errors.print(f"[bold]{len(faults)} {'fault' if len(faults) == 1 else 'faults'}[/]")


def table(title: str, *columns: str, compact: bool = False) -> Table:
    """An empty table in the house style; columns that start with `>` are right-aligned.

    Args:
        compact: for many columns of numbers: no lines between them, and the first is never folded.
    """
    made = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        header_style="dim",
        box=box.SIMPLE_HEAD if compact else box.HEAVY_HEAD,
        padding=(0, 1, 0, 0) if compact else (0, 1),
        pad_edge=not compact,
    )
    for index, column in enumerate(columns):
        made.add_column(
            column.removeprefix(">"),
            justify="right" if column.startswith(">") else "left",
            overflow="fold",
            no_wrap=compact and index == 0,
        )
    return made


class Steps:
    """Says what is going on: a spinner with the elapsed time for people, nothing with `--json`."""

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet
        self._status: Any = None

    def __call__(self, text: str) -> None:
        if self._quiet:
            return
        if self._status is not None and errors.is_terminal:
            self._status.update(f"{text} …")
        else:
            errors.print(f"[dim]… {escape(text)}[/]")

    @contextmanager
    def paused(self) -> Iterator[None]:
        """No spinner inside, so that a progress bar can be shown."""
        if self._status is not None:
            self._status.stop()
        yield
        if self._status is not None:
            self._status.start()

    @contextmanager
    def running(self) -> Iterator[Steps]:
        """Show the spinner inside."""
        if self._quiet or not errors.is_terminal:
            yield self
            return
        with errors.status("starting …") as self._status:
            yield self
        self._status = None
