"""What each shipped scheme means, in float64 with loops over blocks: an entry per scheme.

Nothing here comes from lora_compile but the encoder that makes the packed weights, and that is held
to the scheme's precision.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lora_compile.checkpoints.codes import encode
from lora_compile.schemas.quant_info import ScaleGranularity, WeightDtype
from lora_compile.schemas.quant_scheme import QuantScheme

BLOCK = (64, 32)
"""Not square: rows and columns taken for each other show."""
Activation = Callable[[Tensor, float, float | None], Tensor]
"""(x, nudge, input scale) -> q(x); each quotient is multiplied by nudge before it is rounded."""


@dataclass(frozen=True)
class Oracle:
    """How parts are packed (by the product's own encoder), and what they mean (loops, float64)."""

    weight_dtype: WeightDtype
    granularity: ScaleGranularity
    activation: Activation
    static: bool
    """Each part has an input scale of its own."""
    relative: float
    """Largest relative error of an encoded weight that is not tiny beside the largest."""
    absolute: float
    """The same beside the largest, of any weight."""


def fp8(quotient: Tensor) -> Tensor:
    return quotient.clamp(-448, 448).to(torch.float8_e4m3fn).double()


def int8(quotient: Tensor) -> Tensor:
    return quotient.round().clamp(-127, 127).double()


def dynamic(code: Callable[[Tensor], Tensor], largest: float, group: int | None) -> Activation:
    """One scale per row and group of columns; None: all columns."""

    def decoded(x: Tensor, nudge: float, _: float | None) -> Tensor:
        groups = []
        for values in x.split(group or x.shape[1], 1):
            scale = (values.abs().amax(1, keepdim=True) / largest).clamp(min=1e-12)
            groups.append(code(values / scale * nudge) * scale.double())
        return torch.cat(groups, 1)

    return decoded


def static_fp8(x: Tensor, nudge: float, input_scale: float | None) -> Tensor:
    assert input_scale is not None
    scale = torch.tensor(input_scale)
    return fp8(x / scale * nudge) * scale.double()


FP8, INT8 = (2**-4, 2**-4 / 1000), (0.0, 1 / 253)
"""Errors of codes: FP8's are relative; INT8's are half a step of 1/127 of the largest."""
TOKEN_FP8 = dynamic(fp8, 448, None)
ORACLES = {
    "none": Oracle("float32", "none", lambda x, nudge, _: x.double(), False, 0, 0),
    "fp8_block": Oracle("float8_e4m3fn", "block", dynamic(fp8, 448, BLOCK[1]), False, *FP8),
    "fp8_tensor_static": Oracle("float8_e4m3fn", "tensor", static_fp8, True, *FP8),
    "fp8_tensor_dynamic": Oracle("float8_e4m3fn", "tensor", TOKEN_FP8, False, *FP8),
    "fp8_channel": Oracle("float8_e4m3fn", "row", TOKEN_FP8, False, *FP8),
    "int8_channel": Oracle("int8", "row", dynamic(int8, 127, None), False, *INT8),
}


def decoded(oracle: Oracle, codes: Tensor, scale: Tensor) -> Tensor:
    """Codes times their scales, in float64."""
    values = codes.double()
    high, wide = BLOCK if oracle.granularity == "block" else (1, values.shape[1])
    for n in range(0, values.shape[0], high):
        for k in range(0, values.shape[1], wide):
            one = scale[n // high, k // wide] if oracle.granularity == "block" else scale[n]
            values[n : n + high, k : k + wide] *= one.double()
    return values


def encode_part(oracle: Oracle, weight: Tensor) -> tuple[Tensor, list[Tensor], Tensor]:
    """Weight, its scales if it has some, and its values in float64."""
    if oracle.granularity == "none":
        return weight, [], weight.double()
    dtype, block = getattr(torch, oracle.weight_dtype), oracle.granularity == "block"
    codes, scale = encode(weight, dtype, oracle.granularity, BLOCK if block else None)
    assert codes.dtype == dtype
    return codes, [scale], decoded(oracle, codes, scale)


@dataclass(frozen=True)
class Packed:
    """A group of parts, as the ops take it."""

    weight: Tensor
    aux: list[Tensor]
    dense: Tensor
    """Its values in float64."""
    quant: str
    rows: list[tuple[int, int]]
    input_scales: list[float] | list[None]

    def base(self, oracle: Oracle, x: Tensor, nudge: float = 1) -> Tensor:
        """Q(W) q(x) in float64, part by part."""
        return torch.cat(
            [
                oracle.activation(x, nudge, scale) @ self.dense[slice(*rows)].T
                for rows, scale in zip(self.rows, self.input_scales, strict=True)
            ],
            1,
        )


def pack(scheme: QuantScheme, weights: list[Tensor], input_scale: float) -> Packed:
    """Encode a group.

    Args:
        input_scale: of the first part, where scales are static; each next part has a hundred times
            that of the one before it, from the third on the first again.
    """
    oracle = ORACLES[scheme.name]
    parts = [encode_part(oracle, weight) for weight in weights]
    dense, wanted = torch.cat([part[2] for part in parts]), torch.cat(weights)
    slack = wanted.abs() * oracle.relative + wanted.abs().max() * oracle.absolute
    assert ((dense - wanted).abs() <= slack).all()
    widths = [len(weight) for weight in weights]
    scales = [input_scale * (1, 100)[index % 2] for index in range(len(weights))]
    quant = scheme.info(
        weight_dtype=oracle.weight_dtype,
        block_shape=BLOCK if oracle.granularity == "block" else None,
        in_features=wanted.shape[1],
        part_widths=[(f"p{index}", width) for index, width in enumerate(widths)],
        input_scales=scales if oracle.static else None,
        bias=True,
    )
    aux = [torch.cat(tensors) for tensors in zip(*(part[1] for part in parts), strict=True)]
    if oracle.static:
        aux.append(torch.tensor(list(dict.fromkeys(scales))))
    ends = [sum(widths[: index + 1]) for index in range(len(widths))]
    return Packed(
        weight=torch.cat([part[0] for part in parts]),
        aux=aux,
        dense=dense,
        quant=quant.model_dump_json(),
        rows=[(end - width, end) for end, width in zip(ends, widths, strict=True)],
        input_scales=scales if oracle.static else [None] * len(widths),
    )
