"""The one form in which the rest of the product sees an adapter."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class Provenance:
    """Where one tensor of an adapter came from and how its meaning was decided."""

    file: str
    key: str
    layout: str
    decided_by: str


@dataclass(frozen=True)
class PartDelta:
    """The delta of one projection: W x + scale * B (A x).

    A is (r, in), B is (out, r), both as stored in the file; `scale` is alpha / r or
    alpha / sqrt(r), resolved per module as PEFT does.
    """

    A: torch.Tensor
    B: torch.Tensor
    scale: float
    provenance: tuple[Provenance, ...]

    @property
    def rank(self) -> int:
        return int(self.A.shape[0])


@dataclass(frozen=True)
class CanonicalAdapter:
    """All deltas of one adapter, keyed by the module path of the projection.

    Every tensor of the file has been consumed exactly once. A projection that is absent from
    `deltas` has no delta (zero, of its own width).
    """

    digest: str
    """Hash of the content (tensors, scales, targets). Identity: every cache is keyed by it."""
    source: str
    """The directory it was read from, or `<tensors>`."""
    deltas: dict[str, PartDelta]
    warnings: tuple[str, ...] = ()
    config: dict[str, Any] = field(default_factory=dict, compare=False)

    @property
    def max_rank(self) -> int:
        return max((delta.rank for delta in self.deltas.values()), default=0)
