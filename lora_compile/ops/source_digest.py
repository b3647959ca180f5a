"""Names of implementations that change when the code of the ops changes.

AOTAutograd inlines the bodies of the lowered ops, but its cache key holds only their names and
arguments: an edited body could be served stale. So each op takes `kernel`, a string that ends in
`@` and a digest of these sources; an edit changes the string, the string is in the key.
"""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path
from typing import Literal

DIGEST_LENGTH = 12


@cache
def source_digest() -> str:
    """Hash of the bytes of every Python file in this package, `kernels/` included."""
    root = Path(__file__).resolve().parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root).as_posix()).encode())
        digest.update(b"\0")
        digest.update(path.read_bytes())
        digest.update(b"\0")
    return digest.hexdigest()[:DIGEST_LENGTH]


def kernel_name(kind: Literal["torch", "triton"], row_tile: int | None = None) -> str:
    """The `kernel` argument of a lowered op, e.g. `torch@1a2b3c4d5e6f`.

    Args:
        kind: `torch` = plain PyTorch, compiled by Inductor; `triton` = the Triton kernels.
        row_tile: rows of x that one Triton program holds (16, 32, 64 or 128); None = chosen from
            the number of rows where that is known, else 64.
    """
    if row_tile is None:
        return f"{kind}@{source_digest()}"
    return f"{kind}:{row_tile}@{source_digest()}"


def kernel_kind(kernel: str) -> str:
    """`torch` or `triton`, out of a `kernel` argument.

    Raises:
        ValueError: any other kind.
    """
    kind = kernel.partition("@")[0].partition(":")[0]
    if kind not in ("torch", "triton"):
        raise ValueError(f"unknown kernel {kernel!r}: expected 'torch' or 'triton'")
    return kind


def kernel_row_tile(kernel: str) -> int | None:
    """The row tile that a `kernel` argument asks for, e.g. 16 out of `triton:16@…`."""
    tile = kernel.partition("@")[0].partition(":")[2]
    return int(tile) if tile else None
