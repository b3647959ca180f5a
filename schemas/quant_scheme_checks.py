"""Faults between the values of a quantisation scheme."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from lora_compile.errors import InvalidValue, LoraCompileError, MissingKey
from lora_compile.schemas.source_map import KeyPath, SourceMap, text_path
from lora_compile.schemas.yaml_faults import nearest

_HANDLING = "activation.handling"

_SCALE_SHAPES = {
    "tensor": "one",
    "row": "N, 1",
    "block": "ceil(N/bn), ceil(K/bk)",
}
"""Granularity of the weight's scales -> their shape as stored."""

_ACTIVATION_GRANULARITY = {"none": (None,), "static": ("tensor",), "dynamic": ("token", "group")}


def scheme_faults(sections: Mapping[str, Any], source: SourceMap) -> Iterator[LoraCompileError]:
    """Every fault between values that are valid by themselves. `sections`: see `Check`."""
    scale = sections.get("scale")
    activation = sections.get("activation")
    if scale is not None:
        scaled, blocks = scale.granularity != "none", scale.granularity == "block"
        yield from _together(source, ("scale", "dtype"), scale.dtype, scaled)
        yield from _together(source, ("scale", "block_shape"), scale.block_shape, blocks)
    if activation is not None:
        yield from _activation(activation, source)
        if "ops" in sections:
            quantised = activation.handling != "none"
            yield from _together(source, ("ops", "quantise"), sections["ops"].quantise, quantised)
    if scale is not None and activation is not None:
        yield from _group(scale, activation, source)
    for index, form in enumerate(sections.get("stored_as", ())):
        yield from _form(index, form, scale, activation, source)
    if scale is not None and "quantise_at_load" in sections:
        yield from _at_load(sections["quantise_at_load"], scale, activation, source)


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


def _activation(activation: Any, source: SourceMap) -> Iterator[LoraCompileError]:
    quantised = activation.handling != "none"
    for key in ("granularity", "dtype"):
        yield from _together(source, ("activation", key), getattr(activation, key), quantised)
    dynamic = activation.handling == "dynamic"
    yield from _together(source, ("activation", "min_scale"), activation.min_scale, dynamic)
    grouped = activation.granularity == "group"
    yield from _together(source, ("activation", "group"), activation.group, grouped)
    allowed = _ACTIVATION_GRANULARITY[activation.handling]
    if quantised and activation.granularity is not None and activation.granularity not in allowed:
        yield _fault(
            source,
            ("activation", "granularity"),
            f"scales per {activation.granularity} do not go with `handling: {activation.handling}`",
            expected=" | ".join(map(str, allowed)),
            found=activation.granularity,
            fix="a scale that several rows share would let one row change another's result",
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


def _form(
    index: int, form: Any, scale: Any, activation: Any, source: SourceMap
) -> Iterator[LoraCompileError]:
    # Here and not at the top: the dialects are YAML files, read by code that uses these checks.
    from lora_compile.schemas.quant_dialect import all_dialects

    at: KeyPath = ("stored_as", index)
    if form.dialect is not None and form.dialect not in all_dialects():
        near = nearest(form.dialect, all_dialects())
        yield _fault(
            source,
            (*at, "dialect"),
            f"there is no dialect `{form.dialect}`",
            expected=" | ".join(all_dialects()),
            found=form.dialect,
            fix=f"did you mean `{near}`?" if near else "add a file to schemas/dialects",
        )
    if scale is None or activation is None:
        return
    needed = {"weight": "N, K"}
    if scale.granularity != "none":
        needed["weight_scale"] = _SCALE_SHAPES[scale.granularity]
    if activation.handling == "static":
        needed["input_scale"] = "one"
    for name in sorted(needed.keys() - form.tensors.keys()):
        yield MissingKey(
            f"key `{name}` is missing in `tensors`",
            file=source.file,
            line=source.line((*at, "tensors")),
            where=text_path((*at, "tensors", name)),
            expected="the suffix, dtypes and shape of that tensor",
            fix=f"add `{name}: ...`",
        )
    for name, tensor in form.tensors.items():
        if name not in needed:
            yield _fault(
                source,
                (*at, "tensors", name),
                f"tensor `{name}` has no meaning in this scheme",
                expected=" | ".join(sorted(needed)),
                found=name,
                fix="remove it, or correct `scale.granularity` or `activation.handling`",
            )
        elif tensor.shape != needed[name]:
            yield _fault(
                source,
                (*at, "tensors", name, "shape"),
                f"tensor `{name}` has a shape that does not fit this scheme",
                expected=needed[name],
                found=tensor.shape,
                fix="correct it, or `scale.granularity`",
            )
    if scale.block_shape == "from_config" and "weight_block_size" not in form.requires:
        yield _fault(
            source,
            (*at, "requires"),
            "blocks are read from `weight_block_size`, which is not required",
            expected="requires: [weight_block_size]",
            found=", ".join(form.requires) or "nothing",
            fix="add `weight_block_size` to `requires`",
        )


def _at_load(
    load: Any, scale: Any, activation: Any, source: SourceMap
) -> Iterator[LoraCompileError]:
    if load is None:
        return
    blocks = scale.granularity == "block"
    yield from _together(source, ("quantise_at_load", "block_shape"), load.block_shape, blocks)
    if activation is not None and activation.handling == "static":
        yield _fault(
            source,
            ("quantise_at_load",),
            "static input scales come from calibration and cannot be made at load",
            expected="null",
            found="quantise_at_load",
            fix="write `quantise_at_load: null`, or `activation.handling: dynamic`",
        )
