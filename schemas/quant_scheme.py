"""QuantScheme: one quantisation scheme declared in YAML, the template of QuantInfo.

No field that a kernel depends on has a default: a scheme that does not say its scales, zero point,
activation handling or ops is refused, by the name of what is missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from lora_compile.errors import SchemeUnsupported
from lora_compile.schemas.base import StrictModel
from lora_compile.schemas.quant_info import (
    ActivationInfo,
    PartRows,
    QuantInfo,
    ScaleInfo,
    WeightDtype,
)
from lora_compile.schemas.quant_scheme_checks import scheme_faults
from lora_compile.schemas.quant_scheme_parts import (
    ActivationSpec,
    LoadQuantisation,
    ScaleSpec,
    SchemeOps,
    StoredForm,
)
from lora_compile.schemas.yaml_faults import nearest
from lora_compile.schemas.yaml_file import Loaded, load_yaml

SHIPPED = Path(__file__).parent / "quantization"


class QuantScheme(StrictModel):
    """A way of storing weights, with the reader and the ops that know it."""

    schema_version: Literal[1]
    """Version of this format."""
    name: str
    """Name of the scheme; that of the file."""
    summary: str
    """One sentence for people."""
    stored_as: Annotated[tuple[StoredForm, ...], Field(min_length=1)]
    """The forms in which checkpoints hold it."""
    packing: Literal["none"]
    """Bit packing of the weight; `none`: one element per code."""
    zero_point: Literal["none"]
    """Zero points; `none`: codes are signed around zero."""
    scale: ScaleSpec
    """The scales of the weight."""
    activation: ActivationSpec
    """What happens to the input."""
    input_transforms: tuple[Literal["pre_quant_scale", "g_idx"], ...]
    """Transforms of x before q(x), in order."""
    quantise_at_load: LoadQuantisation | None
    """How 16-bit weights are quantised when loaded; null: they cannot be."""
    ops: SchemeOps
    """The ops."""

    def info(
        self,
        *,
        weight_dtype: WeightDtype,
        block_shape: tuple[int, int] | None,
        in_features: int,
        part_widths: Sequence[tuple[str, int]],
        input_scales: Sequence[float] | None,
        bias: bool,
    ) -> QuantInfo:
        """The QuantInfo of one site.

        Args:
            weight_dtype: dtype of the packed weight, one that some stored form has.
            block_shape: (rows, columns) of a block; None exactly where the scheme has no blocks.
            in_features: K, columns of the weight.
            part_widths: (name, rows) of each part, in order. Rows follow each other without gaps;
                the scale rows of a part are ceil(rows / block rows) and restart at each part.
            input_scales: the static input scale of each part; None exactly where the scheme has
                none.
            bias: whether the site adds a bias.

        Raises:
            SchemeUnsupported: a weight dtype, a block shape or input scales that the scheme does
                not have.
        """
        self._check_instance(weight_dtype, block_shape, input_scales)
        distinct = list(dict.fromkeys(input_scales or ()))
        planes = [distinct.index(scale) for scale in input_scales or ()]
        parts: list[PartRows] = []
        row = scale_row = 0
        for index, (name, width) in enumerate(part_widths):
            scale_rows = None
            if block_shape is not None:
                scale_rows = (scale_row, scale_row + -(-width // block_shape[0]))
                scale_row = scale_rows[1]
            parts.append(
                PartRows(
                    name=name,
                    rows=(row, row + width),
                    scale_rows=scale_rows,
                    input_scale=None if input_scales is None else planes[index],
                )
            )
            row += width
        activation = self.activation.model_dump()
        if activation["group"] == "block_columns" and block_shape is not None:
            activation["group"] = block_shape[1]
        return QuantInfo(
            scheme=self.name,
            weight_dtype=weight_dtype,
            packing=self.packing,
            scale=ScaleInfo(
                granularity=self.scale.granularity,
                dtype=self.scale.dtype,
                block_shape=block_shape,
            ),
            zero_point=self.zero_point,
            activation=ActivationInfo(**activation),
            input_transforms=self.input_transforms,
            bias=bias,
            in_features=in_features,
            parts=tuple(parts),
        )

    @property
    def weight_dtypes(self) -> tuple[WeightDtype, ...]:
        """The dtypes that a weight of this scheme may have."""
        return tuple(
            dict.fromkeys(
                dtype for form in self.stored_as for dtype in form.tensors["weight"].dtypes
            )
        )

    def _check_instance(
        self,
        weight_dtype: WeightDtype,
        block_shape: tuple[int, int] | None,
        input_scales: Sequence[float] | None,
    ) -> None:
        allowed = self.weight_dtypes
        if weight_dtype not in allowed:
            raise SchemeUnsupported(
                f"scheme `{self.name}` does not hold weights of this dtype",
                expected=" | ".join(allowed),
                found=weight_dtype,
            )
        fixed = self.scale.block_shape
        if fixed == "from_config":
            fits, wanted = block_shape is not None, "(rows, columns) of a block"
        else:
            fits, wanted = block_shape == fixed, "no blocks" if fixed is None else str(fixed)
        if not fits:
            raise SchemeUnsupported(
                f"scheme `{self.name}` does not have this block shape",
                expected=wanted,
                found=block_shape,
            )
        static = self.activation.handling == "static"
        if static != (input_scales is not None):
            raise SchemeUnsupported(
                f"scheme `{self.name}` {'needs' if static else 'has no'} static input scales",
                expected="one input scale for each part" if static else "none",
                found=input_scales,
            )


def load_scheme(path: str | Path) -> Loaded[QuantScheme]:
    """Read one scheme file; errors as in `load_yaml`, and those of `scheme_faults`."""
    return load_yaml(path, QuantScheme, scheme_faults)


@lru_cache
def all_schemes() -> tuple[QuantScheme, ...]:
    """Every scheme that is shipped, by name."""
    return tuple(load_scheme(path).value for path in sorted(SHIPPED.glob("*.yaml")))


def find_scheme(
    name: str, *, file: object = None, line: int | None = None, where: str | None = None
) -> QuantScheme:
    """A shipped scheme by name.

    Args:
        file, line, where: the place that names it, for errors.

    Raises:
        SchemeUnsupported: there is none of that name.
    """
    schemes = {scheme.name: scheme for scheme in all_schemes()}
    if name in schemes:
        return schemes[name]
    near = nearest(name, (*schemes, "auto"))
    raise SchemeUnsupported(
        f"no quantisation scheme is called `{name}`",
        file=file,
        line=line,
        where=where,
        expected=f"auto, {', '.join(schemes)}",
        found=name,
        fix=f"did you mean `{near}`?" if near else "use one of these names",
    )
