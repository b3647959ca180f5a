"""Triton kernels and their launchers. Importable, but not runnable, without Triton installed."""

from lora_compile.ops.kernels.launch import (
    HAS_TRITON,
    BlockScales,
    Expand,
    RowScales,
    launch_gemm,
    launch_quantize,
    launch_quantize_static,
    launch_quantize_token,
    launch_shrink,
    require_triton,
)

__all__ = [
    "HAS_TRITON",
    "BlockScales",
    "Expand",
    "RowScales",
    "launch_gemm",
    "launch_quantize",
    "launch_quantize_static",
    "launch_quantize_token",
    "launch_shrink",
    "require_triton",
]
