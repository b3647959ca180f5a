"""Faults of an architecture schema's flags, expressions, kept modules and checkpoint rules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from lora_compile.errors import InvalidValue, LoraCompileError
from lora_compile.schemas.architecture_rules import EXPERT, LAYER
from lora_compile.schemas.expressions import Expression
from lora_compile.schemas.source_map import KeyPath, SourceMap, text_path
from lora_compile.schemas.yaml_faults import nearest

if TYPE_CHECKING:
    from lora_compile.schemas.architecture import EmbeddingSite, LinearSite
    from lora_compile.schemas.architecture_rules import (
        CheckpointRules,
        Flag,
        IgnoreRule,
        KeptRule,
        StackRule,
    )

LAYER_NAME = "layer"
"""What an expression calls the index of its layer."""


def fault(source: SourceMap, path: KeyPath, message: str, **facts: str | None) -> InvalidValue:
    """A fault at a place of the file."""
    return InvalidValue(
        message, file=source.file, line=source.line(path), where=text_path(path), **facts
    )


def rule_faults(sections: Mapping[str, Any], source: SourceMap) -> Iterator[LoraCompileError]:
    """Every fault of what is not a site. `sections`: see `Check`."""
    used: set[str] = set()
    for path, text, layered in _expressions(sections):
        names = Expression.parse(text).names
        used |= names
        if LAYER_NAME in names and not layered:
            yield fault(
                source,
                path,
                f"`{LAYER_NAME}` stands where there is no layer",
                expected=f"`{LAYER_NAME}` only in the `when` of something whose path has `{LAYER}`",
                found=text,
                fix="move the condition into the `when` of a site in the layers",
            )
    yield from _own_names(sections, source)
    if {"sites", "let", "layers", "kept", "checkpoint"} <= sections.keys():
        yield from _flags(sections.get("flags", {}), used, source)
    yield from _kept(sections.get("kept", ()), sections.get("sites", ()), source)
    if "checkpoint" in sections:
        rules: CheckpointRules = sections["checkpoint"]
        yield from _stack(rules.stack, source)
        yield from _ignore(rules.ignore, source)


def _expressions(sections: Mapping[str, Any]) -> Iterator[tuple[KeyPath, str, bool]]:
    """Every expression: its place, its text, and whether it is asked once per layer."""
    in_layers = f"{sections['layers'].at}." if "layers" in sections else LAYER

    def layered(path: str) -> bool:
        # A path below the layers without its index is told elsewhere, once.
        return LAYER in path or f"{path}.".startswith(in_layers)

    for name, text in sections.get("let", {}).items():
        yield ("let", name), text, False
    if "layers" in sections:
        yield ("layers", "count"), sections["layers"].count, False
    for index, site in enumerate(sections.get("sites", ())):
        yield from _of_site(("sites", index), site, layered(site.at))
    for index, kept in enumerate(sections.get("kept", ())):
        if kept.when is not None:
            yield ("kept", index, "when"), kept.when, layered(kept.at)
    if "checkpoint" not in sections:
        return
    rules: CheckpointRules = sections["checkpoint"]
    for index, rule in enumerate(rules.stack):
        path: KeyPath = ("checkpoint", "stack", index)
        yield (*path, "count"), rule.count, False
        for number, piece in enumerate(rule.pieces):
            yield (*path, "pieces", number, "rows"), piece.rows, False
        if rule.when is not None:
            yield (*path, "when"), rule.when, layered(rule.parameter)
    for index, ignored in enumerate(rules.ignore):
        for key in ("layers_from", "layers_count"):
            if (text := getattr(ignored, key)) is not None:
                yield ("checkpoint", "ignore", index, key), text, False


def _of_site(
    path: KeyPath, site: LinearSite | EmbeddingSite, layered: bool
) -> Iterator[tuple[KeyPath, str, bool]]:
    if site.when is not None:
        yield (*path, "when"), site.when, layered
    if site.kind == "embedding":
        yield (*path, "num_embeddings"), site.num_embeddings, False
        yield (*path, "embedding_dim"), site.embedding_dim, False
        return
    yield (*path, "in_features"), site.in_features, False
    yield (*path, "fuse"), site.fuse, False
    if site.tied_if is not None:
        yield (*path, "tied_if"), site.tied_if, False
    for number, part in enumerate(site.parts):
        yield (*path, "parts", number, "out_features"), part.out_features, False


def _own_names(sections: Mapping[str, Any], source: SourceMap) -> Iterator[LoraCompileError]:
    """A name of the file's own means one thing."""
    flags, let = sections.get("flags", {}), sections.get("let", {})
    for section, names in (("flags", flags), ("let", let)):
        if LAYER_NAME in names:
            yield fault(
                source,
                (section, LAYER_NAME),
                f"`{LAYER_NAME}` is the index of a layer",
                expected="another name",
                found=LAYER_NAME,
                fix="rename it",
            )
    for name in flags:
        if name in let:
            yield fault(
                source,
                ("let", name),
                f"`{name}` is a flag too",
                expected="a name that is no flag",
                found=f"the flag in line {source.line(('flags', name))}",
                fix="rename one of them",
            )


def _flags(
    flags: Mapping[str, Flag], used: set[str], source: SourceMap
) -> Iterator[LoraCompileError]:
    for name in flags:
        if name not in used:
            near = nearest(name, sorted(used - flags.keys()))
            yield fault(
                source,
                ("flags", name),
                f"no expression uses the flag `{name}`",
                expected=f"an expression with the name `{name}`, e.g. `fuse: {name}`",
                found=f"`{near}`, which is no flag" if near else "none",
                fix=f"did you mean `{near}`?" if near else "use it, or remove it",
            )


def _kept(
    kept: tuple[KeptRule, ...],
    sites: tuple[LinearSite | EmbeddingSite, ...],
    source: SourceMap,
) -> Iterator[LoraCompileError]:
    for index, rule in enumerate(kept):
        if any(other.at == rule.at and other.when == rule.when for other in kept[:index]):
            yield fault(
                source,
                ("kept", index, "at"),
                f"`{rule.at}` is kept twice",
                expected="each module once",
                found=rule.at,
                fix="remove one of them",
            )
        inside = next((s for s in sites if f"{s.at}.".startswith(f"{rule.at}.")), None)
        if inside is not None:
            yield fault(
                source,
                ("kept", index, "at"),
                f"site `{inside.name}` lies in a module that is kept as it is",
                expected="no site below a kept module",
                found=f"site `{inside.name}` at {inside.at}",
                fix="remove the site, or keep a smaller module",
            )


def _stack(rules: tuple[StackRule, ...], source: SourceMap) -> Iterator[LoraCompileError]:
    for index, rule in enumerate(rules):
        seen: list[str] = []
        for number, piece in enumerate(rule.pieces):
            path: KeyPath = ("checkpoint", "stack", index, "pieces", number, "name")
            rest = piece.name.replace(EXPERT, "").replace(LAYER, "")
            layered = LAYER in rule.parameter
            if piece.name.count(EXPERT) != 1:
                message = f"a piece is told apart by `{EXPERT}`, which stands once in its name"
            elif piece.name.count(LAYER) != layered:
                message = f"`{LAYER}` stands once in a piece's name if it stands in `parameter`"
            elif "{" in rest or "}" in rest:
                message = f"only `{LAYER}` and `{EXPERT}` may stand in braces"
            elif piece.name in seen:
                message = f"`{piece.name}` stands twice"
            else:
                seen.append(piece.name)
                continue
            words = nearest(rest.partition("{")[2].partition("}")[0], ["layer", "expert"])
            yield fault(
                source,
                path,
                message,
                expected="a name such as model.layers.{layer}.mlp.experts.{expert}.up_proj.weight",
                found=piece.name,
                fix=f"did you mean `{{{words}}}`?" if words else "correct the name",
            )


def _ignore(rules: tuple[IgnoreRule, ...], source: SourceMap) -> Iterator[LoraCompileError]:
    for index, rule in enumerate(rules):
        path: KeyPath = ("checkpoint", "ignore", index)
        if (why := rule.compile_error()) is not None:
            yield fault(
                source,
                (*path, "pattern"),
                "the pattern is not a regular expression",
                expected="a regular expression of Python's re module",
                found=f"{rule.pattern!r}: {why}",
                fix="correct the pattern; a literal dot is written `\\.`",
            )
        given = [k for k in ("layers_from", "layers_count") if getattr(rule, k) is not None]
        if len(given) == (2 if LAYER in rule.pattern else 0):
            continue
        yield fault(
            source,
            (*path, given[0] if given else "pattern"),
            f"`{LAYER}`, `layers_from` and `layers_count` go together",
            expected=f"all three, or none; a pattern such as 'model\\.layers\\.{LAYER}\\..+'",
            found=", ".join([*([LAYER] if LAYER in rule.pattern else []), *given]),
            fix="add what is missing, so that no layer of a smaller model is left out",
        )
