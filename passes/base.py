"""What every pass is: a named step over one Dynamo graph, with a contract and a typed report.

A pass edits `gm.graph` in place. It states which facts about the graph it needs (`requires`) and
which it establishes (`ensures`); the pipeline refuses an order in which a fact is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from lora_compile.errors import GraphInvalid
from lora_compile.planning.plan import Plan, SitePlan
from lora_compile.torch_compat import op_packet

SITE_META = "lora_compile_site"
"""Key in `node.meta` under which passes keep the `SitePlan` that a node serves."""

SITE_INPUT_META = "lora_compile_input"
"""Key in `node.meta` of an op that gives a site's output: name of the node of the site's x."""

UNSELECTED = "unselected"
"""Value of an op's `kernel` argument until `select_kernels` has run."""


@dataclass(frozen=True)
class GraphContext:
    """What the passes may know besides the graph itself."""

    plan: Plan
    placeholder_sites: Mapping[str, SitePlan]
    """Name of the placeholder that carries a site's weight -> the site."""
    whole: bool
    """Whether this graph must hold every site of the plan."""


@dataclass(frozen=True)
class PassReport:
    """What one pass did to one graph."""

    name: str
    matched: int
    """How many nodes or groups the pass acted on."""
    nodes_before: int
    nodes_after: int
    details: tuple[str, ...] = ()


@dataclass(frozen=True)
class GraphPass:
    """One step of the pipeline. `run` returns (matched, details)."""

    name: str
    requires: frozenset[str]
    ensures: frozenset[str]
    run: Callable[[fx.GraphModule, GraphContext], tuple[int, tuple[str, ...]]] = field(repr=False)


def calls(graph: fx.Graph, target: object) -> list[fx.Node]:
    """Every node that calls `target`, an OpOverload or its packet, in graph order."""
    return [n for n in graph.nodes if n.op == "call_function" and op_packet(n.target) == target]


def value(node: fx.Node) -> torch.Tensor:
    """The fake tensor that Dynamo recorded for `node`."""
    found = node.meta.get("example_value")
    if not isinstance(found, torch.Tensor):
        raise GraphInvalid(f"node {node.name} carries no example value", found=type(found).__name__)
    return found


def insert_call(
    graph: fx.Graph,
    target: Callable[..., Any],
    args: tuple[Any, ...],
    site: SitePlan,
    example: torch.Tensor | None = None,
) -> fx.Node:
    """Insert a call at the graph's insertion point.

    Args:
        site: the site that the node serves.
        example: the node's fake value, where a later pass or a reader of the graph wants it.
    """
    node = graph.call_function(target, args)
    node.meta[SITE_META] = site
    if example is not None:
        node.meta["example_value"] = example
    return node
