"""Schemes: what checkpoints of third parties are taken for, and what a site's QuantInfo says."""

from __future__ import annotations

import copy
import importlib
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers.integrations.finegrained_fp8 import FP8Linear

from lora_compile.errors import InvalidValue, MissingKey, SchemeUnsupported
from lora_compile.schemas.base import StrictModel
from lora_compile.schemas.lint import lint
from lora_compile.schemas.quant_detect import detect_scheme, read_block_shape
from lora_compile.schemas.quant_dialect import DIALECTS, all_dialects
from lora_compile.schemas.quant_info import ActivationInfo, PartRows, QuantInfo, ScaleInfo
from lora_compile.schemas.quant_scheme import SHIPPED, all_schemes, find_scheme, load_scheme

CONFIGS = Path(__file__).parents[1] / "fixtures" / "quant_configs"


def checkpoint_config(name: str) -> dict[str, Any] | None:
    path = CONFIGS / f"{name}.json"
    if not path.exists():
        path = CONFIGS.parent / name / "config.json"
    config = json.loads(path.read_text())
    found: dict[str, Any] | None = config.get("quantization_config")
    return found


@pytest.mark.parametrize(
    ("name", "scheme"),
    [
        ("base-llama", "none"),
        ("hf-fp8-deepseekv3-mla", "fp8_block"),
        ("hf-fp8-llama-ue8m0-f32", "fp8_block"),
        ("llmc-llama-fp8-static", "fp8_tensor_static"),
        ("llmc-llama-fp8-dynamic", "fp8_channel"),
        ("llmc-qwen2-w8a8", "int8_channel"),
    ],
)
def test_checkpoints_that_are_read(name: str, scheme: str) -> None:
    found = detect_scheme(checkpoint_config(name))
    assert found.scheme.name == scheme
    assert found.form.reader is not None


@pytest.mark.parametrize(
    ("name", "facts"),
    [
        ("bnb-llama-nf4", ["`bitsandbytes`", "load_in_4bit: True"]),
        ("bnb-llama-int8", ["`bitsandbytes`", "load_in_8bit: True"]),
        ("gptqm-llama-gptq4-v2-asym", ["`gptq`", "gptq_v2", "bits: 4"]),
        ("gptqm-llama-awq4", ["gemm", "bits: 4"]),
        ("llmc-llama-nvfp4", ["`compressed-tensors`", "nvfp4-pack-quantized"]),
        ("modelopt-llama-fp8", ["`modelopt`", "quant_algo: FP8"]),
        ("torchao-llama-int8wo", ["`torchao`", "Int8WeightOnlyConfig"]),
        ("mxfp4-gptoss", ["`mxfp4`"]),
    ],
)
def test_checkpoints_that_are_refused_by_name(name: str, facts: list[str]) -> None:
    with pytest.raises(SchemeUnsupported) as caught:
        detect_scheme(checkpoint_config(name), file="m/config.json")
    error = caught.value
    assert (error.file, error.where) == ("m/config.json", "quantization_config")
    for fact in [*facts, "fp8_block", "none"]:
        assert fact in str(error)


FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"fmt": "e4m3", "activation_scheme": "dynamic"},
        {"scale_fmt": "ue8m0"},
        {"scale_fmt": "float", "dequantize": False, "modules_to_convert": None},
        {"modules_to_not_convert": ["lm_head"], "ignored_layers": ["a"]},
        {"modules_to_not_convert": None},
    ],
)
def test_fp8_keys_that_are_accepted(more: dict[str, Any]) -> None:
    assert detect_scheme({**FP8, **more}).scheme.name == "fp8_block"


@pytest.mark.parametrize(
    ("more", "key", "expected"),
    [
        ({"activation_scheme": "static"}, "activation_scheme", "dynamic"),
        ({"fmt": "e5m2"}, "fmt", "e4m3"),
        ({"scale_fmt": "int"}, "scale_fmt", "float | ue8m0 | null"),
        ({"dequantize": True}, "dequantize", "False"),
        ({"dequantize": 0}, "dequantize", "False"),
        ({"modules_to_convert": ["model.embed_tokens"]}, "modules_to_convert", "null"),
        ({"kv_cache_quant": "fp8"}, "kv_cache_quant", "only"),
    ],
)
def test_fp8_keys_that_are_refused_by_name(more, key: str, expected: str) -> None:
    with pytest.raises(SchemeUnsupported) as caught:
        detect_scheme({**FP8, **more})
    error = caught.value
    assert error.where == f"quantization_config.{key}"
    assert (error.expected or "").startswith(expected)
    assert f"{key}: {more[key]}" in (error.found or "")


def test_all_unknown_keys_are_told_at_once(faults) -> None:
    found = faults(lambda: detect_scheme({**FP8, "fmt": "e5m2", "a": 1, "b": 2}))
    assert [f.where for f in found] == [f"quantization_config.{key}" for key in ("fmt", "a", "b")]


@pytest.mark.parametrize("more", [{}, {"weight_block_size": None}])
@pytest.mark.parametrize("activation", ["static", "dynamic"])
def test_fp8_without_blocks_is_per_tensor(activation: str, more: dict[str, Any]) -> None:
    found = detect_scheme({"quant_method": "fp8", "activation_scheme": activation, **more})
    assert found.scheme.name == f"fp8_tensor_{activation}"
    assert found.block_shape is None


def test_fp8_that_does_not_say_how_inputs_are_quantised_is_refused() -> None:
    with pytest.raises(SchemeUnsupported) as caught:
        detect_scheme({"quant_method": "fp8"})
    for fact in (
        "`fp8_block` needs `weight_block_size`",
        "`fp8_tensor_static` needs `activation_scheme: static`",
        "`fp8_tensor_dynamic` needs `activation_scheme: dynamic`",
    ):
        assert fact in str(caught.value)


CT = checkpoint_config("llmc-qwen2-w8a8")


@pytest.mark.parametrize(
    ("path", "value", "facts"),
    [
        ("weights.symmetric", False, ["weights.symmetric False", "True"]),
        ("weights.actorder", "group", ["weights.actorder group", "null"]),
        ("weights.group_size", 128, ["weights.group_size 128"]),
        ("input_activations.symmetric", False, ["input_activations.symmetric"]),
        ("output_activations", {"num_bits": 8}, ["output_activations.num_bits"]),
        ("weights.num_bits", 4, ["num_bits: 4", "`int8_channel` needs", "weights.num_bits: 8"]),
        ("weights.strategy", "block", ["strategy: block"]),
        ("input_activations.dynamic", False, ["input_activations.dynamic: True"]),
        (
            "weights.clipped",
            True,
            ["does not know the key `config_groups.group_0.weights.clipped`"],
        ),
    ],
)
def test_compressed_tensors_that_mean_something_else(path: str, value: Any, facts: list) -> None:
    config = copy.deepcopy(CT)
    assert config is not None
    table = config["config_groups"]["group_0"]
    *folders, last = path.split(".")
    for name in folders:
        table = table[name]
    table[last] = value
    with pytest.raises(SchemeUnsupported) as caught:
        detect_scheme(config)
    for fact in facts:
        assert fact in str(caught.value)


def test_groups_that_differ_are_refused() -> None:
    config = copy.deepcopy(CT)
    assert config is not None
    config["config_groups"]["group_1"] = copy.deepcopy(config["config_groups"]["group_0"])
    assert detect_scheme(config).scheme.name == "int8_channel"
    config["config_groups"]["group_1"]["weights"]["type"] = "float"
    with pytest.raises(SchemeUnsupported, match=r"weights\.type"):
        detect_scheme(config)


@pytest.mark.parametrize(
    ("config", "fact"),
    [
        ({}, "no quant_method"),
        ({"w_bit": 4, "q_group_size": 128, "version": "GEMM"}, "`awq`"),
        ({"quant_algo": "NVFP4"}, "`modelopt`"),
    ],
)
def test_configs_without_a_method(config: dict[str, Any], fact: str) -> None:
    with pytest.raises(SchemeUnsupported, match=fact):
        detect_scheme(config)


@pytest.mark.parametrize(
    "size", [128, [128], [128, 128, 1], [0, 128], ["128", "128"], [128.0, 128], [True, 128]]
)
def test_block_sizes_that_cannot_be_read(size: Any) -> None:
    with pytest.raises(InvalidValue) as caught:
        read_block_shape({"weight_block_size": size}, file="config.json")
    assert caught.value.where == "quantization_config.weight_block_size"


def test_block_shape_comes_from_the_config() -> None:
    assert detect_scheme({**FP8, "weight_block_size": [64, 32]}).block_shape == (64, 32)
    assert detect_scheme(None).block_shape is None


def test_scale_rows_restart_at_each_part(seed: int) -> None:
    """Against the scales that transformers' own layer of each part has."""
    draw = random.Random(seed)
    widths = [draw.randint(1, 700) for _ in range(draw.randint(1, 5))]
    block = (draw.choice([32, 64, 128]), draw.choice([32, 64, 128]))
    columns = draw.randint(1, 500)
    info = find_scheme("fp8_block").info(
        weight_dtype="float8_e4m3fn",
        block_shape=block,
        in_features=columns,
        part_widths=[(f"p{i}", width) for i, width in enumerate(widths)],
        input_scales=None,
        bias=False,
    )
    row = scale_row = 0
    for part, width in zip(info.parts, widths, strict=True):
        with torch.device("meta"):
            layer = FP8Linear(columns, width, block_size=block)
        scale_height = layer.weight_scale_inv.shape[0]
        assert part.rows == (row, row + width), (widths, block)
        assert part.scale_rows == (scale_row, scale_row + scale_height), (widths, block)
        row += width
        scale_row += scale_height
    assert info.out_features == sum(widths)
    assert info.activation.group == block[1]


def test_latent_attention_has_seventeen_scale_rows() -> None:
    """q_a 1536 rows and kv_a 576 rows: 12 and 5 blocks of 128, the last one half full."""
    info = find_scheme("fp8_block").info(
        weight_dtype="float8_e4m3fn",
        block_shape=(128, 128),
        in_features=7168,
        part_widths=[("q_a_proj", 1536), ("kv_a_proj_with_mqa", 576)],
        input_scales=None,
        bias=True,
    )
    assert [p.scale_rows for p in info.parts] == [(0, 12), (12, 17)]
    assert [p.rows for p in info.parts] == [(0, 1536), (1536, 2112)]
    assert info.model_dump(exclude={"parts"}) == {
        "scheme": "fp8_block",
        "weight_dtype": "float8_e4m3fn",
        "packing": "none",
        "scale": {"granularity": "block", "dtype": "float32", "block_shape": (128, 128)},
        "zero_point": "none",
        "activation": {
            "handling": "dynamic",
            "granularity": "group",
            "group": 128,
            "dtype": "float8_e4m3fn",
            "min_scale": 1e-12,
        },
        "input_transforms": (),
        "bias": True,
        "in_features": 7168,
    }


def test_unquantised_sites() -> None:
    info = find_scheme("none").info(
        weight_dtype="bfloat16",
        block_shape=None,
        in_features=8,
        part_widths=[("a", 3), ("b", 4)],
        input_scales=None,
        bias=False,
    )
    assert [(p.rows, p.scale_rows) for p in info.parts] == [((0, 3), None), ((3, 7), None)]
    assert info.activation.handling == "none"
    assert info.aux_names == ()


@pytest.mark.parametrize(
    ("scheme", "dtype", "block", "inputs", "fact"),
    [
        ("none", "float8_e4m3fn", None, None, "float32 | float16 | bfloat16"),
        ("fp8_block", "bfloat16", (128, 128), None, "float8_e4m3fn"),
        ("fp8_block", "float8_e4m3fn", None, None, "of a block"),
        ("none", "float32", (128, 128), None, "no blocks"),
        ("none", "float32", None, [1.0], "none"),
        ("fp8_tensor_static", "float8_e4m3fn", None, None, "one input scale for each part"),
    ],
)
def test_instances_that_a_scheme_does_not_have(scheme, dtype, block, inputs, fact: str) -> None:
    with pytest.raises(SchemeUnsupported) as caught:
        find_scheme(scheme).info(
            weight_dtype=dtype,
            block_shape=block,
            in_features=8,
            part_widths=[("a", 3)],
            input_scales=[1.0]
            if scheme == "none" and block is None and dtype == "float32"
            else None,
            bias=False,
        )
    assert fact in (caught.value.expected or "")


def test_shipped_files() -> None:
    assert {scheme.name for scheme in all_schemes()} == {
        "none",
        "fp8_block",
        "fp8_channel",
        "fp8_tensor_dynamic",
        "fp8_tensor_static",
        "int8_channel",
    }
    for path in DIALECTS.glob("*.yaml"):
        assert all_dialects()[path.stem].name == path.stem
        assert lint(path) == []
    for path in SHIPPED.glob("*.yaml"):
        assert load_scheme(path).value.name == path.stem
        assert lint(path) == []


def test_readers_exist() -> None:
    for scheme in all_schemes():
        for form in scheme.stored_as:
            importlib.import_module(f"lora_compile.checkpoints.readers.{form.reader}")


def test_a_scheme_without_reader_is_refused(monkeypatch) -> None:
    whole = find_scheme("fp8_block")
    form = whole.stored_as[0].model_copy(update={"reader": None})
    unread = whole.model_copy(update={"stored_as": (form,)})
    schemes = (find_scheme("none"), unread)
    monkeypatch.setattr("lora_compile.schemas.quant_scheme.all_schemes", lambda: schemes)
    with pytest.raises(SchemeUnsupported, match="no reader"):
        detect_scheme(FP8)


def test_unknown_scheme_names() -> None:
    with pytest.raises(SchemeUnsupported, match="did you mean `fp8_block`") as caught:
        find_scheme("fp8-block", file="d.yaml", line=4, where="quantization.scheme")
    assert (caught.value.file, caught.value.line) == ("d.yaml", 4)


@pytest.mark.parametrize("model", [QuantInfo, ScaleInfo, ActivationInfo, PartRows])
def test_quant_info_has_no_defaults(model: type[StrictModel]) -> None:
    assert [name for name, field in model.model_fields.items() if not field.is_required()] == []


@pytest.mark.parametrize(
    "key", ["packing", "zero_point", "scale", "activation", "input_transforms", "ops", "stored_as"]
)
def test_nothing_a_kernel_needs_has_a_default(write, key: str) -> None:
    data = yaml.safe_load((SHIPPED / "fp8_block.yaml").read_text())
    inner = data.pop(key)
    (fault,) = [f for f in lint(write(data)) if f.where == key]
    assert type(fault) is MissingKey
    if isinstance(inner, dict):
        for name in inner:
            data[key] = {k: v for k, v in inner.items() if k != name}
            assert [type(f) for f in lint(write(data)) if f.where == f"{key}.{name}"] == [
                MissingKey
            ]


@pytest.mark.parametrize(
    ("scheme", "section", "key", "value", "where"),
    [
        ("fp8_block", "scale", "block_shape", None, "scale.block_shape"),
        ("fp8_block", "scale", "dtype", None, "scale.dtype"),
        ("fp8_block", "scale", "granularity", "none", "scale.dtype"),
        ("fp8_block", "activation", "min_scale", None, "activation.min_scale"),
        ("fp8_block", "activation", "handling", "none", "ops.quantise"),
        ("fp8_block", "ops", "quantise", None, "ops.quantise"),
        ("fp8_block", "quantise_at_load", "block_shape", None, "quantise_at_load.block_shape"),
        ("fp8_tensor_dynamic", "activation", "handling", "static", "activation.granularity"),
        ("fp8_tensor_dynamic", "activation", "granularity", "tensor", "activation.granularity"),
        ("fp8_tensor_dynamic", "activation", "group", 64, "activation.group"),
        ("fp8_tensor_static", "activation", "min_scale", 1e-6, "activation.min_scale"),
        (
            "fp8_channel",
            "scale",
            "granularity",
            "tensor",
            "stored_as[0].tensors.weight_scale.shape",
        ),
        ("fp8_block", "scale", "block_shap", [1, 1], "scale.block_shap"),
        ("none", "activation", "handling", "dynamic", "activation.min_scale"),
        ("none", "scale", "granularity", "block", "stored_as[0].tensors.weight_scale"),
        ("none", "quantise_at_load", "block_shape", [8, 8], "quantise_at_load.block_shape"),
        ("none", "ops", "base", "linear", "ops.base"),
    ],
)
def test_faults_between_values(write, scheme, section, key, value, where: str) -> None:
    data = yaml.safe_load((SHIPPED / f"{scheme}.yaml").read_text())
    data[section][key] = value
    path = write(data)
    found = [fault for fault in lint(path) if fault.where == where]
    assert len(found) == 1
    assert found[0].file == str(path)
    assert found[0].line is not None


@pytest.mark.parametrize(
    ("scheme", "edit", "where"),
    [
        ("fp8_block", {"requires": []}, "stored_as[0].requires"),
        ("fp8_block", {"dialect": "fp9"}, "stored_as[0].dialect"),
        ("none", {"dialect": "compressed-tensors"}, "stored_as[0].dialect"),
    ],
)
def test_faults_of_a_stored_form(write, scheme: str, edit: dict[str, Any], where: str) -> None:
    data = yaml.safe_load((SHIPPED / f"{scheme}.yaml").read_text())
    data["stored_as"][0].update(edit)
    (fault,) = lint(write(data))
    assert fault.where == where
    if "dialect" in edit:
        assert "did you mean" in (fault.fix or "")


def test_tensors_of_a_stored_form(write) -> None:
    data = yaml.safe_load((SHIPPED / "fp8_tensor_static.yaml").read_text())
    tensors = data["stored_as"][1]["tensors"]
    tensors["zeros"] = tensors.pop("input_scale")
    found = {fault.where: type(fault) for fault in lint(write(data))}
    assert found == {
        "stored_as[1].tensors.zeros": InvalidValue,
        "stored_as[1].tensors.input_scale": MissingKey,
    }


def test_static_scales_are_not_made_at_load(write) -> None:
    data = yaml.safe_load((SHIPPED / "fp8_tensor_static.yaml").read_text())
    data["quantise_at_load"] = {"weight_dtype": "float8_e4m3fn", "block_shape": None}
    (fault,) = lint(write(data))
    assert fault.where == "quantise_at_load"
    assert "calibration" in fault.message


def test_parts_of_one_static_scale_share_it() -> None:
    info = find_scheme("fp8_tensor_static").info(
        weight_dtype="float8_e4m3fn",
        block_shape=None,
        in_features=8,
        part_widths=[("q", 4), ("k", 2), ("v", 2)],
        input_scales=[0.5, 0.005, 0.5],
        bias=False,
    )
    assert info.planes == [0, 1, 0]
    assert info.aux_shapes == {"weight_scale": (8,), "input_scale": (2,)}


def test_groups_of_block_columns_need_blocks(write) -> None:
    data = yaml.safe_load((SHIPPED / "none.yaml").read_text())
    data["activation"] = {
        "handling": "dynamic",
        "granularity": "group",
        "group": "block_columns",
        "dtype": "float8_e4m3fn",
        "min_scale": 1e-12,
    }
    data["ops"]["quantise"] = "lora_compile::quantize_fp8_group"
    (fault,) = lint(write(data))
    assert fault.where == "activation.group"
