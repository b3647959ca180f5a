"""From the place that Pydantic gives a fault to the place in the YAML and the type expected there.

Pydantic's places hold more than keys and indices: the tag of a tagged union, a label for each
member of a plain union, `[key]` for the key of a mapping. Users see none of these.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, get_args, get_origin

from pydantic import BaseModel

from lora_compile.schemas.describe import (
    discriminator_of,
    field_type,
    is_model,
    options,
    union_members,
    unwrap,
)
from lora_compile.schemas.source_map import KeyPath


@dataclass(frozen=True)
class Place:
    """A place in the file, and the type that the model expects there."""

    path: KeyPath
    annotation: Any
    union: KeyPath | None
    """The path of the plain union that was entered on the way, where there was one."""
    union_type: Any = None

    @property
    def model(self) -> type[BaseModel] | None:
        """The model at this place, where it is one."""
        bare, _ = unwrap(self.annotation)
        return bare if is_model(bare) else None


def locate(root: type[BaseModel], loc: tuple[str | int, ...]) -> Place:
    """Walk the model along `loc`."""
    annotation: Any = root
    path: KeyPath = ()
    union: KeyPath | None = None
    union_type: Any = None
    steps = [step for step in loc if step != "[key]"]
    while steps:
        bare, notes = unwrap(annotation)
        members = [member for member in union_members(bare) if member is not type(None)]
        if tag := discriminator_of(notes):
            wanted = steps.pop(0)
            annotation = next(m for m in members if wanted in _tags(m, tag))
        elif len(members) == 1:
            annotation = Annotated[members[0], *notes] if notes else members[0]
        elif members:
            steps.pop(0)
            union, union_type = path, annotation
            if steps:
                annotation = next(m for m in members if _has_step(m, steps[0]))
        else:
            step = steps.pop(0)
            annotation = _inner(bare, step)
            path = (*path, step)
    return Place(path, annotation, union, union_type)


def _tags(member: Any, tag: str) -> tuple[str, ...]:
    bare, _ = unwrap(member)
    return options(field_type(bare.model_fields[tag]))


def tagged_union(annotation: Any) -> tuple[str, tuple[str, ...]]:
    """The key that tells the members of a tagged union (or null) apart, and its words."""
    bare, notes = unwrap(annotation)
    members = [member for member in union_members(bare) if member is not type(None)]
    tag = discriminator_of(notes)
    if tag is None and len(members) == 1:
        return tagged_union(members[0])
    assert tag is not None
    return tag, tuple(word for member in members for word in _tags(member, tag))


def _has_step(member: Any, step: str | int) -> bool:
    bare, _ = unwrap(member)
    if isinstance(step, int):
        return get_origin(bare) is tuple
    return get_origin(bare) is dict or is_model(bare)


def _inner(bare: Any, step: str | int) -> Any:
    """The type of one item of a list, one value of a mapping, or one field of a model."""
    if is_model(bare):
        return field_type(bare.model_fields[str(step)])
    arguments = get_args(bare)
    if get_origin(bare) is dict:
        return arguments[1]
    if arguments[-1:] == (Ellipsis,) or not isinstance(step, int):
        return arguments[0]
    return arguments[min(step, len(arguments) - 1)]


def fields_below(root: type[BaseModel]) -> Iterator[tuple[str, str]]:
    """Every field a file may hold, as (where, key); `where` is '' at the top level."""
    yield from _fields(root, "", frozenset())


def _fields(annotation: Any, where: str, seen: frozenset[Any]) -> Iterator[tuple[str, str]]:
    bare, notes = unwrap(annotation)
    tag = discriminator_of(notes)
    for member in union_members(bare):
        kinds = "|".join(_tags(member, tag)) if tag else ""
        yield from _fields(member, f"{where} with {tag}: {kinds}" if tag else where, seen)
    if get_origin(bare) is tuple:
        yield from _fields(get_args(bare)[0], f"{where}[]", seen)
    elif get_origin(bare) is dict:
        yield from _fields(get_args(bare)[1], f"{where}.<name>", seen)
    elif is_model(bare) and bare not in seen:
        for key, info in bare.model_fields.items():
            yield where, key
            below = f"{where}.{key}".removeprefix(".")
            yield from _fields(field_type(info), below, seen | {bare})
