"""Adapters of multi-head latent attention: split, fused, one-sided; routed experts are refused."""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import lora_compile as lc
from lora_compile.adapters.peft_kept import tell_targets
from lora_compile.adapters.peft_reader import inspect_adapter, read_adapter, read_adapter_tensors
from lora_compile.adapters.peft_rules import TargetRule
from lora_compile.adapters.slots import allocate_slots, write_slot
from lora_compile.errors import FaultList, Faults, FeatureUnsupported, LoraCompileError
from lora_compile.planning.plan import Plan
from tests.adapters.plans import FIXTURES, config

EXACT = ["peft-deepseekv3-mla", "peft-deepseekv3-q-a-only", "peft-deepseekv3-kv-a-only"]
ATTENTION = "model.layers.{}.self_attn"
FUSED = "fused_qkv_a_proj_with_mqa"


@cache
def plan(fuse: bool = True) -> Plan:
    """The plan of the base model that the fixtures were made for."""
    model = AutoModelForCausalLM.from_pretrained(FIXTURES / "base-deepseekv3", dtype=torch.float32)
    return lc.wrap(model, flags={"fuse_qkv_a": fuse}).plan


def faults(path: Path) -> tuple[LoraCompileError, ...]:
    with pytest.raises(LoraCompileError) as caught:
        read_adapter(path, plan())
    error = caught.value
    return tuple(error.faults) if isinstance(error, Faults) else (error,)


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("fixture", EXACT)
def test_the_deltas_are_those_of_the_producer(fixture: str, fuse: bool) -> None:
    """From the file to the slot tensors, with zero of its own width where a part has no delta."""
    folder = FIXTURES / fixture
    adapter = read_adapter(folder, plan(fuse))
    reference = load_file(folder / "reference.safetensors")
    assert set(adapter.deltas) == set(reference)
    slots = allocate_slots(plan(fuse), "cpu")
    for tensors in slots.values():
        for tensor in tensors.all():
            tensor.fill_(7)  # what another adapter left there
    write_slot(plan(fuse), slots, 1, adapter)
    for site in plan(fuse).sites:
        if not site.lora:
            continue
        place = slots[site.name]
        for index, part in enumerate(site.parts):
            low, high = site.quant.parts[index].rows
            scale = place.lora_scale[1, index].double()
            found = scale * (place.lora_B[1, low:high].double() @ place.lora_A[1, index].double())
            if part.module in reference:
                expected = reference[part.module].double()
                torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
            else:
                assert found.shape == (part.out_features, site.in_features)
                assert not place.lora_A[1, index].any()
                assert not place.lora_B[1, low:high].any()


@pytest.mark.parametrize("fixture", EXACT)
def test_every_tensor_is_consumed_once(fixture: str) -> None:
    keys = sorted(load_file(FIXTURES / fixture / "adapter_model.safetensors"))
    report = inspect_adapter(FIXTURES / fixture, plan())
    assert sorted(tensor.key for tensor in report.tensors) == keys
    adapter = read_adapter(FIXTURES / fixture, plan())
    assert sorted(p.key for d in adapter.deltas.values() for p in d.provenance) == keys


def fused_tensors(rank: int = 4) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """An adapter of an engine that has the two projections as one module: B (176, r), A shared."""
    path = f"base_model.model.{ATTENTION.format(1)}.{FUSED}"
    tensors = {
        f"{path}.lora_A.weight": torch.randn(rank, 48),
        f"{path}.lora_B.weight": torch.randn(96 + 80, rank),
    }
    return tensors, config(r=rank, lora_alpha=6, target_modules=[FUSED])


@pytest.mark.parametrize("fuse", [True, False])
def test_a_fused_name_is_split_by_the_rows_of_the_parts(fuse: bool, seed: int) -> None:
    """Under `fuse_qkv_a: false` too, where the parts are sites of their own."""
    torch.manual_seed(seed)
    tensors, settings = fused_tensors()
    adapter = read_adapter_tensors(tensors, settings, plan(fuse))
    a, b = tensors.values()
    assert set(adapter.deltas) == {
        f"{ATTENTION.format(1)}.{name}" for name in ("q_a_proj", "kv_a_proj_with_mqa")
    }
    for name, rows in (("q_a_proj", b[:96]), ("kv_a_proj_with_mqa", b[96:])):
        delta = adapter.deltas[f"{ATTENTION.format(1)}.{name}"]
        assert torch.equal(delta.A, a)
        assert torch.equal(delta.B, rows)
        assert delta.scale == 1.5
    assert any(f"'{FUSED}' covers 1 of 2" in warning for warning in adapter.warnings)


def test_a_fused_name_reports_every_site_that_it_touches(tmp_path: Path) -> None:
    """`sites: touched` builds slots where the report says."""
    from safetensors.torch import save_file

    tensors, settings = fused_tensors()
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    sites = {tensor.site for tensor in inspect_adapter(tmp_path, plan(False)).tensors}
    assert sites == {f"{ATTENTION.format(1)}.{name}" for name in ("q_a_proj", "kv_a_proj_with_mqa")}


def test_the_fused_width_of_another_model_is_refused() -> None:
    tensors, settings = fused_tensors()
    path = f"base_model.model.{ATTENTION.format(1)}.{FUSED}"
    tensors[f"{path}.lora_B.weight"] = torch.randn(96 + 96, 4)
    with pytest.raises(LoraCompileError, match=r"\[176, r\]"):
        read_adapter_tensors(tensors, settings, plan())


EXPERTS = [
    "peft-tp-deepseekv3-0.18.1",
    "peft-tp-deepseekv3-0.19.0",
    "peft-tp-deepseekv3-0.19.1",
    "peft-tp-deepseekv3-0.21.2",
    "peft-v4-deepseekv3",
    "peft-deepseekv3-shared-and-dense",
]
"""The last was asked for shared experts and dense layers; PEFT has moved it to routed experts."""


@pytest.mark.parametrize("fixture", EXPERTS)
def test_routed_experts_are_refused_by_name(fixture: str) -> None:
    found = [f for f in faults(FIXTURES / fixture) if "routed experts" in f.message]
    assert all(type(fault) is FeatureUnsupported for fault in found)
    (tensors,) = (fault for fault in found if fault.tensor)
    assert (tensors.file or "").endswith(f"{fixture}/adapter_model.safetensors")
    assert "model.layers.1.mlp.experts." in (tensors.tensor or "")
    assert "without the routed experts" in (tensors.fix or "")
    saved = json.loads((FIXTURES / fixture / "adapter_config.json").read_text())
    if saved.get("target_parameters"):
        (named,) = (fault for fault in found if fault.where == "target_parameters")
        assert (named.file or "").endswith("adapter_config.json")
        assert named.line is not None
    keys = load_file(FIXTURES / fixture / "adapter_model.safetensors")
    count = sum(".mlp.experts." in key for key in keys)
    assert f"{count} tensors" in (tensors.found or "")


def test_what_is_fit_to_serve_is_not_named_beside_the_experts() -> None:
    """The per-expert adapter also has attention, dense and shared deltas, which are fine."""
    (only,) = faults(FIXTURES / "peft-v4-deepseekv3")
    assert "routed experts" in only.message


SHAPES = {
    "experts.0.gate_proj.lora_A.weight": (2, 48),
    "experts.base_layer.lora_B.weight": (40, 8),
    "experts.lora_A.weight": (8, 20),
    "experts.w1.lora_A.weight": (4, 2, 48),
    "experts.gate_proj.lora_A.weight": (1, 2, 48),
    "experts.lora_magnitude_vector": (48,),
    "experts.3.down_proj.lora_A.default.weight": (2, 20),
}


@pytest.mark.parametrize("key", SHAPES)
@pytest.mark.parametrize("prefix", ["base_model.model.", ""])
def test_every_form_of_an_experts_key_is_recognised(key: str, prefix: str) -> None:
    tensors = {f"{prefix}model.layers.1.mlp.{key}": torch.zeros(SHAPES[key])}
    settings = config(target_modules=["q_a_proj"])
    with pytest.raises(LoraCompileError) as caught:
        read_adapter_tensors(tensors, settings, plan())
    error = caught.value
    all_faults = error.faults if isinstance(error, Faults) else (error,)
    named = [f for f in all_faults if next(iter(tensors)) == f.tensor]
    assert [type(f) for f in named] == [FeatureUnsupported]
    assert "routed experts" in named[0].message


@pytest.mark.parametrize(
    "targets",
    [
        ["q_a_proj", "experts.0.gate_proj"],
        ["q_a_proj", "model.layers.1.mlp.experts.2.up_proj"],
        ["q_a_proj", "mlp.experts"],
        r".*(q_a_proj|mlp\.experts)",
    ],
)
def test_targets_that_name_experts_are_refused_without_tensors(targets: Any) -> None:
    adapter = load_file(FIXTURES / "peft-deepseekv3-q-a-only" / "adapter_model.safetensors")
    with pytest.raises(FeatureUnsupported, match="routed experts") as caught:
        read_adapter_tensors(adapter, config(r=3, target_modules=targets), plan())
    assert caught.value.where == "target_modules"
    assert "experts" in (caught.value.found or "")


@pytest.mark.parametrize("targets", [["q_a_proj", "shared_experts.gate_proj"], "all-linear"])
def test_other_targets_are_not_taken_for_experts(targets: Any) -> None:
    found = FaultList()
    rule = TargetRule(tuple(targets) if isinstance(targets, list) else targets, (), (), ())
    tell_targets(rule, plan(), (), file="adapter_config.json", faults=found)
    assert not found


def test_an_adapter_on_the_router_is_refused_by_name(tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / "peft-deepseekv3-q-a-only", tmp_path / "a")
    path = tmp_path / "a" / "adapter_config.json"
    saved = json.loads(path.read_text())
    path.write_text(json.dumps(saved | {"target_parameters": ["mlp.gate.weight"]}))
    (fault,) = faults(tmp_path / "a")
    assert type(fault) is FeatureUnsupported
    assert "router" in fault.message
