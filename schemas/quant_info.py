"""QuantInfo: all that a kernel must know to read one packed weight.

There is one QuantInfo per site. **No field has a default**: a scheme that cannot say its scales,
zero points, activation handling or block shape cannot be built, and so does not run.
"""

from __future__ import annotations

from typing import Literal

from lora_compile.schemas.base import StrictModel

WeightDtype = Literal["float32", "float16", "bfloat16", "float8_e4m3fn"]
ActivationDtype = Literal["float8_e4m3fn"]


class ScaleInfo(StrictModel):
    """Where the scales of a weight are and how they apply: W = w * scale."""

    granularity: Literal["none", "block"]
    """`none`: the weight is not scaled. `block`: one scale per `block_shape` tile of each part."""
    dtype: Literal["float32"] | None
    block_shape: tuple[int, int] | None
    """(rows, columns) of a block. The last block of a part may have fewer rows or columns."""


class ActivationInfo(StrictModel):
    """How x becomes q(x)."""

    handling: Literal["none", "dynamic"]
    """`none`: 16-bit x as it is. `dynamic`: scales computed from x when the op runs."""
    granularity: Literal["group"] | None
    """`group`: one scale per row and `group` consecutive columns."""
    group: int | None
    dtype: ActivationDtype | None
    min_scale: float | None
    """Lower bound of a computed scale, so that a group of zeros stays zeros."""


class PartRows(StrictModel):
    """The rows of one part inside a fused weight, and inside its scales."""

    name: str
    rows: tuple[int, int]
    """[lo, hi) in the fused weight's rows."""
    scale_rows: tuple[int, int] | None
    """[lo, hi) in the rows of the fused block scales; they restart at each part."""


class QuantInfo(StrictModel):
    """How one site's packed weight is to be read. See the module's text."""

    scheme: str
    weight_dtype: WeightDtype
    packing: Literal["none"]
    """Bit packing of the weight tensor; `none` = one element per code, shape (N, K)."""
    scale: ScaleInfo
    zero_point: Literal["none"]
    activation: ActivationInfo
    input_transforms: tuple[Literal["pre_quant_scale", "g_idx"], ...]
    """Transforms of x before q(x), in order; the delta always reads the untransformed x."""
    bias: bool
    in_features: int
    """K, columns of the weight."""
    parts: tuple[PartRows, ...]
    """Row ranges of the parts, in order, without gaps."""

    @property
    def out_features(self) -> int:
        """N, rows of the fused weight."""
        return self.parts[-1].rows[1]

    @property
    def aux_names(self) -> tuple[str, ...]:
        """Names of the tensors that travel with the weight, in the order the ops take them."""
        return ("weight_scale_inv",) if self.scale.granularity == "block" else ()
