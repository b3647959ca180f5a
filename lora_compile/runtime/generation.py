"""What transformers' `generate` needs to be told so that shapes stay fixed."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import nn

from lora_compile.errors import RequestInvalid

CACHE_STEP = 64
"""Static caches are rounded up to a multiple of this, so that requests of similar length share
their graphs."""


def expansion(module: nn.Module, arguments: dict[str, Any]) -> int:
    """How often transformers will repeat each row: beams or returned sequences."""
    config = arguments.get("generation_config") or module.generation_config

    def setting(name: str) -> int:
        return int(arguments.get(name) or getattr(config, name, None) or 1)

    return max(setting("num_beams"), setting("num_return_sequences"))


def cache_arguments(
    module: nn.Module,
    input_ids: torch.Tensor,
    cache: Literal["static", "dynamic"],
    arguments: dict[str, Any],
) -> dict[str, Any]:
    """The cache to generate with, unless the caller brought one or wants none.

    Raises:
        RequestInvalid: a static cache needs to know how long the result may become.
    """
    brought = "past_key_values" in arguments or "cache_implementation" in arguments
    if brought or cache == "dynamic" or arguments.get("use_cache") is False:
        return {}
    from transformers import StaticCache

    config = arguments.get("generation_config") or module.generation_config
    new = arguments.get("max_new_tokens") or getattr(config, "max_new_tokens", None)
    length = arguments.get("max_length") or getattr(config, "max_length", None)
    prompt = int(input_ids.shape[1])
    if new is None and (length is None or int(length) <= prompt):
        raise RequestInvalid(
            "a static cache needs to know how many tokens may be generated",
            expected="max_new_tokens, or a max_length beyond the prompt",
            found=f"max_new_tokens={new}, max_length={length}, a prompt of {prompt} tokens",
            fix="pass max_new_tokens, or cache='dynamic'",
        )
    total = prompt + int(new) if new is not None else int(length or 0)
    rounded = -(-total // CACHE_STEP) * CACHE_STEP
    return {"past_key_values": StaticCache(config=module.config, max_cache_len=rounded)}
