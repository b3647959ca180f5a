"""Where in a YAML file each value stands."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

KeyPath = tuple[str | int, ...]
"""Keys and list indices from the top of a file, e.g. `("adapters", 0, "path")`."""

_STEP = re.compile(r"\.?([^.\[\]]+)|\[(\d+)\]")


def text_path(path: KeyPath) -> str:
    """`("adapters", 0, "path")` -> `adapters[0].path`."""
    text = ""
    for step in path:
        text += f"[{step}]" if isinstance(step, int) else f".{step}"
    return text.removeprefix(".")


def parse_path(text: str) -> KeyPath:
    """`adapters[0].path` -> `("adapters", 0, "path")`; keys that hold a dot need the tuple form."""
    path: list[str | int] = []
    position = 0
    while position < len(text):
        step = _STEP.match(text, position)
        if step is None:
            raise ValueError(f"not a path: {text!r}")
        path.append(step[1] if step[1] is not None else int(step[2]))
        position = step.end()
    return tuple(path)


@dataclass(frozen=True)
class SourceMap:
    """The lines of one file. A key's line is that of the key, a list item's that of its start."""

    file: str
    lines: Mapping[KeyPath, int]
    """Every path of the file -> 1-based line; the empty path is always there."""

    def line(self, path: KeyPath | str = ()) -> int:
        """The 1-based line of `path`, or of its nearest ancestor where `path` is not written."""
        steps = parse_path(path) if isinstance(path, str) else path
        while steps not in self.lines:
            steps = steps[:-1]
        return self.lines[steps]

    @staticmethod
    def text_path(path: KeyPath) -> str:
        """`adapters[0].path` for `("adapters", 0, "path")`."""
        return text_path(path)
