"""Adapter files written by PEFT and others: exact, or refused by the name of what is unusual."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from lora_compile.adapters.peft_reader import inspect_adapter, read_adapter
from lora_compile.adapters.slots import allocate_slots, write_slot
from lora_compile.errors import Faults, LoraCompileError
from lora_compile.planning.plan import Plan
from tests.adapters.plans import FIXTURES, experts_plan, gpt2_plan, llama_plan, sizes

EXACT = [
    "peft-plain",
    "peft-patterns",
    "peft-rslora",
    "peft-target-regex",
    "peft-layers-to-transform",
    "peft-all-linear-exclude",
    "peft-pissa-converted",
    "hand-keys-no-prefix",
    "hand-keys-adapter-name",
    "hand-keys-model-once",
]


def plan_for(fixture: str) -> Plan:
    model = sizes(fixture)
    if "n_embd" in model:
        return gpt2_plan(model)
    if "num_experts" in model:
        return experts_plan(model)
    return llama_plan(
        hidden=model["hidden_size"],
        inter=model["intermediate_size"],
        heads=model["num_attention_heads"],
        kv_heads=model["num_key_value_heads"],
        head_dim=model.get("head_dim", model["hidden_size"] // model["num_attention_heads"]),
        layers=model["num_hidden_layers"],
    )


@pytest.mark.parametrize("fixture", EXACT)
def test_the_deltas_are_those_of_the_producer(fixture: str) -> None:
    plan = plan_for(fixture)
    adapter = read_adapter(FIXTURES / fixture, plan)
    reference = load_file(FIXTURES / fixture / "reference.safetensors")
    assert set(adapter.deltas) == set(reference)
    for module, expected in reference.items():
        delta = adapter.deltas[module]
        found = delta.scale * (delta.B.double() @ delta.A.double())
        error = (found - expected.double()).abs().max() / expected.double().abs().max()
        assert error < 1e-6, f"{module}: relative error {error:.2e}"


@pytest.mark.parametrize("fixture", EXACT)
def test_every_tensor_is_consumed_once(fixture: str) -> None:
    plan = plan_for(fixture)
    keys = sorted(load_file(FIXTURES / fixture / "adapter_model.safetensors"))
    report = inspect_adapter(FIXTURES / fixture, plan)
    assert sorted(tensor.key for tensor in report.tensors) == keys
    used = [
        p.key for d in read_adapter(FIXTURES / fixture, plan).deltas.values() for p in d.provenance
    ]
    assert sorted(used) == keys


@pytest.mark.parametrize("fixture", ["peft-patterns", "peft-all-linear-exclude"])
def test_slots_hold_the_producers_delta(fixture: str) -> None:
    """The whole way from the file to the slot tensors, per site, against the reference."""
    plan = plan_for(fixture)
    slots = allocate_slots(plan, "cpu")
    write_slot(plan, slots, 1, read_adapter(FIXTURES / fixture, plan))
    reference = load_file(FIXTURES / fixture / "reference.safetensors")
    for site in plan.sites:
        place = slots[site.name]
        for index, part in enumerate(site.parts):
            low, high = site.quant.parts[index].rows
            scale = place.lora_scale[1, index].double()
            found = scale * (place.lora_B[1, low:high].double() @ place.lora_A[1, index].double())
            expected = reference.get(part.module, torch.zeros(high - low, site.in_features))
            torch.testing.assert_close(found, expected.double(), rtol=1e-5, atol=1e-6)


REFUSED = [
    ("peft-dora", "use_dora", "lora_magnitude_vector"),
    ("peft-lora-bias", "lora_bias", "lora_B.bias"),
    ("peft-pissa", "init_lora_weights", None),
    ("peft-olora", "init_lora_weights", None),
    ("peft-embed-lm-head", None, "lora_embedding_A"),
    ("peft-embed-lm-head", None, "base_layer.weight"),
    ("peft-embed-lm-head", None, "lm_head.lora_A.weight"),
    ("peft-trainable-tokens", "trainable_token_indices", "trainable_tokens_delta"),
    ("peft-modules-to-save-lm-head", "modules_to_save", "lm_head.weight"),
    ("peft-fan-in-fan-out", "fan_in_fan_out", None),
    ("hand-half-a-pair", None, "experts.1.up_proj.lora_A.weight"),
    ("hand-rank-mismatch", "r, rank_pattern", "lora_A.weight"),
    ("hand-unknown-tensor", None, "qq_proj.lora_A.weight"),
]


@pytest.mark.parametrize(("fixture", "field", "tensor"), REFUSED)
def test_what_is_not_plain_lora_is_refused_by_name(
    fixture: str, field: str | None, tensor: str | None
) -> None:
    with pytest.raises(LoraCompileError) as caught:
        read_adapter(FIXTURES / fixture, plan_for(fixture))
    error = caught.value
    faults = error.faults if isinstance(error, Faults) else (error,)
    if field is not None:
        named = [fault for fault in faults if fault.where == field]
        assert named, error.render()
        config = json.loads((FIXTURES / fixture / "adapter_config.json").read_text())
        if field in config:
            assert all(repr(config[field]) in str(fault) for fault in named)
            assert all(fault.line is not None for fault in named)
    if tensor is not None:
        assert any(tensor in (fault.tensor or "") for fault in faults), error.render()
    assert all(fixture in (fault.file or "") for fault in faults)


def test_expected_class_of_each_hand_made_fault() -> None:
    for fixture, kind in (
        ("hand-half-a-pair", "AdapterPairIncomplete"),
        ("hand-unknown-tensor", "AdapterTargetUnknown"),
        ("hand-bin", "FeatureUnsupported"),
    ):
        with pytest.raises(LoraCompileError) as caught:
            read_adapter(FIXTURES / fixture, plan_for(fixture))
        assert type(caught.value).__name__ == kind, caught.value.render()


def test_a_half_pair_names_what_is_missing() -> None:
    with pytest.raises(LoraCompileError, match=r"experts\.1\.up_proj\.lora_B\.weight"):
        read_adapter(FIXTURES / "hand-half-a-pair", plan_for("hand-half-a-pair"))


def test_an_unknown_tensor_is_told_its_nearest_module() -> None:
    with pytest.raises(LoraCompileError, match=r"nearest: model\.layers\.0\.self_attn\.q_proj"):
        read_adapter(FIXTURES / "hand-unknown-tensor", plan_for("hand-unknown-tensor"))


def test_a_pickle_is_not_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(*args: object, **kwargs: object) -> None:
        raise AssertionError("the pickle was opened")

    monkeypatch.setattr(torch, "load", opened)
    with pytest.raises(LoraCompileError, match=r"adapter_model\.bin"):
        inspect_adapter(FIXTURES / "hand-bin", plan_for("hand-bin"))


def test_partial_coverage_is_a_warning() -> None:
    report = inspect_adapter(FIXTURES / "hand-keys-no-prefix", plan_for("hand-keys-no-prefix"))
    assert any("'k_proj' covers 1 of 2" in warning for warning in report.warnings)
    assert inspect_adapter(FIXTURES / "peft-plain", plan_for("peft-plain")).warnings == ()
