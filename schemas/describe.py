"""What a field expects and what a value is, in words a user of YAML understands."""

from __future__ import annotations

import types
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

_TYPE_WORDS: dict[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    type(None): "null",
}


def unwrap(annotation: Any) -> tuple[Any, tuple[FieldInfo, ...]]:
    """The bare type and the Field(...) notes of an `Annotated[...]`."""
    if get_origin(annotation) is not Annotated:
        return annotation, ()
    bare, *notes = get_args(annotation)
    return bare, tuple(note for note in notes if isinstance(note, FieldInfo))


def field_type(info: FieldInfo) -> Any:
    """The annotation of a model's field with its own constraints attached."""
    return Annotated[info.annotation, info]


def union_members(bare: Any) -> tuple[Any, ...]:
    """The members of a union, `None` included; empty for any other type."""
    return get_args(bare) if get_origin(bare) in (Union, types.UnionType) else ()


def discriminator_of(notes: tuple[FieldInfo, ...]) -> str | None:
    """The key that tells the members of a tagged union apart."""
    return next((n.discriminator for n in notes if isinstance(n.discriminator, str)), None)


def is_model(bare: Any) -> bool:
    return isinstance(bare, type) and issubclass(bare, BaseModel)


def options(annotation: Any) -> tuple[str, ...]:
    """The fixed words that a field accepts, for did-you-mean."""
    bare, _ = unwrap(annotation)
    if get_origin(bare) is Literal:
        return tuple(option for option in get_args(bare) if isinstance(option, str))
    return tuple(word for member in union_members(bare) for word in options(member))


def expected(annotation: Any) -> str:
    """The type and the range of a field, e.g. `a whole number from 1 to 256`.

    A `title` given to `Field` takes the place of the generated words.
    """
    bare, notes = unwrap(annotation)
    title = next((note.title for note in notes if note.title), None)
    if title:
        return title
    origin, arguments = get_origin(bare), get_args(bare)
    if members := union_members(bare):
        return ", or ".join(expected(member) for member in members)
    if origin is Literal:
        return " | ".join(f'"{word}"' if " " in str(word) else str(word) for word in arguments)
    if origin is tuple and arguments[-1:] == (Ellipsis,):
        return f"{_at_least_one(notes)}, each item {expected(arguments[0])}"
    if origin is tuple:
        return f"a list of {len(arguments)}, each item {expected(arguments[0])}"
    if origin is dict:
        return f"a mapping, each value {expected(arguments[1])}"
    if is_model(bare):
        return f"a mapping (keys: {', '.join(bare.model_fields)})"
    return _TYPE_WORDS[bare] + _range(notes)


def _constraint(notes: tuple[FieldInfo, ...], name: str) -> Any:
    """One limit (`ge`, `min_length`, ...) of the field, or None."""
    limits = (getattr(limit, name, None) for note in notes for limit in note.metadata)
    return next((limit for limit in limits if limit is not None), None)


def _at_least_one(notes: tuple[FieldInfo, ...]) -> str:
    return "a list of one or more" if _constraint(notes, "min_length") else "a list"


def _range(notes: tuple[FieldInfo, ...]) -> str:
    low, high, above = (_constraint(notes, name) for name in ("ge", "le", "gt"))
    if low is not None and high is not None:
        return f" from {low} to {high}"
    if low is not None:
        return f" of at least {low}"
    if high is not None:
        return f" of at most {high}"
    if above is not None:
        return f" above {above}"
    return " that is not empty" if _constraint(notes, "min_length") else ""


def shown(value: Any) -> str:
    """A value from a file with its type where the type may surprise."""
    if value is None:
        return "nothing (null)"
    if isinstance(value, bool):
        return f"{str(value).lower()} (true/false)"
    if isinstance(value, str):
        return f"{value if len(value) <= 80 else value[:77] + '...'!r} (text)"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if isinstance(value, dict):
        return f"a mapping (keys: {', '.join(value)})"
    return str(value)
