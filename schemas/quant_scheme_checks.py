"""Faults between the values of a quantisation scheme."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from lora_compile.errors import InvalidValue, LoraCompileError, MissingKey
from lora_compile.schemas.source_map import KeyPath, SourceMap, text_path

SCALE_TENSOR = "weight_scale_inv"
"""The tensor of block scales, as `QuantInfo.aux_names` calls it."""

_HANDLING = "activation.handling"


def scheme_faults(sections: Mapping[str, Any], source: SourceMap) -> Iterator[LoraCompileError]:
    """Every fault between values that are valid by themselves. `sections`: see `Check`."""
    scale = sections.get("scale")
    activation = sections.get("activation")
    if scale is not None:
        blocks = scale.granularity == "block"
        for key in ("dtype", "block_shape"):
            yield from _together(source, ("scale", key), getattr(scale, key), blocks)
    if activation is not None:
        dynamic = activation.handling == "dynamic"
        for key in ("granularity", "group", "dtype", "min_scale"):
            yield from _together(source, ("activation", key), getattr(activation, key), dynamic)
        if "ops" in sections:
            yield from _together(source, ("ops", "quantise"), sections["ops"].quantise, dynamic)
    if scale is not None and activation is not None:
        yield from _group(scale, activation, source)
    if "tensors" in sections:
        yield from _tensors(sections["tensors"], scale, source)
    if scale is not None and "quantise_at_load" in sections:
        yield from _at_load(sections["quantise_at_load"], scale, source)
    if scale is not None and "detect" in sections:
        yield from _config_blocks(sections["detect"], scale, source)


def _fault(source: SourceMap, path: KeyPath, message: str, **facts: str | None) -> InvalidValue:
    return InvalidValue(
        message, file=source.file, line=source.line(path), where=text_path(path), **facts
    )


def _together(
    source: SourceMap, path: KeyPath, value: object, needed: bool
) -> Iterator[LoraCompileError]:
    """`value` must be there exactly where it is `needed`."""
    if (value is not None) == needed:
        return
    told_by = "scale.granularity" if "block_shape" in path or path[0] == "scale" else _HANDLING
    yield _fault(
        source,
        path,
        f"`{text_path(path)}` does not fit `{told_by}`",
        expected="a value" if needed else "null",
        found="null" if value is None else str(value),
        fix=f"correct it, or `{told_by}`",
    )


def _group(scale: Any, activation: Any, source: SourceMap) -> Iterator[LoraCompileError]:
    if activation.group == "block_columns" and scale.granularity != "block":
        yield _fault(
            source,
            ("activation", "group"),
            "`block_columns` needs a weight with blocks",
            expected="a number of columns",
            found="block_columns",
            fix="write the number of columns",
        )


def _tensors(
    tensors: Mapping[str, Any], scale: Any, source: SourceMap
) -> Iterator[LoraCompileError]:
    needed = {"weight"}
    if scale is not None and scale.granularity == "block":
        needed.add(SCALE_TENSOR)
    for name in sorted(needed - tensors.keys()):
        yield MissingKey(
            f"key `{name}` is missing in `tensors`",
            file=source.file,
            line=source.line(("tensors",)),
            where=f"tensors.{name}",
            expected="the suffix, dtypes and shape of that tensor",
            fix=f"add `{name}: ...`",
        )
    if scale is not None:
        for name in sorted(tensors.keys() - needed):
            yield _fault(
                source,
                ("tensors", name),
                f"tensor `{name}` has no meaning in this scheme",
                expected=" | ".join(sorted(needed)),
                found=name,
                fix="remove it, or correct `scale.granularity`",
            )


def _at_load(load: Any, scale: Any, source: SourceMap) -> Iterator[LoraCompileError]:
    if load is not None:
        blocks = scale.granularity == "block"
        yield from _together(source, ("quantise_at_load", "block_shape"), load.block_shape, blocks)


def _config_blocks(detect: Any, scale: Any, source: SourceMap) -> Iterator[LoraCompileError]:
    requires = () if detect is None else detect.requires
    if scale.block_shape == "from_config" and "weight_block_size" not in requires:
        yield _fault(
            source,
            ("detect", "requires") if detect is not None else ("detect",),
            "blocks are read from `weight_block_size`, which is not required",
            expected="requires: [weight_block_size]",
            found=", ".join(requires) or "nothing",
            fix="add `weight_block_size` to `detect.requires`",
        )
