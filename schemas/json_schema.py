"""JSON Schema of the YAML files, for completion and checks in editors."""

from __future__ import annotations

import json
from pathlib import Path

from lora_compile.schemas.architecture import ArchitectureSchema
from lora_compile.schemas.base import StrictModel
from lora_compile.schemas.deployment import Deployment
from lora_compile.schemas.quant_dialect import Dialect
from lora_compile.schemas.quant_scheme import QuantScheme

FOLDER = Path(__file__).parent / "json"

MODELS: dict[str, type[StrictModel]] = {
    "deployment": Deployment,
    "architecture": ArchitectureSchema,
    "quant_scheme": QuantScheme,
    "dialect": Dialect,
}


def json_schema(name: str) -> str:
    """The text of one JSON Schema; `name` is a key of `MODELS`."""
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **MODELS[name].model_json_schema(),
    }
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


def write_json_schemas(folder: str | Path = FOLDER) -> list[Path]:
    """Write `<name>.schema.json` for every kind of file into `folder`; returns the paths."""
    paths = []
    for name in MODELS:
        path = Path(folder) / f"{name}.schema.json"
        path.write_text(json_schema(name), encoding="utf-8")
        paths.append(path)
    return paths
