"""One reader per on-disk format, by the name that schemes use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from lora_compile.checkpoints.readers import none, scaled
from lora_compile.checkpoints.readers.part import PartWeights
from lora_compile.checkpoints.source import WeightSource
from lora_compile.checkpoints.survey import ModuleFormat
from lora_compile.errors import SchemeUnsupported


class Reader(Protocol):
    """What each module of this package offers."""

    def read_part(self, source: WeightSource, fmt: ModuleFormat, /) -> PartWeights:
        """A projection's tensors in the form that the ops take."""


READERS: Mapping[str, Reader] = {"none": none, "scaled": scaled}


def reader_for(name: str) -> Reader:
    """Raises SchemeUnsupported for a name without a reader."""
    if name not in READERS:
        raise SchemeUnsupported(
            f"no reader named {name}", expected=" or ".join(READERS), found=name
        )
    return READERS[name]


__all__ = ["READERS", "PartWeights", "Reader", "reader_for"]
