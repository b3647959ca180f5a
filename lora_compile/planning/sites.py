"""The sites of a schema, found in a model's module tree with their widths checked.

Reads shapes only, so it works on the meta device. Every fault of a schema is collected before
planning stops.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from lora_compile.checkpoints.survey import ModuleSpec
from lora_compile.errors import (
    FaultList,
    FeatureUnsupported,
    InvalidValue,
    SiteMissing,
    WidthMismatch,
)
from lora_compile.planning.names import Names, in_layer
from lora_compile.planning.plan import SourceRef
from lora_compile.schemas.architecture import ArchitectureSchema, LinearSite, Site
from lora_compile.schemas.source_map import SourceMap
from lora_compile.schemas.yaml_file import KeyPath, Loaded, text_path


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
    fuse: bool
    """Whether the parts may share one weight and run as one GEMM."""

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
    loaded: Loaded[ArchitectureSchema],
    config: Any,
    model: nn.Module,
    flags: Mapping[str, bool] | None = None,
    *,
    flags_source: SourceMap | None = None,
) -> list[FoundSite]:
    """Find every site of the schema in the module tree and check its widths.

    Args:
        flags: those that differ from the schema's defaults.
        flags_source: the deployment that sets them, for errors.

    Raises:
        UnknownKey: the schema has no such flag.
        SiteMissing, WidthMismatch, ExpressionInvalid, InvalidValue: naming the site, the schema's
        file and line; all of them together as `Faults`.
    """
    faults = FaultList()
    names = Names.of(loaded, config, flags or {}, source=flags_source)
    modules = dict(model.named_modules())
    found = []
    for index, site in enumerate(loaded.value.sites):
        path: KeyPath = ("sites", index)
        line = loaded.source.line(path)
        fuse = isinstance(site, LinearSite) and bool(names.value(site.fuse, (*path, "fuse")))
        for layer in names.places(site.at, site.when, path):
            at = in_layer(site.at, layer)
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
                        fuse=fuse,
                    )
                )
    _check_once(found, faults)
    faults.raise_if_any()
    return found


def _check_once(found: list[FoundSite], faults: FaultList) -> None:
    """Sites with `when` may be alternatives; over one model only one of them may hold."""
    holders: dict[str, FoundSite] = {}
    told: set[tuple[int, int]] = set()
    for site in found:
        for part in site.parts:
            other = holders.setdefault(part.module, site)
            lines = (other.source.line, site.source.line)
            if other is site or lines in told:
                continue
            told.add(lines)  # once for all layers
            faults.add(
                InvalidValue(
                    f"{part.module} is a part of two sites of this model",
                    file=site.source.file,
                    line=site.source.line,
                    expected="`when` of only one of them to hold",
                    found=f"`{other.schema.name}` in line {other.source.line} and "
                    f"`{site.schema.name}`",
                    fix="make one `when` the opposite of the other",
                )
            )


def _tied_to(site: Site, index: int, names: Names) -> str | None:
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
    names: Names,
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
