"""Architecture schemas: against models that transformers builds, and against their own faults."""

from __future__ import annotations

import copy
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml
from torch import nn

from lora_compile.errors import (
    ArchitectureUnknown,
    ExpressionInvalid,
    FileMissing,
    InvalidValue,
)
from lora_compile.schemas.architecture import (
    SHIPPED,
    ArchitectureSchema,
    LinearSite,
    all_architectures,
    find_architecture,
    load_architecture,
    shipped_names,
)
from lora_compile.schemas.expressions import evaluate
from lora_compile.schemas.lint import lint
from lora_compile.schemas.skeleton import skeleton


def derived(schema: ArchitectureSchema, config: Any) -> dict[str, int | bool]:
    values: dict[str, int | bool] = {name: flag.default for name, flag in schema.flags.items()}
    for name, text in schema.let.items():
        values[name] = evaluate(text, config, values)
    return values


def declared_weights(schema: ArchitectureSchema, config: Any) -> dict[str, tuple[int, int]]:
    """Module path -> shape of its weight, by the schema alone."""
    let = derived(schema, config)
    shapes: dict[str, tuple[int, int]] = {}
    for site in schema.sites:
        in_layers = "{layer}" in site.at
        layers = range(evaluate(schema.layers.count, config, let)) if in_layers else [None]
        for layer in layers:
            names = let if layer is None else {**let, "layer": layer}
            if site.when is not None and not evaluate(site.when, config, names):
                continue
            at = site.at.replace("{layer}", str(layer))
            if isinstance(site, LinearSite):
                width = evaluate(site.in_features, config, let)
                parts = [(p.name, evaluate(p.out_features, config, let), width) for p in site.parts]
            else:
                rows = evaluate(site.num_embeddings, config, let)
                parts = [(site.name, rows, evaluate(site.embedding_dim, config, let))]
            for name, rows, columns in parts:
                module = f"{at}.{name}" if at else name
                assert module not in shapes
                shapes[module] = (rows, columns)
    return shapes


MODELS = ["LlamaConfig", "MistralConfig", "Qwen2Config", "Qwen3Config"]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("explicit_head_dim", [True, False])
def test_widths_are_those_of_the_model(name: str, explicit_head_dim: bool, seed: int) -> None:
    draw = random.Random(f"{seed} {name} {explicit_head_dim}")
    kv_heads, groups, head_dim = draw.randint(1, 3), draw.randint(1, 3), 2 * draw.randint(3, 9)
    heads = kv_heads * groups
    sizes: dict[str, Any] = {
        "hidden_size": heads * head_dim,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": draw.randint(10, 90),
        "num_hidden_layers": draw.randint(1, 3),
        "vocab_size": draw.randint(20, 60),
        "tie_word_embeddings": draw.random() < 0.5,
        "pad_token_id": None,
    }
    if explicit_head_dim:
        other = heads * (head_dim + 2 * draw.randint(1, 9))
        sizes |= {"head_dim": head_dim, "hidden_size": other}
    config = getattr(transformers, name)(**sizes)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    schema = find_architecture(config.model_type).value
    weights = {
        path: tuple(module.weight.shape)
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear | nn.Embedding)
    }
    assert declared_weights(schema, config) == weights, sizes
    head = next(site for site in schema.sites if site.name == "lm_head")
    assert isinstance(head, LinearSite)
    assert evaluate(head.tied_if or "", config) is sizes["tie_word_embeddings"]
    assert (model.lm_head.weight is model.model.embed_tokens.weight) is config.tie_word_embeddings


def test_shipped_files() -> None:
    assert "llama" in shipped_names()
    served = [m for loaded in all_architectures() for m in loaded.value.model_types]
    assert len(served) == len(set(served)), "two files serve one model type"
    for loaded in all_architectures():
        assert loaded.value.name == Path(loaded.source.file).stem
        assert lint(loaded.source.file) == []
        text = Path(loaded.source.file).read_text()
        assert text.startswith("# yaml-language-server: $schema=../json/architecture.schema.json")


def test_llama_fuses_what_reads_one_input() -> None:
    schema = find_architecture("mistral").value
    sites = [site for site in schema.sites if isinstance(site, LinearSite)]
    fused = {s.name: [p.name for p in s.parts] for s in sites if s.fuse == "True"}
    assert fused == {
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "gate_up_proj": ["gate_proj", "up_proj"],
    }
    kept = {site.name for site in schema.sites if not site.quantise_at_load}
    assert kept == {"lm_head", "embed_tokens"}

    def rule_for(tensor: str) -> str | None:
        rules = schema.checkpoint.ignore
        return next((r.why for r in rules if re.fullmatch(r.regex(None), tensor)), None)

    assert "rotary" in (rule_for("model.layers.12.self_attn.rotary_emb.inv_freq") or "")
    assert rule_for("xmodel.layers.1.self_attn.rotary_emb.inv_freq") is None
    assert rule_for("model.layers.1.self_attn.q_proj.weight") is None


def test_l04_an_unknown_model_type_gets_a_file_to_start_from(tmp_path) -> None:
    with pytest.raises(ArchitectureUnknown) as caught:
        find_architecture("gemma9", file="m/config.json")
    error = caught.value
    assert error.file == "m/config.json"
    for fact in ("llama (llama)", "qwen3 (llama)"):
        assert fact in (error.expected or "")
    assert skeleton("gemma9") in (error.fix or "")
    assert "gemma9.yaml" in (error.fix or "")
    path = tmp_path / "gemma9.yaml"
    path.write_text((error.fix or "").partition("\n\n")[2])
    assert lint(path) == []
    loaded = load_architecture(path.name, folder=tmp_path)
    assert (loaded.value.name, loaded.value.model_types) == ("gemma9", ("gemma9",))


@pytest.mark.parametrize("model_type", ["3b", "a-b.c", 'x"]: {', "ü", "true", ""])
def test_a_skeleton_is_valid_for_any_model_type(tmp_path, model_type: str) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(skeleton(model_type), encoding="utf-8")
    assert load_architecture(path).value.model_types == (model_type,)


def test_names_and_paths(tmp_path) -> None:
    assert load_architecture("llama").value.name == "llama"
    assert load_architecture(SHIPPED / "llama.yaml") == load_architecture("llama")
    with pytest.raises(ArchitectureUnknown, match="did you mean `llama`"):
        load_architecture("lama", file="d.yaml", line=3, where="model.architecture")
    (tmp_path / "mine.yaml").touch()
    with pytest.raises(FileMissing, match=r"mine\.yaml") as caught:
        load_architecture("mien.yaml", folder=tmp_path, file="d.yaml", line=3)
    assert (caught.value.file, caught.value.line) == ("d.yaml", 3)


@pytest.fixture
def llama() -> dict[str, Any]:
    return copy.deepcopy(yaml.safe_load((SHIPPED / "llama.yaml").read_text()))


def site(data: dict[str, Any], name: str) -> dict[str, Any]:
    return next(s for s in data["sites"] if s["name"] == name)


def index(data: dict[str, Any], name: str) -> int:
    return next(i for i, s in enumerate(data["sites"]) if s["name"] == name)


def broken(data: dict[str, Any], what: str) -> str:
    """Break one thing; returns where the fault should be told."""
    at = f"sites[{index(data, 'down_proj')}]"
    down = site(data, "down_proj")
    if what == "layer mark missing":
        down["at"] = "model.layers.mlp"
        return f"{at}.at"
    if what == "layer mark elsewhere":
        down["at"] = "model.blocks.{layer}.mlp"
        return f"{at}.at"
    if what == "layer mark twice":
        down["at"] = "model.layers.{layer}.mlp.{layer}"
        return f"{at}.at"
    if what == "another mark":
        down["at"] = "model.layers.{layr}.mlp"
        return f"{at}.at"
    if what == "mark in layers":
        data["layers"]["at"] = "model.layers.{layer}"
        return "layers.at"
    if what == "site twice":
        down["name"], down["at"] = "o_proj", site(data, "o_proj")["at"]
        return f"{at}.name"
    if what == "part in two sites":
        site(data, "o_proj")["at"] = down["at"]
        site(data, "o_proj")["parts"][0]["name"] = "down_proj"
        return f"{at}.parts[0].name"
    if what == "part twice":
        site(data, "qkv_proj")["parts"][2]["name"] = "k_proj"
        return f"sites[{index(data, 'qkv_proj')}].parts[2].name"
    if what == "one part fused":
        down["fuse"] = True
        return f"{at}.fuse"
    if what == "half of a tie":
        del site(data, "lm_head")["tied_if"]
        return f"sites[{index(data, 'lm_head')}].tied_to"
    if what == "tie to nothing":
        site(data, "lm_head")["tied_to"] = "model.embed_token"
        return f"sites[{index(data, 'lm_head')}].tied_to"
    if what == "pattern":
        data["checkpoint"]["ignore"][1]["pattern"] = "(a"
        return "checkpoint.ignore[1].pattern"
    if what == "prefix without dot":
        data["key_prefixes"][0] = "base_model.model"
        return "key_prefixes[0]"
    assert what == "prefix twice"
    data["key_prefixes"].append("")
    return "key_prefixes[2]"


@pytest.mark.parametrize(
    ("what", "facts"),
    [
        ("layer mark missing", ["index", "model.layers.{layer}.mlp"]),
        ("layer mark elsewhere", ["no layer index", "model.layers.{layer}"]),
        ("layer mark twice", ["only one"]),
        ("another mark", ["only one", "{layr}"]),
        ("mark in layers", ["remove `.{layer}`"]),
        ("site twice", ["`model.layers.{layer}.self_attn.o_proj`", "first in line"]),
        ("part in two sites", ["`model.layers.{layer}.mlp.down_proj`", "`o_proj`"]),
        ("part twice", ["`model.layers.{layer}.self_attn.k_proj`"]),
        ("one part fused", ["`down_proj`", "two or more"]),
        ("half of a tie", ["`tied_if`"]),
        ("tie to nothing", ["did you mean `model.embed_tokens`?"]),
        ("pattern", ["'(a'", "unterminated"]),
        ("prefix without dot", ["write `base_model.model.`"]),
        ("prefix twice", ["stands twice"]),
    ],
)
def test_each_fault_between_values(write, llama, what: str, facts: list[str]) -> None:
    where = broken(llama, what)
    path = write(llama)
    (fault,) = lint(path)
    assert type(fault) is InvalidValue
    assert (fault.file, fault.where) == (str(path), where)
    leaf = where.rpartition(".")[2].partition("[")[0]
    line = path.read_text().splitlines()[(fault.line or 0) - 1]
    assert leaf in line or leaf == "key_prefixes"
    for fact in facts:
        assert fact in str(fault)


def test_sites_with_conditions_may_be_alternatives(write, llama) -> None:
    qkv = site(llama, "qkv_proj")
    alone = {**copy.deepcopy(qkv), "name": "q_alone", "fuse": False, "when": "not fuse_qkv"}
    alone["parts"] = alone["parts"][:1]
    llama["sites"].append(alone)
    assert [fault.where for fault in lint(write(llama))] == [
        f"sites[{len(llama['sites']) - 1}].parts[0].name"
    ]
    qkv["when"] = "fuse_qkv"
    assert lint(write(llama)) == []


def test_every_expression_is_parsed(write, llama) -> None:
    """Break each expression of the file in turn."""
    fields = {"in_features", "out_features", "num_embeddings", "embedding_dim", "tied_if", "count"}
    fields |= {"fuse"}
    places: list[tuple[dict[str, Any], str]] = [(llama["let"], name) for name in llama["let"]]

    def collect(value: Any) -> None:
        if isinstance(value, dict):
            places.extend((value, key) for key in value if key in fields)
        for inner in value.values() if isinstance(value, dict) else value:
            if isinstance(inner, dict | list):
                collect(inner)

    collect(llama)
    assert len(places) >= 19
    for holder, key in places:
        kept, holder[key] = holder[key], "config.hidden_size"
        (fault,) = lint(write(llama))
        assert type(fault) is ExpressionInvalid
        assert (fault.where or "").endswith(key)
        assert fault.line is not None
        holder[key] = kept
    assert lint(write(llama)) == []


def test_plain_numbers_and_truth_values_are_expressions(write, llama) -> None:
    site(llama, "down_proj")["in_features"] = 96
    site(llama, "down_proj")["when"] = True
    down = load_architecture(write(llama)).value.sites[index(llama, "down_proj")]
    assert isinstance(down, LinearSite)
    assert evaluate(down.in_features, {}) == 96
    assert evaluate(down.when or "", {}) is True


def test_all_faults_of_a_file_together(write, llama) -> None:
    places = [broken(llama, "prefix twice"), broken(llama, "pattern"), broken(llama, "site twice")]
    llama["layers"]["cuont"] = llama["layers"].pop("count")
    llama["let"]["head_dim"] = "head_dim //"
    found = [fault.where for fault in lint(write(llama))]
    assert sorted(found) == sorted([*places, "layers.cuont", "let.head_dim"])
