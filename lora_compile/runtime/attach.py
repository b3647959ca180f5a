"""Attach: give each projection of a module tree its packed weight and slots, and make it emit a
neutral marker.

Attach decides nothing: the plan has. A projection's module is replaced by one whose forward is a
single marker op that carries x, the part and the buffers. Dynamo lifts the buffers as graph
inputs, so adapters can be swapped in place without a recompile. Parts of a group register the
same tensors, which is how the passes know that they belong together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

import lora_compile.ops  # noqa: F401  (registers the ops)
from lora_compile.adapters.slots import SlotTensors
from lora_compile.errors import FeatureUnsupported
from lora_compile.ops.rows import uses_token_map
from lora_compile.planning.plan import Plan, SitePlan
from lora_compile.runtime.rows import RowMaps


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

    def __init__(self, rows: RowMaps) -> None:
        super().__init__()
        self.packed = rows.packed
        for name, tensor in rows.tensors().items():
            _buffer(self, name, tensor)


class SiteBuffers(nn.Module):
    """The buffers of one site, shared by the modules of its parts. Never called.

    Dynamo guards every path by which it reaches a tensor: parts that reach theirs through one
    shared module cost it one guard a part instead of one a tensor and part.
    """

    def __init__(self, site: SitePlan, storage: SiteStorage, rows: RowBuffers) -> None:
        super().__init__()
        self.quant = site.quant.model_dump_json()
        self.has_slots = storage.slots is not None
        self.aux_names = site.quant.aux_names
        self.rows = rows
        _buffer(self, "weight", storage.weight)
        for name, tensor in zip(self.aux_names, storage.aux, strict=True):
            _buffer(self, name, tensor)
        _buffer(self, "bias", storage.bias)
        if storage.slots is not None:
            for name in ("lora_A", "lora_B", "lora_scale", "lora_rank"):
                _buffer(self, name, getattr(storage.slots, name))


class SiteLinear(nn.Module):
    """One part of a linear site. Its forward is one marker."""

    def __init__(self, site: SitePlan, part: int, buffers: SiteBuffers) -> None:
        super().__init__()
        self.in_features = site.in_features
        self.out_features = site.parts[part].out_features
        self.part = part
        self.site = buffers

    @property
    def weight(self) -> torch.Tensor:
        """The packed weight of the whole site, for code that asks for its device or dtype."""
        return self.site.get_buffer("weight")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        site, rows = self.site, self.site.rows
        aux = []
        for name in site.aux_names:
            aux.append(getattr(site, name))  # Dynamo would inline a comprehension as a call
        adapter = []
        if site.has_slots:
            adapter = [site.lora_A, site.lora_B, site.lora_scale, site.lora_rank]
        # Only the map that the marker will read is touched, and stands in for the other one:
        # Dynamo guards each buffer that it sees at each of the hundreds of projections.
        if uses_token_map(x.dim(), rows.packed):
            slot, scale = rows.token_slot, rows.token_scale
        else:
            slot, scale = rows.seq_slot, rows.seq_scale
        output: torch.Tensor = torch.ops.lora_compile.site_linear(
            x,
            site.weight,
            aux,
            site.bias,
            adapter,
            [slot, scale, slot, scale],
            self.part,
            site.quant,
            rows.packed,
        )
        return output

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, part={self.part}"


class SiteEmbedding(nn.Module):
    """An embedding site. Its forward is one marker."""

    def __init__(self, site: SitePlan, buffers: SiteBuffers) -> None:
        super().__init__()
        self.num_embeddings = site.out_features
        self.embedding_dim = site.in_features
        self.site = buffers

    @property
    def weight(self) -> torch.Tensor:
        """The table, for code that asks for its device or dtype."""
        return self.site.get_buffer("weight")

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        site, rows = self.site, self.site.rows
        if uses_token_map(ids.dim() + 1, rows.packed):
            slot, scale = rows.token_slot, rows.token_scale
        else:
            slot, scale = rows.seq_slot, rows.seq_scale
        output: torch.Tensor = torch.ops.lora_compile.site_embedding(
            ids, site.weight, [], [slot, scale, slot, scale], rows.packed
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
