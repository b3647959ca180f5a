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


class SiteLinear(nn.Module):
    """One part of a linear site. Its forward is one marker."""

    def __init__(
        self, site: SitePlan, part: int, storage: SiteStorage, rows: RowMaps, quant: str
    ) -> None:
        super().__init__()
        self.in_features = site.in_features
        self.out_features = site.parts[part].out_features
        self.part = part
        self.quant = quant
        self.packed = rows.packed
        self._aux = site.quant.aux_names
        _buffer(self, "weight", storage.weight)
        for name, tensor in zip(self._aux, storage.aux, strict=True):
            _buffer(self, name, tensor)
        _buffer(self, "bias", storage.bias)
        self._slots = _register_slots(self, storage.slots)
        for name, tensor in rows.tensors().items():
            _buffer(self, name, tensor)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = torch.ops.lora_compile.site_linear(
            x,
            self.weight,
            [getattr(self, name) for name in self._aux],
            self.bias,
            [getattr(self, name) for name in self._slots],
            _row_maps(self, x.dim()),
            self.part,
            self.quant,
            self.packed,
        )
        return output

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, part={self.part}"


class SiteEmbedding(nn.Module):
    """An embedding site. Its forward is one marker."""

    def __init__(self, site: SitePlan, storage: SiteStorage, rows: RowMaps) -> None:
        super().__init__()
        self.num_embeddings = site.out_features
        self.embedding_dim = site.in_features
        self.packed = rows.packed
        _buffer(self, "weight", storage.weight)
        self._slots = _register_slots(self, storage.slots)
        for name, tensor in rows.tensors().items():
            _buffer(self, name, tensor)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = torch.ops.lora_compile.site_embedding(
            ids,
            self.weight,
            [getattr(self, name) for name in self._slots],
            _row_maps(self, ids.dim() + 1),
            self.packed,
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
    for site in plan.sites:
        storage = storages[site.name]
        # A tied head shares its table with the embedding: two sites, one tensor. Each needs a
        # tensor object of its own to be found by identity; the memory stays shared.
        weight = storage.weight
        if id(weight) in by_tensor:
            weight = weight.detach()
            storage = SiteStorage(weight, storage.aux, storage.bias, storage.slots)
        by_tensor[id(weight)] = site
        quant = site.quant.model_dump_json()
        for index, part in enumerate(site.parts):
            module: nn.Module
            if site.kind == "linear":
                module = SiteLinear(site, index, storage, rows, quant)
            elif site.kind == "embedding":
                module = SiteEmbedding(site, storage, rows)
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


def _row_maps(module: SiteLinear | SiteEmbedding, dim: int) -> list[torch.Tensor]:
    """The maps as markers take them, for an input of `dim` dimensions.

    Only the map that the marker will read is touched, and stands in for the other one: Dynamo
    guards each buffer that it sees at each of the hundreds of projections.
    """
    which = "token" if uses_token_map(dim, module.packed) else "seq"
    maps = [module.get_buffer(f"{which}_slot"), module.get_buffer(f"{which}_scale")]
    return maps + maps


def _register_slots(module: nn.Module, slots: SlotTensors | None) -> tuple[str, ...]:
    if slots is None:
        return ()
    for name in ("lora_A", "lora_B", "lora_scale", "lora_rank"):
        _buffer(module, name, getattr(slots, name))
    return ("lora_A", "lora_B", "lora_scale", "lora_rank")
