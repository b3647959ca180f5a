"""The parts of a quantisation scheme's file; see `quant_scheme`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from lora_compile.schemas.base import StrictModel
from lora_compile.schemas.quant_info import ActivationDtype, WeightDtype

OpName = Annotated[
    str,
    Field(
        pattern=r"^[a-z_][a-z0-9_]*::[a-z_][a-z0-9_]*$",
        title="an op's name, e.g. `lora_compile::linear`",
    ),
]
Positive = Annotated[int, Field(ge=1)]
BlockShape = tuple[Positive, Positive]


class Detect(StrictModel):
    """How a checkpoint's `quantization_config` says that it uses this scheme."""

    quant_method: str
    """Value of `quant_method`."""
    requires: tuple[str, ...]
    """Keys that must be there and not null; without them it is another scheme."""
    values: dict[str, tuple[str | int | bool | None, ...]]
    """Keys that, where present, must have one of these values. Any other value is refused."""
    accepts: tuple[str, ...]
    """Keys of any value that change nothing here or that the reader honours. A key that stands
    in none of these lists is refused."""


class TensorSpec(StrictModel):
    """One tensor of a quantised module, as stored."""

    suffix: str
    """What follows the module's path and a dot, e.g. `weight_scale_inv`."""
    dtypes: Annotated[tuple[WeightDtype, ...], Field(min_length=1)]
    """The dtypes it may have."""
    shape: Literal["N, K", "ceil(N/bn), ceil(K/bk)"]
    """Its shape: N rows and K columns of the module's weight, (bn, bk) the block shape."""


class ScaleSpec(StrictModel):
    """How the scales of a weight apply: W = w * scale."""

    granularity: Literal["none", "block"]
    """`none`: no scales. `block`: one for each block of each part; they restart at each part."""
    dtype: Literal["float32"] | None
    """Type in which the scales are kept. They are never rounded."""
    block_shape: BlockShape | Literal["from_config"] | None
    """(rows, columns) of a block, or `from_config`: the checkpoint's `weight_block_size`."""


class ActivationSpec(StrictModel):
    """How the input x becomes q(x)."""

    handling: Literal["none", "dynamic"]
    """`none`: x as it is. `dynamic`: quantised with scales computed from x when the op runs."""
    granularity: Literal["group"] | None
    """`group`: one scale for each row and each `group` of consecutive columns."""
    group: Positive | Literal["block_columns"] | None
    """Columns of a group, or `block_columns`: as many as a block of the weight has."""
    dtype: ActivationDtype | None
    """Type of the codes."""
    min_scale: Annotated[float, Field(gt=0)] | None
    """Lower bound of a scale, so that a group of zeros stays zeros."""


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
