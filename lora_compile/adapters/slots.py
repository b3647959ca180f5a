"""Slot tensors: the fixed places on the device in which adapters live.

Layout, per site with K input features, N output features, P parts, S slots and R = the maximal
rank rounded up to a multiple of 16:

    lora_A      (S, P, R, K)  slot dtype   rows beyond a part's true rank are zero
    lora_B      (S, N, R)     slot dtype   rows of part p: `quant.parts[p].rows`
    lora_scale  (S, P)        float32      alpha / r or alpha / sqrt(r) of the part
    lora_rank   (S,)          int32        the highest true rank over the parts

They are allocated once and written in place, so a compiled graph never sees them move.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lora_compile.adapters.canonical import CanonicalAdapter, PartDelta
from lora_compile.adapters.finite import all_finite
from lora_compile.errors import (
    AdapterForeign,
    AdapterRankTooHigh,
    AdapterSiteNotBuilt,
    AdapterTargetUnknown,
    FaultList,
    FeatureUnsupported,
    RequestInvalid,
    TensorNotFinite,
)
from lora_compile.planning.plan import Plan, SitePlan

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
RANK_STEP = 16
"""Ranks are stored in multiples of this, the smallest inner size of a tensor-core product."""


@dataclass(frozen=True)
class SlotTensors:
    """The slots of one site. See the module's text for shapes."""

    lora_A: torch.Tensor
    lora_B: torch.Tensor
    lora_scale: torch.Tensor
    lora_rank: torch.Tensor

    def all(self) -> tuple[torch.Tensor, ...]:
        return (self.lora_A, self.lora_B, self.lora_scale, self.lora_rank)


def slot_sites(plan: Plan) -> tuple[SitePlan, ...]:
    """The sites that have slots.

    Raises:
        FeatureUnsupported: slots are planned for a site that is not a linear projection.
    """
    sites = tuple(site for site in plan.sites if site.lora)
    for site in sites:
        if site.kind != "linear":
            raise FeatureUnsupported(
                f"adapter slots at a site of kind {site.kind!r} are not supported",
                where=site.name,
                expected="a linear projection",
                found=site.kind,
            )
    return sites


def allocate_slots(plan: Plan, device: torch.device | str) -> dict[str, SlotTensors]:
    """Zeroed slots of every site with `lora`, by site name: no adapter anywhere."""
    slots, rank, dtype = plan.slots.slots, plan.slots.rank, DTYPES[plan.slots.dtype]
    return {
        site.name: SlotTensors(
            torch.zeros(slots, len(site.parts), rank, site.in_features, dtype=dtype, device=device),
            torch.zeros(slots, site.out_features, rank, dtype=dtype, device=device),
            torch.zeros(slots, len(site.parts), dtype=torch.float32, device=device),
            torch.zeros(slots, dtype=torch.int32, device=device),
        )
        for site in slot_sites(plan)
    }


def site_slot_bytes(plan: Plan, site: SitePlan, max_rank: int | None = None) -> int:
    """Exact bytes of one site's `SlotTensors` in this plan, or with another `max_rank`."""
    rank = plan.slots.rank if max_rank is None else -(-max_rank // RANK_STEP) * RANK_STEP
    parts = len(site.parts)
    per_slot = (
        DTYPES[plan.slots.dtype].itemsize * rank * (parts * site.in_features + site.out_features)
        + torch.float32.itemsize * parts
        + torch.int32.itemsize
    )
    return plan.slots.slots * per_slot


def slot_bytes(plan: Plan, max_rank: int | None = None) -> int:
    """Exact bytes of all tensors of `allocate_slots`, or of a plan with another `max_rank`."""
    return sum(site_slot_bytes(plan, site, max_rank) for site in slot_sites(plan))


def check_fits(plan: Plan, adapter: CanonicalAdapter) -> None:
    """Raise every reason why this adapter cannot be written into this plan's slots."""
    faults = FaultList()
    for module, delta in adapter.deltas.items():
        target = plan.targets.get(module)
        key = delta.provenance[0].key if delta.provenance else module
        if target is None:
            faults.add(
                AdapterTargetUnknown(
                    f"the model has no projection {module!r}", file=adapter.source, tensor=key
                )
            )
            continue
        rows, columns = target.part.out_features, target.site.in_features
        if delta.A.shape != (delta.rank, columns) or delta.B.shape != (rows, delta.rank):
            faults.add(
                AdapterForeign(
                    f"the delta of {module!r} does not fit the model",
                    file=adapter.source,
                    tensor=key,
                    expected=f"A [r, {columns}] and B [{rows}, r]",
                    found=f"A {list(delta.A.shape)} and B {list(delta.B.shape)}",
                )
            )
        if not target.site.lora:
            faults.add(site_not_built(target.site, file=adapter.source, tensor=key))
    if adapter.max_rank > plan.slots.max_rank:
        faults.add(rank_too_high(plan, adapter.max_rank, file=adapter.source))
    faults.raise_if_any()


def site_not_built(site: SitePlan, *, file: str, tensor: str) -> AdapterSiteNotBuilt:
    return AdapterSiteNotBuilt(
        f"the adapter acts at {site.name!r}, where the graph was built without adapter slots",
        file=file,
        tensor=tensor,
        fix="set `runtime.sites: all`, or declare this adapter in the YAML, and compile again",
    )


def rank_too_high(
    plan: Plan, rank: int, *, file: str, tensor: str | None = None
) -> AdapterRankTooHigh:
    sites = len(slot_sites(plan))
    mib = (slot_bytes(plan, rank) - slot_bytes(plan)) / 2**20
    return AdapterRankTooHigh(
        f"the adapter's highest rank is {rank}, more than runtime.max_rank",
        file=file,
        tensor=tensor,
        expected=f"rank <= {plan.slots.max_rank}",
        found=f"rank {rank}",
        fix=f"set `runtime.max_rank: {rank}` (+{mib:.2f} MiB over {sites} sites and "
        f"{plan.slots.slots} slots)",
    )


@dataclass(frozen=True)
class SlotImage:
    """The whole content of one slot, on the host, ready to be copied.

    Per site: A (P, R, K), B (N, R), scale (P,), rank (). None where the adapter does not act:
    such a site's slot is zeroed.
    """

    adapter: CanonicalAdapter
    sites: dict[str, SlotTensors | None]


def make_image(plan: Plan, adapter: CanonicalAdapter) -> SlotImage:
    """Lay an adapter out as a slot holds it, in the slots' dtype; nothing is written.

    Raises:
        Faults or one of AdapterTargetUnknown, AdapterForeign, AdapterSiteNotBuilt,
            AdapterRankTooHigh: the adapter does not fit the plan.
        TensorNotFinite: a value overflows in the slots' dtype.
    """
    check_fits(plan, adapter)
    rank, dtype = plan.slots.rank, DTYPES[plan.slots.dtype]
    faults = FaultList()
    images: dict[str, SlotTensors | None] = {}
    for site in slot_sites(plan):
        deltas = [adapter.deltas.get(part.module) for part in site.parts]
        # A delta of scale 0 is left out, so that base output stays exact whatever A and B hold.
        live = [(i, d) for i, d in enumerate(deltas) if d is not None and d.scale and d.rank]
        if not live:
            images[site.name] = None
            continue
        image = SlotTensors(
            torch.zeros(len(site.parts), rank, site.in_features, dtype=dtype),
            torch.zeros(site.out_features, rank, dtype=dtype),
            torch.zeros(len(site.parts), dtype=torch.float32),
            torch.tensor(max(delta.rank for _, delta in live), dtype=torch.int32),
        )
        for index, delta in live:
            low, high = site.quant.parts[index].rows
            image.lora_A[index, : delta.rank] = delta.A
            image.lora_B[low:high, : delta.rank] = delta.B
            image.lora_scale[index] = delta.scale
            a, b = image.lora_A[index, : delta.rank], image.lora_B[low:high, : delta.rank]
            for tensor, place in ((a, 0), (b, -1)):
                if not all_finite(tensor):
                    faults.add(_overflow(plan, adapter, delta, place))
        images[site.name] = image
    faults.raise_if_any()
    return SlotImage(adapter, images)


def _overflow(
    plan: Plan, adapter: CanonicalAdapter, delta: PartDelta, place: int
) -> TensorNotFinite:
    return TensorNotFinite(
        f"values overflow when stored as {plan.slots.dtype}",
        file=adapter.source,
        tensor=delta.provenance[place].key if delta.provenance else None,
        expected=f"|x| <= {torch.finfo(DTYPES[plan.slots.dtype]).max:g}",
        fix="run with a wider dtype (bfloat16 or float32)",
    )


def copy_image(tensors: dict[str, SlotTensors], slot: int, image: SlotImage) -> None:
    """Write a whole slot in place: every byte of it, zeros where the adapter does not act."""
    with torch.no_grad():
        for name, content in image.sites.items():
            for place, values in zip(
                tensors[name].all(), content.all() if content else (None,) * 4, strict=True
            ):
                if values is None:
                    place[slot].zero_()
                else:
                    place[slot].copy_(values)


def write_slot(
    plan: Plan, tensors: dict[str, SlotTensors], slot: int, adapter: CanonicalAdapter
) -> None:
    """Put an adapter into a slot that nothing reads at the moment.

    Args:
        tensors: what `allocate_slots` gave for this plan.
        slot: 0 <= slot < plan.slots.slots.

    Raises: as `make_image`; and RequestInvalid for a slot that does not exist. Nothing has been
        written then.
    """
    if not 0 <= slot < plan.slots.slots:
        raise RequestInvalid("no such slot", expected=f"0 <= slot < {plan.slots.slots}", found=slot)
    copy_image(tensors, slot, make_image(plan, adapter))
