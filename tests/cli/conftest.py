"""A deployment on disk: a tiny checkpoint, an adapter, and a YAML file that a test may break."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from lora_compile.checkpoints.codes import encode
from tests.tiny import llama, make_adapter

DEPLOYMENT: dict[str, Any] = {
    "schema_version": 1,
    "model": {"path": "model", "dtype": "float32"},
    "quantization": {"scheme": "fp8_block"},
    "adapters": [{"name": "a", "path": "adapter"}],
    "runtime": {"device": "cpu", "max_adapters": 2, "max_rank": 8},
}


@dataclass
class Result:
    code: int
    out: str
    err: str

    @property
    def data(self) -> Any:
        return json.loads(self.out)


@dataclass
class Site:
    """The folder of one deployment."""

    folder: Path

    @property
    def file(self) -> Path:
        return self.folder / "deployment.yaml"

    def write(self, change: Callable[[dict[str, Any]], Any] = lambda data: None) -> Path:
        data = json.loads(json.dumps(DEPLOYMENT))
        change(data)
        self.file.write_text(yaml.safe_dump(data, sort_keys=False))
        return self.file

    def edit_tensors(self, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
        path = self.folder / "model" / "model.safetensors"
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path, metadata={"format": "pt"})

    def quantise(self, block_shape: tuple[int, int]) -> None:
        """Rewrite the checkpoint as DeepSeek-style block FP8, to be read as it is."""

        def rewrite(tensors: dict[str, torch.Tensor]) -> None:
            for key in [key for key in tensors if key.endswith("_proj.weight")]:
                codes, scale = encode(
                    tensors[key].float(), torch.float8_e4m3fn, "block", block_shape
                )
                tensors[key], tensors[f"{key}_scale_inv"] = codes, scale

        self.edit_tensors(rewrite)
        quantization = {
            "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
            "weight_block_size": list(block_shape),
        }  # fmt: skip
        self.edit_json("model/config.json", lambda c: c.update(quantization_config=quantization))
        self.write(lambda data: data["quantization"].update(scheme="auto"))

    def edit_json(self, name: str, change: Callable[[dict[str, Any]], Any]) -> None:
        path = self.folder / name
        data = json.loads(path.read_text())
        change(data)
        path.write_text(json.dumps(data))


@pytest.fixture
def site(tmp_path: Path) -> Site:
    model = llama(21)
    model.save_pretrained(str(tmp_path / "model"))
    make_adapter(model, tmp_path / "adapter", rank=4, seed=1)
    made = Site(tmp_path)
    made.write()
    return made


@pytest.fixture
def cli() -> Callable[..., Result]:
    """`cli("check", file, "--json")` in a process of its own, as a user would."""

    def run(*args: object) -> Result:
        done = subprocess.run(
            [sys.executable, "-m", "lora_compile", *map(str, args)],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert "Traceback" not in done.stderr, done.stderr
        return Result(done.returncode, done.stdout, done.stderr)

    return run
