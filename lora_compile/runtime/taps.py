"""Codes of the quantised inputs, out of the compiled graphs that computed them.

A graph gets its quantised inputs as further outputs, which are kept here and not given to the
caller. Only verification asks for this; graphs that serve have no such outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from lora_compile.passes.base import SITE_META
from lora_compile.passes.verify_graph import OUTPUT_OPS
from lora_compile.torch_compat import op_packet


@dataclass
class Taps:
    """Site -> the codes of its input, one entry for each call of a graph.

    Shapes: (planes, B, tokens, K), in the order of the calls.
    """

    codes: dict[str, list[torch.Tensor]] = field(default_factory=dict)

    def add_outputs(self, gm: fx.GraphModule) -> TapOutputs | None:
        """Make the quantised inputs of all sites outputs of the graph; None if it has none."""
        (output,) = [node for node in gm.graph.nodes if node.op == "output"]
        returned = list(output.args[0])
        own = len(returned)
        sites: dict[str, int] = {}
        planes: dict[str, bool] = {}
        for node in gm.graph.nodes:
            if SITE_META not in node.meta or op_packet(node.target) not in OUTPUT_OPS:
                continue
            names = (
                [argument.name for argument in node.target._schema.arguments]
                if hasattr(node.target, "_schema")
                else []
            )
            if "xq" not in names:
                continue
            codes = node.args[names.index("xq")]
            site = node.meta[SITE_META]
            if codes not in returned[own:]:
                returned.append(codes)
            sites[site.name] = returned.index(codes, own) - own
            planes[site.name] = site.quant.activation.granularity != "group"
        if not sites:
            return None
        output.args = (tuple(returned), *output.args[1:])
        gm.recompile()
        return TapOutputs(self, own, sites, planes)

    def joined(self, tokens: int) -> dict[str, torch.Tensor]:
        """Site -> (planes, B, tokens, K): all calls of one text, along its tokens.

        A site that reads the static cache (`kv_b_proj` of latent attention) sees every position at
        each call: there the last call has them all.
        """
        found = {}
        for site, calls in self.codes.items():
            if sum(call.shape[2] for call in calls) == tokens:
                found[site] = torch.cat(calls, dim=2)
            else:
                found[site] = calls[-1][:, :, :tokens]
        return found


@dataclass(frozen=True)
class TapOutputs:
    """Which further outputs one graph has."""

    taps: Taps
    own: int
    """Outputs of the graph itself."""
    sites: dict[str, int]
    """Site -> which further output holds its codes."""
    planes: dict[str, bool]
    """Site -> whether its codes have a leading dimension of planes."""

    def take(self, outputs: Sequence[object]) -> list[object]:
        """Keep the further outputs; returns the graph's own."""
        further = outputs[self.own :]
        for site, index in self.sites.items():
            codes = further[index]
            assert isinstance(codes, torch.Tensor)
            if not self.planes[site]:
                codes = codes.unsqueeze(0)
            codes = codes.reshape(*codes.shape[:2], -1, codes.shape[-1])
            self.taps.codes.setdefault(site, []).append(codes)
        return list(outputs[: self.own])
