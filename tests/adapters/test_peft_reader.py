"""Faults of adapter files: each is named, all at once, and nothing is passed over."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from lora_compile.adapters.canonical import CanonicalAdapter
from lora_compile.adapters.peft_reader import (
    inspect_adapter,
    read_adapter,
    read_adapter_tensors,
)
from lora_compile.adapters.slots import slot_bytes
from lora_compile.errors import (
    AdapterConfigInvalid,
    AdapterFileInvalid,
    AdapterForeign,
    AdapterPairIncomplete,
    AdapterRankTooHigh,
    AdapterSiteNotBuilt,
    AdapterTargetUnknown,
    Faults,
    FeatureUnsupported,
    FileMissing,
    LoraCompileError,
    TensorNotFinite,
    TensorShape,
    TensorUnexpected,
)
from lora_compile.planning.plan import Plan
from tests.adapters.plans import config, llama_plan, plan_of, site, tensors

PLAN = llama_plan()
PEFT = "base_model.model."
LAYER = "model.layers.1.self_attn"

Tensors = dict[str, torch.Tensor]


def write(folder: Path, made: Tensors, fields: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    save_file(made, folder / "adapter_model.safetensors")
    return folder


def faults_of(made: Tensors, fields: dict[str, Any], plan: Plan = PLAN) -> list[LoraCompileError]:
    with pytest.raises(LoraCompileError) as caught:
        read_adapter_tensors(made, fields, plan)
    error = caught.value
    return list(error.faults) if isinstance(error, Faults) else [error]


def the_fault(made: Tensors, fields: dict[str, Any], plan: Plan = PLAN) -> LoraCompileError:
    faults = faults_of(made, fields, plan)
    assert len(faults) == 1, "\n".join(map(str, faults))
    return faults[0]


def read(made: Tensors, fields: dict[str, Any], plan: Plan = PLAN) -> CanonicalAdapter:
    return read_adapter_tensors(made, fields, plan)


# --- key names -------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["base_model.", ""])
def test_a_prefix_left_out_changes_nothing(prefix: str, seed: int) -> None:
    """The file without `base_model.model.` is the same adapter, bit for bit."""
    full = read(tensors(PLAN, seed=seed), config())
    bare = read(tensors(PLAN, seed=seed, prefix=prefix), config())
    assert bare.digest == full.digest
    assert set(bare.deltas) == set(PLAN.targets)
    for module, delta in bare.deltas.items():
        assert torch.equal(delta.A, full.deltas[module].A)
        assert torch.equal(delta.B, full.deltas[module].B)


def test_a_prefix_that_the_plan_does_not_have_is_refused() -> None:
    plan = llama_plan(key_prefixes=("base_model.model.",))
    error = the_fault(tensors(plan, prefix=""), config(), plan)
    assert isinstance(error, AdapterTargetUnknown)
    assert "key_prefixes" in str(error)


def test_a_surplus_level_is_one_error_with_the_nearest_module() -> None:
    made = tensors(PLAN, prefix=f"{PEFT}language_model.")
    error = the_fault(made, config())
    assert isinstance(error, AdapterTargetUnknown)
    assert "nearest: model.layers.0." in str(error)
    assert f"(and {len(made) - 1} more)" in str(error.tensor)


def test_an_ambiguous_key_is_an_error() -> None:
    plan = plan_of(
        [
            site("q_proj", 8, [("q_proj", 4)], parent=parent, layer=0)
            for parent in ("model.layers.0", "base_model.model.layers.0")
        ]
    )
    made = {
        "base_model.model.layers.0.q_proj.lora_A.weight": torch.ones(4, 8),
        "base_model.model.layers.0.q_proj.lora_B.weight": torch.ones(4, 4),
    }
    assert any(
        "several modules" in fault.message
        for fault in faults_of(made, config(target_modules=["q_proj"]), plan)
    )


def test_the_adapters_name_inside_a_key() -> None:
    plain = tensors(PLAN)
    named = {key.replace(".weight", ".default.weight"): t for key, t in plain.items()}
    assert read(named, config()).digest == read(plain, config()).digest
    first = next(iter(named))
    mixed = {
        key.replace("default", "other") if key == first else key: t for key, t in named.items()
    }
    error = the_fault(mixed, config())
    assert isinstance(error, AdapterFileInvalid)
    assert "other" in str(error)
    assert "default" in str(error)


def test_one_tensor_given_twice() -> None:
    made = tensors(PLAN, [f"{LAYER}.q_proj"])
    made |= tensors(PLAN, [f"{LAYER}.q_proj"], prefix="")
    faults = faults_of(made, config(target_modules=["q_proj"]))
    assert all(isinstance(fault, AdapterFileInvalid) for fault in faults)
    assert "given twice" in faults[0].message


def test_names_and_widths_that_do_not_fit_come_in_one_error() -> None:
    """A misspelt key and a wrong width are both listed; the rest of the file may be a subset."""
    made = tensors(PLAN, [f"{LAYER}.{n}_proj" for n in "qkvo"])
    bad = f"{PEFT}{LAYER}.o_proj.lora_B.weight"
    made[bad] = torch.randn(48 + 8, 4)
    for role in "AB":
        key = f"{PEFT}{LAYER}.q_proj.lora_{role}.weight"
        made[key.replace("q_proj", "q_porj")] = made.pop(key)
    faults = faults_of(made, config(target_modules=["q_proj", "k_proj", "v_proj", "o_proj"]))
    assert sorted(type(fault).__name__ for fault in faults) == [
        "AdapterTargetUnknown",
        "TensorShape",
    ]
    text = "\n".join(map(str, faults))
    assert bad in text
    assert f"{LAYER}.q_porj.lora_A.weight" in text
    assert "[48, r] with r = 4" in text
    assert "[56, 4]" in text


def test_a_subset_of_the_modules_is_legal() -> None:
    adapter = read(tensors(PLAN, [f"{LAYER}.k_proj"]), config(target_modules=["k_proj"]))
    assert set(adapter.deltas) == {f"{LAYER}.k_proj"}
    assert "covers 1 of 2" in adapter.warnings[0]


@pytest.mark.parametrize(
    ("key", "feature"),
    [
        ("q_proj.lora_magnitude_vector", "DoRA"),
        ("q_proj.lora_magnitude_vector.weight", "DoRA"),
        ("q_proj.lora_B.bias", "lora_bias"),
        ("q_proj.base_layer.bias", "replaced bias"),
        ("q_proj.bias", "replaced bias"),
        ("q_proj.base_layer.weight", "base weight"),
        ("q_proj.weight", "modules_to_save"),
        ("q_proj.modules_to_save.default.weight", "modules_to_save"),
        ("q_proj.lora_diag", "KaSA"),
        ("q_proj.lora_embedding_A", "embedding"),
        ("q_proj.token_adapter.trainable_tokens_delta", "embedding rows"),
    ],
)
def test_a_tensor_of_another_feature_is_refused_by_name(key: str, feature: str) -> None:
    made = tensors(PLAN) | {f"{PEFT}{LAYER}.{key}": torch.zeros(4)}
    error = the_fault(made, config())
    assert isinstance(error, FeatureUnsupported)
    assert feature in error.message
    assert error.tensor == f"{PEFT}{LAYER}.{key}"


@pytest.mark.parametrize("key", ["q_proj.lora_C.weight", "q_proj.lora_A", "rotary.inv_freq", "x"])
def test_a_tensor_that_no_rule_reads_is_refused(key: str) -> None:
    error = the_fault(tensors(PLAN) | {f"{PEFT}{LAYER}.{key}": torch.zeros(4)}, config())
    assert isinstance(error, TensorUnexpected)
    assert error.tensor == f"{PEFT}{LAYER}.{key}"


def test_experts_are_refused_by_the_sites_name() -> None:
    plan = plan_of(
        [
            *PLAN.sites,
            site(
                "experts",
                48,
                [("experts", 40)],
                parent="model.layers.0.mlp",
                layer=0,
                kind="experts",
                lora=False,
            ),
        ]
    )
    made = tensors(PLAN)
    made[f"{PEFT}model.layers.0.mlp.experts.lora_A.weight"] = torch.zeros(8, 48)
    made[f"{PEFT}model.layers.0.mlp.experts.lora_B.weight"] = torch.zeros(40, 8)
    error = the_fault(made, config(target_modules=[*config()["target_modules"], "experts"]), plan)
    assert isinstance(error, FeatureUnsupported)
    assert "model.layers.0.mlp.experts" in error.message


# --- another base model ----------------------------------------------------------------------


def test_layers_beyond_the_model_make_an_adapter_foreign() -> None:
    """Valid suffixes, absent layer numbers: nothing binds and the load fails."""
    deep = llama_plan(layers=42)
    names = ["q_proj", "k_proj", "v_proj", "o_proj"]
    modules = [f"model.layers.{i}.self_attn.{n}" for i in (40, 41) for n in names]
    error = the_fault(tensors(deep, modules), config(target_modules=names))
    assert isinstance(error, AdapterForeign)
    assert "0 of 8 modules fit" in error.message
    assert "tiny/base" in str(error)


def test_other_widths_make_an_adapter_foreign() -> None:
    error = the_fault(tensors(llama_plan(hidden=64, inter=56)), config())
    assert isinstance(error, AdapterForeign)
    assert "tiny/base" in str(error)
    assert "with r = 4" in str(error)


def test_an_empty_file_is_refused() -> None:
    error = the_fault({}, config())
    assert isinstance(error, AdapterFileInvalid)
    assert "0 tensors" in error.message


# --- pairs, shapes, ranks --------------------------------------------------------------------


@pytest.mark.parametrize(("kept", "dropped"), [("lora_A", "lora_B"), ("lora_B", "lora_A")])
def test_half_a_pair_is_an_error_with_the_full_name(kept: str, dropped: str) -> None:
    made = tensors(PLAN)
    del made[f"{PEFT}{LAYER}.o_proj.{dropped}.weight"]
    error = the_fault(made, config())
    assert isinstance(error, AdapterPairIncomplete)
    assert error.tensor == f"{PEFT}{LAYER}.o_proj.{kept}.weight"
    assert f"{LAYER}.o_proj.{dropped}.weight" in str(error.expected)


def test_the_narrow_part_of_a_fused_site_loads_alone() -> None:
    """k_proj alone, with fewer rows than q_proj: read with its own width, or told which."""
    plan = llama_plan(hidden=256, inter=384, heads=8, kv_heads=2, head_dim=32)
    fields = config(target_modules=["k_proj"])
    modules = [f"model.layers.{i}.self_attn.k_proj" for i in range(2)]
    adapter = read(tensors(plan, modules), fields, plan)
    assert [tuple(d.B.shape) for d in adapter.deltas.values()] == [(64, 4)] * 2
    wide = tensors(plan, modules)
    wide[f"{PEFT}{modules[0]}.lora_B.weight"] = torch.zeros(256, 4)
    error = the_fault(wide, fields, plan)
    assert isinstance(error, TensorShape)
    assert "[64, r]" in str(error.expected)
    assert error.found == "[256, 4]"


@pytest.mark.parametrize("shape", [(4,), (4, 48, 1), (48, 4), (0,), ()])
def test_a_tensor_of_another_form_is_refused(shape: tuple[int, ...]) -> None:
    made = tensors(PLAN)
    made[f"{PEFT}{LAYER}.q_proj.lora_A.weight"] = torch.zeros(shape)
    error = the_fault(made, config())
    assert isinstance(error, TensorShape)
    assert "[r, 48]" in str(error.expected)


def test_ranks_that_disagree() -> None:
    made = tensors(PLAN)
    made[f"{PEFT}{LAYER}.q_proj.lora_B.weight"] = torch.zeros(48, 5)
    error = the_fault(made, config())
    assert "different ranks" in error.message
    for key in ("lora_A", "lora_B"):
        assert f"{PEFT}{LAYER}.q_proj.{key}.weight" in str(error), "either may be the wrong one"
    assert "[48, 5]" in str(error.found)
    error = the_fault(tensors(PLAN, rank=5), config())
    assert isinstance(error, AdapterConfigInvalid)
    assert error.where == "r, rank_pattern"
    assert "(and 13 more)" in str(error.tensor)


def test_a_rank_too_high_is_told_with_the_cure_and_its_price() -> None:
    error = the_fault(tensors(PLAN, rank=64), config(r=64))
    assert isinstance(error, AdapterRankTooHigh)
    mib = (slot_bytes(llama_plan(max_rank=64)) - slot_bytes(PLAN)) / 2**20
    assert f"runtime.max_rank: 64` (+{mib:.2f} MiB over 8 sites and 3 slots)" in str(error.fix)


def test_the_highest_rank_over_the_patterns_counts() -> None:
    made = tensors(PLAN, rank=8)
    name = f"{PEFT}model.layers.0.mlp.up_proj"
    made[f"{name}.lora_A.weight"] = torch.zeros(64, 48)
    made[f"{name}.lora_B.weight"] = torch.zeros(40, 64)
    fields = config(r=8, rank_pattern={"layers.0.mlp.up_proj": 64})
    error = the_fault(made, fields)
    assert isinstance(error, AdapterRankTooHigh)
    assert "max_rank: 64" in str(error.fix)
    assert error.tensor == f"{name}.lora_A.weight"
    assert read(made, fields, llama_plan(max_rank=64)).max_rank == 64


def test_a_pruned_module_has_no_delta() -> None:
    made = tensors(PLAN)
    made[f"{PEFT}{LAYER}.q_proj.lora_A.weight"] = torch.zeros(0, 48)
    made[f"{PEFT}{LAYER}.q_proj.lora_B.weight"] = torch.zeros(48, 0)
    adapter = read(made, config(rank_pattern={f"{LAYER}.q_proj": 0}))
    assert set(PLAN.targets) - set(adapter.deltas) == {f"{LAYER}.q_proj"}


def test_alpha_zero_gives_scale_zero_and_a_warning() -> None:
    adapter = read(tensors(PLAN), config(lora_alpha=0))
    assert {delta.scale for delta in adapter.deltas.values()} == {0.0}
    assert any("lora_alpha is 0" in warning for warning in adapter.warnings)
    part = read(tensors(PLAN), config(alpha_pattern={"layers.0.mlp.up_proj": 0}))
    assert any("scale 0" in w and "layers.0.mlp.up_proj" in w for w in part.warnings)


# --- targets and slots -----------------------------------------------------------------------


def test_targets_that_bind_nothing_show_both_lists() -> None:
    made = tensors(PLAN, [f"model.layers.{i}.mlp.down_proj" for i in range(2)])
    text = "\n".join(map(str, faults_of(made, config(target_modules=["q_proj"]))))
    assert "coverage 'q_proj' (0/2)" in text
    assert "target_modules: [q_proj]" in text
    assert "tensors for: [down_proj]" in text


def test_an_entry_without_any_tensor_is_an_error() -> None:
    made = {key: t for key, t in tensors(PLAN).items() if "down_proj" not in key}
    error = the_fault(made, config())
    assert isinstance(error, AdapterTargetUnknown)
    assert "'down_proj' (0/2)" in error.message
    assert "'up_proj'" not in error.message


def test_layers_that_are_not_to_be_transformed_are_not_missed() -> None:
    made = {key: t for key, t in tensors(PLAN).items() if ".layers.1." in key}
    assert read(made, config(layers_to_transform=[1])).warnings == ()
    other = "\n".join(map(str, faults_of(made, config(layers_to_transform=[0]))))
    assert "in layers [0]" in other
    assert "7 modules that the config does not adapt" in other


def test_an_entry_that_matches_nothing_is_a_warning() -> None:
    fields = config(target_modules=[*config()["target_modules"], "c_attn"])
    assert read(tensors(PLAN), fields).warnings == (
        "target_modules entry 'c_attn' matches no projection of this model",
    )


def test_a_tensor_that_the_config_does_not_adapt_is_refused() -> None:
    error = the_fault(tensors(PLAN), config(exclude_modules=["v_proj"]))
    assert isinstance(error, AdapterConfigInvalid)
    assert "2 modules" in error.message
    assert "v_proj" in str(error.tensor)


def test_a_site_without_slots_is_refused_by_name() -> None:
    plan = llama_plan(without=("down_proj",))
    error = the_fault(tensors(PLAN), config(), plan)
    assert isinstance(error, AdapterSiteNotBuilt)
    assert "model.layers.0.mlp.down_proj" in error.message
    assert "runtime.sites" in str(error.fix)


# --- fused names -----------------------------------------------------------------------------


def test_a_prefused_adapter_is_the_split_one_with_a_repeated(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    fused: Tensors = {}
    split: Tensors = {}
    for one in (s for s in PLAN.sites if len(s.parts) > 1):
        a = torch.randn(4, one.in_features, generator=generator)
        b = torch.randn(one.out_features, 4, generator=generator)
        fused |= {f"{PEFT}{one.name}.lora_A.weight": a, f"{PEFT}{one.name}.lora_B.weight": b}
        for part, rows in zip(one.parts, one.quant.parts, strict=True):
            low, high = rows.rows
            split |= {
                f"{PEFT}{part.module}.lora_A.weight": a,
                f"{PEFT}{part.module}.lora_B.weight": b[low:high].contiguous(),
            }
    fields = config(target_modules=["qkv_proj", "gate_up_proj"])
    names = ["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"]
    ours, theirs = read(fused, fields), read(split, config(target_modules=names))
    assert ours.digest == theirs.digest
    assert ours.warnings == theirs.warnings == ()
    assert ours.deltas.keys() == theirs.deltas.keys()
    for module, delta in ours.deltas.items():
        assert torch.equal(delta.A, theirs.deltas[module].A)
        assert torch.equal(delta.B, theirs.deltas[module].B)
    both = fused | tensors(PLAN, [f"{LAYER}.q_proj"])
    fields = config(target_modules=["qkv_proj", "gate_up_proj", "q_proj"])
    assert any("given twice" in fault.message for fault in faults_of(both, fields))


def test_patterns_go_by_the_fused_name() -> None:
    name = f"{PEFT}{LAYER}.qkv_proj"
    made = {
        f"{name}.lora_A.weight": torch.ones(2, 48),
        f"{name}.lora_B.weight": torch.ones(80, 2),
    }
    fields = config(
        target_modules=["qkv_proj"], rank_pattern={"qkv_proj": 2}, alpha_pattern={"q_proj": 100}
    )
    assert {delta.scale for delta in read(made, fields).deltas.values()} == {3.0}


# --- values and files ------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_not_finite_are_refused(value: float, dtype: torch.dtype) -> None:
    made = tensors(PLAN, dtype=dtype)
    key = f"{PEFT}{LAYER}.q_proj.lora_B.weight"
    made[key][3, 1] = value
    error = the_fault(made, config())
    assert isinstance(error, TensorNotFinite)
    assert error.tensor == key
    assert "1 of 192" in str(error.found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_stored_dtypes_are_kept(dtype: torch.dtype, tmp_path: Path) -> None:
    folder = write(tmp_path / "a", tensors(PLAN, dtype=dtype), config())
    adapter = read_adapter(folder, PLAN)
    assert {t.dtype for d in adapter.deltas.values() for t in (d.A, d.B)} == {dtype}


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8, torch.float8_e4m3fn])
def test_other_dtypes_are_refused(dtype: torch.dtype, tmp_path: Path) -> None:
    made = tensors(PLAN, dtype=dtype)
    in_memory = the_fault(made, config())
    with pytest.raises(TensorShape) as caught:
        read_adapter(write(tmp_path / "a", made, config()), PLAN)
    for error in (in_memory, caught.value):
        assert isinstance(error, TensorShape)
        assert "(and 27 more)" in str(error.tensor)


def test_the_report_says_where_each_tensor_goes(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", tensors(PLAN), config(use_rslora=True))
    report = inspect_adapter(folder, PLAN)
    assert report.modules == 14
    assert report.max_rank == 4
    assert report.bytes == sum(t.nbytes for t in tensors(PLAN).values())
    assert report.base_model == "tiny/base"
    one = next(t for t in report.tensors if t.key == f"{PEFT}{LAYER}.k_proj.lora_B.weight")
    assert (one.site, one.parts, one.layer) == (f"{LAYER}.qkv_proj", ("k_proj",), 1)
    assert (one.shape, one.rank, one.scale, one.dtype) == ((16, 4), 4, 3.0, "float32")
    assert repr(PEFT) in one.decided_by
    assert json.loads(report.model_dump_json())["modules"] == 14


def test_inspection_loads_no_tensor(tmp_path: Path) -> None:
    """A file whose data are NaN passes: only its header is read."""
    made = {key: torch.full_like(t, float("nan")) for key, t in tensors(PLAN).items()}
    folder = write(tmp_path / "a", made, config())
    assert inspect_adapter(folder, PLAN).modules == 14
    with pytest.raises(Faults):
        read_adapter(folder, PLAN)


def test_broken_directories(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", tensors(PLAN), config())
    weights = folder / "adapter_model.safetensors"
    whole = weights.read_bytes()
    for content in (b"", b"not safetensors", whole[:100], whole[:-8]):
        weights.write_bytes(content)
        with pytest.raises(AdapterFileInvalid, match="not a safetensors file"):
            read_adapter(folder, PLAN)
    weights.unlink()
    with pytest.raises(FileMissing):
        read_adapter(folder, PLAN)
    (folder / "adapter_model.safetensors.index.json").write_text("{}")
    with pytest.raises(FeatureUnsupported, match="several files"):
        read_adapter(folder, PLAN)
    (folder / "adapter_config.json").unlink()
    with pytest.raises(FileMissing, match=r"adapter_config\.json"):
        read_adapter(folder, PLAN)


def test_config_and_tensor_faults_come_together() -> None:
    made = tensors(PLAN) | {"odd": torch.zeros(1)}
    faults = faults_of(made, config(use_dora=True, typo=1) | {"bias": "all"})
    assert {fault.where or fault.tensor for fault in faults} == {"use_dora", "bias", "typo", "odd"}


def test_changing_the_tensors_afterwards_changes_nothing() -> None:
    made = tensors(PLAN)
    adapter = read(made, config())
    before = adapter.deltas[f"{LAYER}.q_proj"].A.clone()
    made[f"{PEFT}{LAYER}.q_proj.lora_A.weight"].zero_()
    assert torch.equal(adapter.deltas[f"{LAYER}.q_proj"].A, before)


# --- identity --------------------------------------------------------------------------------


def test_the_digest_is_the_content() -> None:
    base = read(tensors(PLAN), config())
    assert read(tensors(PLAN), config(lora_dropout=0.5)).digest == base.digest
    assert re.fullmatch(r"[0-9a-f]{64}", base.digest)
    changed = tensors(PLAN)
    changed[f"{PEFT}{LAYER}.q_proj.lora_A.weight"][0, 0] += 1e-6
    others = [
        read(changed, config()),
        read(tensors(PLAN), config(lora_alpha=7)),
        read(tensors(PLAN), config(alpha_pattern={f"{LAYER}.q_proj": 7})),
        read(tensors(PLAN, dtype=torch.bfloat16), config()),
        read(tensors(PLAN, [f"{LAYER}.q_proj"]), config(target_modules=["q_proj"])),
    ]
    assert len({base.digest, *(other.digest for other in others)}) == 6


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_no_tensor_is_passed_over(data: st.DataObject) -> None:
    """Whatever is renamed, dropped or reshaped: it binds all, or the fault names the tensor."""
    made = tensors(PLAN, [f"{LAYER}.{n}_proj" for n in "qkvo"])
    key = data.draw(st.sampled_from(sorted(made)))
    action = data.draw(st.sampled_from(["rename", "drop", "reshape", "layer"]))
    tensor = made.pop(key)
    if action == "rename":
        at = data.draw(st.integers(0, len(key) - 1))
        letter = data.draw(st.sampled_from("abqxyz0159._"))
        new = key[:at] + letter + key[at + 1 :]
    elif action == "layer":
        new = key.replace("layers.1", f"layers.{data.draw(st.integers(2, 99))}")
    else:
        new = key
    if action == "reshape":
        tensor = torch.zeros(data.draw(st.lists(st.integers(0, 50), max_size=3)))
    same = new == key and (action != "reshape" or tensor.shape == made.get(key, tensor).shape)
    if action != "drop":
        made[new] = tensor
    fields = config(target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])
    error = None
    try:
        adapter = read(made, fields)
    except LoraCompileError as raised:
        error = str(raised)
    if error is None:
        used = {p.key for d in adapter.deltas.values() for p in d.provenance}
        assert used == set(made)
        assert same or new in used
    else:
        assert (key.rsplit(".lora_", 1)[0] if action == "drop" else new) in error, error
