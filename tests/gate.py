"""The product's site gate, fed by the tests' own decoder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import lora_compile as lc
from lora_compile.adapters.peft_reader import read_adapter
from lora_compile.checkpoints.packing import DensePart
from lora_compile.planning.plan import SitePlan
from lora_compile.runtime.site_gate import GateResult, GateRow, SiteGate
from tests.fake_quant import decode_weight


def gate_rows(
    model: lc.LoraModel, paths: Mapping[str, Path], names: Sequence[str | None]
) -> list[GateRow]:
    """What each row must get, when `names` are its adapters."""
    read = {name: read_adapter(path, model.plan) for name, path in paths.items()}
    return [GateRow(None if name is None else read[name], 1.0) for name in names]


def judge(
    model: lc.LoraModel,
    plain: nn.Module,
    rows: Sequence[GateRow],
    ids: torch.Tensor,
    names: Sequence[str | None],
    *,
    input_scales: Mapping[str, float] | None = None,
    **kwargs: Any,
) -> GateResult:
    """Run the compiled model once under the gate.

    Args:
        plain: the unquantised model that was wrapped.
        rows: what the gate expects, which need not be what `names` ask for.
        input_scales: module path -> its static scale, under schemes that have them.
        kwargs: of the model's forward.
    """
    weights = dict(plain.named_parameters())

    def read_part(site: SitePlan, index: int) -> DensePart:
        module = site.parts[index].module
        weight = weights[f"{module}.weight"].detach().float()
        scale = None if input_scales is None else input_scales.get(module)
        return DensePart(decode_weight(weight, site.quant.scheme), None, scale)

    gate = SiteGate(model.plan, model.module, read_part, rows)
    model.backend.intercept = gate
    try:
        model(ids, adapters=names, **kwargs)
    finally:
        model.backend.intercept = None
    return gate.result
