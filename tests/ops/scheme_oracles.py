"""What each shipped scheme means, in float64 with loops over blocks: an entry per scheme.

Nothing here comes from lora_compile but the encoders that make the packed weights, and those are
held to the scheme's precision.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lora_compile.checkpoints.readers import fp8_block
from lora_compile.schemas.quant_scheme import QuantScheme

BLOCK = (64, 32)
"""Not square: rows and columns taken for each other show."""
Part = tuple[Tensor, list[Tensor]]
"""Weight and aux of one part."""


@dataclass(frozen=True)
class Oracle:
    """How parts are packed (the product's own encoder), and what they mean (loops, float64)."""

    block_shape: tuple[int, int] | None
    encode: Callable[[Tensor], Part]
    weight: Callable[[Part], Tensor]
    activation: Callable[[Tensor, float], Tensor]
    """q(x); each quotient is multiplied by the second argument before it is rounded."""
    relative: float
    """Largest relative error of an encoded weight that is not tiny beside its block."""


def fp8_weight(part: Part) -> Tensor:
    decoded = part[0].double()
    for n in range(0, decoded.shape[0], BLOCK[0]):
        for k in range(0, decoded.shape[1], BLOCK[1]):
            scale = part[1][0][n // BLOCK[0], k // BLOCK[1]].double()
            decoded[n : n + BLOCK[0], k : k + BLOCK[1]] *= scale
    return decoded


def fp8_activation(x: Tensor, nudge: float) -> Tensor:
    groups = []
    for values in x.split(BLOCK[1], 1):
        scale = (values.abs().amax(1, keepdim=True) / 448).clamp(min=1e-12)
        codes = (values / scale * nudge).clamp(-448, 448).to(torch.float8_e4m3fn)
        groups.append(codes.double() * scale.double())
    return torch.cat(groups, 1)


def fp8_encode(weight: Tensor) -> Part:
    codes, scale = fp8_block.quantise(weight, BLOCK)
    return codes, [scale]


ORACLES = {
    "none": Oracle(None, lambda w: (w, []), lambda p: p[0].double(), lambda x, _: x.double(), 0),
    "fp8_block": Oracle(BLOCK, fp8_encode, fp8_weight, fp8_activation, 2**-4),
}


def pack(scheme: QuantScheme, weights: list[Tensor]) -> tuple[Tensor, list[Tensor], Tensor, str]:
    """Packed weight and aux of a group, its values in float64, its QuantInfo."""
    oracle = ORACLES[scheme.name]
    parts = [oracle.encode(weight) for weight in weights]
    dense, wanted = torch.cat([oracle.weight(part) for part in parts]), torch.cat(weights)
    tiny = wanted.abs().max() * oracle.relative / 1000
    assert ((dense - wanted).abs() <= wanted.abs() * oracle.relative + tiny).all()
    packed = torch.cat([weight for weight, _ in parts])
    quant = scheme.info(
        weight_dtype=str(packed.dtype).removeprefix("torch."),  # type: ignore[arg-type]
        block_shape=oracle.block_shape,
        in_features=wanted.shape[1],
        part_widths=[(f"p{index}", len(weight)) for index, weight in enumerate(weights)],
        bias=True,
    )
    aux = [torch.cat(tensors) for tensors in zip(*(aux for _, aux in parts), strict=True)]
    return packed, aux, dense, quant.model_dump_json()
