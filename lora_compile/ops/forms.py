"""Every lowered op: its two forms and what it is for.

A lowered op takes `kernel` as its last argument; its ATen form takes the same arguments without it.
A new op needs a line here, and the passes know it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

import lora_compile.ops  # noqa: F401  (registers the ops)

_ops = torch.ops.lora_compile


@dataclass(frozen=True)
class LoweredOp:
    """One lowered op, as overload packets."""

    op: Any
    aten: Any | None
    """Its form on a CPU; None: `op` itself."""
    role: Literal["input", "output"]
    """`input`: prepares a site's x, so sites that read the same x can share it. `output`: gives a
    site's output, one per site."""


LOWERED = (
    LoweredOp(_ops.lora_shrink, _ops.aten_lora_shrink, "input"),
    LoweredOp(_ops.linear, None, "output"),
    LoweredOp(_ops.linear_lora, _ops.aten_linear_lora, "output"),
    LoweredOp(_ops.quantize_fp8_group, _ops.aten_quantize_fp8_group, "input"),
    LoweredOp(_ops.fp8_block_linear, _ops.aten_fp8_block_linear, "output"),
    LoweredOp(_ops.fp8_block_linear_lora, _ops.aten_fp8_block_linear_lora, "output"),
    LoweredOp(_ops.quantize_token, _ops.aten_quantize_token, "input"),
    LoweredOp(_ops.quantize_static, _ops.aten_quantize_static, "input"),
    LoweredOp(_ops.scaled_linear, _ops.aten_scaled_linear, "output"),
    LoweredOp(_ops.scaled_linear_lora, _ops.aten_scaled_linear_lora, "output"),
)

KERNEL_OPS = tuple(form.op for form in LOWERED)
"""Every op whose last argument is `kernel`."""

ATEN_OPS: dict[Any, Any] = {form.op: form.aten for form in LOWERED if form.aten is not None}
"""Lowered op -> the op that implements it on a CPU: the same arguments without `kernel`."""

INPUT_OPS = tuple(form.op for form in LOWERED if form.role == "input")

OUTPUT_OPS = tuple(
    op for form in LOWERED if form.role == "output" for op in (form.op, form.aten) if op is not None
)
"""The ops that give a linear site's output, in both forms."""
