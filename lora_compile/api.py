"""`load` a deployment or `wrap` a live module; both give a `LoraModel`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from lora_compile.adapters.peft_reader import inspect_adapter
from lora_compile.adapters.pool import AdapterPool
from lora_compile.adapters.slots import allocate_slots
from lora_compile.checkpoints.other import load_other
from lora_compile.checkpoints.packing import pack_site
from lora_compile.checkpoints.source import ModuleWeights, WeightSource
from lora_compile.checkpoints.survey import Survey
from lora_compile.errors import FaultList, FeatureUnsupported, InvalidValue
from lora_compile.planning.build import build_plan
from lora_compile.planning.kernel_limits import kernel_faults
from lora_compile.planning.meta_model import DTYPES
from lora_compile.planning.plan import ModelDtype, Plan, SitePlan
from lora_compile.planning.prepare import (
    Prepared,
    is_ignored,
    load_scheme_target,
    other_parameters,
    prepare,
    slot_plan,
    survey_checkpoint,
)
from lora_compile.planning.rules import find_rules
from lora_compile.planning.sites import find_sites
from lora_compile.runtime.attach import SiteStorage, attach
from lora_compile.runtime.model import LoraModel
from lora_compile.runtime.rows import RowMaps
from lora_compile.schemas.architecture import find_architecture, load_architecture

Progress = Callable[[str], None]
SiteProgress = Callable[[int, int], None]
"""Called with (sites packed, sites in all)."""


def _quiet(_: str) -> None:
    return None


def load(path: str | Path, *, progress: Progress = _quiet) -> LoraModel:
    """Load the model and the adapters of a deployment file. Not compiled yet.

    Raises:
        LoraCompileError: what is wrong with the file, the checkpoint or an adapter; several
            faults come together as `Faults`.
    """
    return load_prepared(prepare(path, make=True, progress=progress), progress=progress)


def load_prepared(
    prepared: Prepared,
    *,
    progress: Progress = _quiet,
    on_site: SiteProgress | None = None,
) -> LoraModel:
    """The second half of `load`: weights, slots and adapters of what `prepare(make=True)` gave."""
    assert prepared.checkpoint is not None, "prepared with make=False"
    assert prepared.survey is not None
    runtime = prepared.deployment.value.runtime
    plan, module = prepared.plan, prepared.module
    progress("loading weights")
    storages = _storages(plan, prepared.checkpoint, prepared.survey, on_site)
    model = _assemble(
        module, plan, storages, when_full=runtime.when_full, wait_seconds=runtime.wait_seconds
    )
    load_other(
        module,
        prepared.checkpoint,
        prepared.survey.other,
        DTYPES[plan.dtype],
        device=plan.device,
        stacks=prepared.survey.stacks,
    )
    module.to(plan.device)  # buffers: the rotary frequencies
    progress("loading adapters")
    faults = FaultList()
    for adapter in prepared.adapters:
        with faults.collecting():
            model.adapters.load(
                adapter.name, adapter.path, scale=adapter.scale, pinned=adapter.pinned
            )
    faults.raise_if_any()
    return model


def wrap(
    module: nn.Module,
    *,
    architecture: str | Path = "auto",
    flags: Mapping[str, bool] | None = None,
    quantization: str = "none",
    ignore: tuple[str, ...] = (),
    adapters: Mapping[str, str | Path] | None = None,
    max_adapters: int = 4,
    max_rank: int = 16,
    max_rows: int = 16,
    max_tokens: int = 4096,
    packed: bool = False,
    when_full: Literal["error", "wait"] = "error",
    wait_seconds: float = 30.0,
) -> LoraModel:
    """Attach to a transformers causal LM that is in memory, in place.

    Args:
        module: the model; its projections are replaced, its other parameters stay.
        architecture: `auto` (by `module.config.model_type`), a shipped name, or a YAML file.
        flags: those of the architecture that differ from their defaults.
        quantization: a scheme to quantise the projections to, or `none`.
        ignore: module names (last component or full path) to leave unquantised.
        adapters: name -> PEFT directory, loaded at once.
        max_adapters, max_rank, max_rows, max_tokens, packed, when_full, wait_seconds: as under
            `runtime` in a deployment file.

    Raises:
        LoraCompileError: what does not fit; the module is untouched then.
    """
    _refuse_peft(module)
    config: Any = module.config
    loaded = (
        find_architecture(str(config.model_type))
        if architecture == "auto"
        else load_architecture(str(architecture))
    )
    dtype = _dtype_name(module)
    found = find_sites(loaded, config, module, flags)
    rules = find_rules(loaded, config, module, flags)
    source = ModuleWeights(module)
    surveyed = survey_checkpoint(source, found, module, rules)
    device = _single_device(module)
    plan = build_plan(
        loaded,
        found,
        surveyed.formats,
        model_type=str(config.model_type),
        dtype=dtype,
        device=str(device),
        quantise_to=None if quantization == "none" else load_scheme_target(quantization),
        keep=lambda name: is_ignored(name, ignore),
        slots=slot_plan(max_adapters, max_rank, dtype),
        max_rows=max_rows,
        max_tokens=max_tokens,
        packed=packed,
        has_slots=lambda _: True,
        kept=rules.kept,
    )
    faults = FaultList()
    for fault in kernel_faults(plan):
        faults.add(fault)
    for path in (adapters or {}).values():
        with faults.collecting():
            inspect_adapter(path, plan)
    faults.raise_if_any()
    storages = _storages(plan, source, surveyed, None)
    module.eval()
    others = other_parameters(module, found)
    for name, parameter in module.named_parameters():
        if name in others:
            parameter.requires_grad_(False)
    model = _assemble(module, plan, storages, when_full=when_full, wait_seconds=wait_seconds)
    for name, path in (adapters or {}).items():
        model.adapters.load(name, path)
    return model


def _single_device(module: nn.Module) -> torch.device:
    found = {parameter.device for parameter in module.parameters()}
    if len(found) != 1:
        raise InvalidValue(
            "the module's parameters must be on one device",
            expected="one device",
            found=", ".join(sorted(str(device) for device in found)),
            fix="move it first, e.g. module.to('cuda')",
        )
    return next(iter(found))


def _refuse_peft(module: nn.Module) -> None:
    """Sites below PEFT's layers would be found by no schema; the cause is worth its own words."""
    for name, child in module.named_modules():
        if type(child).__module__.partition(".")[0] == "peft" and name:
            raise FeatureUnsupported(
                "the model is wrapped by PEFT",
                where=name,
                expected="a transformers model with its own layers",
                found=f"{type(child).__module__}.{type(child).__qualname__}",
                fix="save the adapter, take the model out with PEFT's `unload()`, and name the "
                "adapter's folder in `adapters=`",
            )


def _dtype_name(module: nn.Module) -> ModelDtype:
    found = {p.dtype for p in module.parameters() if p.is_floating_point()}
    names = {dtype: name for name, dtype in DTYPES.items()}
    if len(found) != 1 or next(iter(found)) not in names:
        raise InvalidValue(
            "the module's parameters must have one floating-point dtype",
            expected=" or ".join(DTYPES),
            found=", ".join(sorted(str(d) for d in found)),
            fix="cast it first, e.g. module.to(torch.bfloat16)",
        )
    return names[next(iter(found))]


def _storages(
    plan: Plan, source: WeightSource, survey: Survey, on_site: SiteProgress | None
) -> dict[str, SiteStorage]:
    slots = allocate_slots(plan, plan.device)
    storages: dict[str, SiteStorage] = {}
    for done, site in enumerate(plan.sites):
        shared = _tied_weight(plan, site, storages)
        if shared is not None:
            storages[site.name] = SiteStorage(shared, (), None, slots.get(site.name))
        else:
            packed = pack_site(
                site, source, survey, dtype=DTYPES[plan.dtype], device=torch.device(plan.device)
            )
            storages[site.name] = SiteStorage(
                packed.weight, tuple(packed.aux), packed.bias, slots.get(site.name)
            )
        if on_site is not None:
            on_site(done + 1, len(plan.sites))
    return storages


def _tied_weight(
    plan: Plan, site: SitePlan, storages: Mapping[str, SiteStorage]
) -> torch.Tensor | None:
    """The table that a tied head shares, if it is packed already and stored alike."""
    if site.tied_to is None:
        return None
    target = plan.targets.get(site.tied_to)
    if target is None or target.site.name not in storages:
        return None
    alike = site.quant.scheme == target.site.quant.scheme == "none" and not site.quant.bias
    return storages[target.site.name].weight if alike else None


def _assemble(
    module: nn.Module,
    plan: Plan,
    storages: Mapping[str, SiteStorage],
    *,
    when_full: Literal["error", "wait"],
    wait_seconds: float,
) -> LoraModel:
    rows = RowMaps(plan.max_rows, plan.max_tokens, packed=plan.packed, device=plan.device)
    sites = attach(module, plan, storages, rows)
    slots = {name: s.slots for name, s in storages.items() if s.slots is not None}
    pool = AdapterPool(plan, slots, when_full=when_full, wait_seconds=wait_seconds)
    return LoraModel(module, plan, sites, rows, pool)
