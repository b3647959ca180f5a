"""Verify a deployment: three gates, and controls that must fail.

(a) site gate: each site's own input through the float32 reference, in the deployment's dtype.
(b) end to end in float32: the same graphs with `dtype: float32`, log-probabilities against the
    reference. Codes of quantised inputs are followed where both are right.
(c) end to end in 16 bit: adapters' rows may not be much further from the reference than base rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from lora_compile.adapters.canonical import CanonicalAdapter
from lora_compile.adapters.digest import digest_of
from lora_compile.adapters.peft_reader import read_adapter
from lora_compile.api import load_prepared
from lora_compile.checkpoints.packing import DensePart, dense_part
from lora_compile.planning.plan import SitePlan
from lora_compile.planning.prepare import Prepared, prepare
from lora_compile.runtime.model import LoraModel
from lora_compile.runtime.site_gate import GateResult, GateRow, SiteGate
from lora_compile.runtime.taps import Taps
from lora_compile.verification.figures import Tokens, compare
from lora_compile.verification.limits import Limits
from lora_compile.verification.reference import Reference
from lora_compile.verification.result import BASE, PHASES, Control, Result, Run
from lora_compile.verification.served import Texts, forced_logits
from lora_compile.verification.texts import encode_texts, verify_rows

Progress = Callable[[str], None]


@dataclass(frozen=True)
class _Batch:
    """One batch of the verification: texts × (base, adapters), as many rows as may run at once."""

    texts: Texts
    names: list[str | None]
    counted: list[bool]
    """False for rows that only fill the batch up."""


@dataclass(frozen=True)
class _Adapters:
    """What each adapter is, and the factor that the deployment puts on it."""

    read: Mapping[str, CanonicalAdapter]
    scales: Mapping[str, float]

    def rows(self, names: Sequence[str | None]) -> list[GateRow]:
        return [
            GateRow(None, 1.0) if name is None else GateRow(self.read[name], self.scales[name])
            for name in names
        ]


def verify(path: str | Path, *, progress: Progress) -> Result:
    """Verify a deployment.

    Raises:
        LoraCompileError: what is wrong with the deployment or its files. Numbers past their limits
            are no errors: see `Result.failures`.
    """
    prepared = prepare(path, make=True, progress=progress)
    value = prepared.deployment.value
    limits = Limits.of(value.verify.limits)
    rows = verify_rows(prepared)
    progress("building the float32 reference")
    reference = Reference(prepared)
    adapters = _Adapters(
        {a.name: read_adapter(a.path, prepared.plan) for a in prepared.adapters},
        {a.name: a.scale for a in prepared.adapters},
    )
    progress("encoding texts (and continuing those without a completion)")
    names = [BASE, *adapters.read]
    texts = encode_texts(prepared, rows, reference, adapters.rows(names))
    batches = _batches(texts, names * len(rows), value.runtime.max_rows)

    low = gate = None
    if value.model.dtype != "float32":
        progress(f"{value.model.dtype}: loading and compiling")
        model = load_prepared(prepared, progress=progress).compile("whole")
        low, gate = _run(model, prepared, reference, batches, adapters, progress, gated=True)
        del model
    progress("float32: loading and compiling")
    prepared32 = prepare(path, make=True, progress=progress, dtype="float32")
    model = load_prepared(prepared32, progress=progress).compile("whole")
    model.backend.taps = Taps()
    float32, own_gate = _run(
        model, prepared32, reference, batches, adapters, progress, gated=gate is None
    )
    controls = _controls(
        model, prepared32, reference, _control_batches(batches), adapters, limits, progress
    )
    del model
    plain = None
    if low is not None:
        progress(f"plain {low.dtype} transformers, for comparison")
        plain = _plain(reference, prepared, batches, adapters)
    gate = gate or own_gate
    assert gate is not None
    return Result(limits, gate, float32, low, plain, tuple(controls))


def _batches(texts: Texts, names: list[str | None], max_rows: int) -> list[_Batch]:
    """Every text, with the adapter (or none) of its row, in batches of one size."""
    rows = list(range(len(names)))
    count = -(-len(rows) // max_rows)
    size = -(-len(rows) // count)
    fill = [0] * (count * size - len(rows))
    counted = [True] * len(rows) + [False] * len(fill)
    rows += fill
    return [
        _Batch(
            texts.take(rows[low : low + size]),
            [names[row] for row in rows[low : low + size]],
            counted[low : low + size],
        )
        for low in range(0, len(rows), size)
    ]


def _control_batches(batches: list[_Batch]) -> list[_Batch]:
    """As many batches as it takes to have every adapter in one: controls need no more texts."""
    names = {name for batch in batches for name in batch.names}
    seen: set[str | None] = set()
    for count, batch in enumerate(batches, 1):
        seen |= set(batch.names)
        if seen == names:
            return batches[:count]
    raise AssertionError("unreachable: all batches together have every adapter")


def _run(
    model: LoraModel,
    prepared: Prepared,
    reference: Reference,
    batches: list[_Batch],
    adapters: _Adapters,
    progress: Progress,
    *,
    gated: bool,
) -> tuple[Run, GateResult | None]:
    """All texts through the product, compared with the reference."""
    run = Run(prepared.plan.dtype)
    result: GateResult | None = None
    for number, batch in enumerate(batches):
        at = f"{run.dtype}, batch {number + 1} of {len(batches)}"
        progress(f"{at}: prefill and decode" + (", site gate" if gated else ""))
        gate = _site_gate(prepared, batch, adapters, model) if gated else None
        logits, codes = _served(model, batch, batch.names, [1.0] * len(batch.names), gate)
        progress(f"{at}: reference")
        rows = adapters.rows(batch.names)
        expected = reference.logits(batch.texts.ids, batch.texts.whole_mask, rows, codes=codes)
        for name in ("codes", "ambiguous", "wrong"):
            more = getattr(reference.followed, name)
            setattr(run.followed, name, getattr(run.followed, name) + more)
        for key, tokens in _compared(batch, expected, logits).items():
            run.tokens.setdefault(key, []).extend(tokens)
        if gate is not None:
            result = gate.result if result is None else result.merged(gate.result)
    return run, result


def _served(
    model: LoraModel,
    batch: _Batch,
    names: Sequence[str | None],
    scales: Sequence[float],
    gate: SiteGate | None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor] | None]:
    """Logits, and the codes of quantised inputs where the model has taps."""
    taps = model.backend.taps
    if taps is not None:
        taps.codes.clear()
    model.backend.intercept = gate
    try:
        logits = forced_logits(model, batch.texts, names, scales)
    finally:
        model.backend.intercept = None
    return logits, None if taps is None else taps.joined(logits.shape[1])


def _compared(
    batch: _Batch, expected: torch.Tensor, found: torch.Tensor
) -> dict[tuple[str | None, str], list[Tokens]]:
    compared: dict[tuple[str | None, str], list[Tokens]] = {}
    following = batch.texts.following
    for phase in PHASES:
        counted = batch.texts.counted(phase)
        for row, name in enumerate(batch.names):
            if batch.counted[row] and bool(counted[row].any()):
                tokens = compare(expected[row], found[row], following[row], counted[row])
                compared.setdefault((name, phase), []).append(tokens)
    return compared


def _site_gate(
    prepared: Prepared, batch: _Batch, adapters: _Adapters, model: LoraModel
) -> SiteGate:
    checkpoint, survey = prepared.checkpoint, prepared.survey
    assert checkpoint is not None
    assert survey is not None

    def read_part(site: SitePlan, index: int) -> DensePart:
        return dense_part(site, index, checkpoint, survey)

    return SiteGate(prepared.plan, model.module, read_part, adapters.rows(batch.names))


def _controls(
    model: LoraModel,
    prepared: Prepared,
    reference: Reference,
    batches: list[_Batch],
    adapters: _Adapters,
    limits: Limits,
    progress: Progress,
) -> list[Control]:
    """Build faults into what the product serves; the reference keeps the whole adapter."""
    controls: list[Control] = []
    dropped = {name: _without_one_site(read, prepared) for name, read in adapters.read.items()}
    for fault in ("off", "half scale", "one site dropped"):
        progress(f"control: {fault}")
        if fault == "one site dropped":
            for name, (_, smaller) in dropped.items():
                model.adapters.replace(name, smaller)
        gates: list[GateResult] = []
        tokens: dict[str, list[Tokens]] = {}
        for batch in batches:
            names = [None] * len(batch.names) if fault == "off" else batch.names
            scale = 0.5 if fault == "half scale" else 1.0
            gate = _site_gate(prepared, batch, adapters, model)
            logits, codes = _served(model, batch, names, [scale] * len(names), gate)
            gates.append(gate.result)
            rows = adapters.rows(batch.names)
            expected = reference.logits(batch.texts.ids, batch.texts.whole_mask, rows, codes=codes)
            for (owner, _), found in _compared(batch, expected, logits).items():
                if owner is not None:
                    tokens.setdefault(owner, []).extend(found)
        for adapter, all_tokens in tokens.items():
            figures = Tokens.join(all_tokens).figures
            rows_of = [[n == adapter for n in batch.names] for batch in batches]
            controls.append(
                Control(
                    adapter=adapter,
                    fault=f"{dropped[adapter][0]} dropped" if "dropped" in fault else fault,
                    figures=figures,
                    end_to_end_caught=not (
                        figures.half_mean_square <= limits.float32
                        and figures.top1 >= limits.float32_top1
                    ),
                    site_gate_caught=any(
                        gate.beyond(limits.site_output, limits.site_delta, rows)
                        for gate, rows in zip(gates, rows_of, strict=True)
                    ),
                )
            )
    for name, read in adapters.read.items():
        model.adapters.replace(name, read)
    return controls


def _without_one_site(
    adapter: CanonicalAdapter, prepared: Prepared
) -> tuple[str, CanonicalAdapter]:
    """The adapter without the site (in one layer) that lies in the middle of those it touches."""
    sites = [
        site
        for site in prepared.plan.sites
        if any(part.module in adapter.deltas for part in site.parts)
    ]
    site = sites[len(sites) // 2]
    gone = {part.module for part in site.parts}
    deltas = {module: delta for module, delta in adapter.deltas.items() if module not in gone}
    return site.name, replace(adapter, deltas=deltas, digest=digest_of(deltas))


def _plain(
    reference: Reference, prepared: Prepared, batches: list[_Batch], adapters: _Adapters
) -> Run:
    """Plain transformers in the deployment's dtype, with the scheme's weights and inputs, against
    float32: how sensitive the model is to 16 bit, with each adapter and with none."""
    run = Run(prepared.plan.dtype)

    def logits(batch: _Batch) -> torch.Tensor:
        rows = adapters.rows(batch.names)
        return reference.logits(batch.texts.ids, batch.texts.whole_mask, rows)

    expected = [logits(batch) for batch in batches]
    reference.cast(prepared)
    for batch, wanted in zip(batches, expected, strict=True):
        for key, tokens in _compared(batch, wanted, logits(batch)).items():
            run.tokens.setdefault(key, []).extend(tokens)
    return run
