"""`lora-compile run`: load, compile, generate one batch with a different adapter per row."""

from __future__ import annotations

import gc
import sys
import time
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import typer
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from lora_compile import torch_compat
from lora_compile.adapters.peft_reader import read_adapter
from lora_compile.api import load_prepared
from lora_compile.checkpoints.packing import DensePart, dense_part
from lora_compile.cli.check import AsJson, DeploymentFile
from lora_compile.cli.output import Steps, console, errors, print_json, table
from lora_compile.errors import MissingKey
from lora_compile.planning.plan import SitePlan
from lora_compile.planning.prepare import Prepared, prepare
from lora_compile.runtime.model import LoraModel
from lora_compile.runtime.prompts import encode_prompts
from lora_compile.runtime.site_gate import DELTA_LIMIT, OUTPUT_LIMIT, GateResult, GateRow, SiteGate
from lora_compile.schemas.deployment import Generation

NoGate = Annotated[bool, typer.Option("--no-gate", help="Leave out the site gate.")]


@dataclass(frozen=True)
class Outcome:
    """What one run produced."""

    texts: list[str]
    new_tokens: int
    first_seconds: float
    """The first generation: compilation and the site gate included."""
    seconds: float
    """The second generation, everything compiled."""
    gate: GateResult | None
    swapped: str | None
    """The adapter that was replaced between the two generations."""
    recompiles: int
    same_after_swap: bool


def run(deployment: DeploymentFile, no_gate: NoGate = False, as_json: AsJson = False) -> None:
    """Load a deployment, compile it and generate its rows as one batch."""
    started = time.perf_counter()
    with Steps(quiet=as_json).running() as progress:
        prepared = prepare(deployment, make=True, progress=progress)
        generation = prepared.deployment.value.generation
        if generation is None:
            source = prepared.deployment.source
            raise MissingKey(
                "the deployment has no `generation`, so there is nothing to run",
                file=source.file,
                line=source.line(()),
                where="generation",
                expected="generation: {rows: [{prompt: …, adapter: …}], max_new_tokens: …}",
                found="nothing",
            )
        model = _load(prepared, progress, quiet=as_json)
        model.compile(prepared.deployment.value.runtime.compile)
        outcome = _generate(prepared, generation, model, progress, gate=not no_gate)
    total = time.perf_counter() - started
    if as_json:
        print_json(_as_data(prepared, generation, model, outcome, total))
    else:
        _show(generation, model, outcome, total)
    failures = []
    if outcome.gate is not None and not outcome.gate.passed:
        failures.append("the site gate failed")
    if not outcome.same_after_swap:
        failures.append("replacing an adapter by itself changed the texts")
    for failure in failures:
        errors.print(f"[bold red]error[/]: {failure}")
    if failures:
        sys.exit(1)


def _load(prepared: Prepared, progress: Steps, *, quiet: bool) -> LoraModel:
    bar = Progress(
        TextColumn("packing sites"), BarColumn(), MofNCompleteColumn(),
        console=errors, transient=True, disable=quiet or not errors.is_terminal,
    )  # fmt: skip
    with progress.paused(), bar:
        task = bar.add_task("sites", total=len(prepared.plan.sites))
        return load_prepared(
            prepared,
            progress=progress,
            on_site=lambda done, _: bar.update(task, completed=done),
        )


def _generate(
    prepared: Prepared, generation: Generation, model: LoraModel, progress: Steps, *, gate: bool
) -> Outcome:
    rows, tokenizer = generation.rows, prepared.tokenizer
    batch = encode_prompts(
        tokenizer,
        [row.prompt for row in rows],
        chat=generation.chat,
        system=generation.system,
        device=torch.device(prepared.plan.device),
    )
    names = [row.adapter for row in rows]
    scales = [row.scale for row in rows]

    def generate() -> tuple[torch.Tensor, float]:
        begin = time.perf_counter()
        ids = model.generate(
            batch["input_ids"],
            attention_mask=batch["attention_mask"],
            adapters=names,
            scales=scales,
            cache=generation.cache,
            max_new_tokens=generation.max_new_tokens,
            num_beams=generation.num_beams,
            do_sample=False,
            pad_token_id=tokenizer.pad_token_id,
        )
        return ids, time.perf_counter() - begin

    site_gate = _site_gate(prepared, generation, model) if gate else None
    model.backend.intercept = site_gate
    what = "compiling (prefill graph, then decode graph)" if model.scope != "off" else "running"
    progress(f"{what}, first generation" + (" and site gate" if gate else ""))
    # Tracing makes millions of objects that live on; collecting between them finds nothing.
    gc.freeze()
    gc.disable()
    first, first_seconds = generate()
    gc.enable()
    model.backend.intercept = None

    swapped = next((name for name in names if name is not None), None)
    graphs = len(model.backend.graphs)
    progress("generating again after an adapter swap, recompilation forbidden")
    if swapped is not None:
        path = next(a.path for a in prepared.adapters if a.name == swapped)
        model.adapters.replace(swapped, path)
    with torch_compat.fail_on_recompile():
        second, seconds = generate()

    prompt = batch["input_ids"].shape[1]
    new = second[:, prompt:]
    pad = tokenizer.pad_token_id
    return Outcome(
        texts=tokenizer.batch_decode(new, skip_special_tokens=True),
        new_tokens=int((new != pad).sum()),
        first_seconds=first_seconds,
        seconds=seconds,
        gate=site_gate.result if site_gate is not None else None,
        swapped=swapped,
        recompiles=len(model.backend.graphs) - graphs,
        same_after_swap=torch.equal(first, second),
    )


def _site_gate(prepared: Prepared, generation: Generation, model: LoraModel) -> SiteGate | None:
    """The gate needs compiled graphs; in eager mode markers are the reference themselves."""
    if model.scope == "off":
        return None
    checkpoint, survey = prepared.checkpoint, prepared.survey
    assert checkpoint is not None
    assert survey is not None

    def read_part(site: SitePlan, index: int) -> DensePart:
        return dense_part(site, index, checkpoint, survey)

    read = {a.name: (read_adapter(a.path, prepared.plan), a.scale) for a in prepared.adapters}
    rows = []
    for row in generation.rows:
        adapter, own = read[row.adapter] if row.adapter is not None else (None, 1.0)
        rows += [GateRow(adapter, row.scale * own)] * generation.num_beams
    return SiteGate(prepared.plan, model.module, read_part, rows)


def _show(generation: Generation, model: LoraModel, outcome: Outcome, total: float) -> None:
    made = table("one batch, one adapter per row", "row", "adapter", ">scale", "prompt", "text")
    made.show_lines = True
    for index, (row, text) in enumerate(zip(generation.rows, outcome.texts, strict=True)):
        made.add_row(
            str(index),
            row.adapter or "-",
            f"{row.scale:g}" if row.adapter else "-",
            escape(row.prompt),
            escape(text.strip()),
        )
    console.print(made)
    console.print(escape(str(model.report)), soft_wrap=True)
    if outcome.swapped is not None:
        same = "the same texts" if outcome.same_after_swap else "OTHER TEXTS"
        console.print(
            f"swap          {outcome.swapped} replaced by itself in another slot: "
            f"{outcome.recompiles} recompiles, {same}",
            soft_wrap=True,
        )
    console.print(
        f"speed         {outcome.new_tokens / outcome.seconds:.1f} tokens/s "
        f"({outcome.new_tokens} tokens of {len(outcome.texts)} rows in {outcome.seconds:.1f} s); "
        f"first generation {outcome.first_seconds:.1f} s, all {total:.1f} s",
        soft_wrap=True,
    )
    if outcome.gate is not None:
        console.print(_gate_text(outcome.gate), soft_wrap=True)


def _gate_text(gate: GateResult) -> str:
    verdict = "[green]passed[/]" if gate.passed else "[bold red]FAILED[/]"
    parts = []
    for kind, figure, limit in (
        ("output", gate.output, OUTPUT_LIMIT),
        ("delta", gate.delta, DELTA_LIMIT),
    ):
        if figure is not None:
            place = escape(f"({figure.site}, row {figure.row}, {figure.phase})")
            parts.append(f"worst {kind} error {figure.error:.1e} of {limit:.0e} {place}")
    joined = "\n              ".join(parts)
    return (
        f"site gate     {verdict}: {gate.comparisons} comparisons at {len(gate.expected)} sites, "
        f"float32 references\n              {joined}"
    )


def _as_data(
    prepared: Prepared, generation: Generation, model: LoraModel, outcome: Outcome, total: float
) -> dict[str, Any]:
    rows = zip(generation.rows, outcome.texts, strict=True)
    return {
        "ok": (outcome.gate is None or outcome.gate.passed) and outcome.same_after_swap,
        "deployment": prepared.deployment.source.file,
        "rows": [{**row.model_dump(mode="json"), "text": text} for row, text in rows],
        "report": model.report.as_dict(),
        "swap": {
            "adapter": outcome.swapped,
            "recompiles": outcome.recompiles,
            "same_texts": outcome.same_after_swap,
        },
        "tokens_per_second": outcome.new_tokens / outcome.seconds,
        "seconds": {
            "first_generation": outcome.first_seconds,
            "generation": outcome.seconds,
            "all": total,
        },
        "gate": None if outcome.gate is None else outcome.gate.as_dict(),
    }
