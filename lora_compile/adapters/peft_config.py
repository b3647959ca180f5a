"""Strict reading of PEFT's `adapter_config.json`.

Every field is known (`peft_fields.FIELDS`) or refused. Nothing that a config names is imported,
fetched or run.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from lora_compile.adapters.peft_fields import FIELDS, INIT_LEAVES_BASE, REQUIRED, same_value
from lora_compile.adapters.peft_kept import parameters_reason
from lora_compile.adapters.peft_rules import TargetRule, pattern_value
from lora_compile.errors import (
    AdapterConfigInvalid,
    AdapterFileInvalid,
    FaultList,
    FeatureUnsupported,
    FileMissing,
)
from lora_compile.planning.plan import KeptModules

CONFIG_NAME = "adapter_config.json"


@dataclass(frozen=True)
class PeftConfig:
    """The part of a LoRA config that decides the delta."""

    r: int
    alpha: float
    rslora: bool
    rank_pattern: dict[str, int]
    alpha_pattern: dict[str, float]
    targets: TargetRule
    base_model: str | None
    """`base_model_name_or_path` as written: a name for messages, never a path that is opened."""
    file: str
    warnings: tuple[str, ...]
    raw: dict[str, Any]

    def rank(self, module: str) -> int:
        return pattern_value(self.rank_pattern, module, self.r)

    def scale(self, module: str) -> float:
        """alpha / r, or alpha / sqrt(r) with rsLoRA, both resolved for this module.

        A rank of 0 (a pruned module) has no delta, hence scale 0.
        """
        rank = self.rank(module)
        if rank == 0:
            return 0.0
        alpha = pattern_value(self.alpha_pattern, module, self.alpha)
        return alpha / (math.sqrt(rank) if self.rslora else rank)


def load_config(directory: Path) -> tuple[dict[str, Any], str]:
    """Read `adapter_config.json` of a directory; returns the mapping and the file's text.

    Raises:
        FileMissing: there is no such file.
        AdapterFileInvalid: it is not a JSON object, or a key stands in it twice.
    """
    path = directory / CONFIG_NAME
    if not path.is_file():
        raise FileMissing(
            "the adapter has no adapter_config.json",
            file=path,
            fix="give the directory that PEFT's save_pretrained wrote",
        )
    text = path.read_bytes().decode("utf-8", errors="replace")

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        twice = sorted({key for key in keys if keys.count(key) > 1})
        if twice:
            raise AdapterFileInvalid(
                f"key {twice[0]!r} stands twice in one object",
                file=path,
                line=_line(text, twice[0]),
                fix="keep one of the two",
            )
        return dict(pairs)

    try:
        raw = json.loads(text, object_pairs_hook=unique)
    except ValueError as error:
        raise AdapterFileInvalid(
            f"not valid JSON: {error}", file=path, line=getattr(error, "lineno", None)
        ) from error
    if not isinstance(raw, dict):
        raise AdapterFileInvalid("not a JSON object", file=path, found=type(raw).__name__)
    return raw, text


def parse_config(
    raw: Mapping[str, Any],
    *,
    file: str,
    faults: FaultList,
    text: str = "",
    kept: tuple[KeptModules, ...] = (),
) -> PeftConfig | None:
    """Check every field and keep what decides the delta.

    Args:
        raw: the config as JSON gives it, or `LoraConfig.to_dict()`.
        file: shown in errors.
        faults: receives one error per field at fault.
        text: the file's text, for line numbers.
        kept: modules of the model that run without adapters, to say so where they are named.

    Returns:
        The config, or None when a field that sets the delta's size is absent or malformed. A
        field that is refused leaves a fault and still gives a config, so that the tensors can be
        checked too.
    """
    return _Parser(raw, file, faults, text, kept).parse()


class _Parser:
    def __init__(
        self,
        raw: Mapping[str, Any],
        file: str,
        faults: FaultList,
        text: str,
        kept: tuple[KeptModules, ...],
    ) -> None:
        self.raw = {key: _plain(value) for key, value in raw.items()}
        self.file = file
        self.faults = faults
        self.text = text
        self.kept = kept
        self.warnings: list[str] = []
        self.sound = True

    def parse(self) -> PeftConfig | None:
        self._check_names()
        if not same_value(self.raw.get("peft_type"), ("LORA",)) and "peft_type" in self.raw:
            self._refuse("peft_type", "only plain LoRA adapters are read", expected="LORA")
        self._check_init()
        r = self._rank("r", self.raw.get("r"), at_least=1)
        alpha = self._number("lora_alpha", self.raw.get("lora_alpha"))
        if alpha == 0:
            self.warnings.append("lora_alpha is 0: the adapter changes nothing where it applies")
        config = PeftConfig(
            r=r,
            alpha=alpha,
            rslora=self._flag("use_rslora"),
            rank_pattern={
                key: self._rank(f"rank_pattern[{key!r}]", value, at_least=0)
                for key, value in self._pattern("rank_pattern").items()
            },
            alpha_pattern={
                key: self._number(f"alpha_pattern[{key!r}]", value)
                for key, value in self._pattern("alpha_pattern").items()
            },
            targets=self._targets(),
            base_model=self._text("base_model_name_or_path"),
            file=self.file,
            warnings=tuple(self.warnings),
            raw=self.raw,
        )
        return config if self.sound else None

    # --- fields that are refused or must be there ---------------------------------------------

    def _check_names(self) -> None:
        for name in REQUIRED:
            if self.raw.get(name) is None:
                self._invalid(name, f"{name} is missing, so the size of the delta is unknown")
        for name, value in self.raw.items():
            rule = FIELDS.get(name)
            if rule is None:
                self._check_unknown(name, value)
            elif rule.use == "off_only" and not same_value(value, rule.off):
                named = name == "target_parameters" and parameters_reason(self.raw, self.kept)
                reason = f"{rule.reason}; {named}" if named else rule.reason
                self._refuse(name, reason, expected=_join(rule.off))

    def _check_unknown(self, name: str, value: Any) -> None:
        if same_value(value, (None, [], {})):
            return
        # PEFT's LoRA switches are off when false, so a newer PEFT's unused ones do no harm.
        if value is False:
            self.warnings.append(f"unknown field {name} is false and was taken as switched off")
            return
        self._invalid(
            name,
            f"unknown field {name}: what it does to the delta is not known",
            found=value,
            usable=True,
            fix="remove the field if it has no effect on the trained weights",
        )

    def _check_init(self) -> None:
        value = self.raw.get("init_lora_weights")
        kind = value.lower() if isinstance(value, str) else value
        if not same_value(kind, INIT_LEAVES_BASE):
            self._refuse(
                "init_lora_weights",
                "this initialisation changes the base weight, so lora_A and lora_B alone give a "
                "wrong model",
                expected=_join(INIT_LEAVES_BASE),
                fix="save it with path_initial_model_for_weight_conversion, which gives a plain "
                "adapter",
            )

    # --- values -------------------------------------------------------------------------------

    def _rank(self, where: str, value: Any, *, at_least: int) -> int:
        if value is None and where in REQUIRED:
            return at_least
        if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
            self._invalid(where, f"{where} is not a rank", f"an integer >= {at_least}", value)
            return at_least
        return value

    def _number(self, where: str, value: Any) -> float:
        if value is None and where in REQUIRED:
            return 1.0
        if isinstance(value, bool) or not isinstance(value, int | float):
            self._invalid(where, f"{where} is not a number", "a number", value)
            return 1.0
        # Scales are kept in float32 beside the slots.
        if not math.isfinite(value) or abs(value) > 3e38:
            self._invalid(where, f"{where} is not finite", "a finite float32 number", value)
            return 1.0
        return float(value)

    def _flag(self, name: str) -> bool:
        value = self.raw.get(name)
        if value is None or isinstance(value, bool):
            return bool(value)
        self._invalid(name, f"{name} is not a boolean", "true or false", value)
        return False

    def _text(self, name: str) -> str | None:
        value = self.raw.get(name)
        if value is None or isinstance(value, str):
            return value
        self._invalid(name, f"{name} is not a string", "a string or null", value)
        return None

    def _pattern(self, name: str) -> dict[str, Any]:
        value = self.raw.get(name)
        if value is None:
            return {}
        if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
            self._invalid(name, f"{name} is not a mapping", "regex: number", value)
            return {}
        return {key: item for key, item in value.items() if self._regex(name, key)}

    def _regex(self, name: str, pattern: str) -> bool:
        try:
            re.compile(f"(.*\\.)?({pattern})$")
            re.compile(pattern)
        except re.error as error:
            self._invalid(name, f"{name}: not a regular expression: {error}", found=pattern)
            return False
        return True

    def _strings(self, name: str) -> tuple[str, ...] | str | None:
        value = self.raw.get(name)
        if value is None or isinstance(value, str):
            return value
        if isinstance(value, list) and all(isinstance(item, str) for item in value):
            return tuple(value)
        self._invalid(name, f"{name} is neither a string nor a list of strings", found=value)
        return ()

    def _targets(self) -> TargetRule:
        targets = self._strings("target_modules")
        exclude = self._strings("exclude_modules") or ()
        for name, value in (("target_modules", targets), ("exclude_modules", exclude)):
            if isinstance(value, str) and not self._regex(name, value):
                targets = () if name == "target_modules" else targets
                exclude = () if name == "exclude_modules" else exclude
        layers = self.raw.get("layers_to_transform")
        layers = [layers] if isinstance(layers, int) else layers or []
        if not isinstance(layers, list) or not all(type(item) is int for item in layers):
            self._invalid(
                "layers_to_transform",
                "layers_to_transform is not a list of layers",
                "an integer or a list of integers",
                layers,
            )
            layers = []
        pattern = self._strings("layers_pattern") or ()
        pattern = (pattern,) if isinstance(pattern, str) else pattern
        pattern = tuple(item for item in pattern if self._regex("layers_pattern", item))
        if isinstance(targets, str) and (layers or pattern):
            self._invalid(
                "layers_to_transform",
                "layers_to_transform and layers_pattern only go with a list of target_modules",
                found=f"target_modules: {targets!r}",
            )
        elif pattern and not layers:
            self._invalid(
                "layers_pattern", "layers_pattern needs layers_to_transform", found=list(pattern)
            )
        if targets is None:
            self.warnings.append("no target_modules: only the tensors say what is adapted")
        return TargetRule(targets, exclude, tuple(layers), pattern)

    # --- faults -------------------------------------------------------------------------------

    def _invalid(
        self,
        where: str,
        message: str,
        expected: Any = None,
        found: Any = None,
        fix: str | None = None,
        usable: bool = False,
    ) -> None:
        """Add a fault; `usable` when the tensors can be checked in spite of it."""
        self.sound &= usable
        self.faults.add(
            AdapterConfigInvalid(
                message,
                file=self.file,
                line=_line(self.text, where.split("[")[0]),
                where=where,
                expected=expected,
                found=None if found is None else repr(found),
                fix=fix,
            )
        )

    def _refuse(self, name: str, reason: str, *, expected: str, fix: str | None = None) -> None:
        self.faults.add(
            FeatureUnsupported(
                f"{name}: {self.raw[name]!r} is not supported: {reason}",
                file=self.file,
                line=_line(self.text, name),
                where=name,
                expected=expected,
                found=repr(self.raw[name]),
                fix=fix or f"train or convert the adapter without {name}",
            )
        )


def _plain(value: Any) -> Any:
    """What JSON would have made of a value of `LoraConfig.to_dict()`: enums and sets."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, set | frozenset | tuple):
        return sorted(value) if isinstance(value, set | frozenset) else list(value)
    return value


def _join(values: tuple[Any, ...]) -> str:
    return " or ".join(json.dumps(value) for value in values)


def _line(text: str, key: str) -> int | None:
    found = re.search(rf'"{re.escape(key)}"\s*:', text)
    return text.count("\n", 0, found.start()) + 1 if found else None
