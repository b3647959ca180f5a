"""The pool: names, leases, eviction, and that a slot in use is never written."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from lora_compile.adapters.canonical import CanonicalAdapter
from lora_compile.adapters.leases import Fence
from lora_compile.adapters.peft_reader import read_adapter_tensors
from lora_compile.adapters.pool import AdapterPool
from lora_compile.adapters.slots import SlotTensors, allocate_slots
from lora_compile.errors import (
    AdapterNameTaken,
    AdapterRankTooHigh,
    AdapterUnknown,
    InvalidValue,
    LoraCompileError,
    PoolFull,
    RequestInvalid,
)
from tests.adapters.plans import FIXTURES, config, llama_plan, plan_of, site, tensors

PLAN = llama_plan(max_adapters=2)
SITE = "model.layers.0.self_attn.qkv_proj"


def make_pool(
    plan: Any = PLAN, when_full: Any = "error", wait_seconds: float = 0.0
) -> tuple[AdapterPool, dict[str, SlotTensors]]:
    slots = allocate_slots(plan, "cpu")
    return AdapterPool(plan, slots, when_full=when_full, wait_seconds=wait_seconds), slots


def adapter(number: int, plan: Any = PLAN) -> CanonicalAdapter:
    return read_adapter_tensors(tensors(plan, seed=number), config(), plan)


def content(slots: dict[str, SlotTensors], slot: int) -> list[torch.Tensor]:
    return [t[slot].clone() for place in slots.values() for t in place.all()]


def unchanged(before: list[torch.Tensor], slots: dict[str, SlotTensors], slot: int) -> bool:
    return all(torch.equal(a, b) for a, b in zip(before, content(slots, slot), strict=True))


# --- loading ---------------------------------------------------------------------------------


def test_every_kind_of_source_gives_the_same_adapter() -> None:
    plan = llama_plan(max_adapters=3)
    pool, slots = make_pool(plan)
    made = tensors(plan)
    first = pool.load("memory", made, config=config())
    second = pool.load("canonical", read_adapter_tensors(made, config(), plan), scale=0.5)
    third = pool.load("file", FIXTURES / "peft-plain", pinned=True)
    assert first.digest == second.digest != third.digest
    assert unchanged(content(slots, first.slot), slots, second.slot)
    assert [a.name for a in pool.list()] == ["canonical", "file", "memory"]
    assert (first.rank, third.rank) == (4, 3)
    assert first.bytes == sum(t.nbytes for t in made.values())
    assert (second.scale, third.scale, third.pinned, second.pinned) == (0.5, 1.0, True, False)
    assert len({a.slot for a in pool.list()}) == 3


def test_wrong_requests_change_nothing(tmp_path: Path) -> None:
    pool, _ = make_pool()
    pool.load("a", adapter(1))
    before = pool.list()
    with pytest.raises(AdapterNameTaken, match="replace"):
        pool.load("a", adapter(2))
    with pytest.raises(RequestInvalid):
        pool.load("", adapter(2))
    with pytest.raises(RequestInvalid, match="config"):
        pool.load("b", tensors(PLAN))
    with pytest.raises(RequestInvalid, match="config"):
        pool.load("b", adapter(2), config=config())
    with pytest.raises(RequestInvalid, match="scale"):
        pool.load("b", adapter(2), scale=float("nan"))
    with pytest.raises(LoraCompileError):
        pool.load("b", tmp_path / "absent")
    with pytest.raises(AdapterRankTooHigh):
        pool.load("b", tensors(PLAN, rank=32), config=config(r=32))
    for wrong in (pool.unload, pool.pin, pool.unpin):
        with pytest.raises(AdapterUnknown, match="'b'"):
            wrong("b")
    with pytest.raises(AdapterUnknown, match="'b'"):
        pool.replace("b", adapter(2))
    assert pool.list() == before
    with pytest.raises(InvalidValue):
        make_pool(when_full="maybe")
    with pytest.raises(InvalidValue):
        make_pool(wait_seconds=-1.0)


def test_a_failed_copy_gives_the_slot_back(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, _ = make_pool()

    def fail(*args: object) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr("lora_compile.adapters.pool.copy_image", fail)
        for _ in range(5):
            with pytest.raises(RuntimeError):
                pool.load("a", adapter(1))
    assert pool.list() == ()
    pool.load("a", adapter(1))
    pool.load("b", adapter(2))
    pool.replace("a", adapter(3))


# --- leases ----------------------------------------------------------------------------------


def test_a_lease_has_one_slot_scale_and_digest_per_row() -> None:
    pool, _ = make_pool()
    a = pool.load("a", adapter(1), scale=2.0)
    b = pool.load("b", adapter(2))
    with pool.lease(["a", None, "b", "a"]) as lease:
        assert lease.slots == (a.slot, -1, b.slot, a.slot)
        assert lease.scales == (2.0, 1.0, 1.0, 2.0)
        assert lease.digests == (a.digest, None, b.digest, a.digest)
    assert lease.closed
    with pool.lease([]) as empty:
        assert empty.slots == ()


def test_an_unknown_name_is_an_error_with_the_loaded_names() -> None:
    """Never base rows: a KeyError that names what was asked and what there is."""
    pool, _ = make_pool()
    pool.load("a", adapter(1))
    pool.load("b", adapter(2))
    with pytest.raises(KeyError) as caught:
        pool.lease(["a", "b", "A"])
    assert isinstance(caught.value, AdapterUnknown)
    assert "'A'" in str(caught.value)
    assert "one of: a, b" in str(caught.value)
    with pytest.raises(AdapterUnknown, match="one of: none"):
        make_pool()[0].lease([""])
    # The failed lease holds nothing: both slots can be taken.
    pool.unload("a")
    pool.unload("b")
    for name in ("c", "d"):
        pool.load(name, adapter(3))
    pool.replace("c", adapter(4))


def test_a_lease_outlives_replace_and_unload() -> None:
    pool, slots = make_pool()
    old = pool.load("a", adapter(1))
    lease = pool.lease(["a"])
    before = content(slots, old.slot)
    new = pool.replace("a", adapter(2), scale=3.0)
    assert new.slot != old.slot
    assert new.digest != old.digest
    assert lease.digests == (old.digest,)
    with pool.lease(["a"]) as second:
        assert (second.slots, second.scales) == ((new.slot,), (3.0,))
    pool.unload("a")
    assert pool.list() == ()
    pool.load("b", adapter(3))
    pool.load("c", adapter(4))
    assert unchanged(before, slots, old.slot)
    with pytest.raises(PoolFull, match="still in use"):
        pool.replace("b", adapter(5))
    lease.close()
    lease.close()
    assert pool.replace("b", adapter(5)).slot == old.slot
    assert not unchanged(before, slots, old.slot)


def test_two_leases_on_one_slot_both_count() -> None:
    plan = llama_plan(max_adapters=1)
    pool, slots = make_pool(plan)
    old = pool.load("a", adapter(1))
    first, second = pool.lease(["a", "a"]), pool.lease(["a"])
    before = content(slots, old.slot)
    pool.replace("a", adapter(2))
    for lease in (first, first, second):
        with pytest.raises(PoolFull):
            pool.replace("a", adapter(3))
        assert unchanged(before, slots, old.slot)
        lease.close()
    assert pool.replace("a", adapter(3)).slot == old.slot


def test_a_name_loaded_again_has_the_new_content() -> None:
    """The name is not the identity: digest and slot content follow what was loaded last."""
    pool, slots = make_pool()
    first = pool.load("x", adapter(1))
    old = content(slots, first.slot)
    pool.unload("x")
    second = pool.load("x", adapter(2))
    assert second.digest != first.digest
    assert not unchanged(old, slots, second.slot)
    with pool.lease(["x"]) as lease:
        assert lease.digests == (second.digest,)


# --- eviction --------------------------------------------------------------------------------


def names(pool: AdapterPool) -> list[str]:
    return [a.name for a in pool.list()]


def test_the_least_recently_used_name_makes_room() -> None:
    pool, _ = make_pool()
    pool.load("a", adapter(1))
    pool.load("b", adapter(2))
    pool.lease(["a"]).close()
    pool.load("c", adapter(3))
    assert names(pool) == ["a", "c"]
    pool.load("d", adapter(4))
    assert names(pool) == ["c", "d"]


def test_pinned_and_leased_names_do_not_make_room() -> None:
    pool, _ = make_pool()
    pool.load("a", adapter(1), pinned=True)
    pool.load("b", adapter(2))
    pool.load("c", adapter(3))
    assert names(pool) == ["a", "c"]
    lease = pool.lease(["c"])
    with pytest.raises(PoolFull) as caught:
        pool.load("d", adapter(4))
    assert "a (pinned)" in str(caught.value)
    assert "c (1 leases)" in str(caught.value)
    assert names(pool) == ["a", "c"]
    pool.unpin("a")
    pool.load("d", adapter(4))
    assert names(pool) == ["c", "d"]
    pool.pin("d")
    lease.close()
    pool.load("e", adapter(5))
    assert names(pool) == ["d", "e"]


def test_replace_never_evicts_and_keeps_the_pin() -> None:
    pool, _ = make_pool()
    pool.load("a", adapter(1), pinned=True)
    pool.load("b", adapter(2))
    held = pool.lease(["a"])
    assert pool.replace("a", adapter(3)).pinned
    with pytest.raises(PoolFull):
        pool.replace("a", adapter(4))
    assert names(pool) == ["a", "b"]
    held.close()
    assert not pool.replace("a", adapter(4), pinned=False).pinned


def test_an_adapter_that_cannot_be_read_evicts_nobody() -> None:
    pool, _ = make_pool()
    pool.load("a", adapter(1))
    pool.load("b", adapter(2))
    with pytest.raises(LoraCompileError):
        pool.load("c", {}, config=config())
    assert names(pool) == ["a", "b"]


# --- waiting ---------------------------------------------------------------------------------


def test_waiting_ends_with_the_lease() -> None:
    plan = llama_plan(max_adapters=1)
    pool, _ = make_pool(plan, "wait", 30.0)
    pool.load("a", adapter(1))
    lease = pool.lease(["a"])
    threading.Timer(0.2, lease.close).start()
    start = time.monotonic()
    pool.load("b", adapter(2))
    assert 0.15 < time.monotonic() - start < 10
    assert names(pool) == ["b"]


def test_waiting_has_an_end() -> None:
    plan = llama_plan(max_adapters=1)
    pool, _ = make_pool(plan, "wait", 0.2)
    pool.load("a", adapter(1), pinned=True)
    start = time.monotonic()
    with pytest.raises(PoolFull):
        pool.load("b", adapter(2))
    assert 0.2 <= time.monotonic() - start < 5
    assert names(pool) == ["a"]


class Gate:
    """A fence that passes when told to, as device work does."""

    def __init__(self) -> None:
        self.passed = False

    def query(self) -> bool:
        return self.passed


class SlowDevicePool(AdapterPool):
    """A pool whose device finishes a lease's work only when its gate is opened."""

    gates: list[Gate]

    def _record_fence(self) -> Fence:
        self.gates.append(Gate())
        return self.gates[-1]


def test_a_closed_lease_holds_its_slot_until_the_device_has_finished() -> None:
    plan = llama_plan(max_adapters=1)
    slots = allocate_slots(plan, "cpu")
    pool = SlowDevicePool(plan, slots, when_full="error", wait_seconds=0.0)
    pool.gates = []
    old = pool.load("a", adapter(1))
    pool.lease(["a"]).close()
    pool.lease(["a"]).close()
    before = content(slots, old.slot)
    pool.replace("a", adapter(2))
    done = threading.Event()

    def replace_again() -> None:
        pool.replace("a", adapter(3))
        done.set()

    thread = threading.Thread(target=replace_again, daemon=True)
    thread.start()
    for gate in pool.gates:
        assert not done.wait(0.1)
        assert unchanged(before, slots, old.slot)
        gate.passed = True
    assert done.wait(10)
    thread.join()
    assert pool.list()[0].slot == old.slot


# --- races -----------------------------------------------------------------------------------


def tiny(max_adapters: int) -> Any:
    one = site("q_proj", 4, [("q_proj", 6)], parent="model.layers.0", layer=0)
    return plan_of([one], max_rank=2, max_adapters=max_adapters)


def constant(value: float, plan: Any) -> CanonicalAdapter:
    """An adapter whose every element is `value`."""
    made = {
        f"model.layers.0.q_proj.lora_{n}.weight": torch.full(s, value)
        for n, s in (("A", (2, 4)), ("B", (6, 2)))
    }
    return read_adapter_tensors(made, config(r=2, target_modules=["q_proj"]), plan)


@pytest.mark.parametrize("max_adapters", [1, 3])
@pytest.mark.parametrize("when_full", ["error", "wait"])
def test_races_never_show_a_lease_other_content(
    max_adapters: int, when_full: str, seed: int
) -> None:
    """Readers hold leases while others load, replace, unload and evict at will.

    Each adapter is one constant, so a reader sees at once if its slot is written meanwhile or
    holds something else than the digest it was given.
    """
    plan = tiny(max_adapters)
    slots = allocate_slots(plan, "cpu")
    pool = AdapterPool(plan, slots, when_full=when_full, wait_seconds=0.01)  # type: ignore[arg-type]
    made = {a.digest: (v, a) for v in range(1, 7) for a in [constant(float(v), plan)]}
    choices = [a for _, a in made.values()]
    place = slots["model.layers.0.q_proj"]
    stop = time.monotonic() + 1.5
    problems: list[str] = []
    reads, writes = [0], [0]

    def reader(rng: random.Random) -> None:
        while time.monotonic() < stop:
            try:
                lease = pool.lease([rng.choice("abcd"), None])
            except AdapterUnknown:
                continue
            with lease:
                for _ in range(3):
                    value = made[str(lease.digests[0])][0]
                    slot = lease.slots[0]
                    seen = place.lora_A[slot, 0, :2], place.lora_B[slot, :, :2]
                    if not all(bool((tensor == value).all()) for tensor in seen):
                        problems.append(f"slot {slot} should hold {value}, holds {seen}")
                    time.sleep(rng.random() * 1e-4)
            reads[0] += 1

    def writer(rng: random.Random) -> None:
        while time.monotonic() < stop:
            name, content = rng.choice("abcd"), rng.choice(choices)
            try:
                action = rng.random()
                if action < 0.4:
                    pool.load(name, content)
                elif action < 0.8:
                    pool.replace(name, content)
                else:
                    pool.unload(name)
                writes[0] += 1
            except (AdapterNameTaken, AdapterUnknown, PoolFull):
                continue

    def run(job: Any, number: int) -> None:
        try:
            job(random.Random(seed + number))
        except BaseException as error:
            problems.append(repr(error))
            raise

    threads = [
        threading.Thread(target=run, args=(job, number), daemon=True)
        for number, job in enumerate([reader, reader, reader, writer, writer])
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive(), "deadlock"
    assert not problems, problems[:3]
    assert reads[0] > 20
    assert writes[0] > 20
    # Nothing has leaked: every slot can be used again.
    for loaded in pool.list():
        pool.unload(loaded.name)
    for number in range(max_adapters):
        pool.load(f"new{number}", choices[0])
    pool.replace("new0", choices[1])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_slot_that_the_gpu_still_reads_is_not_written() -> None:
    """The host closes the lease long before the GPU gets to read the slot."""
    plan = tiny(1)
    slots = allocate_slots(plan, "cuda")
    pool = AdapterPool(plan, slots, when_full="error", wait_seconds=0.0)
    place = slots["model.layers.0.q_proj"]
    old = pool.load("a", constant(1.0, plan))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), pool.lease(["a"]) as lease:
        torch.cuda._sleep(1_000_000_000)
        seen = place.lora_A[lease.slots[0], 0, :2].clone()
    start = time.monotonic()
    assert pool.replace("a", constant(2.0, plan)).slot != old.slot
    assert not stream.query(), "the GPU was done too early for this test to say anything"
    assert pool.replace("a", constant(3.0, plan)).slot == old.slot
    assert stream.query()
    assert time.monotonic() - start > 0.05
    assert bool((seen == 1.0).all())
    assert bool((place.lora_A[old.slot, 0, :2] == 3.0).all())
