"""A schema's rules for what is no site, laid over a model: kept modules, stacked parameters, and
tensors of the checkpoint that are left out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from lora_compile.checkpoints.stacked import ParameterRules, Stack
from lora_compile.errors import FaultList, SiteMissing, WidthMismatch
from lora_compile.planning.names import Names, in_layer
from lora_compile.planning.plan import KeptModules, SourceRef
from lora_compile.schemas.architecture import ArchitectureSchema
from lora_compile.schemas.yaml_faults import nearest
from lora_compile.schemas.yaml_file import KeyPath, Loaded, text_path


@dataclass(frozen=True)
class FoundRules:
    """The rules of a schema with every layer, count and width filled in."""

    kept: tuple[KeptModules, ...]
    stacks: Mapping[str, Stack]
    """Full parameter name -> how a checkpoint may store it."""
    ignored: Mapping[str, str]
    """Regular expression over whole tensor names -> why they are left out."""

    @property
    def parameters(self) -> ParameterRules:
        """What the checkpoint survey needs to know of parameters outside the sites."""
        kept = {module: rule.what for rule in self.kept for module in rule.modules}
        return ParameterRules(self.stacks, kept)


def find_rules(
    loaded: Loaded[ArchitectureSchema],
    config: Any,
    model: nn.Module,
    flags: Mapping[str, bool] | None = None,
) -> FoundRules:
    """Lay the rules over the model and check that what they name is there.

    Args:
        flags: those that differ from the schema's defaults.

    Raises:
        SiteMissing, WidthMismatch, ExpressionInvalid: with the schema's file and line; several
        together as `Faults`.
    """
    work = _Finder(loaded, Names.of(loaded, config, flags or {}), model)
    found = FoundRules(work.kept(), work.stacks(), work.ignored())
    work.faults.raise_if_any()
    return found


class _Finder:
    def __init__(self, loaded: Loaded[ArchitectureSchema], names: Names, model: nn.Module) -> None:
        self.loaded = loaded
        self.names = names
        self.modules = dict(model.named_modules())
        self.parameters = dict(model.named_parameters())
        self.faults = FaultList()

    def kept(self) -> tuple[KeptModules, ...]:
        found = []
        for index, rule in enumerate(self.loaded.value.kept):
            path: KeyPath = ("kept", index)
            wanted = [in_layer(rule.at, n) for n in self.names.places(rule.at, rule.when, path)]
            for module in wanted:
                if module not in self.modules:
                    self._missing("module", module, list(self.modules), (*path, "at"))
            parameters = {
                name
                for module in wanted
                if module in self.modules
                for name, _ in self.modules[module].named_parameters()
            }
            found.append(
                KeptModules(
                    what=rule.what,
                    modules=tuple(wanted),
                    parameters=tuple(sorted(parameters)),
                    source=SourceRef(
                        file=self.loaded.source.file, line=self.loaded.source.line(path)
                    ),
                )
            )
        return tuple(found)

    def stacks(self) -> dict[str, Stack]:
        found: dict[str, Stack] = {}
        for index, rule in enumerate(self.loaded.value.checkpoint.stack):
            path: KeyPath = ("checkpoint", "stack", index)
            for layer in self.names.places(rule.parameter, rule.when, path):
                name = in_layer(rule.parameter, layer)
                if name not in self.parameters:
                    self._missing("parameter", name, list(self.parameters), (*path, "parameter"))
                    continue
                pieces = tuple(
                    (
                        in_layer(piece.name, layer),
                        self.names.value(piece.rows, (*path, "pieces", number, "rows")),
                    )
                    for number, piece in enumerate(rule.pieces)
                )
                count = self.names.value(rule.count, (*path, "count"))
                rows = sum(rows for _, rows in pieces)
                shape = tuple(self.parameters[name].shape)
                if len(shape) != 3 or shape[:2] != (count, rows):
                    self.faults.add(
                        WidthMismatch(
                            f"{name} has another shape than the schema says",
                            file=self.loaded.source.file,
                            line=self.loaded.source.line(path),
                            where=text_path(path),
                            expected=f"[{count}, {rows}, columns] ({rule.count} experts, rows of "
                            f"{' + '.join(piece.rows for piece in rule.pieces)})",
                            found=list(shape),
                            fix="correct `count` or the pieces' `rows`",
                        )
                    )
                    break  # the other layers are alike
                found[name] = Stack(name, (count, rows, shape[2]), pieces)
        return found

    def ignored(self) -> dict[str, str]:
        found: dict[str, str] = {}
        for index, rule in enumerate(self.loaded.value.checkpoint.ignore):
            path: KeyPath = ("checkpoint", "ignore", index)
            layers = None
            if rule.layers_from is not None and rule.layers_count is not None:
                first = self.names.value(rule.layers_from, (*path, "layers_from"))
                count = self.names.value(rule.layers_count, (*path, "layers_count"))
                layers = range(first, first + count)
            found[rule.regex(layers)] = rule.why
        return found

    def _missing(self, kind: str, name: str, there: list[str], path: KeyPath) -> None:
        near = nearest(name, there)
        self.faults.add(
            SiteMissing(
                f"this model has no {kind} {name}",
                file=self.loaded.source.file,
                line=self.loaded.source.line(path),
                where=text_path(path),
                expected=f"a {kind} of this name",
                found="nothing",
                fix=f"did you mean {near}?" if near else "correct the path, or set `when`",
            )
        )
