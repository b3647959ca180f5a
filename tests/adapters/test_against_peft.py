"""Adapters that PEFT makes here, against PEFT's own delta weights."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from peft.utils import get_peft_model_state_dict
from transformers import LlamaConfig, LlamaForCausalLM

from lora_compile.adapters.canonical import CanonicalAdapter
from lora_compile.adapters.peft_reader import read_adapter, read_adapter_tensors
from tests.adapters.plans import llama_plan

PLAN = llama_plan(max_rank=64)
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def trained(seed: int, **fields: Any) -> Any:
    """A tiny Llama under PEFT with random adapter weights."""
    torch.manual_seed(seed)
    base = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=48,
            intermediate_size=40,
            num_attention_heads=3,
            num_key_value_heads=1,
            head_dim=16,
            num_hidden_layers=2,
            vocab_size=64,
        )
    )
    model = get_peft_model(base, LoraConfig(**fields))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_()
    return model


def deltas_of(model: Any) -> dict[str, torch.Tensor]:
    return {
        name.removeprefix("base_model.model."): module.get_delta_weight("default").detach()
        for name, module in model.named_modules()
        if isinstance(module, LoraLayer)
    }


def assert_same(adapter: CanonicalAdapter, expected: dict[str, torch.Tensor]) -> None:
    assert set(adapter.deltas) == set(expected)
    for module, delta in adapter.deltas.items():
        found = delta.scale * (delta.B @ delta.A)
        torch.testing.assert_close(found, expected[module], rtol=1e-5, atol=1e-5)


CASES: dict[str, dict[str, Any]] = {
    "plain": {"r": 3, "lora_alpha": 7, "target_modules": ALL},
    "rslora, odd rank": {"r": 9, "lora_alpha": 5, "use_rslora": True, "target_modules": ALL},
    "rslora, r 16": {"r": 16, "lora_alpha": 16, "use_rslora": True, "target_modules": ["q_proj"]},
    "patterns": {
        "r": 4,
        "lora_alpha": 6,
        "use_rslora": True,
        "target_modules": ALL,
        "rank_pattern": {"0.self_attn.q_proj": 2, r"^model\.layers\.1\..*": 5, "o_proj": 1},
        "alpha_pattern": {".*1.mlp.down_proj": 11, "v_proj": 1, "proj": 9},
    },
    "regex": {"r": 4, "lora_alpha": 8, "target_modules": r".*\.1\..*(q|up)_proj"},
    "all-linear": {"r": 2, "lora_alpha": 1, "target_modules": "all-linear"},
    "exclude": {
        "r": 2,
        "lora_alpha": 1,
        "target_modules": "all-linear",
        "exclude_modules": r".*\.0\.mlp\..*",
    },
    "layers": {
        "r": 2,
        "lora_alpha": 1,
        "target_modules": ["q_proj", "down_proj"],
        "layers_to_transform": 1,
    },
    "orthogonal": {
        "r": 4,
        "lora_alpha": 4,
        "init_lora_weights": "orthogonal",
        "target_modules": ["k_proj"],
    },
}


@pytest.mark.parametrize("case", sorted(CASES))
def test_a_saved_adapter_has_pefts_deltas(case: str, seed: int, tmp_path: Path) -> None:
    model = trained(seed, **CASES[case])
    model.save_pretrained(tmp_path)
    assert_same(read_adapter(tmp_path, PLAN), deltas_of(model))


@pytest.mark.parametrize("case", ["patterns", "regex", "all-linear"])
def test_tensors_in_memory_are_the_same_adapter(case: str, seed: int, tmp_path: Path) -> None:
    model = trained(seed, **CASES[case])
    model.save_pretrained(tmp_path)
    tensors = get_peft_model_state_dict(model)
    adapter = read_adapter_tensors(tensors, model.peft_config["default"].to_dict(), PLAN)
    assert_same(adapter, deltas_of(model))
    assert adapter.digest == read_adapter(tmp_path, PLAN).digest


def test_random_patterns_have_pefts_deltas(seed: int) -> None:
    rng = random.Random(seed)
    keys = [
        "q_proj",
        "proj",
        "self_attn.(q|o)_proj",
        r"^model\.layers\.1\..*",
        "0.mlp.up_proj",
        "model.layers.0.self_attn.k_proj",
        "attn.*",
    ]
    for _ in range(3):
        fields = {
            "r": rng.randint(1, 9),
            "lora_alpha": rng.randint(1, 30),
            "use_rslora": rng.random() < 0.5,
            "target_modules": rng.sample(ALL, rng.randint(1, 7)),
            "rank_pattern": {key: rng.randint(1, 12) for key in rng.sample(keys, 3)},
            "alpha_pattern": {key: rng.randint(1, 30) for key in rng.sample(keys, 3)},
        }
        model = trained(seed, **fields)
        adapter = read_adapter_tensors(
            get_peft_model_state_dict(model), model.peft_config["default"].to_dict(), PLAN
        )
        assert_same(adapter, deltas_of(model))
