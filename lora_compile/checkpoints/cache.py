"""Directories that are made once and kept: converted and random checkpoints."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

MARKER = "lora_compile.json"


def default_cache_dir() -> Path:
    """`$LORA_COMPILE_CACHE`, else `$XDG_CACHE_HOME/lora_compile`, else `~/.cache/lora_compile`."""
    if own := os.environ.get("LORA_COMPILE_CACHE"):
        return Path(own)
    if xdg := os.environ.get("XDG_CACHE_HOME"):
        return Path(xdg) / "lora_compile"
    return Path.home() / ".cache" / "lora_compile"


def is_complete(directory: Path) -> bool:
    """Whether the marker is there and every file has the size that it had when it was written."""
    marker = directory / MARKER
    if not marker.is_file():
        return False
    try:
        files: dict[str, int] = json.loads(marker.read_text(encoding="utf-8"))["files"]
        return all((directory / name).stat().st_size == size for name, size in files.items())
    except (ValueError, KeyError, OSError):
        return False  # damaged: made again


def make_once(
    final: Path,
    make: Callable[[Path, Path], None],
    *,
    facts: Mapping[str, Any],
    tools: tuple[str, ...],
) -> Path:
    """The directory `final`, made now if it is not there complete.

    It appears by a rename when it is complete, so that an interrupted making is never used; another
    process may be quicker.

    Args:
        make: called with an empty working directory and the empty directory to fill.
        facts: what the marker says beside the files and their sizes.
        tools: packages whose versions the marker holds.
    """
    if is_complete(final):
        return final
    root = final.parent
    root.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=".making-", dir=root))
    try:
        out = work / "checkpoint"
        out.mkdir()
        make(work, out)
        marker = {
            **facts,
            "versions": {name: version(name) for name in tools},
            "files": {entry.name: entry.stat().st_size for entry in sorted(out.iterdir())},
        }
        (out / MARKER).write_text(json.dumps(marker, indent=1), encoding="utf-8")
        if final.exists() and not is_complete(final):
            final.rename(work / "damaged")
        try:
            out.rename(final)
        except OSError:
            if not is_complete(final):
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return final
