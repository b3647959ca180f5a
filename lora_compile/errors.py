"""One class per mistake a user can make.

Every error carries the place (file, YAML line or tensor), what was expected, what was found and
what to do about it. Code that checks a whole file collects its errors in a `FaultList` and raises
them together, so that one run shows every fault.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any


class LoraCompileError(Exception):
    """Base of every error that lora_compile raises on purpose.

    Args:
        message: one sentence that says what is wrong.
        file: the file the fault is in.
        line: 1-based line in `file`, where it is text.
        where: a path inside the file (`adapters[0].path`) or a module path of the model.
        tensor: the key of the tensor that is at fault.
        expected: what would have been right.
        found: what is there.
        fix: what the user can do.
    """

    def __init__(
        self,
        message: str,
        *,
        file: object = None,
        line: int | None = None,
        where: str | None = None,
        tensor: str | None = None,
        expected: object = None,
        found: object = None,
        fix: str | None = None,
    ) -> None:
        self.message = message
        self.file = None if file is None else str(file)
        self.line = line
        self.where = where
        self.tensor = tensor
        self.expected = None if expected is None else str(expected)
        self.found = None if found is None else str(found)
        self.fix = fix
        super().__init__(self.render())

    def render(self) -> str:
        place = self.file or ""
        if self.line is not None:
            place += f":{self.line}"
        lines = [f"{place}: {self.message}" if place else self.message]
        for label, value in (
            ("where", self.where),
            ("tensor", self.tensor),
            ("expected", self.expected),
            ("found", self.found),
            ("fix", self.fix),
        ):
            if value is not None:
                lines.append(f"  {label + ':':<10}{value}")
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """The error as plain data, for `--json`; absent fields are left out."""
        fields = ("file", "line", "where", "tensor", "expected", "found", "fix")
        found = {name: getattr(self, name) for name in fields if getattr(self, name) is not None}
        return {"error": type(self).__name__, "message": self.message, **found}


class Faults(LoraCompileError):
    """Several faults found in one run."""

    def __init__(self, faults: Iterable[LoraCompileError]) -> None:
        self.faults = tuple(faults)
        super().__init__(f"{len(self.faults)} faults")

    def render(self) -> str:
        return "\n".join(fault.render() for fault in self.faults)


class FaultList:
    """Collects errors so that all of them can be shown at once."""

    def __init__(self) -> None:
        self.faults: list[LoraCompileError] = []

    def add(self, error: LoraCompileError) -> None:
        self.faults.extend(error.faults if isinstance(error, Faults) else [error])

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Add the errors of a block of code instead of raising them."""
        try:
            yield
        except LoraCompileError as error:
            self.add(error)

    def __bool__(self) -> bool:
        return bool(self.faults)

    def raise_if_any(self) -> None:
        """Raise the only fault itself, or several as `Faults`."""
        if len(self.faults) == 1:
            raise self.faults[0]
        if self.faults:
            raise Faults(self.faults)


# --- YAML files -------------------------------------------------------------------------------


class FileMissing(LoraCompileError):
    """A file or directory that the user named does not exist."""


class YamlSyntax(LoraCompileError):
    """The file is not YAML, or not a mapping at its top level."""


class UnknownKey(LoraCompileError):
    """A key that the model does not know (usually a typo)."""


class DuplicateKey(LoraCompileError):
    """A key that stands twice in one mapping of a YAML file."""


class InvalidValue(LoraCompileError):
    """A value of the wrong type or outside its range."""


class MissingKey(LoraCompileError):
    """A required key is absent."""


# --- architectures and schemes ----------------------------------------------------------------


class ArchitectureUnknown(LoraCompileError):
    """No architecture schema serves this model type."""


class ExpressionInvalid(LoraCompileError):
    """A width expression of a schema cannot be evaluated over the model's config."""


class SiteMissing(LoraCompileError):
    """The schema names a projection that the model does not have."""


class WidthMismatch(LoraCompileError):
    """A projection's width differs from what the schema's expression says."""


class SchemeUnsupported(LoraCompileError):
    """The checkpoint's quantisation scheme has no reader here, or one that is incomplete."""


class FeatureUnsupported(LoraCompileError):
    """Something that was asked for by name and is not supported."""


# --- checkpoints ------------------------------------------------------------------------------


class CheckpointInvalid(LoraCompileError):
    """A checkpoint directory that lacks a part or whose files contradict each other."""


class TensorMissing(LoraCompileError):
    """A tensor that the plan needs is not in the checkpoint."""


class TensorUnexpected(LoraCompileError):
    """A tensor that no rule consumes."""


class TensorShape(LoraCompileError):
    """A tensor of the wrong shape or dtype."""


class TensorNotFinite(LoraCompileError):
    """A scale or an adapter tensor that holds NaN or Inf."""


# --- adapters ---------------------------------------------------------------------------------


class AdapterConfigInvalid(LoraCompileError):
    """A field of `adapter_config.json` is missing, contradictory or not supported."""


class AdapterTargetUnknown(LoraCompileError):
    """An adapter tensor or target that matches no site of this model."""


class AdapterPairIncomplete(LoraCompileError):
    """A lora_A without its lora_B, or the other way round."""


class AdapterRankTooHigh(LoraCompileError):
    """An adapter whose rank exceeds `runtime.max_rank`."""


class AdapterForeign(LoraCompileError):
    """An adapter that was made for another base model."""


class AdapterFileInvalid(LoraCompileError):
    """An adapter directory that lacks a part, or whose tensor file cannot be read as LoRA."""


class AdapterSiteNotBuilt(LoraCompileError):
    """An adapter acts at a site for which the graph was built without slots."""


class AdapterNameTaken(LoraCompileError):
    """An adapter of this name is loaded already."""


class AdapterUnknown(LoraCompileError, KeyError):
    """A request names an adapter that is not loaded."""

    __str__ = Exception.__str__


class PoolFull(LoraCompileError):
    """No slot is free: all are pinned or in use."""


# --- running ----------------------------------------------------------------------------------


class RequestInvalid(LoraCompileError):
    """Adapters or scales of a request that do not fit its rows, or too many rows or tokens."""


class CompileIncomplete(LoraCompileError):
    """The traced graph does not hold exactly the sites that the plan promises."""


class GraphInvalid(LoraCompileError):
    """A graph that breaks the contract of a pass."""
