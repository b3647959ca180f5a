"""What a reader returns for one projection."""

from __future__ import annotations

from typing import NamedTuple

import torch


class PartWeights(NamedTuple):
    """Tensors as stored, on the device of their source."""

    weight: torch.Tensor
    """(N, K), in the stored dtype."""
    aux: dict[str, torch.Tensor]
    """Scales by the names of `QuantInfo.aux_names`."""
