"""Parameters of a model that a checkpoint may store piece by piece, such as routed experts.

In the model such a parameter is (experts, rows, columns). Published checkpoints hold a matrix for
each projection of each expert; transformers 5 stacks them when it loads (`conversion_mapping.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from lora_compile.checkpoints.source import WeightSource
from lora_compile.schemas.architecture_rules import EXPERT


@dataclass(frozen=True)
class Stack:
    """How one parameter may be stored."""

    parameter: str
    """Full name in the model; a checkpoint may hold it whole, under this name."""
    shape: tuple[int, int, int]
    """(experts, rows, columns)."""
    pieces: tuple[tuple[str, int], ...]
    """(name with `{expert}`, rows) of the tensors that follow each other along an expert's rows."""

    def tensors(self, expert: int) -> list[tuple[str, tuple[int, int]]]:
        """Name and shape of one expert's tensors, in the order of their rows."""
        columns = self.shape[2]
        return [(name.replace(EXPERT, str(expert)), (rows, columns)) for name, rows in self.pieces]

    def all_tensors(self) -> list[tuple[str, tuple[int, int]]]:
        return [entry for expert in range(self.shape[0]) for entry in self.tensors(expert)]


@dataclass(frozen=True)
class ParameterRules:
    """What an architecture says of parameters outside its sites."""

    stacks: Mapping[str, Stack] = field(default_factory=dict)
    """Parameter -> how it may be stored."""
    kept: Mapping[str, str] = field(default_factory=dict)
    """Module that must be stored unquantised -> what it is, e.g. `routed experts`."""


NO_RULES = ParameterRules()
"""Every parameter stands in the checkpoint under its own name."""


def is_stored_in_pieces(stack: Stack, source: WeightSource) -> bool:
    """Whether the checkpoint holds pieces rather than the whole parameter."""
    return stack.parameter not in source.headers


def read_stack(
    stack: Stack, source: WeightSource, *, dtype: torch.dtype, device: torch.device | str
) -> torch.Tensor:
    """Assemble a parameter from its pieces.

    The pieces were checked by the survey. At its highest the memory is the parameter and one piece.

    Returns (experts, rows, columns) in `dtype` on `device`.
    """
    whole = torch.empty(stack.shape, dtype=dtype, device=device)
    for expert in range(stack.shape[0]):
        low = 0
        for name, (rows, _) in stack.tensors(expert):
            whole[expert, low : low + rows].copy_(source.tensor(name).detach())
            low += rows
    return whole
