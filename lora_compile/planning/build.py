"""Make the Plan: schema × module tree × checkpoint → every site with everything decided.

Reads shapes only, so it works on the meta device. Every fault of a schema is collected before
planning stops.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from torch import nn

from lora_compile.checkpoints.survey import ModuleFormat, ModuleSpec
from lora_compile.errors import (
    ExpressionInvalid,
    FaultList,
    FeatureUnsupported,
    SchemeUnsupported,
    SiteMissing,
    WidthMismatch,
)
from lora_compile.planning.plan import ModelDtype, PartPlan, Plan, SitePlan, SlotPlan, SourceRef
from lora_compile.schemas.architecture import (
    ArchitectureSchema,
    EmbeddingSite,
    LinearSite,
    Site,
)
from lora_compile.schemas.expressions import evaluate
from lora_compile.schemas.quant_info import WeightDtype
from lora_compile.schemas.quant_scheme import QuantScheme, all_schemes
from lora_compile.schemas.yaml_file import KeyPath, Loaded, text_path

STORED_DTYPES: dict[str, WeightDtype] = {"F8_E4M3": "float8_e4m3fn"}
"""safetensors' names of packed dtypes -> torch's."""


@dataclass(frozen=True)
class FoundPart:
    """One projection that a schema names, found in the module tree."""

    name: str
    module: str
    out_features: int
    in_features: int
    bias: bool


@dataclass(frozen=True)
class FoundSite:
    """One schema site in one layer, with its modules found and their widths checked."""

    schema: Site
    at: str
    layer: int | None
    parts: tuple[FoundPart, ...]
    tied_to: str | None
    source: SourceRef

    def specs(self) -> list[ModuleSpec]:
        """What the checkpoint survey needs to know of the site's modules."""
        return [
            ModuleSpec(
                module=part.module,
                out_features=part.out_features,
                in_features=part.in_features,
                has_bias=part.bias,
                tied_to=self.tied_to,
                group=f"{self.at}.{self.schema.name}" if self.at else self.schema.name,
            )
            for part in self.parts
        ]


def find_sites(
    loaded: Loaded[ArchitectureSchema], config: Any, model: nn.Module
) -> list[FoundSite]:
    """Find every site of the schema in the module tree and check its widths.

    Raises:
        SiteMissing, WidthMismatch, ExpressionInvalid: naming the site, the schema's file and
        line; all of them together as `Faults`.
    """
    schema = loaded.value
    faults = FaultList()
    names = _Names.of(loaded, config)
    modules = dict(model.named_modules())
    found = []
    for index, site in enumerate(schema.sites):
        line = loaded.source.line(("sites", index))
        if site.when is not None and not names.value(site.when, ("sites", index, "when")):
            continue
        layers: Iterable[int | None] = [None]
        if "{layer}" in site.at:
            layers = range(names.value(schema.layers.count, ("layers", "count")))
        for layer in layers:
            at = site.at if layer is None else site.at.replace("{layer}", str(layer))
            parts = _find_parts(loaded, index, site, at, names, modules, faults)
            if parts:
                found.append(
                    FoundSite(
                        schema=site,
                        at=at,
                        layer=layer,
                        parts=parts,
                        tied_to=_tied_to(site, index, names),
                        source=SourceRef(file=loaded.source.file, line=line),
                    )
                )
    faults.raise_if_any()
    return found


@dataclass(frozen=True)
class _Names:
    """Evaluates a schema's expressions over one config; errors carry the schema's line."""

    loaded: Loaded[ArchitectureSchema]
    config: Any
    derived: dict[str, int | bool]

    @classmethod
    def of(cls, loaded: Loaded[ArchitectureSchema], config: Any) -> _Names:
        names = cls(loaded, config, {})
        for name, text in loaded.value.let.items():
            names.derived[name] = names.value(text, ("let", name))
        return names

    def value(self, text: str, path: KeyPath) -> int:
        try:
            return evaluate(text, self.config, self.derived)
        except ExpressionInvalid as error:
            raise ExpressionInvalid(
                error.message,
                file=self.loaded.source.file,
                line=self.loaded.source.line(path),
                where=text_path(path),
                expected=error.expected,
                found=error.found,
                fix=error.fix,
            ) from error


def _tied_to(site: Site, index: int, names: _Names) -> str | None:
    if not isinstance(site, LinearSite) or site.tied_to is None:
        return None
    if site.tied_if is not None and not names.value(site.tied_if, ("sites", index, "tied_if")):
        return None
    return site.tied_to


def _find_parts(
    loaded: Loaded[ArchitectureSchema],
    index: int,
    site: Site,
    at: str,
    names: _Names,
    modules: Mapping[str, nn.Module],
    faults: FaultList,
) -> tuple[FoundPart, ...]:
    wanted: list[tuple[str, str, str, KeyPath]]
    if isinstance(site, LinearSite):
        kind: type[nn.Module] = nn.Linear
        wanted = [
            (part.name, part.out_features, site.in_features, ("sites", index, "parts", i))
            for i, part in enumerate(site.parts)
        ]
    else:
        kind = nn.Embedding
        wanted = [(site.name, site.num_embeddings, site.embedding_dim, ("sites", index))]

    parts = []
    for name, out_expression, in_expression, path in wanted:
        module_path = f"{at}.{name}" if at else name
        line = loaded.source.line(path)
        module = modules.get(module_path)
        if isinstance(module, kind) and _is_special(module, kind):
            faults.add(
                FeatureUnsupported(
                    f"site {site.name}: {module_path} is more than a plain {kind.__name__}",
                    file=loaded.source.file,
                    line=line,
                    expected=f"torch.nn.{kind.__name__} without hooks or parametrisations",
                    found=f"{type(module).__name__}"
                    + (" with hooks" if type(module) is kind else ""),
                    fix="replacing it would lose what it does; leave it out of the schema",
                )
            )
            continue
        if not isinstance(module, kind):
            faults.add(_missing(loaded, site, module_path, module, kind, line, modules))
            continue
        out_features, in_features = _widths(module)
        for what, expression, width in (
            ("output", out_expression, out_features),
            ("input", in_expression, in_features),
        ):
            expected = names.value(expression, path)
            if expected != width:
                faults.add(
                    WidthMismatch(
                        f"site {site.name}: {module_path} has another {what} width than the "
                        "schema says",
                        file=loaded.source.file,
                        line=line,
                        where=text_path(path),
                        expected=f"{expected} ({expression})",
                        found=width,
                        fix="correct the expression; it is evaluated over the model's config",
                    )
                )
        bias = isinstance(module, nn.Linear) and module.bias is not None
        parts.append(FoundPart(name, module_path, out_features, in_features, bias))
    return tuple(parts)


def _is_special(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether the module does more than its plain class, which a marker would drop."""
    hooked = module._forward_hooks or module._forward_pre_hooks or hasattr(module, "_hf_hook")
    return type(module) is not kind or bool(hooked) or hasattr(module, "parametrizations")


def _widths(module: nn.Module) -> tuple[int, int]:
    if isinstance(module, nn.Embedding):
        return module.num_embeddings, module.embedding_dim
    assert isinstance(module, nn.Linear)
    return module.out_features, module.in_features


def _missing(
    loaded: Loaded[ArchitectureSchema],
    site: Site,
    path: str,
    module: nn.Module | None,
    kind: type[nn.Module],
    line: int,
    modules: Mapping[str, nn.Module],
) -> SiteMissing:
    same_kind = [name for name, m in modules.items() if isinstance(m, kind)]
    near = difflib.get_close_matches(path, same_kind, n=3, cutoff=0.5)
    return SiteMissing(
        f"site {site.name} names a projection that this model does not have: {path}",
        file=loaded.source.file,
        line=line,
        expected=f"a {kind.__name__} at {path}",
        found="nothing" if module is None else type(module).__name__,
        fix=f"did you mean {' or '.join(near)}?" if near else "correct `at` or the part's name",
    )


def build_plan(
    loaded: Loaded[ArchitectureSchema],
    found: list[FoundSite],
    formats: Mapping[str, ModuleFormat],
    *,
    model_type: str,
    dtype: ModelDtype,
    device: str,
    quantise_to: QuantScheme | None,
    keep: Callable[[str], bool],
    slots: SlotPlan,
    max_rows: int,
    max_tokens: int,
    packed: bool,
    has_slots: Callable[[str], bool],
) -> Plan:
    """Decide every site's scheme and grouping.

    Args:
        found: the sites, from `find_sites`.
        formats: module path -> how the checkpoint stores it.
        quantise_to: scheme to quantise unquantised projections to at load; None = as stored.
        keep: whether a module (full path) stays as stored although `quantise_to` is set.
        has_slots: whether the site that holds this module gets adapter slots.
    """
    schema = loaded.value
    sites: list[SitePlan] = []
    for site in found:
        decided = [
            _decide(site, part, formats[part.module], dtype, quantise_to, keep)
            for part in site.parts
        ]
        fuse = isinstance(site.schema, LinearSite) and site.schema.fuse
        runs = _runs(decided, fuse)
        for run in runs:
            why = run[0].why
            if fuse and len(runs) > 1:
                why += f"; split: the parts of {site.schema.name} differ in scheme"
            sites.append(_site_plan(site, run, _shared(site, formats), why, has_slots))
    return Plan(
        architecture=schema.name,
        model_type=model_type,
        dtype=dtype,
        device=device,
        scheme=quantise_to.name if quantise_to else _stored_scheme(sites),
        slots=slots,
        max_rows=max_rows,
        max_tokens=max_tokens,
        packed=packed,
        layers=schema.layers.at,
        sites=tuple(sites),
        key_prefixes=tuple(sorted(schema.key_prefixes, key=len, reverse=True)),
    )


def _shared(site: FoundSite, formats: Mapping[str, ModuleFormat]) -> str | None:
    """The module whose weight the site shares, unless the checkpoint has one of its own for it."""
    keys = formats[site.parts[0].module].keys
    own = bool(keys) and keys[0].startswith(f"{site.parts[0].module}.")
    return None if own else site.tied_to


def _stored_scheme(sites: list[SitePlan]) -> str:
    return "+".join(sorted({s.quant.scheme for s in sites} - {"none"})) or "none"


@dataclass(frozen=True)
class _DecidedPart:
    part: FoundPart
    scheme: QuantScheme
    weight_dtype: WeightDtype
    block_shape: tuple[int, int] | None
    why: str

    @property
    def key(self) -> tuple[object, ...]:
        """Parts with equal keys may share one storage and one GEMM."""
        return (self.scheme.name, self.weight_dtype, self.block_shape)


def _decide(
    site: FoundSite,
    part: FoundPart,
    stored: ModuleFormat,
    dtype: ModelDtype,
    quantise_to: QuantScheme | None,
    keep: Callable[[str], bool],
) -> _DecidedPart:
    schemes = {scheme.name: scheme for scheme in all_schemes()}
    if stored.scheme != "none":
        if quantise_to is not None and quantise_to.name != stored.scheme:
            raise SchemeUnsupported(
                f"{part.module} is stored as {stored.scheme} and cannot be requantised",
                where="quantization.scheme",
                expected=f"auto or {stored.scheme}",
                found=quantise_to.name,
                fix="set quantization.scheme: auto",
            )
        packed = STORED_DTYPES[stored.weight_dtype]
        return _DecidedPart(part, schemes[stored.scheme], packed, stored.block_shape, stored.why)
    if quantise_to is None or quantise_to.name == "none":
        return _DecidedPart(part, schemes["none"], dtype, None, stored.why)
    if not site.schema.quantise_at_load:
        return _DecidedPart(
            part, schemes["none"], dtype, None, "the architecture keeps this site unquantised"
        )
    if keep(part.module):
        return _DecidedPart(part, schemes["none"], dtype, None, "in quantization.ignore")
    at_load = quantise_to.quantise_at_load
    assert at_load is not None
    return _DecidedPart(
        part,
        quantise_to,
        dtype if at_load.weight_dtype == "from_model" else at_load.weight_dtype,
        at_load.block_shape,
        f"quantised to {quantise_to.name} at load",
    )


def _runs(parts: list[_DecidedPart], fuse: bool) -> list[list[_DecidedPart]]:
    """The largest runs of neighbouring parts that may fuse."""
    if not fuse:
        return [[part] for part in parts]
    return [list(run) for _, run in groupby(parts, key=lambda part: part.key)]


def _site_plan(
    site: FoundSite,
    run: list[_DecidedPart],
    tied_to: str | None,
    why: str,
    has_slots: Callable[[str], bool],
) -> SitePlan:
    first = run[0]
    in_features = first.part.in_features
    whole = len(run) == len(site.parts)
    name = site.schema.name if whole else "+".join(p.part.name for p in run)
    quant = first.scheme.info(
        weight_dtype=first.weight_dtype,
        block_shape=first.block_shape,
        in_features=in_features,
        part_widths=[(p.part.name, p.part.out_features) for p in run],
        bias=any(p.part.bias for p in run),
    )
    return SitePlan(
        name=f"{site.at}.{name}" if site.at else name,
        kind="embedding" if isinstance(site.schema, EmbeddingSite) else "linear",
        role=site.schema.name,
        layer=site.layer,
        in_features=in_features,
        out_features=quant.out_features,
        parts=tuple(
            PartPlan(name=p.part.name, module=p.part.module, out_features=p.part.out_features)
            for p in run
        ),
        quant=quant,
        lora=not isinstance(site.schema, EmbeddingSite)
        and any(has_slots(p.part.module) for p in run),
        tied_to=tied_to,
        source=site.source,
        why=why,
    )
