"""A model's module tree without its weights: parameters on the meta device, in seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from lora_compile.errors import CheckpointInvalid, FeatureUnsupported
from lora_compile.planning.plan import ModelDtype

DTYPES: dict[ModelDtype, torch.dtype] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


def read_config(path: Path, *, gguf_file: str | None = None) -> Any:
    """The transformers config of a checkpoint directory (or of a GGUF file in it).

    Code that a checkpoint brings along (`auto_map`) is never executed.
    """
    from transformers import AutoConfig

    extra = {"gguf_file": gguf_file} if gguf_file else {}
    try:
        return AutoConfig.from_pretrained(
            str(path), local_files_only=True, trust_remote_code=False, **extra
        )
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointInvalid(
            "transformers cannot read the model's config",
            file=path / (gguf_file or "config.json"),
            found=str(error).splitlines()[0],
            fix="the directory must hold a config.json of a model type that transformers knows "
            "(custom code from a checkpoint is never executed)",
        ) from error


def meta_model(config: Any, dtype: ModelDtype) -> nn.Module:
    """A causal LM whose parameters are on the meta device; its buffers are real.

    Non-persistent buffers (rotary frequencies) are in no checkpoint, so they must be made for
    real here.
    """
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM

    try:
        with init_empty_weights(include_buffers=False):
            model: nn.Module = AutoModelForCausalLM.from_config(
                config, dtype=DTYPES[dtype], trust_remote_code=False
            )
    except ValueError as error:
        raise FeatureUnsupported(
            f"transformers has no causal language model for {type(config).__name__}",
            found=str(error).splitlines()[0],
        ) from error
    return model.eval()
