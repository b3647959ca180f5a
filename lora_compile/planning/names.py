"""The names of a schema's expressions over one model: config, flags, `let` values, and `layer`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lora_compile.errors import ExpressionInvalid, FaultList, UnknownKey
from lora_compile.schemas.architecture import ArchitectureSchema
from lora_compile.schemas.architecture_rule_checks import LAYER_NAME
from lora_compile.schemas.architecture_rules import LAYER
from lora_compile.schemas.expressions import evaluate
from lora_compile.schemas.source_map import SourceMap
from lora_compile.schemas.yaml_faults import nearest
from lora_compile.schemas.yaml_file import KeyPath, Loaded, text_path

FLAGS: KeyPath = ("model", "flags")
"""Where a deployment sets flags."""


@dataclass(frozen=True)
class Names:
    """Evaluates a schema's expressions over one config; errors carry the schema's line."""

    loaded: Loaded[ArchitectureSchema]
    config: Any
    derived: dict[str, int | bool]

    @classmethod
    def of(
        cls,
        loaded: Loaded[ArchitectureSchema],
        config: Any,
        flags: Mapping[str, bool],
        *,
        source: SourceMap | None = None,
    ) -> Names:
        """Flags and `let` values, evaluated.

        Args:
            flags: those that differ from the schema's defaults.
            source: the deployment that sets them, for errors.

        Raises:
            UnknownKey: the schema has no such flag.
            ExpressionInvalid: a `let` value cannot be evaluated.
        """
        schema = loaded.value
        check_flags(schema, flags, source=source)
        names = cls(loaded, config, {name: flag.default for name, flag in schema.flags.items()})
        names.derived.update(flags)
        for name, text in schema.let.items():
            names.derived[name] = names.value(text, ("let", name))
        return names

    def value(self, text: str, path: KeyPath, *, layer: int | None = None) -> int:
        """The value of the expression that stands at `path` of the schema.

        Args:
            layer: what `layer` stands for; None where it may not be used.
        """
        derived = self.derived if layer is None else {**self.derived, LAYER_NAME: layer}
        try:
            return evaluate(text, self.config, derived)
        except ExpressionInvalid as error:
            raise ExpressionInvalid(
                error.message,
                file=self.loaded.source.file,
                line=self.loaded.source.line(path),
                where=text_path(path),
                expected=error.expected,
                found=error.found,
                fix=error.fix,
            ) from error

    def places(self, at: str, when: str | None, path: KeyPath) -> list[int | None]:
        """The layers in which a thing with this path and condition exists; [None]: in no layer."""
        layers: list[int | None] = [None]
        if LAYER in at:
            layers = list(range(self.value(self.loaded.value.layers.count, ("layers", "count"))))
        if when is None:
            return layers
        return [n for n in layers if self.value(when, (*path, "when"), layer=n)]


def in_layer(text: str, layer: int | None) -> str:
    """A path or tensor name with the layer's index filled in."""
    return text if layer is None else text.replace(LAYER, str(layer))


def check_flags(
    schema: ArchitectureSchema, flags: Mapping[str, bool], *, source: SourceMap | None
) -> None:
    """Raise UnknownKey for each flag that the schema does not have; several as Faults."""
    faults = FaultList()
    for name in flags.keys() - schema.flags.keys():
        near = nearest(name, list(schema.flags))
        path = (*FLAGS, name)
        faults.add(
            UnknownKey(
                f"architecture `{schema.name}` has no flag `{name}`",
                file=source.file if source else None,
                line=source.line(path) if source else None,
                where=text_path(path) if source else f"flags.{name}",
                expected=" | ".join(schema.flags) or "no flags: this architecture has none",
                found=name,
                fix=f"did you mean `{near}`?" if near else "remove it",
            )
        )
    faults.raise_if_any()
