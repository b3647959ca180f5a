"""Files to break, and how to look at what they raise."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from lora_compile.errors import Faults, LoraCompileError

DEPLOYMENT: dict[str, Any] = {
    "schema_version": 1,
    "model": {"path": "model", "dtype": "bfloat16"},
    "quantization": {"scheme": "fp8_block", "ignore": ["down_proj"]},
    "adapters": [
        {"name": "sql", "path": "adapters/sql"},
        {"name": "chat", "path": "adapters/chat", "scale": 2, "pinned": True},
    ],
    "runtime": {"max_adapters": 4, "max_rank": 16, "features": ["dora"]},
    "generation": {
        "rows": [{"prompt": "a", "adapter": "sql", "scale": 0.5}, {"prompt": "b"}],
        "max_new_tokens": 8,
    },
}


@pytest.fixture
def deployment() -> dict[str, Any]:
    """A deployment without faults, as data."""
    return copy.deepcopy(DEPLOYMENT)


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str | dict[str, Any]], Path]:
    """Write text or data to a YAML file of the test."""

    def write_file(content: str | dict[str, Any], name: str = "file.yaml") -> Path:
        path = tmp_path / name
        text = content if isinstance(content, str) else yaml.safe_dump(content, sort_keys=False)
        path.write_text(text, encoding="utf-8")
        return path

    return write_file


@pytest.fixture
def faults() -> Callable[[Callable[[], object]], list[LoraCompileError]]:
    """Every fault that a call raises; fails where it raises none."""

    def collect(call: Callable[[], object]) -> list[LoraCompileError]:
        with pytest.raises(LoraCompileError) as caught:
            call()
        error = caught.value
        return list(error.faults) if isinstance(error, Faults) else [error]

    return collect
