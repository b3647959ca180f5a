"""QuantInfo: all that a kernel must know to read one packed weight.

There is one QuantInfo per site. **No field has a default**: a scheme that cannot say its scales,
zero points, activation handling or block shape cannot be built, and so does not run.
"""

from __future__ import annotations

from typing import Literal

from lora_compile.schemas.base import StrictModel

WeightDtype = Literal["float32", "float16", "bfloat16", "float8_e4m3fn", "int8"]
ActivationDtype = Literal["float8_e4m3fn", "int8"]
ScaleGranularity = Literal["none", "tensor", "row", "block"]
ActivationHandling = Literal["none", "static", "dynamic"]
ActivationGranularity = Literal["tensor", "token", "group"]


class ScaleInfo(StrictModel):
    """Where the scales of a weight are and how they apply: W = w * scale."""

    granularity: ScaleGranularity
    """`none`: the weight is not scaled. `tensor`: one scale per part. `row`: one per row of the
    weight. `block`: one per `block_shape` tile of each part."""
    dtype: Literal["float32"] | None
    block_shape: tuple[int, int] | None
    """(rows, columns) of a block. The last block of a part may have fewer rows or columns."""


class ActivationInfo(StrictModel):
    """How x becomes q(x)."""

    handling: ActivationHandling
    """`none`: 16-bit x as it is. `static`: scales out of the checkpoint. `dynamic`: scales computed
    from x when the op runs."""
    granularity: ActivationGranularity | None
    """`tensor`: one scale per part (static only). `token`: one scale per row of x. `group`: one
    scale per row and `group` consecutive columns."""
    group: int | None
    dtype: ActivationDtype | None
    min_scale: float | None
    """Lower bound of a computed scale, so that zeros stay zeros."""


class PartRows(StrictModel):
    """The rows of one part inside a fused weight, and where its scales are."""

    name: str
    rows: tuple[int, int]
    """[lo, hi) in the fused weight's rows."""
    scale_rows: tuple[int, int] | None
    """[lo, hi) in the rows of the fused block scales; they restart at each part."""
    input_scale: int | None
    """With static scales: index of the part's own in the tensor `input_scale`. Parts of the same
    scale share one, and with it one quantised form of x."""


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
    def part_rows(self) -> list[int]:
        """Row boundaries of the parts, [0, N_0, N_0 + N_1, …, N], as the ops take them."""
        return [0, *(part.rows[1] for part in self.parts)]

    @property
    def planes(self) -> list[int]:
        """For each part, which quantised form of x it reads; one form serves all unless static
        scales differ."""
        return [part.input_scale or 0 for part in self.parts]

    @property
    def aux_shapes(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the tensors that travel with the weight, in the order the ops take
        them; all float32, all multipliers.

        `weight_scale`: (N,), also where the scheme has one scale per part; with blocks, (sum over
        parts of ceil(N_p / bn), ceil(K / bk)). `input_scale`: one per distinct static scale.
        """
        shapes: dict[str, tuple[int, ...]] = {}
        if self.scale.block_shape is not None:
            last = self.parts[-1].scale_rows
            assert last is not None, "parts of a block-scaled weight have scale rows"
            shapes["weight_scale"] = (last[1], -(-self.in_features // self.scale.block_shape[1]))
        elif self.scale.granularity != "none":
            shapes["weight_scale"] = (self.out_features,)
        if self.activation.handling == "static":
            shapes["input_scale"] = (max(self.planes) + 1,)
        return shapes

    @property
    def aux_names(self) -> tuple[str, ...]:
        """Names of the tensors that travel with the weight, in the order the ops take them."""
        return tuple(self.aux_shapes)
