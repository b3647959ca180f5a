"""Random checkpoints: weights drawn for a config, to try things out without a download.

A random model as transformers initialises it has almost equal logits, in which faults hide. Here
norms vary and logits are scaled to a standard deviation of `LOGIT_STD`.
"""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import Any

import torch

from lora_compile.checkpoints.cache import default_cache_dir, is_complete, make_once
from lora_compile.errors import CheckpointInvalid

LOGIT_STD = 2.5
RESIDUAL = ("o_proj.weight", "down_proj.weight", "down_proj")
"""Ends of the names of projections that write to the residual stream."""
# Raise it when the way of drawing changes.
VERSION = 4


def random_directory(path: Path, *, seed: int, dtype: torch.dtype) -> Path:
    """Where the checkpoint of the config in `path` is kept.

    Named by the content of its files, the seed and the dtype.

    Raises CheckpointInvalid where `path` holds weights of its own.
    """
    files = sorted(entry for entry in path.iterdir() if entry.is_file())
    own = [entry.name for entry in files if entry.suffix in (".safetensors", ".bin", ".gguf")]
    if own:
        raise CheckpointInvalid(
            "random weights are asked for, but the model's folder has weights",
            file=path,
            where="model.weights",
            expected="a folder with a config.json (and a tokenizer) alone",
            found=", ".join(own),
            fix="set model.weights: checkpoint, or name another folder",
        )
    digest = hashlib.sha256(repr((seed, str(dtype), VERSION)).encode())
    for entry in files:
        digest.update(entry.name.encode() + b"\0" + entry.read_bytes() + b"\0")
    return default_cache_dir() / "random" / f"{path.name}-{digest.hexdigest()[:16]}"


def find_random(path: Path, *, seed: int, dtype: torch.dtype) -> Path | None:
    """The cached directory that `ensure_random` would answer with, or None; makes nothing."""
    final = random_directory(path, seed=seed, dtype=dtype)
    return final if is_complete(final) else None


def ensure_random(path: Path, *, seed: int, dtype: torch.dtype) -> Path:
    """A checkpoint directory with drawn weights for the config in `path`; made once.

    The same config, seed and dtype give the same weights on the same version of torch.
    """

    def make(_: Path, out: Path) -> None:
        model: Any = _draw(path, seed).to(dtype)
        model.save_pretrained(str(out))
        for entry in path.iterdir():
            if entry.is_file() and not (out / entry.name).exists():
                shutil.copyfile(entry, out / entry.name)

    return make_once(
        random_directory(path, seed=seed, dtype=dtype),
        make,
        facts={"source": path.name, "seed": seed, "dtype": str(dtype).removeprefix("torch.")},
        tools=("transformers", "torch", "safetensors"),
    )


@torch.no_grad()
def _draw(path: Path, seed: int) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model.eval()
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5)
            elif "embed" in name:
                parameter.normal_()
            else:
                # Each branch adds half of what is in the residual stream: every layer matters, and
                # rounding errors do not grow from layer to layer.
                gain = 0.5 if name.endswith(RESIDUAL) else 1.0
                parameter.normal_(std=gain * parameter.shape[-1] ** -0.5)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                # Scores lie in (0, 1), so steps above 1 alone decide which experts a token gets:
                # rounding cannot send it to others, which would be a large difference.
                order = torch.randperm(buffer.numel(), dtype=buffer.dtype)
                buffer.copy_(1.1 * order.reshape(buffer.shape))
        ids = torch.randint(3, config.vocab_size, (2, 32))
    head = model.get_output_embeddings()
    for _ in range(4):  # a tied head scales the inputs too
        head.weight.mul_(LOGIT_STD / model(ids, use_cache=False).logits.std())
    return model
