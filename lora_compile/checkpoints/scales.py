"""Checks of a projection's tensors: dtype, shape from the config, and values that can be used."""

from __future__ import annotations

import torch

from lora_compile.checkpoints.source import WeightSource
from lora_compile.errors import TensorNotFinite, TensorShape
from lora_compile.schemas.quant_info import WeightDtype
from lora_compile.schemas.quant_scheme_parts import TensorSpec

STORED_NAMES: dict[WeightDtype, str] = {
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "int8": "I8",
}
"""torch's names of dtypes -> those of safetensors."""


def scale_shape(shape: tuple[int, int], block_shape: tuple[int, int]) -> tuple[int, int]:
    """(ceil(N / bn), ceil(K / bk)): the last block of either side may be narrower."""
    return -(-shape[0] // block_shape[0]), -(-shape[1] // block_shape[1])


def stored_shapes(
    spec: TensorSpec, shape: tuple[int, int], block_shape: tuple[int, int] | None
) -> tuple[tuple[int, ...], ...]:
    """The shapes that a tensor of an (N, K) weight may have."""
    if spec.shape == "N, K":
        return (shape,)
    if spec.shape == "N, 1":
        return ((shape[0], 1), (shape[0],))
    if spec.shape == "one":
        return (), (1,), (1, 1)
    assert block_shape is not None, "block scales come with a block shape"
    return (scale_shape(shape, block_shape),)


def check_stored(
    source: WeightSource,
    key: str,
    spec: TensorSpec,
    shape: tuple[int, int],
    block_shape: tuple[int, int] | None,
    *,
    what: str,
    where: str,
) -> None:
    """Check dtype and shape of one tensor of an (N, K) weight.

    Raises TensorShape.
    """
    header = source.headers[key]
    allowed = stored_shapes(spec, shape, block_shape)
    dtypes = [STORED_NAMES[dtype] for dtype in spec.dtypes]
    if header.dtype in dtypes and header.shape in allowed:
        return
    blocks = f": one scale per {list(block_shape or ())} block of {list(shape)}"
    raise TensorShape(
        what,
        file=header.file,
        where=where,
        tensor=key,
        expected="/".join(dtypes)
        + f" {' or '.join(str(list(one)) for one in allowed)}"
        + (blocks if spec.shape.startswith("ceil") else ""),
        found=f"{header.dtype} {list(header.shape)}",
    )


def check_scale_values(source: WeightSource, key: str, *, where: str) -> torch.Tensor:
    """The scales, float32, all of them finite and > 0.

    Raises TensorNotFinite.
    """
    scale = source.tensor(key).float()
    bad = torch.nonzero(~(torch.isfinite(scale) & (scale > 0)))
    if len(bad):
        first = tuple(int(side) for side in bad[0])
        raise TensorNotFinite(
            "a scale that is not a positive finite number",
            file=source.headers[key].file,
            where=where,
            tensor=key,
            expected="finite and > 0",
            found=f"{scale[first].item()} at {list(first)}"
            + (f", and {len(bad) - 1} more" if len(bad) > 1 else ""),
            fix="the file is damaged or was written by a faulty encoder; fetch it again",
        )
    return scale
