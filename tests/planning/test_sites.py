"""A schema laid over a model: sites, flags, layer conditions and rules, and what does not fit."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml
from torch import nn

import lora_compile as lc
from lora_compile.errors import (
    ExpressionInvalid,
    Faults,
    InvalidValue,
    LoraCompileError,
    SiteMissing,
    UnknownKey,
    WidthMismatch,
)
from lora_compile.planning.rules import find_rules
from lora_compile.planning.sites import find_sites
from lora_compile.schemas.architecture import SHIPPED, ArchitectureSchema, load_architecture
from lora_compile.schemas.yaml_file import Loaded
from tests.deepseek import SIZES, deepseek

Write = Callable[[dict[str, Any]], Loaded[ArchitectureSchema]]


def meta(**changes: Any) -> nn.Module:
    config = transformers.DeepseekV3Config(**{**SIZES, **changes})
    with torch.device("meta"):
        model: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    return model


@pytest.fixture
def data() -> dict[str, Any]:
    return dict(yaml.safe_load((SHIPPED / "deepseek_v3.yaml").read_text()))


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write_file(content: dict[str, Any]) -> Loaded[ArchitectureSchema]:
        (tmp_path / "mine.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
        return load_architecture("mine.yaml", folder=tmp_path)

    return write_file


def faults(call: Callable[[], object]) -> list[LoraCompileError]:
    with pytest.raises(LoraCompileError) as caught:
        call()
    error = caught.value
    return list(error.faults) if isinstance(error, Faults) else [error]


def names(sites: list[Any]) -> set[str]:
    return {f"{site.at}.{site.schema.name}" for site in sites if site.at}


def test_a_condition_may_depend_on_the_layer() -> None:
    model = meta(num_hidden_layers=4, first_k_dense_replace=2)
    found = names(find_sites(load_architecture("deepseek_v3"), model.config, model))
    for layer in range(4):
        dense = f"model.layers.{layer}.mlp.gate_up_proj"
        shared = f"model.layers.{layer}.mlp.shared_experts.gate_up_proj"
        assert (dense in found) is (layer < 2)
        assert (shared in found) is (layer >= 2)


@pytest.mark.parametrize("flags", [{}, {"fuse_qkv_a": True}, {"fuse_qkv_a": False}])
def test_a_flag_chooses_whether_a_site_fuses(flags: dict[str, bool]) -> None:
    model = meta()
    sites = find_sites(load_architecture("deepseek_v3"), model.config, model, flags)
    fuse = {s.schema.name: s.fuse for s in sites if s.at.endswith("self_attn")}
    assert fuse["fused_qkv_a_proj_with_mqa"] is flags.get("fuse_qkv_a", True)
    assert not fuse["o_proj"]
    assert all(s.fuse for s in sites if s.schema.name == "gate_up_proj")


def test_an_unknown_flag_is_told_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "d.yaml"
    checkpoint = Path(__file__).parents[1] / "fixtures" / "base-deepseekv3"
    path.write_text(
        f"schema_version: 1\nmodel:\n  path: {checkpoint}\n  dtype: float32\n  flags:\n"
        "    fuse_qkv: false\nquantization: {scheme: none}\n"
        "runtime: {max_adapters: 1, max_rank: 4}\n"
    )
    (fault,) = faults(lambda: lc.load(path))
    assert type(fault) is UnknownKey
    assert (fault.file, fault.line, fault.where) == (str(path), 6, "model.flags.fuse_qkv")
    assert fault.fix == "did you mean `fuse_qkv_a`?"
    (fault,) = faults(lambda: lc.wrap(deepseek(0), flags={"fuse_qkv": False}))
    assert type(fault) is UnknownKey
    assert (fault.where, fault.fix) == ("flags.fuse_qkv", "did you mean `fuse_qkv_a`?")


def test_a_flag_that_is_not_declared_is_told_in_the_schema(data: Any, write: Write) -> None:
    data["sites"][1]["fuse"] = "fuse_qkv_aa"
    model = meta()
    (fault,) = faults(lambda: find_sites(write(data), model.config, model))
    assert type(fault) is ExpressionInvalid
    assert fault.where == "sites[1].fuse"
    assert "fuse_qkv_a`" in (fault.fix or "")


def test_two_alternatives_may_not_hold_at_once(data: Any, write: Write) -> None:
    data["sites"][2]["when"] = "True"
    data["sites"][2]["parts"][0] = {"name": "q_a_proj", "out_features": "q_lora_rank"}
    model = meta()
    found = faults(lambda: find_sites(write(data), model.config, model))
    assert len(found) == 1, "once for all layers"
    assert type(found[0]) is InvalidValue
    for word in ("fused_qkv_a_proj_with_mqa", "fused_q_kv_a_proj_with_mqa", "`when`"):
        assert word in str(found[0])


def test_rules_of_a_model() -> None:
    model = meta(num_hidden_layers=4, first_k_dense_replace=2)
    rules = find_rules(load_architecture("deepseek_v3"), model.config, model)
    experts, router = rules.kept
    assert experts.what == "routed experts"
    assert experts.modules == ("model.layers.2.mlp.experts", "model.layers.3.mlp.experts")
    assert experts.parameters == ("down_proj", "gate_up_proj")
    assert experts.source.line == load_architecture("deepseek_v3").source.line(("kept", 0))
    assert router.modules == ("model.layers.2.mlp.gate", "model.layers.3.mlp.gate")
    assert set(rules.stacks) == {
        f"model.layers.{layer}.mlp.experts.{name}"
        for layer in (2, 3)
        for name in ("gate_up_proj", "down_proj")
    }
    stack = rules.stacks["model.layers.3.mlp.experts.gate_up_proj"]
    assert stack.shape == (4, 192, 256)
    assert stack.tensors(2) == [
        ("model.layers.3.mlp.experts.2.gate_proj.weight", (96, 256)),
        ("model.layers.3.mlp.experts.2.up_proj.weight", (96, 256)),
    ]


@pytest.mark.parametrize(("layers", "mtp"), [(3, 1), (4, 2), (5, 0)])
def test_layers_that_predict_ahead_are_ignored_and_no_others(layers: int, mtp: int) -> None:
    model = meta(num_hidden_layers=layers, num_nextn_predict_layers=mtp)
    rules = find_rules(load_architecture("deepseek_v3"), model.config, model)
    ignored = [
        n
        for n in range(100)
        if any(re.fullmatch(p, f"model.layers.{n}.eh_proj.weight") for p in rules.ignored)
    ]
    assert ignored == list(range(layers, layers + mtp))


def test_rules_that_do_not_fit_the_model(data: Any, write: Write) -> None:
    data["kept"][0]["at"] = "model.layers.{layer}.mlp.expert"
    stack = data["checkpoint"]["stack"]
    stack[0]["count"] = "n_routed_experts + 1"
    stack[1]["parameter"] = "model.layers.{layer}.mlp.experts.down"
    model = meta()
    loaded = write(data)
    found = faults(lambda: find_rules(loaded, model.config, model))
    for kind, where, word in (
        (SiteMissing, "kept[0].at", "model.layers.1.mlp.experts"),
        (WidthMismatch, "checkpoint.stack[0]", "[5, 192, columns]"),
        (SiteMissing, "checkpoint.stack[1].parameter", "model.layers.1.mlp.experts.down_proj"),
    ):
        fault = next(f for f in found if f.where == where)
        assert type(fault) is kind
        assert word in str(fault)
        assert fault.file == loaded.source.file
        assert fault.line is not None
