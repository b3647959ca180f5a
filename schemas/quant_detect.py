"""Which scheme a checkpoint has, by its `quantization_config`.

Every key of a config is known to the dialect or to the scheme, with a value that the reader is
right for; anything else is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from lora_compile.errors import FaultList, InvalidValue, SchemeUnsupported
from lora_compile.schemas import quant_scheme
from lora_compile.schemas.quant_dialect import Dialect, all_dialects
from lora_compile.schemas.quant_scheme import QuantScheme
from lora_compile.schemas.quant_scheme_parts import StoredForm, Values

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
    "quant_type.default._type",
    "weight_block_size",
    "activation_scheme",
    "config_groups.*.weights.num_bits",
    "config_groups.*.weights.type",
    "config_groups.*.weights.strategy",
    "config_groups.*.input_activations.strategy",
)
"""Keys by which people know a scheme; the error shows those that are there."""

_UNNAMED_METHODS = {"w_bit": "awq", "quant_algo": "modelopt"}
"""Config files of their own (AutoAWQ, ModelOpt) that leave `quant_method` out."""


@dataclass(frozen=True)
class Detected:
    """What a checkpoint is."""

    scheme: QuantScheme
    form: StoredForm
    dialect: Dialect | None
    block_shape: tuple[int, int] | None
    """(rows, columns) of its scale blocks, where it has any."""

    def skipped(self, config: Mapping[str, Any] | None) -> dict[str, Any]:
        """The lists of unquantised modules that the config holds, by key."""
        keys = () if self.dialect is None else self.dialect.skip_lists
        return {key: config[key] for key in keys if config and config.get(key) is not None}


def detect_scheme(
    quantization_config: Mapping[str, Any] | None, *, file: object = None
) -> Detected:
    """The scheme of a checkpoint and the form in which it is stored.

    Args:
        quantization_config: that of `config.json` (of its text config, where it is nested there);
            None where the checkpoint has none.
        file: the config's path, for errors.

    Raises:
        SchemeUnsupported: no scheme with a reader says that it reads this, or a key or value of the
            config is one that the scheme does not know. Several are raised together.
        InvalidValue: the block size cannot be read.
    """
    forms = [(scheme, form) for scheme in quant_scheme.all_schemes() for form in scheme.stored_as]
    if quantization_config is None:
        scheme, form = next(found for found in forms if found[1].dialect is None)
        return Detected(scheme, form, None, None)
    flat = dict(_leaves(quantization_config))
    for scheme, form in forms:
        dialect = None if form.dialect is None else all_dialects()[form.dialect]
        if dialect is None or flat.get("quant_method") != dialect.quant_method:
            continue
        if _lacking(form, flat):
            continue
        if form.reader is None:
            break
        _check_keys(scheme, form, dialect, flat, file)
        block_shape = None
        if scheme.scale.block_shape == "from_config":
            block_shape = read_block_shape(quantization_config, file=file)
        elif scheme.scale.block_shape is not None:
            block_shape = scheme.scale.block_shape
        return Detected(scheme, form, dialect, block_shape)
    raise _unsupported(forms, flat, file)


def read_block_shape(config: Mapping[str, Any], *, file: object = None) -> tuple[int, int]:
    """(rows, columns) of a checkpoint's blocks, from `weight_block_size`.

    Never derived from the shape of the scales: ragged edges make that ambiguous (192 rows with 2
    scale rows are blocks of 128 and 64, not of 96).

    Raises:
        InvalidValue: `weight_block_size` is not two positive whole numbers.
    """
    found = config.get("weight_block_size")
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


def _leaves(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(path with dots, value) of everything that is not a table; empty tables say nothing."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _fits(path: str, pattern: str) -> bool:
    """`*` stands for one name, so both have as many."""
    names, wanted = path.split("."), pattern.split(".")
    return len(names) == len(wanted) and all(map(fnmatchcase, names, wanted))


def _found(flat: Mapping[str, Any], pattern: str) -> list[Any]:
    """The values at a path; [None] where there is none."""
    return [value for path, value in flat.items() if _fits(path, pattern)] or [None]


def _equal(value: Any, allowed: tuple[Any, ...]) -> bool:
    return any(type(value) is type(other) and value == other for other in allowed)


def _lacking(form: StoredForm, flat: Mapping[str, Any]) -> list[str]:
    """What a config would need to be of this form."""
    lacking = [f"`{key}`" for key in form.requires if None in _found(flat, key)]
    for pattern, allowed in form.where.items():
        if not all(_equal(value, allowed) for value in _found(flat, pattern)):
            lacking.append(f"`{pattern}: {_alternatives(allowed)}`")
    return lacking


def _alternatives(allowed: tuple[Any, ...]) -> str:
    return " | ".join("null" if value is None else str(value) for value in allowed)


def _unsupported(
    forms: list[tuple[QuantScheme, StoredForm]], flat: Mapping[str, Any], file: object
) -> SchemeUnsupported:
    method = flat.get("quant_method")
    if method is None:
        method = next((name for key, name in _UNNAMED_METHODS.items() if key in flat), None)
    says = {
        path: value
        for key in _TELLING_KEYS
        for path, value in flat.items()
        if _fits(path, key) and value is not None
    }
    near, readable = [], []
    for scheme, form in forms:
        dialect = None if form.dialect is None else all_dialects()[form.dialect]
        if form.reader is not None:
            how = "no quantization_config" if dialect is None else dialect.quant_method
            readable.append(f"{scheme.name} ({how})")
        if dialect is not None and dialect.quant_method == method:
            near.append(f"`{scheme.name}` needs {', '.join(_lacking(form, flat))}")
    name = "that it does not name" if method is None else f"`{method}`"
    return SchemeUnsupported(
        f"the checkpoint is quantised by a method {name} for which there is no reader"
        if not near
        else f"the checkpoint is quantised by {name} in a way for which there is no reader",
        file=file,
        where="quantization_config",
        expected=f"one of {', '.join(readable)}",
        found=", ".join(f"{key}: {value}" for key, value in says.items()) or "no quant_method",
        fix="; ".join(near)
        or "use a checkpoint in 16 bit or in one of these schemes, or a 16-bit one with "
        "`quantization.scheme` set to a scheme",
    )


def _check_keys(
    scheme: QuantScheme,
    form: StoredForm,
    dialect: Dialect,
    flat: Mapping[str, Any],
    file: object,
) -> None:
    """Every key of the config is known and has a value that the reader is right for."""
    faults = FaultList()
    anything = {"quant_method", *form.requires, *dialect.accepts, *dialect.skip_lists}
    values: Values = {**dialect.values, **form.values, **form.where}
    for path, value in flat.items():
        if any(_fits(path, key) for key in anything):
            continue
        place: dict[str, Any] = {"file": file, "where": f"quantization_config.{path}"}
        allowed = next((ok for key, ok in values.items() if _fits(path, key)), None)
        if allowed is None:
            faults.add(
                SchemeUnsupported(
                    f"scheme `{scheme.name}` does not know the key `{path}`",
                    **place,
                    expected=f"only {', '.join(sorted({*anything, *values}))}",
                    found=f"{path}: {value}",
                    fix="if the key changes nothing for reading, add it to `accepts` of "
                    f"schemas/dialects/{dialect.name}.yaml",
                )
            )
        elif not _equal(value, allowed):
            faults.add(
                SchemeUnsupported(
                    f"scheme `{scheme.name}` does not support {path} {value}",
                    **place,
                    expected=_alternatives(allowed),
                    found=f"{path}: {value}",
                    fix="use a checkpoint made with one of these values",
                )
            )
    faults.raise_if_any()
