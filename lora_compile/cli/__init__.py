"""The command line: `lora-compile check|explain|run|schema`.

Exit codes: 0 fine, 1 the input is wrong (every fault is listed), 2 used wrongly.
"""

from __future__ import annotations

import os
import sys
import warnings


def main() -> None:
    """Entry point of the `lora-compile` command."""
    # Everything is on this machine; set before transformers is imported.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    # The steps that we print say what goes on; bars of other libraries would cut through them.
    os.environ.setdefault("TQDM_DISABLE", "1")
    # transformers caches the answers of version checks; that Dynamo traces through them is fine.
    warnings.filterwarnings("ignore", "Dynamo detected a call to a `functools.lru_cache`")
    from lora_compile.cli.app import app
    from lora_compile.cli.output import show_faults
    from lora_compile.errors import LoraCompileError

    try:
        app()
    except LoraCompileError as error:
        show_faults(error, as_json="--json" in sys.argv)
        sys.exit(1)
