"""Slot tensors: layout, exact bytes, and that a write leaves nothing of what was there."""

from __future__ import annotations

import random

import pytest
import torch

from lora_compile.adapters.canonical import CanonicalAdapter, PartDelta
from lora_compile.adapters.peft_reader import read_adapter_tensors
from lora_compile.adapters.slots import (
    SlotTensors,
    allocate_slots,
    site_slot_bytes,
    slot_bytes,
    write_slot,
)
from lora_compile.errors import (
    AdapterForeign,
    AdapterRankTooHigh,
    AdapterSiteNotBuilt,
    AdapterTargetUnknown,
    Faults,
    FeatureUnsupported,
    RequestInvalid,
    TensorNotFinite,
)
from lora_compile.planning.plan import Plan
from tests.adapters.plans import config, llama_plan, plan_of, site, tensors


def adapter_of(plan: Plan, modules: list[str] | None = None, **fields: object) -> CanonicalAdapter:
    made = tensors(plan, modules, rank=int(str(fields.get("r", 4))))
    names = sorted({module.rsplit(".", 1)[-1] for module in modules or plan.targets})
    return read_adapter_tensors(made, config(target_modules=names, **fields), plan)


def poisoned(plan: Plan) -> dict[str, SlotTensors]:
    """Slots full of NaN (and of a negative rank): what is not written shows."""
    slots = allocate_slots(plan, "cpu")
    for place in slots.values():
        for tensor in (place.lora_A, place.lora_B, place.lora_scale):
            tensor.fill_(float("nan"))
        place.lora_rank.fill_(-7)
    return slots


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("max_rank", [1, 16, 17, 40])
def test_shapes_and_bytes(dtype: str, max_rank: int) -> None:
    plan = llama_plan(dtype=dtype, max_rank=max_rank, max_adapters=3, without=("o_proj",))
    slots = allocate_slots(plan, "cpu")
    assert set(slots) == {s.name for s in plan.sites if s.role != "o_proj"}
    place, rank = slots["model.layers.0.self_attn.qkv_proj"], plan.slots.rank
    assert place.lora_A.shape == (4, 3, rank, 48)
    assert place.lora_B.shape == (4, 80, rank)
    assert (place.lora_scale.shape, place.lora_scale.dtype) == ((4, 3), torch.float32)
    assert (place.lora_rank.shape, place.lora_rank.dtype) == ((4,), torch.int32)
    assert place.lora_A.dtype == place.lora_B.dtype == getattr(torch, dtype)
    for name, tensors_ in slots.items():
        found = sum(tensor.nbytes for tensor in tensors_.all())
        assert site_slot_bytes(plan, plan.by_name[name]) == found
    assert slot_bytes(plan) == sum(t.nbytes for p in slots.values() for t in p.all())
    assert slot_bytes(plan, 64) == slot_bytes(
        llama_plan(dtype=dtype, max_rank=64, max_adapters=3, without=("o_proj",))
    )
    assert all(not bool(t.any()) for p in slots.values() for t in p.all())


def test_a_write_fills_the_whole_slot_and_no_other(seed: int) -> None:
    """NaN before the write: none is left in the slot, and every other slot keeps its NaN."""
    rng = random.Random(seed)
    plan = llama_plan(max_rank=24, max_adapters=2)
    modules = rng.sample(sorted(plan.targets), rng.randint(1, len(plan.targets)))
    names = sorted({module.rsplit(".", 1)[-1] for module in modules})
    ranks = {module: rng.randint(1, 24) for module in modules}
    made: dict[str, torch.Tensor] = {}
    for module, rank in ranks.items():
        made |= tensors(plan, [module], rank=rank, seed=seed)
    fields = config(
        target_modules=names,
        rank_pattern=ranks,
        alpha_pattern={m: i + 1 for i, m in enumerate(modules)},
    )
    adapter = read_adapter_tensors(made, fields, plan)
    slot = rng.randrange(3)
    slots = poisoned(plan)
    addresses = {name: [t.data_ptr() for t in p.all()] for name, p in slots.items()}
    write_slot(plan, slots, slot, adapter)
    assert addresses == {name: [t.data_ptr() for t in p.all()] for name, p in slots.items()}
    for one in plan.sites:
        place = slots[one.name]
        for other in {0, 1, 2} - {slot}:
            assert bool(place.lora_A[other].isnan().all())
            assert bool(place.lora_B[other].isnan().all())
            assert bool(place.lora_scale[other].isnan().all())
            assert place.lora_rank[other] == -7
        highest = 0
        for index, part in enumerate(one.parts):
            low, high = one.quant.parts[index].rows
            a, b = place.lora_A[slot, index], place.lora_B[slot, low:high]
            delta = adapter.deltas.get(part.module)
            rank = 0 if delta is None else delta.rank
            highest = max(highest, rank)
            assert not bool(a[rank:].any())
            assert not bool(b[:, rank:].any())
            if delta is None:
                assert place.lora_scale[slot, index] == 0
            else:
                assert torch.equal(a[:rank], delta.A)
                assert torch.equal(b[:, :rank], delta.B)
                assert place.lora_scale[slot, index] == pytest.approx(delta.scale)
        assert place.lora_rank[slot] == highest


def test_a_smaller_adapter_leaves_nothing_of_a_larger_one() -> None:
    plan = llama_plan(max_rank=16)
    used, fresh = allocate_slots(plan, "cpu"), allocate_slots(plan, "cpu")
    small = adapter_of(plan, ["model.layers.0.self_attn.k_proj"], r=3)
    write_slot(plan, used, 1, adapter_of(plan, r=16))
    write_slot(plan, used, 1, small)
    write_slot(plan, fresh, 1, small)
    for name, place in used.items():
        for mine, theirs in zip(place.all(), fresh[name].all(), strict=True):
            assert torch.equal(mine, theirs)


def test_values_are_rounded_once_to_the_slots_dtype() -> None:
    plan = llama_plan(dtype="bfloat16")
    slots = allocate_slots(plan, "cpu")
    adapter = adapter_of(plan)
    write_slot(plan, slots, 0, adapter)
    delta = adapter.deltas["model.layers.1.mlp.down_proj"]
    place = slots["model.layers.1.mlp.down_proj"]
    assert torch.equal(place.lora_A[0, 0, :4], delta.A.bfloat16())
    assert torch.equal(place.lora_B[0, :, :4], delta.B.bfloat16())


def test_overflow_in_the_slots_dtype_is_refused_before_anything_is_written() -> None:
    plan = llama_plan(dtype="float16")
    made = tensors(plan)
    key = "base_model.model.model.layers.1.mlp.up_proj.lora_B.weight"
    made[key][0, 0] = 1e5
    adapter = read_adapter_tensors(made, config(), plan)
    slots = allocate_slots(plan, "cpu")
    with pytest.raises(TensorNotFinite) as caught:
        write_slot(plan, slots, 0, adapter)
    assert caught.value.tensor == key
    assert all(not bool(t.any()) for p in slots.values() for t in p.all())


def test_a_delta_of_scale_zero_is_not_written() -> None:
    plan = llama_plan()
    slots = poisoned(plan)
    write_slot(plan, slots, 2, adapter_of(plan, lora_alpha=0))
    assert all(not bool(t[2].any()) for p in slots.values() for t in p.all())


def test_an_adapter_of_another_plan_is_refused() -> None:
    adapter = adapter_of(llama_plan(max_rank=32), r=20)
    for plan, kind in (
        (llama_plan(max_rank=16), AdapterRankTooHigh),
        (llama_plan(max_rank=32, without=("down_proj",)), AdapterSiteNotBuilt),
        (llama_plan(max_rank=32, layers=1), AdapterTargetUnknown),
        (llama_plan(max_rank=32, inter=56), AdapterForeign),
    ):
        with pytest.raises((kind, Faults)) as caught:
            write_slot(plan, allocate_slots(plan, "cpu"), 0, adapter)
        error = caught.value
        faults = error.faults if isinstance(error, Faults) else (error,)
        assert {type(fault) for fault in faults} == {kind}
    plan = llama_plan(max_rank=32)
    for slot in (-1, 3):
        with pytest.raises(RequestInvalid):
            write_slot(plan, allocate_slots(plan, "cpu"), slot, adapter)


def test_a_delta_with_a_wrong_shape_is_refused() -> None:
    """Broadcasting must not hide a delta that does not fit."""
    plan = llama_plan()
    module = "model.layers.0.mlp.down_proj"
    delta = PartDelta(torch.ones(2, 1), torch.ones(48, 2), 1.0, ())
    adapter = CanonicalAdapter(digest="x", source="<test>", deltas={module: delta})
    with pytest.raises(AdapterForeign, match="down_proj"):
        write_slot(plan, allocate_slots(plan, "cpu"), 0, adapter)


def test_slots_at_a_site_that_is_not_linear_are_refused() -> None:
    plan = plan_of(
        [
            site(
                "embed_tokens",
                8,
                [("embed_tokens", 4)],
                parent="model",
                layer=None,
                kind="embedding",
            )
        ]
    )
    with pytest.raises(FeatureUnsupported, match="embedding"):
        slot_bytes(plan)
