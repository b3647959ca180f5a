"""Every model shape times every scheme: a checkpoint, an oracle and adapters for each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from tests.conftest import SEED
from tests.deepseek import deepseek, deepseek_adapter, for_peft
from tests.fake_quant import fake_quantise
from tests.quantised import calibrate, deployment, write_checkpoint
from tests.tiny import llama, make_adapter, prompts

SCHEMES = ("none", "fp8_block", "fp8_tensor_static", "fp8_tensor_dynamic", "int8_channel")
AT_LOAD = ("none", "int8_channel")
"""Schemes made at load here; the others are read from a checkpoint that the tests write."""


@dataclass(frozen=True)
class Variant:
    """One model in one scheme, on disk."""

    scheme: str
    plain: nn.Module
    oracle: nn.Module
    """transformers' model with decoded weights and decoded q(x), ready for PEFT."""
    input_scales: dict[str, float] | None
    adapters: dict[str, Path]
    file: Path
    """The deployment, in float32."""


def make_variant(shape: str, scheme: str, folder: Path, **runtime: Any) -> Variant:
    """`shape`: llama or deepseek. Adapters: on every linear site, on one part, on another."""
    adapter: Callable[..., Path]
    if shape == "llama":
        plain: nn.Module = llama(SEED)
        adapter, parts = make_adapter, ("k_proj", "q_proj")
    else:
        plain = deepseek(SEED, num_hidden_layers=2)
        adapter, parts = deepseek_adapter, ("kv_a_proj_with_mqa", "q_a_proj")
    paths = {
        "every": adapter(plain, folder / "every", rank=8, seed=1, lora_alpha=16),
        "second": adapter(plain, folder / "second", rank=4, seed=2, targets=(parts[0],)),
        "first": adapter(plain, folder / "first", rank=16, seed=3, targets=(parts[1],)),
    }
    scales = calibrate(plain, prompts(SEED, 4, 40)) if scheme == "fp8_tensor_static" else None
    checkpoint = folder / "model"
    if scheme in AT_LOAD:
        plain.save_pretrained(str(checkpoint))  # type: ignore[operator]
    else:
        write_checkpoint(plain, checkpoint, scheme, input_scales=scales)
    file = deployment(
        folder,
        checkpoint,
        paths,
        dtype="float32",
        scheme=scheme if scheme in AT_LOAD else "auto",
        **runtime,
    )
    oracle = for_peft(fake_quantise(plain, scheme, input_scales=scales))
    return Variant(scheme, plain, oracle, scales, paths, file)
