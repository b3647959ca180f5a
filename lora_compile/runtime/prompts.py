"""A deployment's prompts as one left-padded batch."""

from __future__ import annotations

from typing import Any

import torch

from lora_compile.schemas.deployment import Generation


def encode_rows(
    tokenizer: Any, generation: Generation, device: torch.device
) -> dict[str, torch.Tensor]:
    """Encode every row's prompt.

    Returns:
        `input_ids` and `attention_mask`, both (rows, longest prompt), padded on the left so that
        the last position of each row is its last token.
    """
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    texts = [_text(tokenizer, generation, row.prompt) for row in generation.rows]
    batch = tokenizer(
        texts,
        return_tensors="pt",
        padding=True,
        padding_side="left",
        # A chat template writes the special tokens itself.
        add_special_tokens=not generation.chat,
    )
    return {name: batch[name].to(device) for name in ("input_ids", "attention_mask")}


def _text(tokenizer: Any, generation: Generation, prompt: str) -> str:
    if not generation.chat:
        return prompt
    messages = [{"role": "user", "content": prompt}]
    if generation.system is not None:
        messages.insert(0, {"role": "system", "content": generation.system})
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
