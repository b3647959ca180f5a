"""Serve many LoRA adapters over quantised LLMs under torch.compile.

import lora_compile as lc

model = lc.load("configs/quickstart.yaml").compile()
model.generate(input_ids, adapters=["pirate", None])
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lora_compile import errors

if TYPE_CHECKING:
    from lora_compile.api import load, wrap
    from lora_compile.runtime.model import LoraModel

__version__ = "0.1.0"
__all__ = ["LoraModel", "__version__", "errors", "load", "wrap"]


def __getattr__(name: str) -> Any:
    # torch takes seconds to import; schemas and errors do not need it.
    if name in ("load", "wrap"):
        from lora_compile import api

        return getattr(api, name)
    if name == "LoraModel":
        from lora_compile.runtime.model import LoraModel

        return LoraModel
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
