"""What an architecture schema says beside its sites: flags, modules left as they are, and rules for
the tensors of a checkpoint."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import Field

from lora_compile.schemas.base import StrictModel
from lora_compile.schemas.expressions import ExpressionText

LAYER = "{layer}"
"""Stands for the index of a decoder layer in paths, tensor names and patterns."""
EXPERT = "{expert}"
"""Stands for the index of a piece in the tensor names of a stacked parameter."""

ModulePath = Annotated[
    str,
    Field(
        pattern=r"^[A-Za-z0-9_{}]+(\.[A-Za-z0-9_{}]+)*$",
        title="a module path such as `model.layers.{layer}.mlp`",
    ),
]
NonEmpty = Annotated[str, Field(min_length=1)]


class Flag(StrictModel):
    """A choice that a deployment may make: `model: {flags: {NAME: true}}`."""

    default: bool
    """The value where a deployment says nothing."""
    summary: NonEmpty
    """What the flag chooses, for people."""


class KeptRule(StrictModel):
    """Modules that stay as transformers runs them: unquantised, and without adapters.

    An adapter that acts there, and a checkpoint that stores them quantised, are refused by name.
    """

    at: ModulePath
    """The module. `{layer}` stands for each layer's index."""
    what: NonEmpty
    """What it is, in the words of error messages, e.g. `routed experts`."""
    when: ExpressionText | None = None
    """The module exists only where this is true; absent means always. May use `layer`."""


class StackPiece(StrictModel):
    """One of the tensors that make up an expert's rows."""

    name: ModulePath
    """The tensor's name in the checkpoint; `{expert}` stands for the expert's index."""
    rows: ExpressionText
    """Rows of the tensor. Its columns are those of the parameter."""


class StackRule(StrictModel):
    """A parameter (experts, rows, columns) that checkpoints may store one expert at a time.

    A checkpoint may also hold it whole, under its own name; both together are refused.
    """

    parameter: ModulePath
    """The parameter in the model, e.g. `model.layers.{layer}.mlp.experts.down_proj`."""
    count: ExpressionText
    """Number of experts: the parameter's first dimension."""
    pieces: Annotated[tuple[StackPiece, ...], Field(min_length=1)]
    """What is concatenated along the rows to make up one expert, in this order."""
    when: ExpressionText | None = None
    """The parameter exists only where this is true; absent means always. May use `layer`."""


class IgnoreRule(StrictModel):
    """Tensors of a checkpoint that are not needed, and why."""

    pattern: NonEmpty
    """A regular expression that the whole tensor name has to match. `{layer}` in it stands for the
    layers that `layers_from` and `layers_count` name."""
    layers_from: ExpressionText | None = None
    """The first layer that `{layer}` stands for, e.g. `num_hidden_layers`."""
    layers_count: ExpressionText | None = None
    """How many layers `{layer}` stands for; with 0 the rule matches nothing."""
    why: NonEmpty
    """Why these tensors can be left out; `explain` shows it."""

    def regex(self, layers: range | None) -> str:
        """The regular expression with `{layer}` filled in; `layers`: None for a rule without."""
        if layers is None:
            return self.pattern
        if not layers:
            return "(?!)"  # matches nothing
        return self.pattern.replace(LAYER, f"(?:{'|'.join(map(str, layers))})")

    def compile_error(self) -> str | None:
        """Why the pattern is no regular expression; None where it is one."""
        try:
            re.compile(self.regex(range(1) if LAYER in self.pattern else None))
        except re.error as error:
            return str(error)
        return None


class CheckpointRules(StrictModel):
    """Rules for the tensors of a checkpoint that belong to no site."""

    stack: tuple[StackRule, ...] = ()
    """Parameters that checkpoints may store piece by piece."""
    ignore: tuple[IgnoreRule, ...] = ()
    """Tensors to leave out. A tensor that no rule and no site consumes is refused."""
