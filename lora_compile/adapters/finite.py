"""Whether a tensor holds NaN or Inf."""

from __future__ import annotations

import math

import torch


def all_finite(tensor: torch.Tensor) -> bool:
    """True if every element is finite; in one pass (`isfinite().all()` takes several)."""
    if not tensor.numel():
        return True
    # aminmax gives NaN where any element is NaN, and Inf shows as an extreme.
    return all(math.isfinite(float(extreme)) for extreme in torch.aminmax(tensor))
