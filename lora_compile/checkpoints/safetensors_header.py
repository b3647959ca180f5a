"""The header of one safetensors file, read without touching the data.

Format: 8 bytes little-endian header length n, n bytes of JSON (key -> dtype, shape, data_offsets
relative to the end of the header), then the data (https://github.com/huggingface/safetensors).
Parsed here rather than by the library so that a truncated download, an LFS pointer or a damaged
header is told apart by name.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path

from lora_compile.checkpoints.source import TensorHeader
from lora_compile.errors import CheckpointInvalid

_MAX_HEADER = 100_000_000  # the library's own limit, in bytes


def read_safetensors_header(path: Path) -> dict[str, TensorHeader]:
    """Key -> header of every tensor of `path`. Raises CheckpointInvalid."""
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(8)
        if head == b"version ":
            raise CheckpointInvalid(
                "the file is a Git LFS pointer, not the weights",
                file=path,
                fix="run `git lfs pull` in the checkpoint's repository",
            )
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else -1
        if not 2 <= length <= min(_MAX_HEADER, size - 8):
            raise CheckpointInvalid(
                "not a safetensors file: its header does not fit into it",
                file=path,
                expected=f"a header length between 2 and {max(size - 8, 0)} bytes",
                found=f"{length} in a file of {size} bytes",
                fix="download the file again",
            )
        raw = file.read(length)
    try:
        entries = json.loads(raw)
        headers: dict[str, TensorHeader] = {}
        end = 0
        for key, entry in entries.items():
            if key == "__metadata__":
                continue
            shape = tuple(int(side) for side in entry["shape"])
            headers[key] = TensorHeader(str(path), str(entry["dtype"]), shape)
            end = max(end, int(entry["data_offsets"][1]))
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise CheckpointInvalid(
            "the safetensors header cannot be read",
            file=path,
            found=error,
            fix="download the file again",
        ) from error
    if 8 + length + end != size:
        raise CheckpointInvalid(
            "the file's size is not what its header says",
            file=path,
            expected=f"{8 + length + end} bytes",
            found=f"{size} bytes",
            fix="the download is incomplete or damaged; fetch the file again",
        )
    return headers
