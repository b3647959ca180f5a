"""Parameters outside projections (norms, router biases and the like), loaded by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import nn

from lora_compile.checkpoints.source import WeightSource
from lora_compile.checkpoints.stacked import NO_RULES, Stack, read_stack
from lora_compile.errors import FaultList, SiteMissing, TensorMissing, TensorShape


def load_other(
    model: nn.Module,
    source: WeightSource,
    names: Iterable[str],
    dtype: torch.dtype,
    *,
    device: torch.device | str = "cpu",
    stacks: Mapping[str, Stack] = NO_RULES.stacks,
) -> None:
    """Put the named tensors of `source` into `model`, replacing meta or real ones.

    Those in `stacks` are assembled from their pieces, which the survey has checked.

    Floating-point tensors become `dtype`, except those that the model's class lists as to be kept
    in float32 (transformers' `_keep_in_fp32_modules_strict`, and `_keep_in_fp32_modules` for
    float16), e.g. the correction bias of DeepSeek-V3 routers. Parameters need no gradient.

    Raises TensorMissing, TensorShape or SiteMissing, together as Faults; on any fault the model
    is left as it was.
    """
    faults = FaultList()
    modules = dict(model.named_modules())
    found: list[tuple[str, nn.Module, str, torch.Tensor]] = []
    for name in names:
        path, _, leaf = name.rpartition(".")
        owner = modules.get(path)
        present = None if owner is None else getattr(owner, leaf, None)
        header = source.headers.get(name)
        if owner is None or not isinstance(present, torch.Tensor):
            faults.add(SiteMissing("the model has no such parameter", where=name))
        elif name in stacks:
            found.append((name, owner, leaf, present))
        elif header is None:
            faults.add(
                TensorMissing(
                    "the checkpoint lacks a parameter", file=source.name, where=path, tensor=name
                )
            )
        elif header.shape != tuple(present.shape):
            faults.add(
                TensorShape(
                    "a parameter of the wrong shape",
                    file=header.file,
                    where=path,
                    tensor=name,
                    expected=list(present.shape),
                    found=list(header.shape),
                )
            )
        else:
            found.append((name, owner, leaf, present))
    faults.raise_if_any()
    kept = _kept_in_float32(model, dtype)
    for name, owner, leaf, present in found:
        keep = any(f".{entry}." in f".{name}." for entry in kept)
        wanted = torch.float32 if keep else dtype
        if name in stacks:
            loaded = read_stack(stacks[name], source, dtype=wanted, device=device)
        else:
            tensor = source.tensor(name)
            target = wanted if tensor.is_floating_point() else tensor.dtype
            # Always a copy: the source may be a memory map or the model that is being wrapped.
            loaded = tensor.detach().to(device=device, dtype=target, copy=True)
        if isinstance(present, nn.Parameter):
            setattr(owner, leaf, nn.Parameter(loaded, requires_grad=False))
        else:
            setattr(owner, leaf, loaded)


def _kept_in_float32(model: nn.Module, dtype: torch.dtype) -> set[str]:
    """Names of modules or tensors that the model's class wants in float32 whatever `dtype` is."""
    kept = set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    if dtype == torch.float16:
        kept |= set(getattr(model, "_keep_in_fp32_modules", None) or ())
    return kept
