"""The semantic ops. Importing this package registers all of them under `torch.ops.lora_compile`.

`markers`: what a rewritten model calls. `lora`, `dense`, `fp8_block`, `scaled`: what the passes
lower the markers to; `forms` lists them. `reference`: what all of them mean.
"""

from lora_compile.ops.aten import (
    aten_fp8_block_linear,
    aten_fp8_block_linear_lora,
    aten_linear_lora,
    aten_lora_shrink,
    aten_quantize_fp8_group,
    aten_quantize_static,
    aten_quantize_token,
    aten_scaled_linear,
    aten_scaled_linear_lora,
)
from lora_compile.ops.dense import linear, linear_lora
from lora_compile.ops.fp8_block import (
    fp8_block_linear,
    fp8_block_linear_lora,
    quantize_fp8_group,
)
from lora_compile.ops.lora import lora_shrink
from lora_compile.ops.markers import site_embedding, site_experts, site_linear
from lora_compile.ops.scaled import (
    quantize_static,
    quantize_token,
    scaled_linear,
    scaled_linear_lora,
)
from lora_compile.ops.source_digest import kernel_name

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
    "fp8_block_linear",
    "fp8_block_linear_lora",
    "kernel_name",
    "linear",
    "linear_lora",
    "lora_shrink",
    "quantize_fp8_group",
    "quantize_static",
    "quantize_token",
    "scaled_linear",
    "scaled_linear_lora",
    "site_embedding",
    "site_experts",
    "site_linear",
]
