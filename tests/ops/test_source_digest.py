"""Kernel names: what they say, and that they change with the code."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lora_compile.ops import source_digest
from lora_compile.ops.source_digest import kernel_kind, kernel_name, kernel_row_tile

ROOT = Path(__file__).resolve().parents[2]


def test_names_are_read_back() -> None:
    assert kernel_kind(kernel_name("torch")) == "torch"
    assert kernel_row_tile(kernel_name("torch")) is None
    tiled = kernel_name("triton", 16)
    assert tiled == f"triton:16@{source_digest.source_digest()}"
    assert kernel_kind(tiled) == "triton"
    assert kernel_row_tile(tiled) == 16
    assert kernel_kind("triton") == "triton"
    with pytest.raises(ValueError, match="unknown kernel 'cuda@1'"):
        kernel_kind("cuda@1")


@pytest.mark.parametrize("edited", ["fp8_block.py", "kernels/gemm.py", "aten/scaled.py"])
def test_an_edited_source_changes_the_name(edited: str, tmp_path: Path) -> None:
    package = Path(source_digest.__file__).parent
    probe = (
        "import importlib.util, sys; "
        "spec = importlib.util.spec_from_file_location('digest', sys.argv[1]); "
        "module = importlib.util.module_from_spec(spec); spec.loader.exec_module(module); "
        "print(module.kernel_name('torch'))"
    )

    def name_in(folder: Path) -> str:
        command = [sys.executable, "-c", probe, str(folder / "source_digest.py")]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    shutil.copytree(package, tmp_path / "ops", ignore=shutil.ignore_patterns("__pycache__"))
    assert name_in(tmp_path / "ops") == kernel_name("torch")
    with (tmp_path / "ops" / edited).open("a") as source:
        source.write("# edited\n")
    assert name_in(tmp_path / "ops") != kernel_name("torch")
