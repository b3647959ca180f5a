"""What a reader returns for one projection."""

from __future__ import annotations

from typing import NamedTuple

import torch


class PartWeights(NamedTuple):
    """One projection's weight in the form that the ops take, on the device of its source."""

    weight: torch.Tensor
    """(N, K), in the stored dtype."""
    scale: torch.Tensor | None
    """float32, (N,) or one per block (see `QuantInfo.aux_shapes`); None for unscaled weights."""
