"""A Hugging Face checkpoint directory: its config, and the headers of all its tensors."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from lora_compile.checkpoints.safetensors_header import read_safetensors_header
from lora_compile.checkpoints.source import TensorHeader
from lora_compile.errors import (
    CheckpointInvalid,
    FaultList,
    FileMissing,
    LoraCompileError,
    TensorMissing,
)

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

# Quantisation described beside config.json -> the method it belongs to: NVIDIA ModelOpt,
# AutoGPTQ/GPTQModel, AutoAWQ.
_SIDE_FILES: Mapping[str, str] = {
    "hf_quant_config.json": "modelopt",
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
}


class CheckpointIndex:
    """Config and tensor headers of one directory; data is memory-mapped when asked for."""

    def __init__(
        self,
        path: Path,
        config: dict[str, Any],
        headers: Mapping[str, TensorHeader],
        quantization_config: dict[str, Any] | None,
        quantization_source: str | None,
    ) -> None:
        self.path = path
        self.config = config
        """config.json, parsed."""
        self.quantization_config = quantization_config
        """The checkpoint's description of its quantisation as written, or None. `quant_method` is
        added only where the place implies it (side files, compression_config)."""
        self.quantization_source = quantization_source
        """File and key that `quantization_config` was read from."""
        self._headers = headers
        self._files: dict[str, Any] = {}

    @classmethod
    def open(cls, path: str | Path) -> CheckpointIndex:
        """Read config.json and the headers of all shards.

        Raises FileMissing or CheckpointInvalid; several faults come together as Faults.
        """
        path = Path(path)
        if not path.exists():
            raise FileMissing("no such checkpoint directory", file=path)
        if not path.is_dir():
            raise CheckpointInvalid(
                "not a checkpoint directory",
                file=path,
                expected=f"a directory with config.json and {SINGLE} or {INDEX}",
                found="a file",
            )
        faults = FaultList()
        config: dict[str, Any] = {}
        quantization: tuple[dict[str, Any], str] | None = None
        try:
            config = _read_json(path / "config.json")
            quantization = _find_quantization(path, config)
        except LoraCompileError as error:
            faults.add(error)
        headers = _read_headers(path, faults)
        faults.raise_if_any()
        settings, source = quantization if quantization is not None else (None, None)
        return cls(path, config, headers, settings, source)

    @property
    def name(self) -> str:
        return str(self.path)

    @property
    def headers(self) -> Mapping[str, TensorHeader]:
        return self._headers

    def tensor(self, key: str) -> torch.Tensor:
        """Read one tensor as it is stored, onto the CPU, through a memory map."""
        header = self._headers.get(key)
        if header is None:
            raise TensorMissing("the checkpoint has no such tensor", file=self.path, tensor=key)
        if header.file not in self._files:
            self._files[header.file] = safe_open(header.file, framework="pt", device="cpu")
        tensor: torch.Tensor = self._files[header.file].get_tensor(key)
        return tensor


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise CheckpointInvalid(
            f"the checkpoint has no {path.name}", file=path.parent, expected=str(path)
        )
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointInvalid("not valid JSON", file=path, found=error) from error
    if not isinstance(value, dict):
        raise CheckpointInvalid(
            "not a JSON object", file=path, expected="{...}", found=type(value).__name__
        )
    return value


def _find_quantization(path: Path, config: dict[str, Any]) -> tuple[dict[str, Any], str] | None:
    """The first place that describes the quantisation; two that differ are an error."""
    file = path / "config.json"
    found: list[tuple[dict[str, Any], str]] = []
    text = config.get("text_config")
    for owner, prefix in ((config, ""), (text if isinstance(text, dict) else {}, "text_config.")):
        for key in ("quantization_config", "compression_config"):
            value = owner.get(key)
            if value is None:
                continue
            if not isinstance(value, dict):
                raise CheckpointInvalid(
                    "the quantisation config is not an object",
                    file=file,
                    where=prefix + key,
                    found=value,
                )
            # compressed-tensors wrote this key before `quant_method` existed.
            method = {"quant_method": "compressed-tensors"} if key == "compression_config" else {}
            found.append(({**method, **value}, f"{file}: {prefix}{key}"))
    if len(found) > 1 and any(settings != found[0][0] for settings, _ in found[1:]):
        raise CheckpointInvalid(
            "config.json describes the quantisation twice, and differently",
            file=file,
            found=", ".join(where for _, where in found),
            fix="keep the one that the tensors were written with",
        )
    if found:
        return found[0]
    for name, method_name in _SIDE_FILES.items():
        if (path / name).is_file():
            side = _read_json(path / name)
            if name == "hf_quant_config.json" and isinstance(side.get("quantization"), dict):
                side = side["quantization"]
            return {"quant_method": method_name, **side}, str(path / name)
    return None


def _read_headers(path: Path, faults: FaultList) -> dict[str, TensorHeader]:
    single, index = (path / SINGLE).is_file(), (path / INDEX).is_file()
    if single and index:
        faults.add(
            CheckpointInvalid(
                "two sets of weights: which one is meant cannot be told",
                file=path,
                found=f"{SINGLE} and {INDEX}",
                fix="remove the one that is not meant",
            )
        )
        return {}
    if single:
        return _read_shard(path / SINGLE, faults)
    if index:
        return _read_shards(path, faults)
    others = sorted(entry.name for entry in path.iterdir() if entry.suffix == ".safetensors")
    pickles = sorted(entry.name for entry in path.iterdir() if entry.suffix in (".bin", ".pt"))
    faults.add(
        CheckpointInvalid(
            "only pickled weights, which are not read"
            if pickles and not others
            else "the checkpoint has no weights",
            file=path,
            expected=f"{SINGLE} or {INDEX}",
            found=", ".join(others + pickles) or "no weight files",
            fix="load the model with transformers and save it with `save_pretrained`, "
            "which writes safetensors"
            if pickles
            else None,
        )
    )
    return {}


def _read_shard(path: Path, faults: FaultList) -> dict[str, TensorHeader]:
    try:
        return read_safetensors_header(path)
    except LoraCompileError as error:
        faults.add(error)
        return {}


def _read_shards(path: Path, faults: FaultList) -> dict[str, TensorHeader]:
    file = path / INDEX
    try:
        weight_map = _read_json(file).get("weight_map")
    except LoraCompileError as error:
        faults.add(error)
        return {}
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        faults.add(CheckpointInvalid("no `weight_map` from tensor to shard", file=file))
        return {}
    listed: dict[str, set[str]] = defaultdict(set)
    for key, shard in weight_map.items():
        listed[shard].add(key)
    headers: dict[str, TensorHeader] = {}
    for shard, keys in sorted(listed.items()):
        if not (path / shard).is_file():
            faults.add(
                CheckpointInvalid(
                    "a shard that the index names is missing",
                    file=path / shard,
                    expected=f"{len(keys)} tensors, e.g. {min(keys)} (named in {INDEX})",
                    fix="download the shard",
                )
            )
            continue
        before = len(faults.faults)
        held = _read_shard(path / shard, faults)
        if len(faults.faults) > before:
            continue
        for message, odd in (
            (f"tensors that {INDEX} places in this shard are not in it", keys - held.keys()),
            (f"the shard holds tensors that {INDEX} does not place in it", held.keys() - keys),
        ):
            if odd:
                faults.add(
                    CheckpointInvalid(
                        message,
                        file=path / shard,
                        tensor=min(odd),
                        found=f"{len(odd)} tensors" if len(odd) > 1 else None,
                        fix="index and shards are of different versions; download both again",
                    )
                )
        headers.update(held)
    return headers
