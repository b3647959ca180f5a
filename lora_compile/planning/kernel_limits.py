"""Which sites of a plan the kernels of its device cannot run, before anything is compiled.

The launchers refuse the same by the same numbers (`ops.kernels.limits`), but only when a graph is
compiled.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from lora_compile.errors import FeatureUnsupported
from lora_compile.ops.kernels.limits import MAX_PARTS, MIN_COLUMN_STEP, common_step
from lora_compile.passes.select_kernels import TABLE, site_kernel
from lora_compile.planning.plan import Plan, SitePlan


def kernel_faults(plan: Plan) -> list[FeatureUnsupported]:
    """What the plan's device cannot run: one fault for each site of the schema and each limit.

    The layers of a schema's site are alike, so the fault names the first and counts the others.
    Only the Triton kernels have limits; empty where none is selected (on a CPU).
    """
    device = torch.device(plan.device).type
    if all(rule.device not in ("*", device) for rule in TABLE):
        return []  # Such a device runs the eager ops alone; select_kernels refuses to compile.
    found: dict[tuple[str, int, str, str], list[SitePlan]] = {}
    for site in plan.sites:
        if site_kernel(site, device) != "triton":
            continue
        for limit, value in _beyond(site):
            key = (site.source.file, site.source.line, limit, value)
            found.setdefault(key, []).append(site)
    return [
        _fault(sites, limit, value, plan.device) for (_, _, limit, value), sites in found.items()
    ]


def _beyond(site: SitePlan) -> Iterator[tuple[str, str]]:
    """(limit, what the site has instead) for each limit that the site is beyond."""
    quant = site.quant
    scaled = quant.scale.granularity != "none"
    # An unquantised GEMM without deltas runs over all rows as one part.
    if (site.lora or scaled) and len(quant.parts) > MAX_PARTS:
        yield "parts", f"{len(quant.parts)} ({', '.join(part.name for part in quant.parts)})"
    if quant.scale.block_shape is not None and quant.activation.group is not None:
        columns, group = quant.scale.block_shape[1], quant.activation.group
        if common_step(columns, group) < MIN_COLUMN_STEP:
            yield "scales", f"blocks of {columns} columns, groups of {group}"


def _fault(sites: list[SitePlan], limit: str, value: str, device: str) -> FeatureUnsupported:
    first = sites[0]
    others = f" and {len(sites) - 1} more like it" if len(sites) > 1 else ""
    if limit == "parts":
        message = f"site {first.role} fuses more projections than the Triton GEMM takes"
        expected = f"at most {MAX_PARTS} projections in one GEMM"
        fix = f"set `fuse: false` for site {first.role} in this file, or run on the CPU"
    else:
        message = f"the Triton GEMM cannot tile the block scales of site {first.role}"
        expected = (
            f"block columns and activation group with a common power of two >= {MIN_COLUMN_STEP}"
        )
        fix = "use a checkpoint with other blocks (128 x 128 are usual), or run on the CPU"
    return FeatureUnsupported(
        f"{message} on {device}",
        file=first.source.file,
        line=first.source.line,
        where=first.name + others,
        expected=expected,
        found=value,
        fix=fix,
    )
