"""Static input scales: each part of a fused group uses its own; and one-sided adapters on INT8."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

import lora_compile as lc
from lora_compile.errors import SchemeUnsupported
from tests.fake_quant import fake_quantise
from tests.gate import gate_rows, judge
from tests.quantised import calibrate, deployment, write_checkpoint
from tests.tiny import llama, make_adapter, prompts, relative

ATTENTION = "model.layers.0.self_attn"


def test_parts_whose_scales_are_a_hundred_times_apart(tmp_path: Path, seed: int) -> None:
    plain = llama(seed)
    path = make_adapter(plain, tmp_path / "a", rank=6, seed=seed)
    scales = calibrate(plain, prompts(seed, 4, 40))
    for name in scales:
        if name.endswith("k_proj"):
            scales[name] *= 100.0
    write_checkpoint(plain, tmp_path / "model", "fp8_tensor_static", input_scales=scales)
    file = deployment(tmp_path, tmp_path / "model", {"a": path}, dtype="float32")
    model = lc.load(file).compile()
    site = model.plan.by_name[f"{ATTENTION}.qkv_proj"]
    assert [part.name for part in site.parts] == ["q_proj", "k_proj", "v_proj"], "one fused group"
    assert site.quant.planes == [0, 1, 0]
    ids, names = prompts(seed, 3, 9), [None, "a", None]
    rows = gate_rows(model, {"a": path}, names)
    result = judge(model, plain, rows, ids, names, input_scales=scales, use_cache=False)
    assert result.output is not None
    assert result.output.error <= 1e-5, result.output
    common = {name: scales[name.replace("k_proj", "q_proj")] for name in scales}
    wrong = judge(model, plain, rows, ids, names, input_scales=common, use_cache=False)
    assert not wrong.passed, "one scale for all parts must be noticed"

    oracle = fake_quantise(plain, "fp8_tensor_static", input_scales=scales)
    x = torch.randn(1, 5, 256)
    with torch.no_grad(), model.bind(ids[:1, :5], [None]):
        for name in ("q_proj", "k_proj", "v_proj"):
            served = model.module.get_submodule(f"{ATTENTION}.{name}")(x)
            assert relative(served, oracle.get_submodule(f"{ATTENTION}.{name}")(x)) <= 1e-5


def test_an_adapter_on_q_alone_over_int8(tmp_path: Path, seed: int) -> None:
    """8 query heads and 2 key/value heads: zeros of k and v have their own width."""
    plain = llama(seed)
    paths = {
        "q": make_adapter(plain, tmp_path / "q", rank=4, seed=1, targets=("q_proj",)),
        "qo": make_adapter(plain, tmp_path / "qo", rank=4, seed=2, targets=("q_proj", "o_proj")),
    }
    model = lc.wrap(copy.deepcopy(plain), quantization="int8_channel", adapters=paths)
    x, ids = torch.randn(3, 4, 256), prompts(seed, 3, 4)
    attention = model.module.get_submodule(ATTENTION)
    outputs: dict[str, list[torch.Tensor]] = {}
    for names in ([None, None, None], ["q", None, "qo"]):
        with model.bind(ids, names):
            for name in ("q_proj", "k_proj", "v_proj"):
                outputs.setdefault(name, []).append(getattr(attention, name)(x))
    for name, (base, live) in outputs.items():
        assert torch.equal(base[1], live[1])
        changed = [not torch.equal(base[row], live[row]) for row in (0, 2)]
        assert changed == [name == "q_proj"] * 2, name


def test_static_scales_cannot_be_made_at_load() -> None:
    with pytest.raises(SchemeUnsupported, match="cannot be quantised to `fp8_tensor_static`") as e:
        lc.wrap(llama(1), quantization="fp8_tensor_static")
    assert "calibrated input scales" in str(e.value)
    assert "fp8_tensor_dynamic" in str(e.value)
