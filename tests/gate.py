"""The product's site gate, fed by the tests' own decoder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import lora_compile as lc
from lora_compile.adapters.peft_reader import read_adapter
from lora_compile.planning.plan import SitePlan
from lora_compile.runtime.site_gate import GateResult, GateRow, SiteGate
from tests.fake_quant import decode_block_fp8


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
    **kwargs: Any,
) -> GateResult:
    """Run the compiled model once under the gate.

    Args:
        plain: the unquantised model that was wrapped.
        rows: what the gate expects, which need not be what `names` ask for.
        kwargs: of the model's forward.
    """
    weights = dict(plain.named_parameters())

    def dense(site: SitePlan, index: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        weight = weights[f"{site.parts[index].module}.weight"].detach().float()
        return (decode_block_fp8(weight) if site.quant.scheme == "fp8_block" else weight), None

    gate = SiteGate(model.plan, model.module, dense, rows)
    model.backend.intercept = gate
    try:
        model(ids, adapters=names, **kwargs)
    finally:
        model.backend.intercept = None
    return gate.result
