"""Models that one schema file serves, and widths that are awkward, against PEFT."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

import lora_compile as lc
from tests.fake_quant import fake_quantise
from tests.tiny import llama, make_adapter, peft_logits, prompts, relative

SHAPE: dict[str, Any] = {
    "hidden_size": 192, "intermediate_size": 320, "num_hidden_layers": 2, "vocab_size": 320,
    "num_attention_heads": 6, "num_key_value_heads": 2, "pad_token_id": 0,
}  # fmt: skip


def build(config: Any, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model: nn.Module = AutoModelForCausalLM.from_config(config).eval().float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.mul_(3.0)
    return model


@pytest.mark.parametrize("scheme", ["none", "fp8_block"])
@pytest.mark.parametrize(
    "config",
    [MistralConfig(**SHAPE), Qwen2Config(**SHAPE), Qwen3Config(**SHAPE, head_dim=40)],
    ids=["mistral", "qwen2 with biases", "qwen3 with head_dim"],
)
def test_one_schema_serves_its_relatives(
    config: Any, scheme: str, tmp_path: Path, seed: int
) -> None:
    plain = build(config, seed)
    path = make_adapter(plain, tmp_path / "a", rank=6, seed=seed)
    model = lc.wrap(copy.deepcopy(plain), quantization=scheme, adapters={"a": path})
    oracle = plain if scheme == "none" else fake_quantise(plain)
    ids = prompts(seed, 2, 9)
    found = model(ids, adapters=["a", None]).logits
    bound = 1e-5 if scheme == "none" else 1e-1
    assert relative(found[:1], peft_logits(oracle, path, ids[:1])) <= bound
    with torch.no_grad():
        assert relative(found[1:], oracle(ids[1:]).logits) <= bound


def test_parts_of_80_rows_have_a_partial_last_block(tmp_path: Path, seed: int) -> None:
    """q 320, k 80, v 80: no part is a whole number of blocks, so scales restart in mid-block."""
    plain = llama(seed, head_dim=40)
    path = make_adapter(plain, tmp_path / "a", rank=6, seed=seed)
    model = lc.wrap(copy.deepcopy(plain), quantization="fp8_block", adapters={"a": path})
    site = model.plan.by_name["model.layers.0.self_attn.qkv_proj"]
    assert [part.rows for part in site.quant.parts] == [(0, 320), (320, 400), (400, 480)]
    assert [part.scale_rows for part in site.quant.parts] == [(0, 3), (3, 4), (4, 5)]
    oracle = fake_quantise(plain)
    ids = prompts(seed, 2, 9)
    found = model(ids, adapters=[None, "a"]).logits
    assert relative(found[1:], peft_logits(oracle, path, ids[1:])) <= 1e-1
    # One projection, without the codes that may flip further on:
    k_proj = model.module.get_submodule("model.layers.0.self_attn.k_proj")
    x = torch.randn(1, 4, 256)
    expected = oracle.get_submodule("model.layers.0.self_attn.k_proj")(x)
    with model.bind(ids[:1, :4], [None]):
        assert relative(k_proj(x), expected) <= 1e-5


@pytest.mark.parametrize("scheme", ["fp8_block", "fp8_tensor_dynamic"])
def test_rslora_of_odd_rank_on_a_quantised_base(scheme: str, tmp_path: Path, seed: int) -> None:
    """alpha / sqrt(9) = alpha / 3."""
    plain = llama(seed)
    settings: dict[str, Any] = {"rank": 9, "seed": seed, "lora_alpha": 18, "use_rslora": True}
    path = make_adapter(plain, tmp_path / "a", **settings)
    model = lc.wrap(copy.deepcopy(plain), quantization=scheme, adapters={"a": path})
    ids = prompts(seed, 1, 9)
    found = model(ids, adapters=["a"]).logits
    assert relative(found, peft_logits(fake_quantise(plain, scheme), path, ids)) <= 1e-1
    site = model.module.get_submodule("model.layers.0.mlp.down_proj.site")
    assert float(site.lora_scale[0, 0]) == pytest.approx(6.0)


def test_an_adapter_on_k_alone_leaves_q_and_v_at_the_base(tmp_path: Path, seed: int) -> None:
    plain = llama(seed)
    path = make_adapter(plain, tmp_path / "a", rank=4, seed=seed, targets=("k_proj",))
    model = lc.wrap(copy.deepcopy(plain), adapters={"a": path})
    ids = prompts(seed, 2, 9)
    found = model(ids, adapters=["a", None]).logits
    assert relative(found[:1], peft_logits(plain, path, ids[:1])) <= 1e-5
    x = torch.randn(2, 4, 256)
    attention = model.module.get_submodule("model.layers.0.self_attn")
    with model.bind(ids[:, :4], [None, None]):
        base = {name: getattr(attention, name)(x) for name in ("q_proj", "k_proj", "v_proj")}
    with model.bind(ids[:, :4], ["a", None]):
        live = {name: getattr(attention, name)(x) for name in base}
    assert torch.equal(live["q_proj"], base["q_proj"])
    assert torch.equal(live["v_proj"], base["v_proj"])
    assert not torch.equal(live["k_proj"][0], base["k_proj"][0])
    assert torch.equal(live["k_proj"][1], base["k_proj"][1])


@pytest.mark.parametrize("scheme", ["none", "fp8_block"])
def test_bf16_row_alone_is_within_two_ulp_site_by_site(
    scheme: str, tmp_path: Path, seed: int
) -> None:
    plain = llama(seed, torch.bfloat16)
    path = make_adapter(plain, tmp_path / "a", rank=8, seed=seed)
    model = lc.wrap(copy.deepcopy(plain), quantization=scheme, adapters={"a": path})
    ids = prompts(seed, 3, 5)
    for name in ("self_attn.q_proj", "self_attn.v_proj", "mlp.up_proj", "mlp.down_proj"):
        site = model.module.get_submodule(f"model.layers.1.{name}")
        x = torch.randn(3, 5, site.in_features, dtype=torch.bfloat16)
        with model.bind(ids, [None, "a", None]):
            batch = site(x)
        with model.bind(ids[1:2], ["a"]):
            alone = site(x[1:2])
        largest = batch[1].float().abs().amax(-1, keepdim=True)
        ulp = torch.exp2(torch.floor(torch.log2(largest)) - 7)
        assert ((batch[1].float() - alone[0].float()).abs() <= 2 * ulp).all(), name
