"""QuantScheme: one quantisation scheme declared in YAML, the template of QuantInfo.

No field that a kernel depends on has a default: a scheme that does not say its scales, zero point,
activation handling or ops is refused, by the name of what is missing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from lora_compile.errors import FaultList, InvalidValue, SchemeUnsupported
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
    Detect,
    LoadQuantisation,
    ScaleSpec,
    SchemeOps,
    TensorSpec,
)
from lora_compile.schemas.yaml_faults import nearest
from lora_compile.schemas.yaml_file import Loaded, load_yaml

SHIPPED = Path(__file__).parent / "quantization"

_TELLING_KEYS = (
    "quant_method",
    "quant_algo",
    "format",
    "checkpoint_format",
    "version",
    "bits",
    "load_in_4bit",
    "load_in_8bit",
    "quant_type",
    "weight_block_size",
)
"""Keys by which people know a scheme; the error shows those that are there."""

_UNNAMED_METHODS = {"w_bit": "awq", "quant_algo": "modelopt"}
"""Config files of their own (AutoAWQ, ModelOpt) that leave `quant_method` out."""


class QuantScheme(StrictModel):
    """A way of storing weights, with the reader and the ops that know it."""

    schema_version: Literal[1]
    """Version of this format."""
    name: str
    """Name of the scheme; that of the file."""
    summary: str
    """One sentence for people."""
    detect: Detect | None
    """How checkpoints say it; null: the checkpoint has no `quantization_config`."""
    reader: str | None
    """Module of `lora_compile.checkpoints.readers` that reads it. Null: no reader, so checkpoints
    of this scheme are refused by name."""
    tensors: dict[str, TensorSpec]
    """The tensors of a quantised module, by the names that the ops use."""
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

    def config_block_shape(
        self, quantization_config: Mapping[str, Any] | None, *, file: object = None
    ) -> tuple[int, int] | None:
        """(rows, columns) of a checkpoint's blocks; None where the scheme has none.

        Never derived from the shape of the scales: ragged edges make that ambiguous.

        Raises:
            InvalidValue: `weight_block_size` is not two positive whole numbers.
        """
        shape = self.scale.block_shape
        if shape != "from_config":
            return shape
        found = (quantization_config or {}).get("weight_block_size")
        if (
            not isinstance(found, (list, tuple))
            or len(found) != 2
            or any(type(size) is not int or size < 1 for size in found)
        ):
            raise InvalidValue(
                "the checkpoint's block size cannot be read",
                file=file,
                where="quantization_config.weight_block_size",
                expected="two whole numbers of at least 1, e.g. [128, 128]",
                found=found,
                fix="correct the checkpoint's config.json",
            )
        return found[0], found[1]

    def info(
        self,
        *,
        weight_dtype: WeightDtype,
        block_shape: tuple[int, int] | None,
        in_features: int,
        part_widths: Sequence[tuple[str, int]],
        bias: bool,
    ) -> QuantInfo:
        """The QuantInfo of one site.

        Args:
            weight_dtype: dtype of the packed weight, one of `tensors.weight.dtypes`.
            block_shape: (rows, columns) of a block; None exactly where the scheme has no blocks.
            in_features: K, columns of the weight.
            part_widths: (name, rows) of each part, in order. Rows follow each other without gaps;
                the scale rows of a part are ceil(rows / block rows) and restart at each part.
            bias: whether the site adds a bias.

        Raises:
            SchemeUnsupported: a weight dtype or a block shape that the scheme does not have.
        """
        self._check_instance(weight_dtype, block_shape)
        parts: list[PartRows] = []
        row = scale_row = 0
        for name, width in part_widths:
            scale_rows = None
            if block_shape is not None:
                scale_rows = (scale_row, scale_row + -(-width // block_shape[0]))
                scale_row = scale_rows[1]
            parts.append(PartRows(name=name, rows=(row, row + width), scale_rows=scale_rows))
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

    def _check_instance(
        self, weight_dtype: WeightDtype, block_shape: tuple[int, int] | None
    ) -> None:
        allowed = self.tensors["weight"].dtypes
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


def detect_scheme(
    quantization_config: Mapping[str, Any] | None, *, file: object = None
) -> QuantScheme:
    """The shipped scheme of a checkpoint.

    Args:
        quantization_config: that of `config.json` (of its text config, where it is nested there);
            None where the checkpoint has none.
        file: the config's path, for errors.

    Raises:
        SchemeUnsupported: no scheme with a reader says that it reads this, or a key or value of the
            config is one that the scheme does not know. Several are raised together.
    """
    schemes = all_schemes()
    if quantization_config is None:
        return next(scheme for scheme in schemes if scheme.detect is None)
    for scheme in schemes:
        if scheme.detect is not None and _matches(scheme.detect, quantization_config):
            if scheme.reader is None:
                break
            _check_keys(scheme.name, scheme.detect, quantization_config, file)
            return scheme
    raise _unsupported(schemes, quantization_config, file)


def _matches(detect: Detect, config: Mapping[str, Any]) -> bool:
    return config.get("quant_method") == detect.quant_method and all(
        config.get(key) is not None for key in detect.requires
    )


def _unsupported(
    schemes: tuple[QuantScheme, ...], config: Mapping[str, Any], file: object
) -> SchemeUnsupported:
    method = config.get("quant_method")
    if method is None:
        method = next((name for key, name in _UNNAMED_METHODS.items() if key in config), None)
    says = {key: config[key] for key in _TELLING_KEYS if config.get(key) is not None}
    near = [
        f"`{scheme.name}` needs {', '.join(f'`{key}`' for key in lacking)}"
        for scheme in schemes
        if scheme.detect is not None
        and scheme.detect.quant_method == method
        and (lacking := [key for key in scheme.detect.requires if config.get(key) is None])
    ]
    readable = [_says(scheme) for scheme in schemes if scheme.reader is not None]
    name = "that it does not name" if method is None else f"`{method}`"
    return SchemeUnsupported(
        f"the checkpoint is quantised by a method {name} for which there is no reader",
        file=file,
        where="quantization_config",
        expected=f"one of {'; '.join(readable)}",
        found=", ".join(f"{key}: {value}" for key, value in says.items()) or "no quant_method",
        fix="; ".join(near)
        or "use a checkpoint in 16 bit or in one of these schemes, or a 16-bit one with "
        "`quantization.scheme` set to a scheme",
    )


def _says(scheme: QuantScheme) -> str:
    if scheme.detect is None:
        return f"{scheme.name} (no quantization_config)"
    keys = "".join(f" with {key}" for key in scheme.detect.requires)
    return f"{scheme.name} (quant_method {scheme.detect.quant_method}{keys})"


def _check_keys(scheme: str, detect: Detect, config: Mapping[str, Any], file: object) -> None:
    """Every key of the config is known and has a value that the reader is right for."""
    faults = FaultList()
    anything = {"quant_method", *detect.requires, *detect.accepts}
    for key, value in config.items():
        if key in anything:
            continue
        place: dict[str, Any] = {"file": file, "where": f"quantization_config.{key}"}
        if key not in detect.values:
            faults.add(
                SchemeUnsupported(
                    f"scheme `{scheme}` does not know the key `{key}`",
                    **place,
                    expected=f"only {', '.join(sorted({*anything, *detect.values}))}",
                    found=f"{key}: {value}",
                    fix="if the key changes nothing for reading, add it to `detect.accepts` of "
                    f"schemas/quantization/{scheme}.yaml",
                )
            )
        elif not any(type(value) is type(ok) and value == ok for ok in detect.values[key]):
            allowed = " | ".join("null" if ok is None else str(ok) for ok in detect.values[key])
            faults.add(
                SchemeUnsupported(
                    f"scheme `{scheme}` does not support {key} {value}",
                    **place,
                    expected=allowed,
                    found=f"{key}: {value}",
                    fix="use a checkpoint made with one of these values",
                )
            )
    faults.raise_if_any()
