"""Tiny random DeepSeek models and adapters for tests: transformers and PEFT make them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, DeepseekV2Config, DeepseekV3Config

from tests.tiny import make_adapter

ATTENTION = ("q_a_proj", "kv_a_proj_with_mqa", "q_b_proj", "kv_b_proj", "o_proj")
LITE_ATTENTION = ("q_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")

SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 320,
    "moe_intermediate_size": 96,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 96,
    "kv_lora_rank": 64,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 48,
    "vocab_size": 320,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
"""kv_a_proj_with_mqa has 64 + 16 = 80 rows beside the 96 of q_a_proj."""


def deepseek(
    seed: int,
    dtype: torch.dtype = torch.float32,
    config_class: type[DeepseekV3Config] | type[DeepseekV2Config] = DeepseekV3Config,
    **changes: Any,
) -> nn.Module:
    """A random model whose logits have a standard deviation of at least 2, so that faults show.

    Routing is by weights and correction biases that are far apart, so that rounding in float32
    seldom changes the choice of an expert.
    """
    torch.manual_seed(seed)
    config = config_class(**{**SIZES, **changes})
    config._attn_implementation = "sdpa"
    model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.mul_(2.0)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.uniform_(-0.2, 0.2)
        ids = torch.randint(3, config.vocab_size, (2, 16))
        model.lm_head.weight.mul_(4.0 / model(ids).logits.std())
        if config.tie_word_embeddings:
            model.tie_weights()
        assert model(ids).logits.std() >= 2
    return as_dtype(model, dtype)


def as_dtype(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The model in `dtype`, its correction biases in float32 as transformers loads them."""
    biases = {n: b for n, b in model.named_buffers() if n.endswith("e_score_correction_bias")}
    model = model.to(dtype)
    for name, bias in biases.items():
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, bias.float())
    return model


def for_peft(model: nn.Module) -> nn.Module:
    """A copy under another model type.

    For DeepSeek's own, PEFT moves the targets gate_proj, up_proj and down_proj from shared experts
    and dense layers to the routed experts; under an unknown type it adapts what is named.
    """
    changed = copy.deepcopy(model)
    changed.config.model_type = "plain"
    return changed


def targets(model: nn.Module) -> tuple[str, ...]:
    """Every projection of the decoder layers; routed experts are no linear modules."""
    attention = LITE_ATTENTION if model.config.q_lora_rank is None else ATTENTION
    return (*attention, *MLP)


def deepseek_adapter(model: nn.Module, path: Path, **settings: Any) -> Path:
    """A PEFT adapter over all projections, or over `targets`."""
    return make_adapter(for_peft(model), path, **{"targets": targets(model), **settings})
