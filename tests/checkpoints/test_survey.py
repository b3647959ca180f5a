"""Every tensor is accounted for, and every contradiction is told with its names and numbers."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lora_compile.checkpoints.skip_list import SkipList
from lora_compile.checkpoints.survey import ModuleSpec, survey
from lora_compile.errors import (
    CheckpointInvalid,
    Faults,
    InvalidValue,
    LoraCompileError,
    TensorMissing,
    TensorNotFinite,
    TensorShape,
    TensorUnexpected,
)

FP8 = "hf-fp8-deepseekv3-mla"
ATTENTION = "model.layers.0.self_attn"
KV_A = f"{ATTENTION}.kv_a_proj_with_mqa"

Edit = Callable[[dict[str, torch.Tensor]], object]


def test_formats_of_a_block_fp8_checkpoint(survey_fixture: Callable[..., Any]) -> None:
    index, found = survey_fixture(FP8)
    kv_a = found.formats[KV_A]
    assert (kv_a.scheme, kv_a.weight_dtype, kv_a.block_shape) == (
        "fp8_block",
        "F8_E4M3",
        (128, 128),
    )
    assert kv_a.keys == (f"{KV_A}.weight", f"{KV_A}.weight_scale_inv")
    head = found.formats["lm_head"]
    assert (head.scheme, head.weight_dtype, head.block_shape) == ("none", "BF16", None)
    assert "does not list it" in head.why
    used = {key for fmt in found.formats.values() for key in fmt.keys} | set(found.other)
    assert used == set(index.headers)


def test_a_tied_head_takes_the_embedding(survey_fixture: Callable[..., Any]) -> None:
    _, found = survey_fixture("base-llama-tied")
    assert found.formats["lm_head"].keys == ("model.embed_tokens.weight",)
    assert "model.embed_tokens.weight" in found.formats["lm_head"].why


def test_a_tied_head_with_its_own_weight_keeps_it(tensors: Callable, scheme: Callable) -> None:
    source = tensors({"embed.weight": torch.zeros(6, 4), "head.weight": torch.ones(6, 4)})
    found = survey(
        source,
        [ModuleSpec("head", 6, 4, False, tied_to="embed")],
        scheme("none"),
        quantization_config=None,
        other={"embed.weight": (6, 4)},
        ignored={},
    )
    assert found.formats["head"].keys == ("head.weight",)
    assert "has both weights" in found.formats["head"].why


def _broken(
    copied: Callable, survey_fixture: Callable, edit: Edit | None, config: Any = None
) -> LoraCompileError:
    with pytest.raises(LoraCompileError) as caught:
        survey_fixture(FP8, copied(FP8, edit, config))
    return caught.value


def _poison(value: float) -> Edit:
    def edit(data: dict[str, torch.Tensor]) -> None:
        data[f"{KV_A}.weight_scale_inv"][0, 1] = value

    return edit


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0, -1.0])
def test_unusable_scales(copied: Callable, survey_fixture: Callable, value: float) -> None:
    error = _broken(copied, survey_fixture, _poison(value))
    assert isinstance(error, TensorNotFinite)
    assert (error.tensor, error.where) == (f"{KV_A}.weight_scale_inv", KV_A)
    assert error.file is not None
    assert error.file.endswith("model.safetensors")
    assert f"{value} at [0, 1]" in str(error)


@pytest.mark.parametrize(
    ("edit", "kind", "tensor", "facts"),
    [
        (
            lambda d: d.pop(f"{KV_A}.weight_scale_inv"),
            TensorMissing,
            f"{KV_A}.weight_scale_inv",
            ["without its scales"],
        ),
        (
            lambda d: d.update({f"{KV_A}.weight_scale": d.pop(f"{KV_A}.weight_scale_inv")}),
            TensorMissing,
            f"{KV_A}.weight_scale_inv",
            ["beside it: weight_scale"],
        ),
        (
            lambda d: d.update({f"{KV_A}.weight": d[f"{KV_A}.weight"].to(torch.bfloat16)}),
            TensorShape,
            f"{KV_A}.weight",
            ["F8_E4M3 [80, 136]", "BF16 [80, 136]"],
        ),
        (
            lambda d: d.update({f"{KV_A}.weight": d[f"{KV_A}.weight"].to(torch.float8_e5m2)}),
            TensorShape,
            f"{KV_A}.weight",
            ["F8_E5M2"],
        ),
        (
            lambda d: d.update({f"{KV_A}.weight_scale_inv": torch.ones(2, 2)}),
            TensorShape,
            f"{KV_A}.weight_scale_inv",
            ["F32 [1, 2]", "[128, 128] block of [80, 136]", "F32 [2, 2]"],
        ),
        (
            lambda d: d.update({f"{KV_A}.weight_scale_inv": torch.ones(1, 2).bfloat16()}),
            TensorShape,
            f"{KV_A}.weight_scale_inv",
            ["BF16 [1, 2]"],
        ),
        (
            lambda d: d.update({f"{KV_A}.weight": d[f"{KV_A}.weight"][:72].clone()}),
            TensorShape,
            f"{KV_A}.weight",
            ["[72, 136]"],
        ),
        (
            lambda d: [d.pop(key) for key in list(d) if key.startswith(KV_A)],
            TensorMissing,
            f"{KV_A}.weight",
            ["[80, 136]", "no other tensor"],
        ),
        (
            lambda d: d.update({f"{KV_A}.bias": torch.zeros(80)}),
            TensorUnexpected,
            f"{KV_A}.bias",
            ["F32 [80]"],
        ),
        (
            lambda d: d.update({"lm_head.weight": torch.zeros(64, 136, dtype=torch.int8)}),
            TensorShape,
            "lm_head.weight",
            ["I8 [64, 136]", "BF16/F16/F32"],
        ),
        (
            lambda d: d.update({"lm_head.weight": torch.zeros(64, 136).to(torch.float8_e4m3fn)}),
            TensorMissing,
            "lm_head.weight_scale_inv",
            ["without its scales"],
        ),
        (lambda d: d.pop("model.norm.weight"), TensorMissing, "model.norm.weight", ["[136]"]),
        (
            lambda d: d.update({"model.norm.weight": torch.zeros(135)}),
            TensorShape,
            "model.norm.weight",
            ["[136]", "[135]"],
        ),
    ],
)
def test_one_fault(
    copied: Callable,
    survey_fixture: Callable,
    edit: Edit,
    kind: type[LoraCompileError],
    tensor: str,
    facts: list[str],
) -> None:
    error = _broken(copied, survey_fixture, edit)
    first = error.faults[0] if isinstance(error, Faults) else error
    assert type(first) is kind
    assert first.tensor == tensor
    for fact in facts:
        assert fact in str(first)
    if isinstance(error, Faults):  # only the renamed scale is a second, related fault
        assert [type(fault) for fault in error.faults[1:]] == [TensorUnexpected]


def test_all_faults_come_together(copied: Callable, survey_fixture: Callable) -> None:
    def edit(data: dict[str, torch.Tensor]) -> None:
        data["model.layers.7.mlp.up_proj.weight"] = torch.zeros(2, 2)
        del data["model.norm.weight"]
        data[f"{KV_A}.weight_scale_inv"][0, 0] = float("nan")

    error = _broken(copied, survey_fixture, edit)
    assert isinstance(error, Faults)
    assert sorted(type(fault).__name__ for fault in error.faults) == [
        "TensorMissing",
        "TensorNotFinite",
        "TensorUnexpected",
    ]


def test_ignored_tensors_match_whole_names(copied: Callable, survey_fixture: Callable) -> None:
    key = "model.layers.1.eh_proj.weight"
    path = copied(FP8, lambda d: d.update({key: torch.zeros(2, 2)}))
    _, found = survey_fixture(FP8, path, {r"model\.layers\.1\..*": "draft layer"})
    assert found.ignored == {key: "draft layer"}
    with pytest.raises(TensorUnexpected, match=re.escape(key)):
        survey_fixture(FP8, path, {r"layers\.1\.": "not a whole name"})


@pytest.mark.parametrize("size", [[128], [0, 128], [128.0, 128]])
def test_block_size_is_the_configs(copied: Callable, survey_fixture: Callable, size: Any) -> None:
    error = _broken(
        copied,
        survey_fixture,
        None,
        lambda c: c["quantization_config"].update(weight_block_size=size),
    )
    assert isinstance(error, InvalidValue)
    assert error.where == "quantization_config.weight_block_size"


def test_block_scales_without_a_block_size_are_not_another_schemes(
    copied: Callable, survey_fixture: Callable
) -> None:
    """The config then says FP8 per tensor, whose scales have another name."""
    error = _broken(
        copied, survey_fixture, None, lambda c: c["quantization_config"].pop("weight_block_size")
    )
    assert isinstance(error, Faults)
    first = error.faults[0]
    assert isinstance(first, TensorMissing)
    assert "as fp8_tensor_dynamic has" in str(first)
    assert "beside it: weight_scale_inv" in str(first)


def test_block_size_is_not_guessed_from_shapes(tensors: Callable, scheme: Callable) -> None:
    # 192 rows and 2 scale rows: blocks of 128 and 64 by the config, though 96 would divide.
    source = tensors(
        {"m.weight": torch.zeros(192, 64).to(torch.float8_e4m3fn)}
        | {"m.weight_scale_inv": torch.ones(2, 1)}
    )
    spec = ModuleSpec("m", 192, 64, False, None)
    for size, fits in (([128, 128], True), ([64, 64], False)):
        config = {"quant_method": "fp8", "weight_block_size": size}
        call = lambda c=config: survey(  # noqa: E731
            source,
            [spec],
            scheme("fp8_block", tuple(c["weight_block_size"])),
            quantization_config=c,
            other={},
            ignored={},
        )
        if fits:
            assert call().formats["m"].block_shape == (128, 128)
        else:
            with pytest.raises(TensorShape, match=re.escape("F32 [3, 1]")):
                call()


def test_scales_without_a_config_are_refused(tensors: Callable, scheme: Callable) -> None:
    source = tensors(
        {"m.weight": torch.zeros(8, 8).to(torch.float8_e4m3fn)}
        | {"m.weight_scale_inv": torch.ones(1, 1)}
    )
    with pytest.raises(CheckpointInvalid, match="no quantization_config says how"):
        survey(
            source,
            [ModuleSpec("m", 8, 8, False, None)],
            scheme("none"),
            quantization_config=None,
            other={},
            ignored={},
        )


def test_a_declared_scheme_that_no_tensor_has(copied: Callable, survey_fixture: Callable) -> None:
    def edit(data: dict[str, torch.Tensor]) -> None:
        for key in [key for key in data if key.endswith("_scale_inv")]:
            del data[key]
            weight = key.removesuffix("_scale_inv")
            data[weight] = data[weight].to(torch.bfloat16)

    error = _broken(copied, survey_fixture, edit)
    assert isinstance(error, CheckpointInvalid)
    assert "declares fp8_block" in str(error)


def _mixed(tensors: Callable, scheme: Callable, skip: list[str]) -> Any:
    """q is bfloat16, k is FP8, both parts of one fused group."""
    source = tensors(
        {
            "model.layers.0.self_attn.q_proj.weight": torch.zeros(8, 8).bfloat16(),
            "model.layers.0.self_attn.k_proj.weight": torch.zeros(8, 8).to(torch.float8_e4m3fn),
            "model.layers.0.self_attn.k_proj.weight_scale_inv": torch.ones(1, 1),
        }
    )
    fused = "model.layers.0.self_attn.qkv_proj"
    return survey(
        source,
        [
            ModuleSpec(f"model.layers.0.self_attn.{name}", 8, 8, False, None, group=fused)
            for name in ("q_proj", "k_proj")
        ],
        scheme("fp8_block"),
        quantization_config={"weight_block_size": [128, 128], "modules_to_not_convert": skip},
        other={},
        ignored={},
    ).formats


@pytest.mark.parametrize(
    "entry",
    ["q_proj", "self_attn.q_proj", "model.layers.0.self_attn.q_proj", "model.layers.*.self_attn",
     "model.layers.0.self_attn.qkv_proj", "qkv_proj"],
)  # fmt: skip
def test_skip_list_spellings(tensors: Callable, scheme: Callable, entry: str) -> None:
    found = _mixed(tensors, scheme, [entry])
    q = found["model.layers.0.self_attn.q_proj"]
    k = found["model.layers.0.self_attn.k_proj"]
    assert (q.scheme, k.scheme) == ("none", "fp8_block")
    assert f"as the config says ({entry})" in q.why
    listed = "q_proj" not in entry
    assert ("tensors decide" in k.why) is listed


def test_an_unlisted_bf16_weight_is_told(tensors: Callable, scheme: Callable) -> None:
    found = _mixed(tensors, scheme, ["lm_head"])["model.layers.0.self_attn.q_proj"]
    assert found.scheme == "none"
    assert "does not list it" in found.why


def test_skip_entries_match_whole_components() -> None:
    skip = SkipList(("mlp.gate", "layers.1"))
    assert skip.entry_for("model.layers.0.mlp.gate", None) == "mlp.gate"
    assert skip.entry_for("model.layers.0.mlp.gate_proj", None) is None
    assert skip.entry_for("model.layers.11.mlp.up_proj", None) is None
    assert skip.entry_for("model.layers.1.mlp.up_proj", None) == "layers.1"
    with pytest.raises(CheckpointInvalid, match="ignored_layers"):
        SkipList.from_config({"ignored_layers": "lm_head"}, file="config.json")


def test_biases_are_required_or_refused(tensors: Callable, scheme: Callable) -> None:
    data = {"m.weight": torch.zeros(4, 2), "m.bias": torch.zeros(4)}

    def run(data: dict[str, torch.Tensor], has_bias: bool) -> Any:
        return survey(
            tensors(data),
            [ModuleSpec("m", 4, 2, has_bias, None)],
            scheme("none"),
            quantization_config=None,
            other={},
            ignored={},
        )

    assert run(data, True).formats["m"].bias_key == "m.bias"
    with pytest.raises(TensorUnexpected, match=re.escape("m.bias")):
        run(data, False)
    with pytest.raises(TensorMissing, match=re.escape("m.bias")):
        run({"m.weight": data["m.weight"]}, True)
