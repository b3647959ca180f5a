"""Sites that read the same x share its quantised form and, where the slots are the same, its
shrink: equal calls become one."""

from __future__ import annotations

from typing import Any

from torch import fx

from lora_compile.ops.forms import INPUT_OPS
from lora_compile.passes.base import GraphContext, GraphPass
from lora_compile.torch_compat import op_packet


def run(gm: fx.GraphModule, ctx: GraphContext) -> tuple[int, tuple[str, ...]]:
    first: dict[Any, fx.Node] = {}
    shared: list[str] = []
    for node in list(gm.graph.nodes):
        if node.op != "call_function" or op_packet(node.target) not in INPUT_OPS:
            continue
        earlier = first.setdefault((node.target, node.args), node)
        if earlier is not node:
            node.replace_all_uses_with(earlier)
            gm.graph.erase_node(node)
            shared.append(f"{node.name} -> {earlier.name}")
    return len(shared), tuple(shared)


share_quantisation = GraphPass(
    name="share_quantisation",
    requires=frozenset({"markers_lowered"}),
    ensures=frozenset({"quantisation_shared"}),
    run=run,
)
