"""Markers as nodes of a graph: which ops they are and how to read their arguments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import fx

import lora_compile.ops  # noqa: F401  (registers the ops)
from lora_compile.ops.markers import ALL_PARTS
from lora_compile.torch_compat import op_packet

__all__ = ["ALL_PARTS", "MARKERS", "LinearMarker", "part_of", "with_part"]

MARKERS = (torch.ops.lora_compile.site_linear, torch.ops.lora_compile.site_embedding)
"""Every marker that attach emits. A marker's second argument is the tensor of its weight."""

_PART = 6
"""Position of `part` among the arguments of `site_linear`."""


@dataclass(frozen=True)
class LinearMarker:
    """The arguments of one `site_linear` node, by name."""

    x: fx.Node
    weight: fx.Node
    aux: list[fx.Node]
    bias: fx.Node | None
    adapter: list[fx.Node]
    """[] or [lora_A, lora_B, lora_scale, lora_rank]."""
    rows: list[fx.Node]
    """[seq_slot, seq_scale, token_slot, token_scale]."""
    part: int
    quant: str
    packed: bool

    @classmethod
    def of(cls, node: fx.Node) -> LinearMarker:
        return cls(*cast(Any, node.args))


def part_of(node: fx.Node) -> int:
    """The index of the part that a marker computes; 0 for an embedding."""
    if op_packet(node.target) is torch.ops.lora_compile.site_linear:
        return cast(int, node.args[_PART])
    return 0


def with_part(node: fx.Node, part: int) -> tuple[Any, ...]:
    """The arguments of a `site_linear` node with another part."""
    return (*node.args[:_PART], part, *node.args[_PART + 1 :])
