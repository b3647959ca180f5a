"""Checkpoints in the schemes that cannot be made at load, and models served from them.

The files are written here as their producers write them, by the tests' own encoder.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from tests.fake_quant import amax_scale, encode_weight

CONFIGS: dict[str, dict[str, Any]] = {
    "fp8_block": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "fp8_tensor_static": {"quant_method": "fp8", "activation_scheme": "static"},
    "fp8_tensor_dynamic": {"quant_method": "fp8", "activation_scheme": "dynamic"},
}
"""What a checkpoint's config says: DeepSeek's and AutoFP8's form."""


def calibrate(
    model: nn.Module, ids: torch.Tensor, keep: tuple[str, ...] = ("lm_head",)
) -> dict[str, float]:
    """Module path -> static input scale: the largest input that `ids` cause, over 448."""
    scales: dict[str, float] = {}
    hooks = []
    for name, module in model.named_modules():
        if type(module) is not nn.Linear or name.rpartition(".")[2] in keep:
            continue

        def hook(_: nn.Module, args: tuple[torch.Tensor], name: str = name) -> None:
            found = float(amax_scale(args[0].float(), torch.float8_e4m3fn))
            scales[name] = max(scales.get(name, 0.0), found)

        hooks.append(module.register_forward_pre_hook(hook))
    with torch.no_grad():
        model(ids)
    for handle in hooks:
        handle.remove()
    return scales


def write_checkpoint(
    model: nn.Module,
    folder: Path,
    scheme: str,
    *,
    keep: tuple[str, ...] = ("lm_head",),
    input_scales: Mapping[str, float] | None = None,
) -> Path:
    """Save `model` with its linear layers (but `keep`) quantised."""
    model.save_pretrained(str(folder))  # type: ignore[operator]
    path = folder / "model.safetensors"
    tensors = load_file(path)
    suffix = "weight_scale_inv" if scheme == "fp8_block" else "weight_scale"
    for name, module in model.named_modules():
        if type(module) is not nn.Linear or name.rpartition(".")[2] in keep:
            continue
        codes, scales = encode_weight(tensors[f"{name}.weight"].float(), scheme)
        tensors[f"{name}.weight"], tensors[f"{name}.{suffix}"] = codes, scales
        if input_scales is not None:
            tensors[f"{name}.input_scale"] = torch.tensor(input_scales[name])
    save_file(tensors, path, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    skipped = {"ignored_layers": list(keep)}
    config["quantization_config"] = {**CONFIGS[scheme], **skipped}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def deployment(
    folder: Path,
    checkpoint: Path,
    adapters: Mapping[str, Path],
    *,
    dtype: str,
    scheme: str = "auto",
    **runtime: Any,
) -> Path:
    """A deployment file over a checkpoint and adapters."""
    path = folder / "deployment.yaml"
    data = {
        "schema_version": 1,
        "model": {"path": str(checkpoint), "dtype": dtype},
        "quantization": {"scheme": scheme},
        "adapters": [{"name": name, "path": str(where)} for name, where in adapters.items()],
        "runtime": {"max_adapters": 4, "max_rank": 16, **runtime},
    }
    path.write_text(json.dumps(data))  # JSON is YAML
    return path
