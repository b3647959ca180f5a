"""Without Triton the package works, and says what is missing when a Triton kernel is selected."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

PROBE = """
import sys
sys.modules["triton"] = None
import torch
from lora_compile.errors import FeatureUnsupported
from lora_compile.ops import kernel_name
from lora_compile.ops.kernels import HAS_TRITON
from lora_compile.ops.sample import run_lowered, sample_site
assert not HAS_TRITON
rows = torch.zeros(8, dtype=torch.int32), torch.ones(8), True
for scheme in ("fp8_block", "fp8_tensor_static", "int8_channel"):
    site = sample_site(torch.Generator().manual_seed(0), [40], 64, [8], scheme=scheme)
    arguments = site, torch.randn(3, 64), *rows
    for kernel in (kernel_name("torch"), "aten"):
        assert run_lowered(*arguments, kernel).isfinite().all()
    try:
        run_lowered(*arguments, kernel_name("triton"))
    except FeatureUnsupported as error:
        print(error.fix)
"""


def test_import_run_and_refusal() -> None:
    command = [sys.executable, "-W", "ignore", "-c", PROBE]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-4000:]
    assert result.stdout.splitlines() == ["install triton, or run on the CPU"] * 3
