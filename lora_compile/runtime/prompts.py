"""Prompts as one left-padded batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def encode_prompts(
    tokenizer: Any,
    prompts: Sequence[str],
    *,
    chat: bool,
    system: str | None,
    device: torch.device,
    spare: int = 0,
) -> dict[str, torch.Tensor]:
    """Encode prompts.

    Args:
        chat: whether they go through the tokenizer's chat template.
        system: a system message for every row; needs `chat`.
        spare: positions of padding that even the longest prompt gets.

    Returns:
        `input_ids` and `attention_mask`, both (rows, longest prompt + spare), padded on the left
        so that the last position of each row is its last token.
    """
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    texts = [_templated(tokenizer, prompt, system) if chat else prompt for prompt in prompts]
    # A chat template writes the special tokens itself.
    ids = tokenizer(texts, add_special_tokens=not chat)["input_ids"]
    batch = tokenizer.pad(
        {"input_ids": ids},
        return_tensors="pt",
        padding="max_length",
        max_length=max(map(len, ids)) + spare,
        padding_side="left",
    )
    return {name: batch[name].to(device) for name in ("input_ids", "attention_mask")}


def _templated(tokenizer: Any, prompt: str, system: str | None) -> str:
    messages = [{"role": "user", "content": prompt}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
