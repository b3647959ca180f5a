"""The CPU path: each lowered op as one opaque call that runs ATen.

The arguments are those of the lowered op without `kernel`. Inductor could compile the plain PyTorch
bodies too (the `torch` kernels), but it takes seconds of code generation for each layer of a model.
Behind an opaque op a model compiles in the time of its norms and attention, and the op may look at
the row map: a batch without adapters pays nothing for its slots.
"""

from __future__ import annotations

from lora_compile.ops.aten.dense import aten_linear_lora
from lora_compile.ops.aten.fp8_block import (
    aten_fp8_block_linear,
    aten_fp8_block_linear_lora,
    aten_quantize_fp8_group,
)
from lora_compile.ops.aten.lora import aten_lora_shrink
from lora_compile.ops.aten.scaled import (
    aten_quantize_static,
    aten_quantize_token,
    aten_scaled_linear,
    aten_scaled_linear_lora,
)

__all__ = [
    "aten_fp8_block_linear",
    "aten_fp8_block_linear_lora",
    "aten_linear_lora",
    "aten_lora_shrink",
    "aten_quantize_fp8_group",
    "aten_quantize_static",
    "aten_quantize_token",
    "aten_scaled_linear",
    "aten_scaled_linear_lora",
]
