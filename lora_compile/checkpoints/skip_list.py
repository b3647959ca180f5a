"""The config's list of modules that were not quantised."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from lora_compile.errors import CheckpointInvalid

# DeepSeek and transformers write the first, MiniMax and AutoFP8 the second.
_KEYS = ("modules_to_not_convert", "ignored_layers")


@dataclass(frozen=True)
class SkipList:
    """Entries as written: a part's name, a module path or its end, or a fused name."""

    entries: tuple[str, ...]

    @classmethod
    def from_config(cls, config: Mapping[str, Any], *, file: str) -> SkipList:
        """Raises CheckpointInvalid for a list that is not one of names."""
        entries: list[str] = []
        for key in _KEYS:
            value = config.get(key)
            if value is None:
                continue
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
        and all below it, never `...mlp.gate_proj`. `*` and `?` work inside a component.
        """
        names = [name.split(".") for name in (module, group) if name is not None]
        for entry in self.entries:
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
