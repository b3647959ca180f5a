"""Whether the tensors of an adapter are what its config promises."""

from __future__ import annotations

from collections.abc import Mapping, Set

from lora_compile.adapters.peft_config import PeftConfig
from lora_compile.adapters.peft_names import Role
from lora_compile.adapters.peft_rules import names
from lora_compile.errors import AdapterConfigInvalid, AdapterTargetUnknown, FaultList
from lora_compile.planning.plan import Plan


def check_targets(
    config: PeftConfig,
    found: Mapping[str, Mapping[Role, str]],
    meant: Set[str],
    plan: Plan,
    faults: FaultList,
) -> list[str]:
    """Compare `target_modules` with the modules that have tensors.

    An entry of which no module has a tensor is a fault, and so is a tensor for a module that the
    config does not name (PEFT would leave it unused). Partial coverage gives a warning.

    Args:
        found: module path -> role -> key, of every module of the file that the plan knows.
        meant: names of the file that the plan does not know, and the modules they look like. An
            entry for one of them is not called empty: the name is a fault of its own.
        faults: receives what is wrong.

    Returns:
        Warnings.
    """
    rule = config.targets
    surplus = [path for path in found if not rule.matches(path)]
    empty: list[str] = []
    warnings: list[str] = []
    for entry in rule.entries:
        promised = _promised(config, entry, plan)
        have = [path for path in promised if _present(path, found, plan)]
        if promised and not have and any(names((entry,), name) for name in meant):
            continue
        if promised and not have:
            empty.append(f"{entry!r} (0/{len(promised)})")
        elif len(have) < len(promised):
            missing = next(path for path in promised if path not in have)
            warnings.append(
                f"target_modules entry {entry!r} covers {len(have)} of {len(promised)} modules of "
                f"this model; no tensors for {missing}"
            )
        elif not promised and not _known(config, entry, plan):
            warnings.append(f"target_modules entry {entry!r} matches no projection of this model")
    wanted = f"target_modules: {_list(rule.entries)}"
    if rule.layers:
        wanted += f" in layers {list(rule.layers)}"
    there = f"tensors for: {_list(sorted({path.rsplit('.', 1)[-1] for path in found}))}"
    if empty:
        faults.add(
            AdapterTargetUnknown(
                "the config promises modules for which the file has no tensor (coverage "
                f"{', '.join(empty)})",
                file=config.file,
                where="target_modules",
                fix="export the adapter again, or take the entry out of target_modules",
                expected=wanted,
                found=there,
            )
        )
    if surplus:
        faults.add(
            AdapterConfigInvalid(
                f"the file has tensors for {len(surplus)} modules that the config does not adapt",
                file=config.file,
                where="target_modules, exclude_modules, layers_to_transform",
                tensor=next(iter(found[surplus[0]].values())),
                fix="make target_modules name what was trained",
                expected=wanted,
                found=there,
            )
        )
    return warnings


def _promised(config: PeftConfig, entry: str, plan: Plan) -> list[str]:
    """Modules of the plan that an entry asks for: projections, else the fused site's own name."""
    rule = config.targets
    promised: list[str] = []
    for group, targets in plan.groups.items():
        # PEFT leaves the output embedding out of all-linear; the decoder's layers are the rest.
        if rule.all_linear and not group.startswith(plan.layers + "."):
            continue
        modules = [target.part.module for target in targets]
        parts = [module for module in modules if rule.entry_matches(entry, module)]
        promised += parts or ([group] if rule.entry_matches(entry, group) else [])
    return promised


def _present(path: str, found: Mapping[str, Mapping[Role, str]], plan: Plan) -> bool:
    target = plan.targets.get(path)
    return path in found or (target is not None and target.site.group in found)


def _known(config: PeftConfig, entry: str, plan: Plan) -> bool:
    """Whether an entry asks for a module of the plan that exclusion or layers then take away."""
    if isinstance(config.targets.targets, str):
        return any(config.targets.excluded(path) for path in plan.targets)
    return any(names((entry,), path) for path in (*plan.targets, *plan.groups))


def _list(items: tuple[str, ...] | list[str], most: int = 12) -> str:
    shown = ", ".join(items[:most])
    return f"[{shown}, ...{len(items)} in all]" if len(items) > most else f"[{shown}]"
