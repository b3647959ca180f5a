"""Choose an implementation for every lowered op, from a table.

The choice depends on the op and the device alone, never on the adapters that happen to
be loaded, so one graph serves any mix of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import fx

from lora_compile.errors import GraphInvalid
from lora_compile.ops.forms import ATEN_OPS, KERNEL_OPS
from lora_compile.ops.source_digest import kernel_name
from lora_compile.passes.base import UNSELECTED, GraphContext, GraphPass
from lora_compile.planning.plan import SitePlan
from lora_compile.schemas.quant_scheme import find_scheme
from lora_compile.torch_compat import op_packet

KernelKind = Literal["aten", "torch", "triton"]


@dataclass(frozen=True)
class KernelRule:
    """One row of the table; the first row that fits decides. `*` fits everything."""

    op: str
    device: str
    kernel: KernelKind


TABLE: tuple[KernelRule, ...] = (
    # ATen's own linear: Inductor picks the GEMM.
    KernelRule(op="linear", device="cpu", kernel="torch"),
    KernelRule(op="*", device="cuda", kernel="triton"),
    KernelRule(op="*", device="cpu", kernel="aten"),
)


def kernel_for(op: str, device: str) -> KernelKind:
    """The kernel family (`aten`, `torch` or `triton`) of an op on a device."""
    for rule in TABLE:
        if rule.op in ("*", op) and rule.device in ("*", device):
            return rule.kernel
    raise GraphInvalid(
        f"no kernel for {op} on {device}",
        expected=f"one of the devices {', '.join(sorted({r.device for r in TABLE}))}",
        found=device,
    )


def site_kernel(site: SitePlan, device: str) -> KernelKind:
    """The kernel family that computes a site's output."""
    if site.kind == "embedding":
        return "torch"
    ops = find_scheme(site.quant.scheme).ops
    return kernel_for((ops.lora if site.lora else ops.base).removeprefix("lora_compile::"), device)


def run(gm: fx.GraphModule, ctx: GraphContext) -> tuple[int, tuple[str, ...]]:
    chosen: dict[str, int] = {}
    device = torch.device(ctx.plan.device).type
    for node in gm.graph.nodes:
        if node.op != "call_function" or op_packet(node.target) not in KERNEL_OPS:
            continue
        if node.args[-1] != UNSELECTED:
            raise GraphInvalid(f"{node.name} has a kernel already", found=node.args[-1])
        op = str(op_packet(node.target)).removeprefix("lora_compile.")
        kernel = kernel_for(op, device)
        if kernel == "aten":
            node.target = ATEN_OPS[op_packet(node.target)].default
            node.args = node.args[:-1]
        else:
            node.args = (*node.args[:-1], kernel_name(kernel))
        key = f"{op}: {kernel}"
        chosen[key] = chosen.get(key, 0) + 1
    return sum(chosen.values()), tuple(f"{key} x {count}" for key, count in sorted(chosen.items()))


select_kernels = GraphPass(
    name="select_kernels",
    requires=frozenset({"markers_lowered", "quantisation_shared"}),
    ensures=frozenset({"kernels_selected"}),
    run=run,
)
