"""Lint: the kind of a file by its content; and the JSON Schemas beside the models."""

from __future__ import annotations

import json

import pytest

from lora_compile.errors import FileMissing, InvalidValue, UnknownKey, YamlSyntax
from lora_compile.schemas.architecture import SHIPPED as ARCHITECTURES
from lora_compile.schemas.json_schema import FOLDER, MODELS, write_json_schemas
from lora_compile.schemas.lint import kind_of, lint
from lora_compile.schemas.quant_scheme import SHIPPED as SCHEMES
from lora_compile.schemas.yaml_reader import parse_yaml, read_yaml


def test_kinds(write, deployment) -> None:
    assert kind_of(read_yaml(write(deployment))) == "deployment"
    assert kind_of(read_yaml(ARCHITECTURES / "llama.yaml")) == "architecture"
    assert kind_of(read_yaml(SCHEMES / "none.yaml")) == "quantisation scheme"
    assert lint(write(deployment)) == []


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("runtme: {}", "deployment"),
        ("sitse: []\nname: x", "architecture"),
        ("packing: none\nname: x", "quantisation scheme"),
        ("modle: {path: x}", "deployment"),
    ],
)
def test_the_kind_of_a_file_full_of_faults(text: str, kind: str) -> None:
    assert kind_of(parse_yaml(text, "f")) == kind


@pytest.mark.parametrize("text", ["schema_version: 1\nname: x\n", "a: 1\n", "{}"])
def test_a_file_of_no_kind(write, text: str) -> None:
    path = write(text)
    (fault,) = lint(path)
    assert type(fault) is InvalidValue
    assert fault.file == str(path)
    for word in ("runtime", "sites", "packing"):
        assert word in (fault.expected or "")


def test_lint_returns_faults_of_every_stage(write, tmp_path, deployment) -> None:
    assert [type(f) for f in lint(tmp_path / "gone.yaml")] == [FileMissing]
    assert [type(f) for f in lint(write("a: ["))] == [YamlSyntax]
    deployment["runtime"]["max_rnk"] = deployment["runtime"].pop("max_rank")
    deployment["adapters"][1]["name"] = "sql"
    assert [type(f) for f in lint(write(deployment))] == [InvalidValue, UnknownKey]


def test_committed_json_schemas_are_up_to_date(tmp_path) -> None:
    written = write_json_schemas(tmp_path)
    assert sorted(p.name for p in written) == sorted(p.name for p in FOLDER.glob("*.json"))
    for path in written:
        assert path.read_text() == (FOLDER / path.name).read_text(), (
            "run lora_compile.schemas.json_schema.write_json_schemas()"
        )


def test_json_schemas_forbid_unknown_keys_and_describe_every_field() -> None:
    for name in MODELS:
        schema = json.loads((FOLDER / f"{name}.schema.json").read_text())
        for model in [schema, *schema.get("$defs", {}).values()]:
            assert model["additionalProperties"] is False
            assert model["description"]
            for key, field in model["properties"].items():
                assert field.get("description"), f"{name}: {model['title']}.{key}"
