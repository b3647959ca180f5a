"""Faults between the values of an architecture schema."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from lora_compile.errors import LoraCompileError
from lora_compile.schemas.architecture_rule_checks import fault, rule_faults
from lora_compile.schemas.architecture_rules import LAYER
from lora_compile.schemas.source_map import KeyPath, SourceMap
from lora_compile.schemas.yaml_faults import nearest

if TYPE_CHECKING:
    from lora_compile.schemas.architecture import EmbeddingSite, Layers, LinearSite


def architecture_faults(
    sections: Mapping[str, Any], source: SourceMap
) -> Iterator[LoraCompileError]:
    """Every fault between values that are valid by themselves. `sections`: see `Check`."""
    sites = sections.get("sites", ())
    yield from _repeated(sites, source)
    yield from _tying(sites, source)
    for index, site in enumerate(sites):
        if site.kind == "linear" and site.fuse != "False" and len(site.parts) == 1:
            yield fault(
                source,
                ("sites", index, "fuse"),
                f"site `{site.name}` fuses a single part",
                expected="fuse: true with two or more parts",
                found=f"the part `{site.parts[0].name}`",
                fix="remove `fuse: true`, or list the other parts",
            )
    if "layers" in sections:
        yield from _layer_marks(sections["layers"], _paths(sections), source)
    yield from rule_faults(sections, source)
    yield from _prefixes(sections.get("key_prefixes", ()), source)


def module_path(at: str, name: str) -> str:
    """`at` and `name` as one path; `at` may be empty."""
    return f"{at}.{name}" if at else name


def _repeated(
    sites: tuple[LinearSite | EmbeddingSite, ...], source: SourceMap
) -> Iterator[LoraCompileError]:
    """A site's path, and a module, may stand once. Sites with `when` may be alternatives."""
    names: dict[str, int] = {}
    modules: dict[str, tuple[int, KeyPath, bool]] = {}
    for index, site in enumerate(sites):
        path: KeyPath = ("sites", index, "name")
        whole = module_path(site.at, site.name)
        if whole in names:
            yield fault(
                source,
                path,
                f"two sites are called `{whole}`",
                expected="each site's name once at one `at`",
                found=f"first in line {names[whole]}",
                fix="rename one of them",
            )
        names.setdefault(whole, source.line(path))
        places: list[tuple[str, KeyPath]]
        if site.kind == "linear":
            places = [
                (part.name, ("sites", index, "parts", number, "name"))
                for number, part in enumerate(site.parts)
            ]
        else:
            places = [(site.name, path)]
        for name, place in places:
            module = module_path(site.at, name)
            if module in modules:
                other, first, conditional = modules[module]
                if not (conditional and site.when is not None and other != index):
                    yield fault(
                        source,
                        place,
                        f"module `{module}` is a part twice",
                        expected="each module in one site",
                        found=f"first in site `{sites[other].name}`, line {source.line(first)}",
                        fix="remove it from one of them",
                    )
            modules.setdefault(module, (index, place, site.when is not None))


def _tying(
    sites: tuple[LinearSite | EmbeddingSite, ...], source: SourceMap
) -> Iterator[LoraCompileError]:
    tables = [module_path(site.at, site.name) for site in sites if site.kind == "embedding"]
    for index, site in enumerate(sites):
        if site.kind != "linear" or (site.tied_to is None and site.tied_if is None):
            continue
        if site.tied_to is None or site.tied_if is None:
            given, absent = (
                ("tied_if", "tied_to")
                if site.tied_to is None
                else (
                    "tied_to",
                    "tied_if",
                )
            )
            yield fault(
                source,
                ("sites", index, given),
                f"`{given}` stands without `{absent}`",
                expected="both or neither",
                found=given,
                fix=f"add `{absent}`, or remove `{given}`",
            )
        elif site.tied_to not in tables:
            near = nearest(site.tied_to, tables)
            yield fault(
                source,
                ("sites", index, "tied_to"),
                f"`{site.tied_to}` is not an embedding of this file",
                expected=" | ".join(tables) or "a site of kind embedding",
                found=site.tied_to,
                fix=f"did you mean `{near}`?" if near else "declare that embedding as a site",
            )


def _paths(sections: Mapping[str, Any]) -> Iterator[tuple[KeyPath, str]]:
    """Every path into the model that may hold `{layer}`, and where it stands."""
    for index, site in enumerate(sections.get("sites", ())):
        yield ("sites", index, "at"), site.at
        yield ("sites", index, "tied_to"), getattr(site, "tied_to", None) or ""
    for index, kept in enumerate(sections.get("kept", ())):
        yield ("kept", index, "at"), kept.at
    rules = sections["checkpoint"].stack if "checkpoint" in sections else ()
    for index, rule in enumerate(rules):
        yield ("checkpoint", "stack", index, "parameter"), rule.parameter


def _layer_marks(
    layers: Layers, paths: Iterator[tuple[KeyPath, str]], source: SourceMap
) -> Iterator[LoraCompileError]:
    """`{layer}` stands exactly where the index of a decoder layer stands."""
    if "{" in layers.at or "}" in layers.at:
        yield fault(
            source,
            ("layers", "at"),
            "`layers.at` is the list of layers itself",
            expected="a path without braces, e.g. model.layers",
            found=layers.at,
            fix=f"remove `.{LAYER}`" if layers.at.endswith(f".{LAYER}") else "remove the braces",
        )
        return
    for path, text in paths:
        rest = text.replace(LAYER, "")
        below = text == layers.at or text.startswith(f"{layers.at}.")
        marked = text == f"{layers.at}.{LAYER}" or text.startswith(f"{layers.at}.{LAYER}.")
        if "{" in rest or "}" in rest or text.count(LAYER) > 1:
            message, fix = "only one `{layer}` may stand in braces", None
        elif LAYER in text and not marked:
            message = f"`{LAYER}` stands where `{layers.at}` has no layer index"
            fix = f"write `{layers.at}.{LAYER}`, or correct `layers.at`"
        elif below and not marked:
            message = f"a place below `{layers.at}` needs the layer's index"
            fix = text.replace(layers.at, f"{layers.at}.{LAYER}", 1)
        else:
            continue
        yield fault(
            source,
            path,
            message,
            expected=f"{layers.at}.{LAYER}. and the rest of the path",
            found=text,
            fix=fix,
        )


def _prefixes(prefixes: tuple[str, ...], source: SourceMap) -> Iterator[LoraCompileError]:
    for index, prefix in enumerate(prefixes):
        path: KeyPath = ("key_prefixes", index)
        if prefix and not prefix.endswith("."):
            yield fault(
                source,
                path,
                f'prefix "{prefix}" does not end at a dot',
                expected='whole components, e.g. `base_model.model.`, or "" for no prefix',
                found=prefix,
                fix=f"write `{prefix}.`",
            )
        if prefix in prefixes[:index]:
            yield fault(
                source,
                path,
                f'prefix "{prefix}" stands twice',
                expected="each prefix once",
                found=f"first in line {source.line(('key_prefixes', prefixes.index(prefix)))}",
                fix="remove one of them",
            )
