"""The Plan: every decision about one model, as plain data.

A plan can be printed, compared and made on the meta device in seconds. Later rooms (packing,
attach, passes, pool) only read it.
"""

from __future__ import annotations

from functools import cached_property
from typing import Literal, NamedTuple

from lora_compile.schemas.base import StrictModel
from lora_compile.schemas.quant_info import QuantInfo

ModelDtype = Literal["float32", "float16", "bfloat16"]
SiteKind = Literal["linear", "embedding", "experts"]


class SourceRef(StrictModel):
    """Where in a schema file a site was declared."""

    file: str
    line: int


class PartPlan(StrictModel):
    """One projection of a site. Its rows inside the site are in `SitePlan.quant.parts`."""

    name: str
    """The projection's own name, e.g. `q_proj`."""
    module: str
    """Full path of the module in the model, e.g. `model.layers.0.self_attn.q_proj`."""
    out_features: int


class SitePlan(StrictModel):
    """A place where a low-rank delta may act: a projection, or a group fused into one GEMM."""

    name: str
    """Full path, e.g. `model.layers.0.self_attn.qkv_proj`; unique in the plan."""
    kind: SiteKind
    role: str
    """The site's name in the schema, e.g. `qkv_proj`; the same in every layer."""
    layer: int | None
    in_features: int
    out_features: int
    parts: tuple[PartPlan, ...]
    quant: QuantInfo
    lora: bool
    """Whether the graph is built with adapter slots here."""
    tied_to: str | None
    """The module whose weight this site shares, e.g. `model.embed_tokens` for a tied head."""
    source: SourceRef
    why: str
    """How the scheme and the grouping were decided, for `explain`."""

    @property
    def group(self) -> str:
        """Full path of the schema's site, also where the plan has split it into several."""
        parent = self.parts[0].module.rpartition(".")[0]
        return f"{parent}.{self.role}" if parent else self.role


class PartTarget(NamedTuple):
    """Where one projection's delta goes."""

    site: SitePlan
    part_index: int
    """Index of the part in `site.parts`."""

    @property
    def part(self) -> PartPlan:
        return self.site.parts[self.part_index]


class KeptModules(StrictModel):
    """Modules that run as transformers has them: no adapter may act there."""

    what: str
    """What they are, for messages, e.g. `routed experts`."""
    modules: tuple[str, ...]
    """Their full paths, one for each layer that has one."""
    parameters: tuple[str, ...]
    """Names of the parameters below such a module, e.g. `gate_up_proj`."""
    source: SourceRef

    def module_of(self, path: str) -> str | None:
        """The kept module that `path` is, or lies in."""
        return next((m for m in self.modules if f"{path}.".startswith(f"{m}.")), None)


class SlotPlan(StrictModel):
    """What the pool of adapter slots is built for; fixed when the graph is built."""

    max_adapters: int
    max_rank: int
    """The highest rank an adapter may have, as the user wrote it."""
    rank: int
    """`max_rank` rounded up to a multiple of 16: the stored width."""
    features: tuple[str, ...]
    dtype: ModelDtype

    @property
    def slots(self) -> int:
        """Slots per site: one spare is kept so that a live slot is never written."""
        return self.max_adapters + 1


class Plan(StrictModel):
    """Every site of one model with everything decided."""

    architecture: str
    model_type: str
    dtype: ModelDtype
    device: str
    scheme: str
    """The deployment's scheme name; a site's own scheme is in `SitePlan.quant`."""
    slots: SlotPlan
    max_rows: int
    """Most rows of a batch (beams counted)."""
    max_tokens: int
    """Most tokens of one forward, over all rows."""
    packed: bool
    """Whether rows are packed into one sequence (batch size 1, one slot per token)."""
    layers: str
    """Module path of the decoder layers, e.g. `model.layers`."""
    sites: tuple[SitePlan, ...]
    key_prefixes: tuple[str, ...]
    """Prefixes that adapter files may put before a module path, longest first."""
    kept: tuple[KeptModules, ...]

    @cached_property
    def targets(self) -> dict[str, PartTarget]:
        """Every projection's module path -> its site and part."""
        return {
            part.module: PartTarget(site, index)
            for site in self.sites
            for index, part in enumerate(site.parts)
        }

    @cached_property
    def groups(self) -> dict[str, tuple[PartTarget, ...]]:
        """Full path of each of the schema's sites -> its parts, in the order of their rows.

        A site whose parts do not share one GEMM is one group of several sites.
        """
        groups: dict[str, tuple[PartTarget, ...]] = {}
        for target in self.targets.values():
            groups[target.site.group] = (*groups.get(target.site.group, ()), target)
        return groups

    @cached_property
    def by_name(self) -> dict[str, SitePlan]:
        return {site.name: site for site in self.sites}
