"""q(x) of a scheme in plain float32, for references."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lora_compile.schemas.quant_info import ActivationInfo

LARGEST_CODE = {"float8_e4m3fn": 448.0, "int8": 127.0}

FOLLOW = 2e-5
"""How far from the border between two codes, as a share of the largest x of its scale, a float32
input may be for either code to be right. Two float32 evaluations of one model differ by about
this much, and a code that flips is a difference of 6 % in FP8."""


@dataclass
class Followed:
    """How the codes of a run compare with those of the reference's own input."""

    codes: int = 0
    """Codes compared."""
    ambiguous: int = 0
    """Codes that differ, where the reference's input lies on the border (see FOLLOW): followed."""
    wrong: int = 0
    """Codes that differ otherwise: not followed."""


def quantised_activation(
    activation: ActivationInfo,
    x: torch.Tensor,
    input_scale: float | None,
    *,
    codes: torch.Tensor | None = None,
    counted: torch.Tensor | None = None,
    tally: Followed | None = None,
) -> torch.Tensor:
    """q(x) as one part of a site sees it, decoded to float32.

    Args:
        activation: of the site's scheme.
        x: (..., K) float32.
        input_scale: the part's own, where the scheme's scales are static.
        codes: (..., K), codes that another run of the same model had here. They are followed where
            x lies on the border between two codes, since both are right there.
        counted: (...) bool, which rows of `codes` to count in `tally`.
        tally: what to count into.

    Returns:
        (..., K) float32.
    """
    if activation.handling == "none":
        return x
    assert activation.dtype is not None
    width = activation.group or x.shape[-1]
    # A tensor: CUDA turns a division by a number into a product with its reciprocal, and one ulp
    # of the scale moves the codes of 16-bit inputs that lie just between two codes.
    divisor = torch.tensor(LARGEST_CODE[activation.dtype], device=x.device)
    decoded = []
    others: Sequence[torch.Tensor | None] = (
        [None] * -(-x.shape[-1] // width) if codes is None else torch.split(codes, width, dim=-1)
    )
    for group, other in zip(torch.split(x, width, dim=-1), others, strict=True):
        if activation.handling == "static":
            assert input_scale is not None
            scale = torch.tensor(input_scale, dtype=torch.float32, device=x.device)
        else:
            assert activation.min_scale is not None
            peak = group.abs().amax(dim=-1, keepdim=True)
            scale = (peak / divisor).clamp(min=activation.min_scale)
        units = (group / scale).clamp(
            -LARGEST_CODE[activation.dtype], LARGEST_CODE[activation.dtype]
        )
        own = _rounded(units, activation.dtype)
        if other is not None:
            own = _follow(units, own, other.float(), counted, tally)
        decoded.append(own * scale)
    return torch.cat(decoded, dim=-1)


def _rounded(units: torch.Tensor, dtype: str) -> torch.Tensor:
    return units.round() if dtype == "int8" else units.to(torch.float8_e4m3fn).float()


def _follow(
    units: torch.Tensor,
    own: torch.Tensor,
    other: torch.Tensor,
    counted: torch.Tensor | None,
    tally: Followed | None,
) -> torch.Tensor:
    differs = own != other
    border = FOLLOW * units.abs().amax(dim=-1, keepdim=True)
    near = (units - other).abs() - (units - own).abs() <= 2 * border
    if tally is not None:
        count = torch.ones_like(differs[..., 0]) if counted is None else counted
        tally.codes += int(count.sum()) * units.shape[-1]
        tally.ambiguous += int((differs & near & count.unsqueeze(-1)).sum())
        tally.wrong += int((differs & ~near & count.unsqueeze(-1)).sum())
    return torch.where(differs & near, other, own)
