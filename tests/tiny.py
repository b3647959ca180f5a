"""Tiny random models and adapters for tests: transformers makes the model, PEFT the adapters."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

ALL_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
RANKS = (1, 3, 8, 16, 33, 64)


def llama_config(**changes: Any) -> LlamaConfig:
    """Llama-like with GQA; no width but the hidden size is a multiple of 128."""
    settings: dict[str, Any] = {
        "hidden_size": 256,
        "intermediate_size": 384,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 320,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": None,
        **changes,
    }
    return LlamaConfig(**settings)


def llama(seed: int, dtype: torch.dtype = torch.float32, **changes: Any) -> LlamaForCausalLM:
    """A random model whose logits have a standard deviation of at least 2, so that faults show."""
    torch.manual_seed(seed)
    config = llama_config(**changes)
    config._attn_implementation = "sdpa"
    model = LlamaForCausalLM(config).eval().to(dtype)
    ids = torch.randint(3, config.vocab_size, (2, 16))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            elif parameter.dim() == 2:
                parameter.mul_(2.0)
        model.lm_head.weight.mul_(4.0 / model(ids).logits.float().std())
        if config.tie_word_embeddings:
            model.tie_weights()
        assert model(ids).logits.float().std() >= 2
    return model


def make_adapter(
    model: nn.Module,
    path: Path,
    *,
    rank: int = 8,
    seed: int = 0,
    strength: float = 0.3,
    targets: tuple[str, ...] | str = ALL_LINEAR,
    **config: Any,
) -> Path:
    """Write a PEFT adapter with random A and B (B is zero only in an untrained adapter)."""
    torch.manual_seed(seed)
    wanted = list(targets) if isinstance(targets, tuple) else targets
    settings = {"r": rank, "lora_alpha": rank, "target_modules": wanted, **config}
    peft = get_peft_model(copy.deepcopy(model), LoraConfig(**settings, task_type="CAUSAL_LM"))
    for name, parameter in peft.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=strength / rank**0.5 / parameter.shape[0] ** 0.25)
    peft.save_pretrained(str(path), save_embedding_layers=False)
    return path


def peft_logits(model: nn.Module, path: Path, ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    """What transformers and PEFT give for one adapter."""
    peft = PeftModel.from_pretrained(copy.deepcopy(model), str(path)).eval()
    with torch.no_grad():
        logits: torch.Tensor = peft(ids, **kwargs).logits
    return logits


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference over the largest expected value."""
    return float((found - expected).abs().max() / expected.abs().max())


def prompts(seed: int, rows: int, length: int, vocab: int = 320) -> torch.Tensor:
    """Random token ids (rows, length), without the pad token."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, vocab, (rows, length), generator=generator)
