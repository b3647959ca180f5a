"""One YAML file -> one frozen model with the lines of its keys, or every fault of the file.

Values are validated as JSON: a list fills a tuple field and `1` a float field, but `"1"` and `true`
are no whole numbers. How scalars are read (YAML 1.2) is said in `yaml_reader`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import ValidationError, create_model

from lora_compile.errors import FaultList, LoraCompileError
from lora_compile.schemas.base import StrictModel
from lora_compile.schemas.source_map import KeyPath, SourceMap, text_path
from lora_compile.schemas.yaml_faults import faults_of
from lora_compile.schemas.yaml_reader import Document, missing_file, parse_yaml, read_yaml

__all__ = [
    "Check",
    "Document",
    "KeyPath",
    "Loaded",
    "SourceMap",
    "load_yaml",
    "missing_file",
    "parse_yaml",
    "read_yaml",
    "text_path",
    "validate",
]

ModelT = TypeVar("ModelT", bound=StrictModel)
ModelCo = TypeVar("ModelCo", bound=StrictModel, covariant=True)

Check = Callable[[Mapping[str, Any], SourceMap], Iterable[LoraCompileError]]
"""Looks for faults between the values of a file. It gets the top-level keys whose values are
valid by themselves, so that one run shows these faults beside the others."""


@dataclass(frozen=True)
class Loaded(Generic[ModelCo]):
    """A validated file and where its values stand."""

    value: ModelCo
    source: SourceMap


def load_yaml(path: str | Path, model: type[ModelT], check: Check | None = None) -> Loaded[ModelT]:
    """Read and validate one file.

    Raises:
        FileMissing, YamlSyntax: the file cannot be read at all.
        UnknownKey, InvalidValue, MissingKey, DuplicateKey, or what `check` yields: the one fault
            of the file. Several are raised together as `Faults`, ordered by line.
    """
    return validate(read_yaml(path), model, check)


def validate(document: Document, model: type[ModelT], check: Check | None = None) -> Loaded[ModelT]:
    """The same for a document that has been read."""
    source = document.source
    found = list(document.faults)
    value: ModelT | None = None
    sections: Mapping[str, Any]
    try:
        value = model.model_validate_json(json.dumps(document.data))
        sections = dict(value)
    except ValidationError as error:
        found += faults_of(error, model, source)
        sections = _valid_sections(error, model, document.data)
    if check is not None:
        found += check(sections, source)
    if found or value is None:
        faults = FaultList()
        for fault in sorted(found, key=lambda fault: fault.line or 0):
            faults.add(fault)
        faults.raise_if_any()
    assert value is not None
    return Loaded(value, source)


def _valid_sections(
    error: ValidationError, model: type[StrictModel], data: Mapping[str, Any]
) -> dict[str, Any]:
    """The top-level values that are valid although others are not.

    An absent key counts as valid (its default holds) unless a key is unknown: that one may be the
    absent one, misspelt.
    """
    bad = {detail["loc"][0] for detail in error.errors(include_url=False) if detail["loc"]}
    unknown = bool(data.keys() - model.model_fields.keys())
    fields: dict[str, Any] = {
        name: (info.annotation, info)
        for name, info in model.model_fields.items()
        if name not in bad and (name in data or not unknown)
    }
    partial = create_model(model.__name__, __base__=StrictModel, **fields)
    valid = {name: data[name] for name in fields if name in data}
    return dict(partial.model_validate_json(json.dumps(valid)))
