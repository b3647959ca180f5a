"""Find every fault of one YAML file, whatever kind of file it is."""

from __future__ import annotations

from pathlib import Path

from lora_compile.errors import Faults, InvalidValue, LoraCompileError
from lora_compile.schemas.architecture import ArchitectureSchema
from lora_compile.schemas.architecture_checks import architecture_faults
from lora_compile.schemas.base import StrictModel
from lora_compile.schemas.deployment import Deployment
from lora_compile.schemas.deployment_checks import deployment_faults
from lora_compile.schemas.quant_dialect import Dialect
from lora_compile.schemas.quant_scheme import QuantScheme
from lora_compile.schemas.quant_scheme_checks import scheme_faults
from lora_compile.schemas.yaml_faults import nearest
from lora_compile.schemas.yaml_file import Check, Document, read_yaml, validate

_KINDS: dict[str, tuple[type[StrictModel], Check]] = {
    "deployment": (Deployment, deployment_faults),
    "architecture": (ArchitectureSchema, architecture_faults),
    "quantisation scheme": (QuantScheme, scheme_faults),
    "dialect": (Dialect, lambda sections, source: ()),
}


def kind_of(document: Document) -> str:
    """One of the kinds above, by the top-level keys.

    The kind whose own keys the file holds most of; a misspelt key counts half.

    Raises:
        InvalidValue: the keys point to no kind, or to two alike.
    """
    scores = {name: _score(document, model) for name, (model, _) in _KINDS.items()}
    best = max(scores, key=lambda name: scores[name])
    if scores[best] == 0 or list(scores.values()).count(scores[best]) > 1:
        kinds = "; ".join(f"{name}: {', '.join(_own_keys(m))}" for name, (m, _) in _KINDS.items())
        raise InvalidValue(
            "the keys do not tell what kind of file this is",
            file=document.source.file,
            line=document.source.line(),
            expected=kinds,
            found=", ".join(document.data) or "no keys",
        )
    return best


def _own_keys(model: type[StrictModel]) -> list[str]:
    """The top-level keys that no other kind of file has."""
    others = {key for m, _ in _KINDS.values() if m is not model for key in m.model_fields}
    return [key for key in model.model_fields if key not in others]


def _score(document: Document, model: type[StrictModel]) -> float:
    own = _own_keys(model)
    return sum(1.0 if key in own else 0.5 * bool(nearest(key, own)) for key in document.data)


def lint(path: str | Path) -> list[LoraCompileError]:
    """Every fault of the file, by line; empty where there is none."""
    try:
        document = read_yaml(path)
        model, check = _KINDS[kind_of(document)]
        validate(document, model, check)
    except Faults as faults:
        return list(faults.faults)
    except LoraCompileError as error:
        return [error]
    return []
