"""Attach: give each projection of a module tree its packed weight and slots, and make it emit a
neutral marker.

Attach decides nothing: the plan has. A projection's module is replaced by one whose forward is a
single marker op that carries x, the part and the buffers. Dynamo lifts the buffers as graph
inputs, so adapters can be swapped in place without a recompile. Parts of a group reach
theirs through one shared module; by the weight tensor the passes know that they belong together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

import torch
from torch import nn

import lora_compile.ops  # noqa: F401  (registers the ops)
from lora_compile.adapters.slots import SlotTensors
from lora_compile.errors import FeatureUnsupported
from lora_compile.ops.rows import uses_token_map
from lora_compile.planning.plan import Plan, SitePlan
from lora_compile.runtime.rows import RowMaps

SLOT_NAMES = tuple(field.name for field in fields(SlotTensors))
"""In the order in which markers take them."""


@dataclass(frozen=True)
class SiteStorage:
    """The tensors of one site, shared by its parts."""

    weight: torch.Tensor
    """(N, K) packed as the site's QuantInfo says."""
    aux: tuple[torch.Tensor, ...]
    """Scales and the like, in the order of `QuantInfo.aux_names`."""
    bias: torch.Tensor | None
    slots: SlotTensors | None


class RowBuffers(nn.Module):
    """The row maps as buffers, shared by every site of one model. Never called."""

    seq_slot: torch.Tensor
    seq_scale: torch.Tensor
    token_slot: torch.Tensor
    token_scale: torch.Tensor

    def __init__(self, rows: RowMaps) -> None:
        super().__init__()
        self.packed = rows.packed
        for name, tensor in rows.tensors().items():
            _buffer(self, name, tensor)

    def maps(self, dim: int) -> list[torch.Tensor]:
        """The maps as markers take them, for an input of `dim` dimensions.

        Only the map that the marker will read is touched, and stands in for the other one: Dynamo
        guards each buffer that it sees at each of the hundreds of projections.
        """
        if uses_token_map(dim, self.packed):
            slot, scale = self.token_slot, self.token_scale
        else:
            slot, scale = self.seq_slot, self.seq_scale
        return [slot, scale, slot, scale]


class SiteBuffers(nn.Module):
    """The buffers of one site, shared by the modules of its parts. Never called.

    Dynamo guards every path by which it reaches a tensor: parts that reach theirs through one
    shared module cost it one guard a part instead of one a tensor and part.
    """

    def __init__(self, site: SitePlan, storage: SiteStorage, rows: RowBuffers) -> None:
        super().__init__()
        self.quant = site.quant.model_dump_json()
        self.aux_names = site.quant.aux_names
        self.slot_names = SLOT_NAMES if storage.slots is not None else ()
        self.rows = rows
        _buffer(self, "weight", storage.weight)
        for name, tensor in zip(self.aux_names, storage.aux, strict=True):
            _buffer(self, name, tensor)
        _buffer(self, "bias", storage.bias)
        for name in self.slot_names:
            _buffer(self, name, getattr(storage.slots, name))

    def named(self, names: tuple[str, ...]) -> list[torch.Tensor]:
        """The buffers of these names, in their order."""
        found = []
        for name in names:  # Dynamo traces a comprehension as one more call, at every projection
            found.append(getattr(self, name))
        return found


class SiteModule(nn.Module):
    """A projection or an embedding of a site, in the place of the model's own module."""

    def __init__(self, buffers: SiteBuffers) -> None:
        super().__init__()
        self.site = buffers

    @property
    def weight(self) -> torch.Tensor:
        """The packed weight of the whole site, for code that asks for its device or dtype."""
        return self.site.get_buffer("weight")


class SiteLinear(SiteModule):
    """One part of a linear site. Its forward is one marker."""

    def __init__(self, site: SitePlan, part: int, buffers: SiteBuffers) -> None:
        super().__init__(buffers)
        self.in_features = site.in_features
        self.out_features = site.parts[part].out_features
        self.part = part

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        site = self.site
        output: torch.Tensor = torch.ops.lora_compile.site_linear(
            x,
            site.weight,
            site.named(site.aux_names),
            site.bias,
            site.named(site.slot_names),
            site.rows.maps(x.dim()),
            self.part,
            site.quant,
            site.rows.packed,
        )
        return output

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, part={self.part}"


class SiteEmbedding(SiteModule):
    """An embedding site. Its forward is one marker."""

    def __init__(self, site: SitePlan, buffers: SiteBuffers) -> None:
        super().__init__(buffers)
        self.num_embeddings = site.out_features
        self.embedding_dim = site.in_features

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        site = self.site
        output: torch.Tensor = torch.ops.lora_compile.site_embedding(
            ids,
            site.weight,
            site.named(site.slot_names),
            site.rows.maps(ids.dim() + 1),
            site.rows.packed,
        )
        return output


def attach(
    model: nn.Module, plan: Plan, storages: Mapping[str, SiteStorage], rows: RowMaps
) -> dict[int, SitePlan]:
    """Replace every projection of the plan in `model`, in place.

    Args:
        storages: site name -> its tensors.

    Returns:
        id of each site's weight tensor -> the site; the backend finds sites by it.
    """
    by_tensor: dict[int, SitePlan] = {}
    shared = RowBuffers(rows)
    for site in plan.sites:
        storage = storages[site.name]
        # A tied head shares its table with the embedding: two sites, one tensor. Each needs a
        # tensor object of its own to be found by identity; the memory stays shared.
        weight = storage.weight
        if id(weight) in by_tensor:
            weight = weight.detach()
            storage = SiteStorage(weight, storage.aux, storage.bias, storage.slots)
        by_tensor[id(weight)] = site
        buffers = SiteBuffers(site, storage, shared)
        for index, part in enumerate(site.parts):
            module: nn.Module
            if site.kind == "linear":
                module = SiteLinear(site, index, buffers)
            elif site.kind == "embedding":
                module = SiteEmbedding(site, buffers)
            else:
                raise FeatureUnsupported(
                    f"site {site.name}: {site.kind} sites are not supported yet",
                    file=site.source.file,
                    line=site.source.line,
                )
            module.train(False)
            model.set_submodule(part.module, module)
    return by_tensor


def _buffer(module: nn.Module, name: str, tensor: torch.Tensor | None) -> None:
    module.register_buffer(name, tensor, persistent=False)
