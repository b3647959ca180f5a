"""Pydantic's validation errors -> our errors, in the words of the YAML file."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from lora_compile.errors import InvalidValue, LoraCompileError, MissingKey, UnknownKey
from lora_compile.schemas.describe import (
    expected,
    options,
    shown,
    union_members,
    unwrap,
)
from lora_compile.schemas.places import Place, fields_below, locate, tagged_union
from lora_compile.schemas.rejected import RejectedValue
from lora_compile.schemas.source_map import KeyPath, SourceMap, text_path

_BOOLEAN_LOOKALIKES = {"yes": "true", "on": "true", "no": "false", "off": "false"}


def nearest(word: str, candidates: Iterable[str]) -> str | None:
    """The candidate most like `word`, if any is alike enough to be a misspelling of it."""
    near = difflib.get_close_matches(word.lower(), sorted(set(candidates)), n=1, cutoff=0.6)
    return near[0] if near else None


def faults_of(
    error: ValidationError, root: type[BaseModel], source: SourceMap
) -> list[LoraCompileError]:
    """One of our errors for each mistake in the file."""
    translate = _Translator(root, source)
    details = error.errors(include_url=False)
    unknown = [translate.unknown_key(d) for d in details if d["type"] == "extra_forbidden"]
    misspelt = {meant for _, meant in unknown if meant is not None}
    faults: list[LoraCompileError] = [fault for fault, _ in unknown]
    in_unions: dict[KeyPath, list[tuple[Place, ErrorDetails]]] = {}
    for detail in details:
        kind = detail["type"]
        if kind == "extra_forbidden" or (kind == "too_short" and _has_deeper(detail, details)):
            continue
        place = locate(root, detail["loc"])
        if place.union is not None:
            in_unions.setdefault(place.union, []).append((place, detail))
        elif kind == "missing" and isinstance(detail["loc"][-1], str):
            if place.path not in misspelt:  # else it is the unknown key's fault
                faults.append(translate.missing_key(place))
        else:
            faults.append(translate.invalid(place, detail))
    for path, found in in_unions.items():
        faults.extend(translate.in_union(path, found))
    return faults


def _has_deeper(detail: ErrorDetails, details: list[ErrorDetails]) -> bool:
    """Whether an item is at fault: the list then counts as too short only for lacking it."""
    loc = detail["loc"]
    return any(len(d["loc"]) > len(loc) and d["loc"][: len(loc)] == loc for d in details)


class _Translator:
    def __init__(self, root: type[BaseModel], source: SourceMap) -> None:
        self.root = root
        self.source = source

    def where(self, path: KeyPath) -> dict[str, Any]:
        return {
            "file": self.source.file,
            "line": self.source.line(path),
            "where": text_path(path) or None,
        }

    def unknown_key(self, detail: ErrorDetails) -> tuple[UnknownKey, KeyPath | None]:
        """The error, and the path of the key that was probably meant at the same place."""
        *parent, key = detail["loc"]
        place = locate(self.root, tuple(parent))
        known = tuple(place.model.model_fields) if place.model else ()
        near = nearest(str(key), known)
        homes = sorted({where for where, name in fields_below(self.root) if name == key})
        hints = [] if near is None else [f"did you mean `{near}`?"]
        if homes:
            named = " or ".join(f"`{home}`" if home else "the top level" for home in homes)
            hints.append(f"`{key}` is a key of {named}: move it there if that was meant")
        inside = f"in `{text_path(place.path)}`" if place.path else "at the top level"
        fault = UnknownKey(
            f"unknown key `{key}` {inside}",
            **self.where((*place.path, key)),
            expected=f"one of {', '.join(known)}",
            found=f"`{key}`",
            fix="; ".join(hints) or "remove it",
        )
        return fault, None if near is None else (*place.path, near)

    def missing_key(self, place: Place) -> MissingKey:
        key = place.path[-1]
        inside = f"in `{text_path(place.path[:-1])}`" if place.path[:-1] else "at the top level"
        return MissingKey(
            f"key `{key}` is missing {inside}",
            **self.where(place.path),
            expected=expected(place.annotation),
            fix=f"add `{key}: ...`",
        )

    def invalid(self, place: Place, detail: ErrorDetails) -> LoraCompileError:
        kind, value = detail["type"], detail["input"]
        if kind in ("union_tag_invalid", "union_tag_not_found"):
            return self.bad_tag(place, value)
        if kind == "missing":  # an item of a list of fixed length
            place = locate(self.root, detail["loc"][:-1])
        reason = detail.get("ctx", {}).get("error")
        if isinstance(reason, RejectedValue):
            return reason.kind(
                reason.message,
                **self.where(place.path),
                expected=reason.expected,
                found=reason.found or shown(value),
                fix=reason.fix,
            )
        if detail["loc"][-1:] == ("[key]",):
            return InvalidValue(
                f"`{value}` cannot be used as a name here",
                **self.where(place.path),
                expected="a name of letters, digits and _",
                found=shown(value),
            )
        return InvalidValue(
            f"wrong value for `{text_path(place.path) or 'the file'}`",
            **self.where(place.path),
            expected=expected(place.annotation),
            found=shown(value),
            fix=_hint(place.annotation, value),
        )

    def bad_tag(self, place: Place, value: Any) -> LoraCompileError:
        tag, tags = tagged_union(place.annotation)
        path = (*place.path, tag)
        if isinstance(value, dict) and tag in value:
            return InvalidValue(
                f"wrong value for `{text_path(path)}`",
                **self.where(path),
                expected=" | ".join(tags),
                found=shown(value[tag]),
                fix=_did_you_mean(value[tag], tags),
            )
        return MissingKey(
            f"key `{tag}` is missing in `{text_path(place.path)}`",
            **self.where(path),
            expected=" | ".join(tags),
            fix=f"add `{tag}: ...`",
        )

    def in_union(
        self, path: KeyPath, found: list[tuple[Place, ErrorDetails]]
    ) -> Iterable[LoraCompileError]:
        """A value with several allowed forms is at fault once, not once per form."""
        deep = [(place, d) for place, d in found if len(place.path) > len(path)]
        deep = [(place, d) for place, d in deep if d["type"] != "missing"]
        if deep:
            return [self.invalid(place, detail) for place, detail in deep]
        place, detail = found[0]
        value = detail["input"]
        return [
            InvalidValue(
                f"wrong value for `{text_path(path)}`",
                **self.where(path),
                expected=expected(place.union_type),
                found=shown(value),
                fix=_hint(place.union_type, value),
            )
        ]


def _did_you_mean(value: Any, candidates: Iterable[str]) -> str | None:
    near = nearest(value, candidates) if isinstance(value, str) else None
    return None if near is None else f"did you mean `{near}`?"


def _hint(annotation: Any, value: Any) -> str | None:
    bare, _ = unwrap(annotation)
    types = {bare, *(unwrap(member)[0] for member in union_members(bare))}
    if isinstance(value, str):
        if bool in types and value.lower() in _BOOLEAN_LOOKALIKES:
            return f"write `{_BOOLEAN_LOOKALIKES[value.lower()]}` (yes, no, on, off are text here)"
        if types & {int, float} and value.strip().lstrip("+-").replace(".", "", 1).isdigit():
            return "remove the quotes"
    elif str in types and isinstance(value, (bool, int, float)):
        return "put the value in quotes"
    return _did_you_mean(value, options(annotation))
