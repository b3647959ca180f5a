"""From a deployment file to a Plan and the reports on its adapters, without loading a weight.

This is what `check` and `explain` run, and the first half of `load`. Faults are collected as far
as they do not depend on each other.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lora_compile.adapters.peft_config import load_config
from lora_compile.adapters.peft_reader import inspect_adapter
from lora_compile.adapters.report import AdapterReport
from lora_compile.adapters.slots import RANK_STEP
from lora_compile.checkpoints.index import CheckpointIndex
from lora_compile.checkpoints.readers import READERS
from lora_compile.checkpoints.source import ModuleWeights
from lora_compile.checkpoints.survey import ModuleFormat, Survey, survey
from lora_compile.errors import (
    FaultList,
    FileMissing,
    LoraCompileError,
    SchemeUnsupported,
)
from lora_compile.passes.insert_lora import LOWERINGS
from lora_compile.planning.build import build_plan
from lora_compile.planning.inputs import (
    ModelFiles,
    Progress,
    architecture_of,
    model_files,
    refuse_features,
    resolve_device,
    tokenizer_of,
)
from lora_compile.planning.kernel_limits import kernel_faults
from lora_compile.planning.meta_model import meta_model, read_config
from lora_compile.planning.plan import ModelDtype, Plan, SlotPlan
from lora_compile.planning.rules import FoundRules, find_rules
from lora_compile.planning.sites import FoundSite, find_sites
from lora_compile.schemas.architecture import ArchitectureSchema
from lora_compile.schemas.deployment import Deployment, load_deployment, resolve_path
from lora_compile.schemas.quant_detect import detect_scheme
from lora_compile.schemas.quant_scheme import QuantScheme, all_schemes, find_scheme
from lora_compile.schemas.yaml_file import Loaded


@dataclass(frozen=True)
class AdapterSource:
    """One adapter of the deployment, its path resolved, and what its headers say."""

    name: str
    path: Path
    scale: float
    pinned: bool
    report: AdapterReport


@dataclass(frozen=True)
class Prepared:
    """Everything that is known before a weight is loaded."""

    deployment: Loaded[Deployment]
    architecture: Loaded[ArchitectureSchema]
    model_path: Path
    """The checkpoint directory, or the GGUF file while it is not converted."""
    config: Any
    module: nn.Module
    """The module tree on the meta device."""
    tokenizer: Any
    """None if the deployment has no texts, or while a GGUF file is not converted."""
    checkpoint: CheckpointIndex | None
    """None while a GGUF file is not converted."""
    survey: Survey | None
    plan: Plan
    adapters: tuple[AdapterSource, ...]
    notes: tuple[str, ...]


def prepare(
    path: str | Path, *, make: bool, progress: Progress, dtype: ModelDtype | None = None
) -> Prepared:
    """Read a deployment and plan it.

    Args:
        path: the deployment's YAML file.
        make: convert a GGUF model (about half a minute for 135M parameters) or draw random weights
            that are not in the cache yet; otherwise plan such a model from its config alone.
        dtype: run in this dtype instead of `model.dtype`; the checkpoint stays the same.
        progress: called with a line of text before each long step.

    Raises:
        LoraCompileError: the fault, or several as `Faults`. Of what stands on a fault (the plan on
            the model, where an adapter goes on the plan) as much is checked as stands without it.
    """
    deployment = load_deployment(path)
    faults = FaultList()
    refuse_features(deployment, faults)
    device = "cpu"  # stands in for one that is refused, to look at the rest
    with faults.collecting():
        device = resolve_device(deployment)
    progress("reading the model's config")
    model = None
    with faults.collecting():
        wanted = dtype or deployment.value.model.dtype
        model = _read_model(deployment, wanted, make and not faults, progress)

    progress("reading tensor headers")
    checkpoint = surveyed = None
    if model is not None and model.files.pending is None:
        with faults.collecting():
            checkpoint = CheckpointIndex.open(model.files.path)
            surveyed = survey_checkpoint(checkpoint, model.found, model.module, model.rules)

    tokenizer = None
    if model is not None and model.files.gguf_file is None:
        with faults.collecting():
            tokenizer = tokenizer_of(deployment, model.files.path)

    def plan_with(has_slots: Callable[[str], bool]) -> Plan | None:
        if model is None:
            return None
        formats = _dense_formats(model) if surveyed is None else surveyed.formats
        with faults.collecting():
            return _plan(deployment, model, formats, device, has_slots)
        return None

    progress("checking adapters")
    plan = plan_with(lambda module: True)
    adapters = _adapters(deployment, plan, faults)
    if plan is not None and not faults and deployment.value.runtime.sites == "touched":
        touched = _touched(plan, adapters)
        plan = plan_with(lambda module: module in touched)
    for fault in kernel_faults(plan) if plan is not None else ():
        faults.add(fault)
    faults.raise_if_any()
    assert model is not None
    assert plan is not None
    files = model.files
    return Prepared(
        deployment=deployment,
        architecture=model.architecture,
        model_path=files.path / files.gguf_file if files.gguf_file else files.path,
        config=model.config,
        module=model.module,
        tokenizer=tokenizer,
        checkpoint=checkpoint,
        survey=surveyed,
        plan=plan,
        adapters=adapters,
        notes=() if files.pending is None else (files.pending,),
    )


@dataclass(frozen=True)
class _Model:
    """A model's files, its tree on the meta device, and its sites."""

    files: ModelFiles
    config: Any
    architecture: Loaded[ArchitectureSchema]
    module: nn.Module
    dtype: ModelDtype
    found: list[FoundSite]
    rules: FoundRules


def _read_model(
    deployment: Loaded[Deployment], dtype: ModelDtype, make: bool, progress: Progress
) -> _Model:
    files = model_files(deployment, make, progress)
    config = read_config(files.path, gguf_file=files.gguf_file)
    architecture = architecture_of(deployment, config, files.path)
    module = meta_model(config, dtype)
    flags = deployment.value.model.flags
    found = find_sites(architecture, config, module, flags, flags_source=deployment.source)
    rules = find_rules(architecture, config, module, flags)
    return _Model(files, config, architecture, module, dtype, found, rules)


def survey_checkpoint(
    source: CheckpointIndex | ModuleWeights,
    found: list[FoundSite],
    module: nn.Module,
    rules: FoundRules,
) -> Survey:
    """Lay the checkpoint's tensors over the sites; every tensor is consumed or refused."""
    config, config_source = None, None
    if isinstance(source, CheckpointIndex):
        config, config_source = source.quantization_config, source.quantization_source
    detected = detect_scheme(config, file=config_source)
    require_complete(detected.scheme)
    return survey(
        source,
        [spec for site in found for spec in site.specs()],
        detected,
        quantization_config=config,
        other=other_parameters(module, found),
        ignored=rules.ignored,
        rules=rules.parameters,
    )


def other_parameters(module: nn.Module, found: list[FoundSite]) -> dict[str, tuple[int, ...]]:
    """Name -> shape of what a checkpoint must hold beside the sites (norms and the like)."""
    sites = {part.module for site in found for part in site.parts}
    return {
        name: tuple(tensor.shape)
        for name, tensor in module.state_dict().items()
        if name.rpartition(".")[0] not in sites
    }


def _dense_formats(model: _Model) -> dict[str, ModuleFormat]:
    """What a checkpoint will hold that is made when it is loaded: each module dense."""
    return {
        part.module: ModuleFormat(
            scheme="none",
            weight_dtype=model.dtype,
            block_shape=None,
            keys=(),
            why=f"unquantised; {model.files.pending}",
        )
        for site in model.found
        for part in site.parts
    }


def _plan(
    deployment: Loaded[Deployment],
    model: _Model,
    formats: Mapping[str, ModuleFormat],
    device: str,
    has_slots: Callable[[str], bool],
) -> Plan:
    value = deployment.value
    ignore = value.quantization.ignore
    try:
        return build_plan(
            model.architecture,
            model.found,
            formats,
            model_type=model.config.model_type,
            dtype=model.dtype,
            device=device,
            quantise_to=_target_scheme(deployment),
            keep=lambda module: is_ignored(module, ignore),
            slots=slot_plan(value.runtime.max_adapters, value.runtime.max_rank, model.dtype),
            max_rows=value.runtime.max_rows,
            max_tokens=value.runtime.max_tokens,
            packed=value.runtime.packed,
            has_slots=has_slots,
            kept=model.rules.kept,
        )
    except SchemeUnsupported as error:
        raise SchemeUnsupported(
            error.message,
            file=deployment.source.file,
            line=deployment.source.line(("quantization", "scheme")),
            where="quantization.scheme",
            expected=error.expected,
            found=error.found,
            fix=error.fix,
        ) from error


def slot_plan(max_adapters: int, max_rank: int, dtype: ModelDtype) -> SlotPlan:
    """Slots for `max_adapters` adapters of rank `max_rank`, stored in `dtype`."""
    rank = -(-max_rank // RANK_STEP) * RANK_STEP
    return SlotPlan(
        max_adapters=max_adapters,
        max_rank=max_rank,
        rank=rank,
        features=(),
        dtype=dtype,
    )


def _target_scheme(deployment: Loaded[Deployment]) -> QuantScheme | None:
    name = deployment.value.quantization.scheme
    line = deployment.source.line(("quantization", "scheme"))
    place = {"file": deployment.source.file, "line": line, "where": "quantization.scheme"}
    return None if name == "auto" else load_scheme_target(name, **place)


def load_scheme_target(name: str, **place: Any) -> QuantScheme:
    """The scheme `name`, if weights can be quantised to it at load (or are left alone: `none`).

    Raises:
        SchemeUnsupported: there is none, or it can only be read.
    """
    scheme = require_complete(find_scheme(name, **place))
    if scheme.name != "none" and scheme.quantise_at_load is None:
        raise SchemeUnsupported(
            f"weights cannot be quantised to `{name}` at load",
            **place,
            expected="auto"
            if scheme.activation.handling != "static"
            else "a checkpoint with calibrated input scales, and `auto`",
            found=name,
            fix=f"use one of {', '.join(s.name for s in all_schemes() if s.quantise_at_load)}",
        )
    return scheme


def require_complete(scheme: QuantScheme) -> QuantScheme:
    """The scheme itself, if it has all that it takes to run: a reader, its ops and a lowering.

    Raises:
        SchemeUnsupported: naming what is missing.
    """
    ops = [op for op in (scheme.ops.base, scheme.ops.lora, scheme.ops.quantise) if op is not None]
    missing = [
        f"the op {op}"
        for op in ops
        if not hasattr(torch.ops.lora_compile, op.removeprefix("lora_compile::"))
    ]
    if any(form.reader not in READERS for form in scheme.stored_as):
        missing.insert(0, "a reader")
    if scheme.ops.base not in LOWERINGS:
        missing.append("a lowering")
    if missing:
        raise SchemeUnsupported(
            f"scheme `{scheme.name}` cannot run: it lacks {', '.join(missing)}",
            expected="a reader, ops and a lowering",
            found=f"no {', no '.join(missing)}",
        )
    return scheme


def is_ignored(module: str, ignore: Collection[str]) -> bool:
    """Whether `ignore` names the module, by its last component or its full path."""
    return module in ignore or module.rpartition(".")[2] in ignore


def _adapters(
    deployment: Loaded[Deployment], plan: Plan | None, faults: FaultList
) -> tuple[AdapterSource, ...]:
    """Every adapter against the plan; without one, only that its config can be read."""
    sources = []
    for index, adapter in enumerate(deployment.value.adapters):
        try:
            path = resolve_path(deployment.source.file, adapter.path)
            if plan is None:
                load_config(path)
                continue
            report = inspect_adapter(path, plan)
        except FileMissing as error:
            faults.add(
                FileMissing(
                    error.message,
                    file=deployment.source.file,
                    line=deployment.source.line(("adapters", index, "path")),
                    where=f"adapters[{index}].path",
                    expected=error.expected,
                    found=error.found,
                    fix=error.fix,
                )
            )
            continue
        except LoraCompileError as error:
            faults.add(error)
            continue
        sources.append(AdapterSource(adapter.name, path, adapter.scale, adapter.pinned, report))
    return tuple(sources)


def _touched(plan: Plan, adapters: tuple[AdapterSource, ...]) -> set[str]:
    """Module paths that some declared adapter has a delta for."""
    sites = {tensor.site for adapter in adapters for tensor in adapter.report.tensors}
    return {part.module for name in sites for part in plan.by_name[name].parts}
