"""The wheel holds every file of the package's folders, linked ones included, and no other."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = {
    "lora_compile": "lora_compile",
    "schemas": "lora_compile/schemas",
    "passes": "lora_compile/passes",
    "configs": "lora_compile/configs",
}
"""Folder of the tree -> where it lies in the wheel."""
IGNORED = ("__pycache__", "*.pyc", "*.egg-info")

BUILD = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"


def tree(root: Path) -> set[str]:
    """Names in the wheel of the files that the folders of `root` hold."""
    return {
        f"{place}/{path.relative_to(root / folder).as_posix()}"
        for folder, place in FOLDERS.items()
        for path in (root / folder).rglob("*")
        if path.is_file()
        and not path.is_symlink()
        and "__pycache__" not in path.parts
        # rglob of Python 3.13 goes into links, and the linked folders are walked by themselves.
        and path.resolve().is_relative_to((root / folder).resolve())
    }


def built(root: Path, out: Path) -> set[str]:
    """Names in the wheel that is built, offline, from a copy of the package's files in `root`."""
    out.mkdir()
    run = subprocess.run(
        [sys.executable, "-c", BUILD, str(out)], cwd=root, check=False, capture_output=True,
        text=True,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    (wheel,) = out.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of what the wheel is built from, without the repository around it."""
    copy = tmp_path / "checkout"
    copy.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for folder in FOLDERS:
        ignore = shutil.ignore_patterns(*IGNORED)
        shutil.copytree(ROOT / folder, copy / folder, symlinks=True, ignore=ignore)
    return copy


def test_the_wheel_holds_every_file_of_the_tree(checkout: Path, tmp_path: Path) -> None:
    expected = tree(checkout)
    # What the comparison rests on: one file of each kind, which users get at by name.
    assert expected >= {
        "lora_compile/py.typed",
        "lora_compile/api.py",
        "lora_compile/passes/pipeline.py",
        "lora_compile/schemas/base.py",
        "lora_compile/schemas/architectures/llama.yaml",
        "lora_compile/schemas/quantization/fp8_block.yaml",
        "lora_compile/schemas/json/deployment.schema.json",
        "lora_compile/configs/quickstart.yaml",
        "lora_compile/configs/adapters/pirate/adapter_model.safetensors",
    }
    found = built(checkout, tmp_path / "wheel")
    assert not expected - found, "left out of the wheel; see package-data in pyproject.toml"
    assert not found - expected, "in the wheel, but not in the tree"


def test_a_file_that_no_pattern_names_is_missed(checkout: Path, tmp_path: Path) -> None:
    """The test above would see it."""
    (checkout / "schemas" / "quantization" / "tables.bin").write_bytes(b"\0")
    missing = tree(checkout) - built(checkout, tmp_path / "wheel")
    assert missing == {"lora_compile/schemas/quantization/tables.bin"}
