"""Bytes of a plan, known before anything is allocated."""

from __future__ import annotations

from lora_compile.planning.plan import SitePlan

ITEMSIZE = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1}


def weight_bytes(site: SitePlan, dtype: str) -> int:
    """Bytes of a site's packed weight, scales and bias.

    Args:
        dtype: the model's dtype, in which biases are stored.
    """
    quant = site.quant
    if site.tied_to is not None and quant.scheme == "none":
        return 0  # the embedding's
    total = quant.out_features * quant.in_features * ITEMSIZE[quant.weight_dtype]
    if quant.scale.block_shape is not None:
        assert quant.scale.dtype is not None
        last = quant.parts[-1].scale_rows
        assert last is not None
        columns = -(-quant.in_features // quant.scale.block_shape[1])
        total += last[1] * columns * ITEMSIZE[quant.scale.dtype]
    if quant.bias:
        total += quant.out_features * ITEMSIZE[dtype]
    return total


def mib(count: int) -> str:
    """Bytes for people: `12.3 MiB`."""
    return f"{count / 2**20:.1f} MiB"
