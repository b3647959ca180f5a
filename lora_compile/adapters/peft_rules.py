"""PEFT's own rules that go from a module path to a rank, an alpha, or "is adapted".

Source: PEFT 0.21, `utils/other.py: get_pattern_key` and
`tuners/tuners_utils.py: check_target_module_exists`. They are followed to the letter (dots of a
pattern are not escaped, dict order decides), since a file's tensors were made by them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

Value = TypeVar("Value")

ALL_LINEAR = "all-linear"


def pattern_value(pattern: Mapping[str, Value], module: str, default: Value) -> Value:
    """The value of the first key, in dict order, whose regex `(.*\\.)?(KEY)$` matches `module`.

    Args:
        pattern: `rank_pattern` or `alpha_pattern`.
        module: module path without the file's prefix.
        default: the value where no key matches.
    """
    for key, value in pattern.items():
        if re.match(rf"(.*\.)?({key})$", module):
            return value
    return pattern.get(module, default)


def names(entries: tuple[str, ...], module: str) -> bool:
    """Whether a list entry is the module path itself or a dotted suffix of it."""
    return any(module == entry or module.endswith(f".{entry}") for entry in entries)


@dataclass(frozen=True)
class TargetRule:
    """Which modules a config says it adapts.

    `targets` is a tuple (list form), a string (regex, full match), or None (the config does not
    say). `all-linear` is a string that stands for every linear layer but the output embedding.
    """

    targets: tuple[str, ...] | str | None
    exclude: tuple[str, ...] | str
    layers: tuple[int, ...]
    layers_pattern: tuple[str, ...]

    @property
    def all_linear(self) -> bool:
        return isinstance(self.targets, str) and self.targets.lower() == ALL_LINEAR

    @property
    def entries(self) -> tuple[str, ...]:
        """What was asked for, one by one; a regex counts as one entry."""
        if self.targets is None:
            return ()
        return (self.targets,) if isinstance(self.targets, str) else self.targets

    def excluded(self, module: str) -> bool:
        if isinstance(self.exclude, str):
            return bool(self.exclude) and re.fullmatch(self.exclude, module) is not None
        return names(self.exclude, module)

    def layer_wanted(self, module: str) -> bool:
        """Whether `layers_to_transform` lets this module through; the first layer index counts."""
        if not self.layers:
            return True
        patterns = (
            [rf"(?:^|.*?\.){pattern}\.(?P<idx>\d+)\." for pattern in self.layers_pattern]
            if self.layers_pattern
            else [r".*?\.[^.]*\.(?P<idx>\d+)\."]
        )
        for pattern in patterns:
            found = re.match(pattern, module)
            if found:
                return int(found["idx"]) in self.layers
        return False

    def entry_matches(self, entry: str, module: str) -> bool:
        """Whether one entry of `entries` asks for this module, exclusion and layers counted."""
        if self.excluded(module):
            return False
        if isinstance(self.targets, str):
            return self.all_linear or re.fullmatch(entry, module) is not None
        # As in PEFT: a module given by its whole path is adapted in whatever layer it is.
        return module == entry or (module.endswith(f".{entry}") and self.layer_wanted(module))

    def matches(self, module: str) -> bool:
        """Whether the config adapts this module; without targets only exclusion counts."""
        if self.targets is None:
            return not self.excluded(module)
        return any(self.entry_matches(entry, module) for entry in self.entries)
