"""Make the Plan: the sites of a model × how its checkpoint stores them × what the deployment asks
for → every site with everything decided."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import groupby

from lora_compile.checkpoints.scales import STORED_NAMES
from lora_compile.checkpoints.survey import ModuleFormat
from lora_compile.errors import SchemeUnsupported
from lora_compile.planning.plan import KeptModules, ModelDtype, PartPlan, Plan, SitePlan, SlotPlan
from lora_compile.planning.sites import FoundPart, FoundSite
from lora_compile.schemas.architecture import ArchitectureSchema, EmbeddingSite
from lora_compile.schemas.quant_info import WeightDtype
from lora_compile.schemas.quant_scheme import QuantScheme, all_schemes
from lora_compile.schemas.yaml_file import Loaded

STORED_DTYPES = {stored: dtype for dtype, stored in STORED_NAMES.items()}
"""safetensors' names of dtypes -> torch's."""


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
    kept: tuple[KeptModules, ...] = (),
) -> Plan:
    """Decide every site's scheme and grouping.

    Args:
        found: the sites, from `find_sites`.
        formats: module path -> how the checkpoint stores it.
        quantise_to: scheme to quantise unquantised projections to at load; None = as stored.
        keep: whether a module (full path) stays as stored although `quantise_to` is set.
        has_slots: whether the site that holds this module gets adapter slots.
        kept: modules without sites that adapters must not touch, from `find_rules`.
    """
    schema = loaded.value
    sites: list[SitePlan] = []
    for site in found:
        decided = [
            _decide(site, part, formats[part.module], dtype, quantise_to, keep)
            for part in site.parts
        ]
        fuse = site.fuse
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
        kept=kept,
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
    input_scale: float | None = None

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
        return _DecidedPart(
            part,
            schemes[stored.scheme],
            packed,
            stored.block_shape,
            stored.why,
            stored.input_scale,
        )
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
        input_scales=None
        if first.scheme.activation.handling != "static"
        else [p.input_scale for p in run if p.input_scale is not None],
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
