"""From the config and the tensors' headers to what each tensor is; no tensor is loaded.

All faults are collected, so that one run shows everything that is wrong with a file. Every key is
either bound to projections of the plan or named in a fault; none is passed over.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from lora_compile.adapters.peft_config import PeftConfig
from lora_compile.adapters.peft_coverage import check_targets
from lora_compile.adapters.peft_kept import tell_targets
from lora_compile.adapters.peft_keys import DTYPE_SIZES, Pair, SortedKeys, TensorHeader, some
from lora_compile.adapters.peft_names import LoraKey, Module, Neighbours
from lora_compile.adapters.report import AdapterReport, TensorReport
from lora_compile.adapters.slots import rank_too_high, site_not_built
from lora_compile.errors import (
    AdapterConfigInvalid,
    AdapterFileInvalid,
    AdapterForeign,
    AdapterPairIncomplete,
    AdapterTargetUnknown,
    FaultList,
    FeatureUnsupported,
    LoraCompileError,
    TensorShape,
)
from lora_compile.planning.plan import Plan, SitePlan

_FOREIGN_MODULES = 3
"""When so many modules do not fit, and more than half of all, the adapter is called foreign."""


@dataclass(frozen=True)
class Binding:
    """One lora_A and lora_B pair and the projections that it serves."""

    module: Module
    key_A: str
    key_B: str
    rank: int
    """0 for a pruned module, which has no delta."""
    scale: float


@dataclass(frozen=True)
class Resolution:
    """Every pair of a file, bound; and the same for people."""

    bindings: tuple[Binding, ...]
    report: AdapterReport


def resolve(
    config: PeftConfig,
    headers: Mapping[str, TensorHeader],
    plan: Plan,
    *,
    file: str,
    source: str | None = None,
    faults: FaultList | None = None,
) -> Resolution:
    """Bind every tensor of an adapter to the plan.

    Args:
        config: the adapter's config.
        headers: key -> dtype and shape of every tensor of the file.
        plan: the model.
        file: the tensors' file, shown in errors.
        source: what the report calls the adapter; default `file`.
        faults: faults found before, raised together with the ones found here.

    Raises:
        Faults, or the only fault: see the classes under "adapters" in `lora_compile.errors`.
    """
    faults = faults if faults is not None else FaultList()
    resolver = _Resolver(config, headers, plan, file, faults)
    bindings = resolver.run()
    faults.raise_if_any()
    return Resolution(tuple(bindings), resolver.report(bindings, source or file))


class _Resolver:
    def __init__(
        self,
        config: PeftConfig,
        headers: Mapping[str, TensorHeader],
        plan: Plan,
        file: str,
        faults: FaultList,
    ) -> None:
        self.config = config
        self.headers = headers
        self.plan = plan
        self.file = file
        self.faults = faults
        self.keys = SortedKeys(headers, plan, file, faults)
        self.misfits: dict[str, list[LoraCompileError]] = defaultdict(list)
        self.wrong_ranks: dict[tuple[int, int], list[str]] = defaultdict(list)
        """(rank by the config, rank of the tensors) -> keys of lora_A."""
        self.unbuilt: dict[str, list[tuple[SitePlan, str]]] = defaultdict(list)
        self.warnings: list[str] = list(config.warnings)

    def run(self) -> list[Binding]:
        if not self.headers:
            self.faults.add(AdapterFileInvalid("the adapter holds 0 tensors", file=self.file))
            return []
        bindings = [
            binding
            for _, pair in sorted(self.keys.pairs.items())
            if (binding := self._bind(pair)) is not None
        ]
        for places in self.unbuilt.values():
            keys = some([key for _, key in places])
            self.faults.add(site_not_built(places[0][0], file=self.file, tensor=keys))
        self._check_ranks(bindings)
        if not self._check_foreign():
            meant = self._report_unfit()
            self.warnings += check_targets(
                self.config,
                {path: pair.keys for path, pair in self.keys.pairs.items()},
                meant,
                self.plan,
                self.faults,
            )
            tell_targets(
                self.config.targets,
                self.plan,
                self.keys.kept.whats,
                file=self.config.file,
                faults=self.faults,
            )
        silent = sorted(b.module.path for b in bindings if b.scale == 0 and self.config.alpha != 0)
        if silent:
            self.warnings.append(f"scale 0, so no change: {some(silent)}")
        return bindings

    # --- pairs --------------------------------------------------------------------------------

    def _bind(self, pair: Pair) -> Binding | None:
        module = pair.module
        key_a, key_b = pair.keys.get("lora_A"), pair.keys.get("lora_B")
        if key_a is None or key_b is None:
            there, missing = ("lora_A", "lora_B") if key_b is None else ("lora_B", "lora_A")
            self.faults.add(
                AdapterPairIncomplete(
                    f"{module.path!r} has {there} but no {missing}",
                    file=self.file,
                    tensor=next(iter(pair.keys.values())),
                    expected=f"{module.path}.{missing}.weight beside it",
                    fix="export the adapter again; a missing half is never taken as zero",
                )
            )
            return None
        for site in module.sites:
            if site.kind != "linear":
                self.faults.add(
                    FeatureUnsupported(
                        f"LoRA at {site.name!r}, a site of kind {site.kind!r}, is not supported",
                        file=self.file,
                        tensor=key_a,
                        expected="a linear projection",
                    )
                )
                return None
            if not site.lora:
                self.unbuilt[site.role].append((site, key_a))
                return None
        rank = self._check_shapes(module, key_a, key_b)
        if rank is None:
            return None
        return Binding(module, key_a, key_b, rank, self.config.scale(module.path))

    def _check_shapes(self, module: Module, key_a: str, key_b: str) -> int | None:
        shape_a, shape_b = self.headers[key_a].shape, self.headers[key_b].shape
        rank = self.config.rank(module.path)
        columns, rows = module.in_features, module.out_features
        for key, shape, axis, width in ((key_a, shape_a, 1, columns), (key_b, shape_b, 0, rows)):
            if len(shape) != 2 or shape[axis] != width:
                form = f"[r, {width}]" if axis else f"[{width}, r]"
                self.misfits[module.path].append(
                    TensorShape(
                        f"the tensor does not fit {module.path!r}",
                        file=self.file,
                        tensor=key,
                        expected=f"{form} with r = {rank}",
                        found=list(shape),
                        fix="use the adapter with the base model it was trained on",
                    )
                )
        if module.path in self.misfits:
            return None
        if shape_a[0] != shape_b[1]:
            self.faults.add(
                TensorShape(
                    f"lora_A and lora_B of {module.path!r} have different ranks",
                    file=self.file,
                    tensor=f"{key_a}, {key_b}",
                    expected=f"[{rank}, {columns}] and [{rows}, {rank}], the config's rank",
                    found=f"{list(shape_a)} and {list(shape_b)}",
                    fix="save the adapter again: one of the two is of another adapter",
                )
            )
            return None
        if shape_a[0] != rank:
            self.wrong_ranks[rank, shape_a[0]].append(key_a)
            return None
        return rank

    def _check_ranks(self, bindings: list[Binding]) -> None:
        for (wanted, there), keys in self.wrong_ranks.items():
            self.faults.add(
                AdapterConfigInvalid(
                    f"the config says rank {wanted} and the tensors have rank {there}, so the "
                    "scale is not known",
                    file=self.config.file,
                    where="r, rank_pattern",
                    tensor=some(keys),
                    expected=f"[{wanted}, {self.headers[keys[0]].shape[1]}]",
                    found=list(self.headers[keys[0]].shape),
                    fix="correct r or rank_pattern",
                )
            )
        highest = max(bindings, key=lambda binding: binding.rank, default=None)
        if highest is not None and highest.rank > self.plan.slots.max_rank:
            self.faults.add(
                rank_too_high(self.plan, highest.rank, file=self.file, tensor=highest.key_A)
            )

    # --- what does not fit --------------------------------------------------------------------

    def _check_foreign(self) -> bool:
        """One error instead of hundreds when most modules do not fit this model."""
        beyond = {key.head for key in self.keys.beyond}
        unfit = len(beyond) + len(self.misfits)
        if unfit < _FOREIGN_MODULES or 2 * unfit <= len(self.keys.heads):
            return False
        base = self.config.base_model
        examples = [key.key for key in self.keys.beyond[:2]]
        examples += [fault.render() for faults in self.misfits.values() for fault in faults][:2]
        bound = len(self.keys.heads) - unfit - len({key.head for key in self.keys.unknown})
        self.faults.add(
            AdapterForeign(
                f"the adapter was made for another base model: {bound} of {len(self.keys.heads)} "
                f"modules fit, {len(beyond)} lie beyond this model's layers, "
                f"{len(self.misfits)} have other widths",
                file=self.file,
                expected=f"an adapter for this {self.plan.model_type} model",
                found=f"base_model_name_or_path: {base!r}; e.g. " + "; ".join(examples),
                fix="use the adapter with the base model it was trained on",
            )
        )
        return True

    def _report_unfit(self) -> set[str]:
        """Add the faults; returns the names that were given, and those probably meant."""
        for faults in self.misfits.values():
            for fault in faults:
                self.faults.add(fault)
        neighbours = Neighbours(self.plan)
        groups: dict[tuple[str, ...], list[LoraKey]] = defaultdict(list)
        for key in self.keys.unknown + self.keys.beyond:
            same = neighbours.same_tail(key.head)
            # One error per wrong prefix, or else per kind of module: layer and expert numbers
            # do not count.
            kind = (
                (same[0],)
                if same
                else tuple("#" if part.isdigit() else part for part in key.head.split("."))
            )
            groups[kind].append(key)
        meant = {key.head for key in self.keys.unknown}
        for keys in groups.values():
            near = neighbours.nearest(keys[0].head)
            meant |= {near} if near else set()
            self.faults.add(
                AdapterTargetUnknown(
                    "no projection of this model goes by this name",
                    file=self.file,
                    tensor=some([key.key for key in keys]),
                    expected=f"nearest: {near}" if near else "a projection that the plan has",
                    found=keys[0].head,
                    fix="correct the key, or add its prefix to key_prefixes of the "
                    f"{self.plan.architecture!r} schema",
                )
            )
        return meant

    # --- report -------------------------------------------------------------------------------

    def report(self, bindings: list[Binding], source: str) -> AdapterReport:
        tensors = [
            TensorReport(
                key=key,
                site=site.name,
                parts=tuple(t.part.name for t in binding.module.targets if t.site is site),
                layer=site.layer,
                role=role,
                shape=self.headers[key].shape,
                dtype=self.headers[key].dtype,
                rank=binding.rank,
                scale=binding.scale,
                decided_by=binding.module.decided_by,
            )
            for binding in bindings
            for site in binding.module.sites
            for role, key in (("lora_A", binding.key_A), ("lora_B", binding.key_B))
        ]
        return AdapterReport(
            source=source,
            base_model=self.config.base_model,
            max_rank=max((binding.rank for binding in bindings), default=0),
            modules=len(bindings),
            bytes=sum(DTYPE_SIZES[h.dtype] * prod(h.shape) for h in self.headers.values()),
            tensors=tuple(tensors),
            warnings=tuple(self.warnings),
        )
