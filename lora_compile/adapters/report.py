"""What an adapter file holds, as plain data for people and machines."""

from __future__ import annotations

from lora_compile.schemas.base import StrictModel


class TensorReport(StrictModel):
    """One tensor of the file and where it goes."""

    key: str
    site: str
    parts: tuple[str, ...]
    """Names of the projections it serves; several for a tensor of a fused projection."""
    layer: int | None
    role: str
    """`lora_A` or `lora_B`."""
    shape: tuple[int, ...]
    dtype: str
    rank: int
    scale: float
    """alpha / r or alpha / sqrt(r), as resolved for this module."""
    decided_by: str
    """How the key was read."""


class AdapterReport(StrictModel):
    """Everything that is known about an adapter from its config and tensor headers."""

    source: str
    base_model: str | None
    """The base that the config names; for information only."""
    max_rank: int
    modules: int
    """Modules of the file that were bound to projections of the plan."""
    bytes: int
    """Bytes of all tensors as stored."""
    tensors: tuple[TensorReport, ...]
    warnings: tuple[str, ...]
