"""The config's lists of modules that were not quantised."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from lora_compile.errors import CheckpointInvalid

REGEX = "re:"
"""compressed-tensors marks regular expressions by it; they are anchored at the start only."""


@dataclass(frozen=True)
class SkipList:
    """Entries as written: a part's name, a module path or its end, or a fused name."""

    entries: tuple[str, ...]

    @classmethod
    def from_config(cls, lists: Mapping[str, Any], *, file: str) -> SkipList:
        """Key of the config -> its list. Raises CheckpointInvalid for one that is not of names."""
        entries: list[str] = []
        for key, value in lists.items():
            if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
                raise CheckpointInvalid(
                    "the list of unquantised modules is not a list of names",
                    file=file,
                    where=f"quantization_config.{key}",
                    expected="a list of strings",
                    found=value,
                )
            entries.extend(value)
        return cls(tuple(entries))

    def entry_for(self, module: str, group: str | None) -> str | None:
        """The entry that names this module or its fused group, else None.

        An entry matches a run of whole path components: `mlp.gate` names `model.layers.3.mlp.gate`
        and all below it, never `...mlp.gate_proj`. `*` and `?` work inside a component. `re:X`
        matches where X matches from the start of the module's path.
        """
        names = [name.split(".") for name in (module, group) if name is not None]
        for entry in self.entries:
            if entry.startswith(REGEX):
                if re.match(entry.removeprefix(REGEX), module):
                    return entry
                continue
            wanted = entry.split(".")
            if any(_contains(name, wanted) for name in names):
                return entry
        return None


def _contains(name: list[str], wanted: list[str]) -> bool:
    span = len(wanted)
    return any(
        all(map(fnmatchcase, name[start : start + span], wanted))
        for start in range(len(name) - span + 1)
    )
