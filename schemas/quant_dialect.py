"""Dialect: how one family of checkpoints writes its `quantization_config`.

A dialect says which keys there are and which values a reader is right for. Which scheme such a
checkpoint has is said by the schemes (`stored_as`).
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Literal

from lora_compile.schemas.base import StrictModel
from lora_compile.schemas.quant_scheme_parts import Values
from lora_compile.schemas.yaml_file import load_yaml

DIALECTS = Path(__file__).parent / "dialects"


class Dialect(StrictModel):
    """The keys of one kind of `quantization_config`."""

    schema_version: Literal[1]
    """Version of this format."""
    name: str
    """Name of the dialect; that of the file."""
    quant_method: str
    """Value of `quant_method`."""
    summary: str
    """One sentence for people."""
    values: Values
    """Keys that, where present, must have one of these values. Any other value is refused."""
    accepts: tuple[str, ...]
    """Keys of any value that change nothing for reading. A key that stands in none of these lists,
    nor in those of the scheme, is refused."""
    skip_lists: tuple[str, ...]
    """Keys that list modules which are left in 16 bit; checked against the tensors."""


@lru_cache
def all_dialects() -> dict[str, Dialect]:
    """Every dialect that is shipped, by name."""
    paths = sorted(DIALECTS.glob("*.yaml"))
    return {path.stem: load_yaml(path, Dialect).value for path in paths}
