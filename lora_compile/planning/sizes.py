"""Bytes of a plan, known before anything is allocated."""

from __future__ import annotations

from math import prod

from lora_compile.planning.plan import SitePlan

ITEMSIZE = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "int8": 1}


def weight_bytes(site: SitePlan, dtype: str) -> int:
    """Bytes of a site's packed weight, scales and bias.

    Args:
        dtype: the model's dtype, in which biases are stored.
    """
    quant = site.quant
    if site.tied_to is not None and quant.scheme == "none":
        return 0  # the embedding's
    total = quant.out_features * quant.in_features * ITEMSIZE[quant.weight_dtype]
    total += sum(prod(shape) * ITEMSIZE["float32"] for shape in quant.aux_shapes.values())
    if quant.bias:
        total += quant.out_features * ITEMSIZE[dtype]
    return total


def mib(count: int) -> str:
    """Bytes for people: `12.3 MiB`."""
    return f"{count / 2**20:.1f} MiB"
