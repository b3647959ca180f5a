"""Flags, layer conditions, kept modules and checkpoint rules of architecture schemas."""

from __future__ import annotations

import copy
import random
import re
from typing import Any

import pytest
import torch
import transformers
import yaml
from torch import nn

from lora_compile.errors import InvalidValue, UnknownKey
from lora_compile.schemas.architecture import SHIPPED, find_architecture
from lora_compile.schemas.architecture_rules import IgnoreRule
from lora_compile.schemas.expressions import Expression
from lora_compile.schemas.lint import lint
from tests.schemas.test_architecture import declared_weights


@pytest.mark.parametrize("name", ["DeepseekV3Config", "DeepseekV2Config"])
@pytest.mark.parametrize("q_lora", [True, False])
def test_deepseek_widths_are_those_of_the_model(name: str, q_lora: bool, seed: int) -> None:
    draw = random.Random(f"{seed} {name} {q_lora}")
    heads, layers = draw.randint(1, 4), draw.randint(2, 4)
    sizes: dict[str, Any] = {
        "hidden_size": heads * draw.randint(5, 20),
        "intermediate_size": draw.randint(10, 90),
        "moe_intermediate_size": draw.randint(5, 30),
        "num_hidden_layers": layers,
        "first_k_dense_replace": draw.randint(0, layers),
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "n_routed_experts": 4,
        "n_shared_experts": draw.randint(1, 2),
        "n_group": 1,
        "topk_group": 1,
        "q_lora_rank": draw.randint(3, 40) if q_lora else None,
        "kv_lora_rank": draw.randint(3, 40),
        "qk_rope_head_dim": 2 * draw.randint(1, 9),
        "qk_nope_head_dim": draw.randint(3, 20),
        "v_head_dim": draw.randint(3, 20),
        "vocab_size": draw.randint(20, 60),
        "pad_token_id": None,
    }
    config = getattr(transformers, name)(**sizes)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    weights = {
        path: tuple(module.weight.shape)
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear | nn.Embedding)
    }
    assert declared_weights(find_architecture(config.model_type).value, config) == weights, sizes


@pytest.fixture
def deepseek() -> dict[str, Any]:
    return copy.deepcopy(yaml.safe_load((SHIPPED / "deepseek_v3.yaml").read_text()))


def number(data: dict[str, Any], at: str, name: str) -> int:
    sites = data["sites"]
    return next(i for i, s in enumerate(sites) if (s["at"], s["name"]) == (at, name))


MLP = "model.layers.{layer}.mlp"


def broken(data: dict[str, Any], what: str) -> str:
    """Break one thing; returns where the fault should be told."""
    dense = number(data, MLP, "gate_up_proj")
    stack, ignore = data["checkpoint"]["stack"], data["checkpoint"]["ignore"]
    if what == "flag that nothing uses":
        for site in data["sites"]:
            if site.get("fuse") == "fuse_qkv_a":
                site["fuse"] = "fuse_qkva"
        return "flags.fuse_qkv_a"
    if what == "flag called layer":
        data["flags"]["layer"] = {"default": True, "summary": "x"}
        return "flags.layer"
    if what == "flag and let":
        data["let"]["fuse_qkv_a"] = "True"
        return "let.fuse_qkv_a"
    if what == "let called layer":
        data["let"]["layer"] = 3
        return "let.layer"
    if what == "layer in a width":
        data["sites"][dense]["in_features"] = "hidden_size + layer"
        return f"sites[{dense}].in_features"
    if what == "layer in fuse":
        data["sites"][dense]["fuse"] = "layer > 1"
        return f"sites[{dense}].fuse"
    if what == "layer in let":
        data["let"]["q_features"] = "num_attention_heads * layer"
        return "let.q_features"
    if what == "layer outside the layers":
        head = number(data, "", "lm_head")
        data["sites"][head]["when"] = "layer > 1"
        return f"sites[{head}].when"
    if what == "kept without a layer":
        data["kept"][0]["at"] = "model.layers.mlp.experts"
        return "kept[0].at"
    if what == "kept twice":
        data["kept"].append(copy.deepcopy(data["kept"][0]))
        return "kept[2].at"
    if what == "site in a kept module":
        data["kept"][1]["at"] = f"{MLP}.shared_experts"
        return "kept[1].at"
    if what == "piece without expert":
        stack[1]["pieces"][0]["name"] = f"{MLP}.experts.0.down_proj.weight"
        return "checkpoint.stack[1].pieces[0].name"
    if what == "piece with another mark":
        stack[1]["pieces"][0]["name"] = f"{MLP}.experts.{{exprt}}.down_proj.weight"
        return "checkpoint.stack[1].pieces[0].name"
    if what == "piece without layer":
        stack[0]["pieces"][1]["name"] = "model.mlp.experts.{expert}.up_proj.weight"
        return "checkpoint.stack[0].pieces[1].name"
    if what == "piece twice":
        stack[0]["pieces"][1]["name"] = stack[0]["pieces"][0]["name"]
        return "checkpoint.stack[0].pieces[1].name"
    if what == "stack outside the layers":
        stack[1]["parameter"] = "model.blocks.{layer}.mlp.experts.down_proj"
        return "checkpoint.stack[1].parameter"
    if what == "ignore without a bound":
        del ignore[0]["layers_from"], ignore[0]["layers_count"]
        return "checkpoint.ignore[0].pattern"
    if what == "ignore with half a bound":
        del ignore[0]["layers_count"]
        return "checkpoint.ignore[0].layers_from"
    assert what == "bound without a layer"
    ignore[1]["layers_from"] = ignore[1]["layers_count"] = 1
    return "checkpoint.ignore[1].layers_from"


@pytest.mark.parametrize(
    ("what", "facts"),
    [
        ("flag that nothing uses", ["did you mean `fuse_qkva`?"]),
        ("flag called layer", ["index of a layer"]),
        ("flag and let", ["is a flag too"]),
        ("let called layer", ["index of a layer"]),
        ("layer in a width", ["no layer", "hidden_size + layer"]),
        ("layer in fuse", ["no layer"]),
        ("layer in let", ["no layer"]),
        ("layer outside the layers", ["no layer"]),
        ("kept without a layer", ["model.layers.{layer}.mlp.experts"]),
        ("kept twice", ["kept twice"]),
        ("site in a kept module", ["site `gate_up_proj`"]),
        ("piece without expert", ["`{expert}`"]),
        ("piece with another mark", ["did you mean `{expert}`?"]),
        ("piece without layer", ["`{layer}` stands once"]),
        ("piece twice", ["stands twice"]),
        ("stack outside the layers", ["model.layers.{layer}"]),
        ("ignore without a bound", ["go together", "smaller model"]),
        ("ignore with half a bound", ["go together"]),
        ("bound without a layer", ["go together"]),
    ],
)
def test_each_fault_of_the_rules(write, deepseek, what: str, facts: list[str]) -> None:
    where = broken(deepseek, what)
    path = write(deepseek)
    found = {fault.where: fault for fault in lint(path)}
    assert set(found) == {where}, [str(fault) for fault in found.values()]
    fault = found[where]
    assert type(fault) is InvalidValue
    assert fault.file == str(path)
    leaf = where.rpartition(".")[2].partition("[")[0]
    assert leaf in path.read_text().splitlines()[(fault.line or 0) - 1]
    for fact in facts:
        assert fact in str(fault)


def test_misspelt_keys_of_the_rules(write, deepseek) -> None:
    deepseek["flags"]["fuse_qkv_a"]["defalt"] = deepseek["flags"]["fuse_qkv_a"].pop("default")
    deepseek["kept"][0]["waht"] = deepseek["kept"][0].pop("what")
    rule = deepseek["checkpoint"]["stack"][0]
    rule["peices"] = rule.pop("pieces")
    found = {fault.where: fault for fault in lint(write(deepseek))}
    for where, meant in (
        ("flags.fuse_qkv_a.defalt", "default"),
        ("kept[0].waht", "what"),
        ("checkpoint.stack[0].peices", "pieces"),
    ):
        assert type(found[where]) is UnknownKey
        assert meant in str(found[where])
        assert found[where].line is not None


def test_names_of_an_expression() -> None:
    text = "a or (b if layer < c else -d) * 2 // e and not True"
    assert Expression.parse(text).names == {"a", "b", "c", "d", "e", "layer"}


@pytest.mark.parametrize("layers", [range(61, 62), range(3, 5), range(9, 12), range(4, 4)])
def test_an_ignore_rule_names_its_layers_alone(layers: range) -> None:
    rule = IgnoreRule(
        pattern=r"model\.layers\.{layer}\..+", layers_from="n", layers_count="m", why="x"
    )
    matched = [
        n for n in range(700) if re.fullmatch(rule.regex(layers), f"model.layers.{n}.x.weight")
    ]
    assert matched == list(layers)
    assert not re.fullmatch(rule.regex(layers), "model.layers.61")
