"""Checks of block scales: block size from the config, shape from that, values usable."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from lora_compile.checkpoints.source import WeightSource
from lora_compile.errors import CheckpointInvalid, TensorNotFinite, TensorShape

SCALE_SUFFIX = ".weight_scale_inv"


def scale_shape(shape: tuple[int, int], block_shape: tuple[int, int]) -> tuple[int, int]:
    """(ceil(N / bn), ceil(K / bk)): the last block of either side may be narrower."""
    return -(-shape[0] // block_shape[0]), -(-shape[1] // block_shape[1])


def read_block_shape(source: WeightSource, config: Mapping[str, Any] | None) -> tuple[int, int]:
    """`weight_block_size` of the config, (rows, columns).

    Never derived from shapes: 192 rows with 2 scale rows are blocks of 128 and 64, not of 96.
    Raises CheckpointInvalid.
    """
    value = None if config is None else config.get("weight_block_size")
    if (
        isinstance(value, list | tuple)
        and len(value) == 2
        and all(type(side) is int and side > 0 for side in value)
    ):
        return value[0], value[1]
    scales = sorted(key for key in source.headers if key.endswith(SCALE_SUFFIX))
    raise CheckpointInvalid(
        "block scales need `weight_block_size`, which the config does not give",
        file=source.name,
        where="quantization_config.weight_block_size",
        tensor=scales[0] if scales else None,
        expected="two positive integers, e.g. [128, 128]",
        found="no quantization_config" if config is None else value,
    )


def check_block_scale(
    source: WeightSource,
    key: str,
    shape: tuple[int, int],
    block_shape: tuple[int, int],
    *,
    where: str,
) -> None:
    """Check dtype, shape and values of the scales of one (N, K) weight.

    Raises TensorShape, or TensorNotFinite for NaN, Inf or a value <= 0.
    """
    header = source.headers[key]
    expected = scale_shape(shape, block_shape)
    if header.dtype != "F32" or header.shape != expected:
        raise TensorShape(
            "block scales of the wrong shape or dtype",
            file=header.file,
            where=where,
            tensor=key,
            expected=f"F32 {list(expected)}: one scale per {list(block_shape)} block of "
            f"{list(shape)}",
            found=f"{header.dtype} {list(header.shape)}",
        )
    scale = source.tensor(key)
    bad = torch.nonzero(~(torch.isfinite(scale) & (scale > 0)))
    if len(bad):
        first = tuple(int(side) for side in bad[0])
        raise TensorNotFinite(
            "a scale that is not a positive finite number",
            file=header.file,
            where=where,
            tensor=key,
            expected="finite and > 0",
            found=f"{scale[first].item()} at {list(first)}"
            + (f", and {len(bad) - 1} more" if len(bad) > 1 else ""),
            fix="the file is damaged or was written by a faulty encoder; fetch it again",
        )
