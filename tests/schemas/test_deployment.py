"""Deployments: what a valid one becomes, and every fault between its values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from lora_compile.errors import (
    AdapterUnknown,
    ArchitectureUnknown,
    FeatureUnsupported,
    FileMissing,
    InvalidValue,
    LoraCompileError,
    MissingKey,
    SchemeUnsupported,
    UnknownKey,
)
from lora_compile.schemas.deployment import Deployment, load_deployment, resolve_path

MINIMAL = """\
schema_version: 1
model: {path: m, dtype: float32}
quantization: {scheme: auto}
runtime: {max_adapters: 2, max_rank: 8}
"""


def change(data: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    *parent, last = path.split(".")
    holder: Any = data
    for step in parent:
        holder = holder[int(step)] if step.isdigit() else holder[step]
    holder[int(last) if last.isdigit() else last] = value
    return data


def test_a_minimal_file_and_its_defaults(write) -> None:
    value = load_deployment(write(MINIMAL)).value
    assert value.model.architecture == "auto"
    assert value.model.package is None
    assert value.adapters == ()
    assert value.generation is None
    assert value.runtime.model_dump() == {
        "device": "auto",
        "max_adapters": 2,
        "max_rank": 8,
        "max_rows": 16,
        "max_tokens": 4096,
        "packed": False,
        "compile": "whole",
        "mode": "default",
        "sites": "all",
        "features": "auto",
        "when_full": "error",
        "wait_seconds": 30.0,
    }


def test_a_full_file(write, deployment) -> None:
    loaded = load_deployment(write(deployment))
    assert json.loads(loaded.value.model_dump_json(exclude_unset=True)) == deployment
    assert type(loaded.value.adapters[1].scale) is float
    assert loaded.source.line("adapters[1].path") == 13
    with pytest.raises(ValidationError):
        loaded.value.model.path = "x"  # type: ignore[misc]


def test_off_is_a_word(write) -> None:
    text = MINIMAL.replace("max_rank: 8", "max_rank: 8, compile: off")
    assert load_deployment(write(text)).value.runtime.compile == "off"


def test_l01_misspelt_keys_are_refused_with_line_and_meaning(write, faults) -> None:
    text = MINIMAL.replace("quantization:", "quantisation_scheme:")
    (fault,) = faults(lambda: load_deployment(write(text)))
    assert type(fault) is UnknownKey
    assert fault.line == 3
    assert fault.where == "quantisation_scheme"
    assert "did you mean `quantization`?" in (fault.fix or "")


def test_l02_a_misspelt_section_is_no_missing_default(write, faults) -> None:
    text = MINIMAL.replace("quantization: {scheme: auto}", "quantizaton: 4bit")
    (fault,) = faults(lambda: load_deployment(write(text)))
    assert type(fault) is UnknownKey
    assert "`quantization`" in (fault.fix or "")
    text = MINIMAL.replace("quantization: {scheme: auto}\n", "")
    (fault,) = faults(lambda: load_deployment(write(text)))
    assert type(fault) is MissingKey
    assert fault.where == "quantization"


@pytest.mark.parametrize(
    ("text", "key", "home"),
    [
        (MINIMAL + "max_rows: 4\n", "max_rows", "`runtime`"),
        (MINIMAL.replace("dtype: ", "scheme: auto, dtype: "), "scheme", "`quantization`"),
        (
            MINIMAL + "generation: {rows: [{prompt: a, chat: true}], max_new_tokens: 1}\n",
            "chat",
            "",
        ),
        (MINIMAL + "adapters: [{name: a, path: b, max_rank: 4}]\n", "max_rank", "`runtime`"),
        (MINIMAL.replace("dtype: ", "adapters: [], dtype: "), "adapters", "the top level"),
        (MINIMAL + "pinned: true\n", "pinned", "`adapters[]`"),
    ],
)
def test_l02_a_key_at_the_wrong_level_is_told_where_it_belongs(
    write, faults, text: str, key: str, home: str
) -> None:
    (fault,) = faults(lambda: load_deployment(write(text)))
    assert type(fault) is UnknownKey
    assert fault.found == f"`{key}`"
    assert f"`{key}` is a key of " in (fault.fix or "")
    assert home in (fault.fix or "")


CASES: list[tuple[str, dict[str, Any], type[LoraCompileError], str, list[str]]] = [
    (
        "undeclared adapter",
        {"generation.rows.0.adapter": "sgl"},
        AdapterUnknown,
        "generation.rows[0].adapter",
        ["did you mean `sql`?", "sql, chat"],
    ),
    (
        "duplicate adapter",
        {"adapters.1.name": "sql"},
        InvalidValue,
        "adapters[1].name",
        ["`sql`", "first in line"],
    ),
    (
        "rows and beams",
        {"generation.num_beams": 9},
        InvalidValue,
        "generation.rows",
        ["2 rows x 9 beams = 18", "at most 16", "max_rows: 18"],
    ),
    (
        "more adapters than slots",
        {"runtime.max_adapters": 1},
        InvalidValue,
        "runtime.max_adapters",
        ["at least 2", "max_adapters: 2"],
    ),
    (
        "packed rows and generation",
        {"runtime.packed": True},
        FeatureUnsupported,
        "runtime.packed",
        ["packed: false"],
    ),
    (
        "layers and a cache",
        {"runtime.compile": "layers"},
        FeatureUnsupported,
        "runtime.compile",
        ["cache", "compile: whole"],
    ),
    (
        "CUDA graphs without a graph",
        {"runtime.mode": "reduce-overhead", "runtime.compile": "off"},
        InvalidValue,
        "runtime.mode",
        ["compile: off"],
    ),
    (
        "CUDA graphs on CPU",
        {"runtime.mode": "reduce-overhead", "runtime.device": "cpu"},
        InvalidValue,
        "runtime.mode",
        ["device: cpu"],
    ),
    (
        "fewer tokens than rows",
        {"runtime.max_tokens": 15},
        InvalidValue,
        "runtime.max_tokens",
        ["at least 16"],
    ),
    (
        "a feature twice",
        {"runtime.features": ["dora", "bias", "dora"]},
        InvalidValue,
        "runtime.features[2]",
        ["dora"],
    ),
    (
        "an unknown scheme",
        {"quantization.scheme": "fp8_blok"},
        SchemeUnsupported,
        "quantization.scheme",
        ["did you mean `fp8_block`?", "none"],
    ),
    (
        "ignore without quantising",
        {"quantization.scheme": "auto"},
        InvalidValue,
        "quantization.ignore",
        ["scheme: auto"],
    ),
    (
        "an unknown architecture",
        {"model.architecture": "lama"},
        ArchitectureUnknown,
        "model.architecture",
        ["did you mean `llama`?"],
    ),
    (
        "an architecture file that is not there",
        {"model.architecture": "archs/mine.yaml"},
        FileMissing,
        "model.architecture",
        ["archs/mine.yaml", "does not exist"],
    ),
    (
        "a seed for weights that are not drawn",
        {"model.seed": 3},
        InvalidValue,
        "model.seed",
        ["weights: checkpoint", "set weights: random"],
    ),
    (
        "no weights in a package",
        {"model.weights": "none", "model.package": "json"},
        InvalidValue,
        "model.weights",
        ["a folder with a config.json", "package: json"],
    ),
    (
        "random weights and a GGUF file",
        {"model.weights": "random", "model.path": "m/model.gguf"},
        InvalidValue,
        "model.weights",
        ["a folder with a config.json", "path: m/model.gguf"],
    ),
    (
        "an unset variable",
        {"adapters.0.path": "${LORA_COMPILE_NOT_SET}/a"},
        InvalidValue,
        "adapters[0].path",
        ["`LORA_COMPILE_NOT_SET`", "not set"],
    ),
    (
        "a scale for the base model",
        {"generation.rows.1.scale": 0.5},
        InvalidValue,
        "generation.rows[1].scale",
        ["without an adapter"],
    ),
    (
        "a system message without a template",
        {"generation.system": "s", "generation.chat": False},
        InvalidValue,
        "generation.system",
        ["chat: true"],
    ),
    ("a name with a space", {"adapters.0.name": "s l"}, InvalidValue, "adapters[0].name", []),
    ("rank 257", {"runtime.max_rank": 257}, InvalidValue, "runtime.max_rank", ["from 1 to 256"]),
    ("no prompt", {"generation.rows": []}, InvalidValue, "generation.rows", ["one or more"]),
    ("an empty path", {"model.path": ""}, InvalidValue, "model.path", ["not empty"]),
    ("a version to come", {"schema_version": 2}, InvalidValue, "schema_version", ["1"]),
]


@pytest.mark.parametrize(
    ("changes", "kind", "where", "facts"),
    [case[1:] for case in CASES],
    ids=[case[0] for case in CASES],
)
def test_each_fault(write, faults, deployment, changes, kind, where, facts) -> None:
    for path, value in changes.items():
        change(deployment, path, value)
    path = write(deployment)
    found = [f for f in faults(lambda: load_deployment(path)) if type(f) is kind]
    (fault,) = [f for f in found if f.where == where]
    written = path.read_text().splitlines()[(fault.line or 0) - 1]
    assert fault.file == str(path)
    assert where.rpartition(".")[2].partition("[")[0] in written or "features[" in where
    for fact in facts:
        assert fact in str(fault)


def test_faults_between_values_show_beside_other_faults(write, faults, deployment) -> None:
    change(deployment, "adapters.1.name", "sql")
    change(deployment, "generation.rows.0.adapter", "nobody")
    change(deployment, "runtime.max_rank", "8")
    change(deployment, "model.dtyp", 1)
    found = faults(lambda: load_deployment(write(deployment)))
    assert {type(f) for f in found} == {InvalidValue, AdapterUnknown, UnknownKey}
    assert [f.line for f in found] == sorted(f.line or 0 for f in found)
    assert {f.where for f in found} == {
        "model.dtyp",
        "adapters[1].name",
        "runtime.max_rank",
        "generation.rows[0].adapter",
    }


def test_a_misspelt_adapters_key_does_not_blame_the_rows(write, faults, deployment) -> None:
    deployment["adaptors"] = deployment.pop("adapters")
    (fault,) = faults(lambda: load_deployment(write(deployment)))
    assert type(fault) is UnknownKey


def test_own_architecture_file_is_found_beside_the_deployment(write, deployment) -> None:
    write("any: thing", "mine.yaml")
    change(deployment, "model.architecture", "mine.yaml")
    assert load_deployment(write(deployment)).value.model.architecture == "mine.yaml"


def test_paths(tmp_path, monkeypatch) -> None:
    file = tmp_path / "folder" / "d.yaml"
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.setenv("STORE", "/store")
    monkeypatch.setenv("PART", "part")
    assert resolve_path(file, "m/x") == tmp_path / "folder" / "m" / "x"
    assert resolve_path(file, "../m") == tmp_path / "folder" / ".." / "m"
    assert resolve_path(file, "/abs") == Path("/abs")
    assert resolve_path(file, "~/m") == Path("/home/somebody/m")
    assert resolve_path(file, "${STORE}/m") == Path("/store/m")
    assert resolve_path(file, "a/${PART}/${PART}") == tmp_path / "folder/a/part/part"
    assert resolve_path(file, "$STORE") == tmp_path / "folder" / "$STORE"


@pytest.mark.parametrize("text", ["${GONE}/m", "${EMPTY}/m", "${GO", "${}", "${A-b}", "~nobody0/x"])
def test_paths_that_cannot_be_expanded(tmp_path, monkeypatch, text: str) -> None:
    monkeypatch.delenv("GONE", raising=False)
    monkeypatch.setenv("EMPTY", "")
    with pytest.raises(InvalidValue) as caught:
        resolve_path(tmp_path / "d.yaml", text, line=3, where="model.path")
    assert (caught.value.line, caught.value.where) == (3, "model.path")
    assert caught.value.fix


def test_every_field_is_described() -> None:
    schema = Deployment.model_json_schema()
    models = [schema, *schema["$defs"].values()]
    assert not [
        name
        for model in models
        for name, field in model["properties"].items()
        if not field.get("description")
    ]


def test_flags_of_the_architecture(write, faults) -> None:
    """Which flags there are is known once the model is: see tests/planning/test_sites.py."""
    assert load_deployment(write(MINIMAL)).value.model.flags == {}
    with_flags = MINIMAL.replace("dtype: float32", "dtype: float32, flags: {fuse_qkv_a: %s}")
    assert load_deployment(write(with_flags % "false")).value.model.flags == {"fuse_qkv_a": False}
    for wrong in ("0", "no", "'false'", "null"):
        (fault,) = faults(lambda text=wrong: load_deployment(write(with_flags % text)))
        assert type(fault) is InvalidValue
        assert (fault.line, fault.where) == (2, "model.flags.fuse_qkv_a")
        assert "true or false" in (fault.expected or "")
