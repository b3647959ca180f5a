"""Adapters that act on modules which stay as transformers runs them, e.g. routed experts.

Nothing would carry their delta, so each is refused by the name of the module, whatever form its
keys have: a module per expert, tensors of all experts, or only the config's word.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from lora_compile.adapters.peft_rules import TargetRule, names
from lora_compile.errors import FaultList, FeatureUnsupported
from lora_compile.planning.plan import KeptModules, Plan


class KeptKeys:
    """The keys of a file that lie in kept modules."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._found: dict[str, list[str]] = defaultdict(list)
        self._modules: dict[str, str] = {}

    def take(self, key: str) -> bool:
        """Whether the key lies in a kept module; it is remembered then."""
        for prefix in self._plan.key_prefixes:
            if not key.startswith(prefix):
                continue
            for rule in self._plan.kept:
                module = rule.module_of(key[len(prefix) :])
                if module is not None:
                    self._found[rule.what].append(key)
                    self._modules.setdefault(rule.what, module)
                    return True
        return False

    @property
    def whats(self) -> set[str]:
        """What the modules are of which there are keys."""
        return set(self._found)

    def tell(self, file: str, faults: FaultList) -> None:
        """One fault for each kind of module, whatever number of tensors it has."""
        for what, keys in self._found.items():
            first, *rest = sorted(keys)
            faults.add(
                FeatureUnsupported(
                    f"the adapter acts on the {what} ({self._modules[what]}), which run without "
                    "adapters here",
                    file=file,
                    tensor=f"{first} (and {len(rest)} more)" if rest else first,
                    expected="tensors for the model's other projections only",
                    found=f"{len(keys)} tensors of {what}",
                    fix=_fix(what),
                )
            )


def tell_targets(
    rule: TargetRule, plan: Plan, known: Iterable[str], *, file: str, faults: FaultList
) -> None:
    """A fault for each kind of kept module that `target_modules` names.

    Args:
        known: what the file's own tensors were told of already.
        file: the config's path.
    """
    told = set(known)
    for kept in plan.kept:
        entry = next((e for e in rule.entries if _names_kept(rule, e, kept)), None)
        if entry is None or kept.what in told:
            continue
        told.add(kept.what)
        faults.add(
            FeatureUnsupported(
                f"target_modules names the {kept.what}, which run without adapters here",
                file=file,
                where="target_modules",
                expected="the model's other projections only",
                found=repr(entry),
                fix=_fix(kept.what),
            )
        )


def parameters_reason(raw: Mapping[str, Any], kept: Iterable[KeptModules]) -> str | None:
    """What `target_parameters` names among the kept modules, in words; None for nothing.

    As in PEFT an entry is a parameter's full path or a dotted suffix of it.
    """
    entries = raw.get("target_parameters")
    if not isinstance(entries, list):
        return None
    for rule in kept:
        paths = [f"{module}.{name}" for module in rule.modules for name in rule.parameters]
        if any(isinstance(e, str) and names((e,), path) for e in entries for path in paths):
            return f"it names parameters of the {rule.what}, which run without adapters here"
    return None


def _names_kept(rule: TargetRule, entry: str, kept: KeptModules) -> bool:
    """Whether an entry of `target_modules` asks for a kept module or for something in it."""
    if rule.all_linear:
        return False  # their parameters are no linear layers
    if isinstance(rule.targets, str):
        return any(re.fullmatch(entry, module) for module in kept.modules)
    parts = entry.split(".")
    heads = tuple(".".join(parts[:end]) for end in range(1, len(parts) + 1))
    return any(
        names(heads, module) and not rule.excluded(f"{module}.{parts[-1]}")
        for module in kept.modules
    )


def _fix(what: str) -> str:
    return f"train the adapter without the {what}, or take their tensors and targets out of it"
