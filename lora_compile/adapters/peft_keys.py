"""Every key of an adapter file sorted into pairs, unsupported features and unknown names."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from lora_compile.adapters.peft_kept import KeptKeys
from lora_compile.adapters.peft_names import (
    FeatureKey,
    LoraKey,
    Module,
    Role,
    beyond_layers,
    classify,
    find_modules,
)
from lora_compile.errors import (
    AdapterFileInvalid,
    AdapterTargetUnknown,
    FaultList,
    FeatureUnsupported,
    TensorShape,
    TensorUnexpected,
)
from lora_compile.planning.plan import Plan

DTYPE_SIZES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Dtypes that are read, and their bytes per element."""


class TensorHeader(NamedTuple):
    """What a file says about a tensor before its data: torch's name of the dtype, and shape."""

    dtype: str
    shape: tuple[int, ...]


@dataclass
class Pair:
    """The keys of one module of the file; complete when it has both roles."""

    module: Module
    keys: dict[Role, str] = field(default_factory=dict)


class SortedKeys:
    """The keys of a file, sorted; what cannot be sorted is in `faults`.

    Attributes:
        pairs: module path -> its keys.
        heads: every module name of the file, prefix included, known or not.
        unknown: keys of LoRA form whose module the plan does not have.
        beyond: those that would fit if the model had more layers.
        kept: keys in modules that run without adapters, whatever their form.
    """

    def __init__(
        self, headers: Mapping[str, TensorHeader], plan: Plan, file: str, faults: FaultList
    ) -> None:
        self.headers = headers
        self.plan = plan
        self.file = file
        self.faults = faults
        self.pairs: dict[str, Pair] = {}
        self.heads: set[str] = set()
        self.unknown: list[LoraKey] = []
        self.beyond: list[LoraKey] = []
        self.kept = KeptKeys(plan)
        self._check_dtypes()
        self._sort_keys()
        self._check_overlap()

    def _check_dtypes(self) -> None:
        wrong: dict[str, list[str]] = defaultdict(list)
        for key, header in self.headers.items():
            if header.dtype not in DTYPE_SIZES:
                wrong[header.dtype].append(key)
        for dtype, keys in sorted(wrong.items()):
            self.faults.add(
                TensorShape(
                    "adapter tensors of a dtype that is not read",
                    file=self.file,
                    tensor=some(keys),
                    expected=" or ".join(DTYPE_SIZES),
                    found=dtype,
                )
            )

    def _sort_keys(self) -> None:
        features: dict[str, list[str]] = defaultdict(list)
        adapters: dict[str | None, list[str]] = defaultdict(list)
        for key in sorted(self.headers):
            if self.kept.take(key):
                continue
            form = classify(key)
            if isinstance(form, LoraKey):
                adapters[form.adapter].append(key)
                self.heads.add(form.head)
                self._place(form)
            elif isinstance(form, FeatureKey):
                features[form.feature].append(key)
            else:
                self.faults.add(
                    TensorUnexpected(
                        "no rule reads this tensor",
                        file=self.file,
                        tensor=key,
                        expected="<module>.lora_A.weight or <module>.lora_B.weight",
                    )
                )
        self.kept.tell(self.file, self.faults)
        for feature, keys in features.items():
            self.faults.add(
                FeatureUnsupported(
                    f"the adapter holds {feature}, which is not supported",
                    file=self.file,
                    tensor=some(keys),
                    fix="train or convert the adapter to plain LoRA on linear layers",
                )
            )
        if len(adapters) > 1:
            self.faults.add(
                AdapterFileInvalid(
                    "the file holds tensors of several adapters",
                    file=self.file,
                    expected="one adapter name, or none, in all keys",
                    found=", ".join(f"{name}: {keys[0]}" for name, keys in adapters.items()),
                )
            )

    def _place(self, key: LoraKey) -> None:
        modules = find_modules(key.head, self.plan)
        if len(modules) > 1:
            self.faults.add(
                AdapterTargetUnknown(
                    "the key can be read as several modules",
                    file=self.file,
                    tensor=key.key,
                    expected="one reading under the architecture's key_prefixes",
                    found=", ".join(module.path for module in modules),
                )
            )
        elif not modules:
            beyond = beyond_layers(key.head, self.plan)
            (self.beyond if beyond else self.unknown).append(key)
        else:
            pair = self.pairs.setdefault(modules[0].path, Pair(modules[0]))
            if key.role in pair.keys:
                self.faults.add(
                    AdapterFileInvalid(
                        f"{key.role} of {modules[0].path!r} is given twice",
                        file=self.file,
                        tensor=key.key,
                        found=pair.keys[key.role],
                    )
                )
            pair.keys[key.role] = key.key

    def _check_overlap(self) -> None:
        """A projection may have its delta alone or inside a fused module's, not both."""
        for path, pair in self.pairs.items():
            for target in pair.module.targets if pair.module.fused else ():
                if target.part.module in self.pairs:
                    self.faults.add(
                        AdapterFileInvalid(
                            f"the delta of {target.part.module!r} is given twice",
                            file=self.file,
                            tensor=next(iter(self.pairs[target.part.module].keys.values())),
                            found=f"also inside {path!r}",
                        )
                    )


def some(keys: Iterable[str]) -> str:
    """The first of several keys and how many more there are."""
    first, *rest = keys
    return f"{first} (and {len(rest)} more)" if rest else first
