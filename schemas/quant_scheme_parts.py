"""The parts of a quantisation scheme's file; see `quant_scheme`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from lora_compile.schemas.base import StrictModel
from lora_compile.schemas.quant_info import (
    ActivationDtype,
    ActivationGranularity,
    ActivationHandling,
    ScaleGranularity,
    WeightDtype,
)

OpName = Annotated[
    str,
    Field(
        pattern=r"^[a-z_][a-z0-9_]*::[a-z_][a-z0-9_]*$",
        title="an op's name, e.g. `lora_compile::linear`",
    ),
]
Positive = Annotated[int, Field(ge=1)]
BlockShape = tuple[Positive, Positive]


Scalar = str | int | bool | None
Values = dict[str, tuple[Scalar, ...]]
"""Keys of a `quantization_config` -> the values they may have; null stands for an absent key too.
A key may be a path with dots, in which `*` stands for any one name."""


class TensorSpec(StrictModel):
    """One tensor of a quantised module, as stored."""

    suffix: str
    """What follows the module's path and a dot, e.g. `weight_scale_inv`."""
    dtypes: Annotated[tuple[WeightDtype, ...], Field(min_length=1)]
    """The dtypes it may have."""
    shape: Literal["N, K", "N, 1", "one", "ceil(N/bn), ceil(K/bk)"]
    """Its shape: N rows and K columns of the module's weight, (bn, bk) the block shape; `one`: one
    element, whatever the number of dimensions."""


class StoredForm(StrictModel):
    """One way in which checkpoints hold this scheme."""

    dialect: str | None
    """Name of a file in `schemas/dialects`, which says how such checkpoints write their config;
    null: the checkpoint has no `quantization_config`."""
    reader: str | None
    """Module of `lora_compile.checkpoints.readers` that reads it. Null: no reader, so checkpoints
    of this form are refused by name."""
    where: Values
    """What must hold for a checkpoint to be of this scheme; else it is of another."""
    requires: tuple[str, ...]
    """Keys that must be there and not null; without them it is of another scheme."""
    values: Values
    """Beside those of the dialect: keys that, where present, must have one of these values."""
    tensors: dict[str, TensorSpec]
    """The tensors of a quantised module, by the names that the ops use."""


class ScaleSpec(StrictModel):
    """How the scales of a weight apply: W = w * scale."""

    granularity: ScaleGranularity
    """`none`: no scales. `tensor`: one for each part. `row`: one for each row of the weight.
    `block`: one for each block of each part; they restart at each part."""
    dtype: Literal["float32"] | None
    """Type in which the scales are kept. They are never rounded."""
    block_shape: BlockShape | Literal["from_config"] | None
    """(rows, columns) of a block, or `from_config`: the checkpoint's `weight_block_size`."""


class ActivationSpec(StrictModel):
    """How the input x becomes q(x)."""

    handling: ActivationHandling
    """`none`: x as it is. `static`: quantised with the checkpoint's own scales. `dynamic`:
    quantised with scales computed from x when the op runs."""
    granularity: ActivationGranularity | None
    """`tensor`: one scale for each part (static). `token`: one for each row of x. `group`: one for
    each row and each `group` of consecutive columns."""
    group: Positive | Literal["block_columns"] | None
    """Columns of a group, or `block_columns`: as many as a block of the weight has."""
    dtype: ActivationDtype | None
    """Type of the codes."""
    min_scale: Annotated[float, Field(gt=0)] | None
    """Lower bound of a computed scale, so that zeros stay zeros."""


class LoadQuantisation(StrictModel):
    """Quantising a 16-bit checkpoint when it is loaded."""

    weight_dtype: WeightDtype | Literal["from_model"]
    """Type of the codes made then; `from_model`: the deployment's `model.dtype`."""
    block_shape: BlockShape | None
    """(rows, columns) of the blocks made then."""


class SchemeOps(StrictModel):
    """The ops that compute with this scheme."""

    base: OpName
    """y = Q(W) q(x) + bias."""
    lora: OpName
    """The same with the low-rank deltas added."""
    quantise: OpName | None
    """x -> q(x); null where x is taken as it is."""
