"""Checkpoint directories: what is read from them, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from lora_compile.checkpoints.index import INDEX, CheckpointIndex
from lora_compile.checkpoints.source import ModuleWeights
from lora_compile.errors import CheckpointInvalid, Faults, FileMissing, TensorMissing


def test_headers_and_tensors_match_the_library(fixtures: Path) -> None:
    path = fixtures / "hf-fp8-deepseekv3-mla"
    index = CheckpointIndex.open(path)
    expected = load_file(path / "model.safetensors")
    assert index.headers.keys() == expected.keys()
    for key, tensor in expected.items():
        assert index.headers[key].shape == tuple(tensor.shape)
        assert index.headers[key].file == str(path / "model.safetensors")
        assert torch.equal(index.tensor(key).view(torch.uint8), tensor.view(torch.uint8))
    name = "model.layers.0.self_attn.q_a_proj.weight"
    assert index.headers[name].dtype == "F8_E4M3"
    assert index.headers[name + "_scale_inv"].dtype == "F32"
    assert index.quantization_config is not None
    assert index.quantization_config["weight_block_size"] == [128, 128]
    with pytest.raises(TensorMissing, match="nothing"):
        index.tensor("nothing")


def _shard(path: Path, shards: int = 3) -> dict[str, str]:
    """Turn a single-file checkpoint into a sharded one; returns its weight map."""
    data = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    weight_map = {
        key: f"model-{i % shards:05}-of-{shards:05}.safetensors" for i, key in enumerate(data)
    }
    for shard in set(weight_map.values()):
        save_file({k: v for k, v in data.items() if weight_map[k] == shard}, path / shard)
    (path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return weight_map


def test_shards_read_like_one_file(copied: Callable[..., Path], fixtures: Path) -> None:
    path = copied("base-llama")
    weight_map = _shard(path)
    index = CheckpointIndex.open(path)
    for key, tensor in load_file(fixtures / "base-llama" / "model.safetensors").items():
        assert torch.equal(index.tensor(key), tensor)
        assert index.headers[key].file == str(path / weight_map[key])


def test_all_faults_of_shards_come_together(copied: Callable[..., Path]) -> None:
    path = copied("base-llama")
    weight_map = _shard(path)
    first, second, third = sorted(set(weight_map.values()))
    (path / first).unlink()
    data = load_file(path / second)
    gone = min(data)
    data["extra"] = data.pop(gone)
    save_file(data, path / second)
    (path / third).write_bytes((path / third).read_bytes()[:-10])
    (path / "config.json").write_text("{")
    with pytest.raises(Faults) as caught:
        CheckpointIndex.open(path)
    assert all(isinstance(fault, CheckpointInvalid) for fault in caught.value.faults)
    told = [(Path(fault.file or "").name, fault.tensor) for fault in caught.value.faults]
    assert told == [
        ("config.json", None),
        (first, None),
        (second, gone),
        (second, "extra"),
        (third, None),
    ]
    assert "size" in caught.value.faults[-1].message


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "has no weights"),
        ({"pytorch_model.bin": b"x"}, "pickled"),
        ({"other.safetensors": b"x"}, "has no weights"),
        ({"model.safetensors": b"version https://git-lfs.github.com/spec/v1\n"}, "LFS"),
        ({"model.safetensors": b"\xff" * 20}, "not a safetensors file"),
        ({"model.safetensors": b"\x04" + b"\0" * 7 + b"nope"}, "cannot be read"),
        ({"model.safetensors": b"", INDEX: b"{}"}, "two sets"),
        ({INDEX: b"{}"}, "weight_map"),
    ],
)
def test_directories_without_readable_weights(
    tmp_path: Path, files: dict[str, bytes], message: str
) -> None:
    (tmp_path / "config.json").write_text("{}")
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointInvalid, match=message):
        CheckpointIndex.open(tmp_path)


def test_no_directory(tmp_path: Path) -> None:
    with pytest.raises(FileMissing):
        CheckpointIndex.open(tmp_path / "none")


@pytest.mark.parametrize(
    ("config", "side", "method"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, None, "fp8"),
        ({"text_config": {"quantization_config": {"quant_method": "fp8"}}}, None, "fp8"),
        ({"compression_config": {"format": "x"}}, None, "compressed-tensors"),
        ({}, ("hf_quant_config.json", {"quantization": {"quant_algo": "FP8"}}), "modelopt"),
        ({}, ("quantize_config.json", {"bits": 4}), "gptq"),
        ({}, ("quant_config.json", {"w_bit": 4}), "awq"),
        ({"quantization_config": None}, None, None),
    ],
)
def test_where_the_quantisation_is_described(
    copied: Callable[..., Path], config: dict, side: tuple[str, dict] | None, method: str | None
) -> None:
    path = copied("base-llama", edit_config=lambda c: c.update(config))
    if side is not None:
        (path / side[0]).write_text(json.dumps(side[1]))
    found = CheckpointIndex.open(path).quantization_config
    assert (None if found is None else found["quant_method"]) == method


def test_two_descriptions_that_differ(copied: Callable[..., Path]) -> None:
    two = {
        "quantization_config": {"quant_method": "fp8"},
        "text_config": {"quantization_config": {"quant_method": "gptq"}},
    }
    path = copied("base-llama", edit_config=lambda c: c.update(two))
    with pytest.raises(CheckpointInvalid, match="twice"):
        CheckpointIndex.open(path)


def test_a_live_model_is_a_source() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2)).to(torch.bfloat16)
    source = ModuleWeights(model)
    assert source.headers["0.weight"].dtype == "BF16"
    assert source.headers["0.weight"].shape == (2, 3)
    assert source.tensor("1.bias").data_ptr() == model[1].bias.data_ptr()
    with pytest.raises(TensorMissing):
        source.tensor("2.weight")
    with pytest.raises(CheckpointInvalid, match="no data"):
        ModuleWeights(nn.Linear(3, 2, device="meta"))
