"""Which format each projection is stored in, decided from the tensors and checked with the config.

Rules: the scheme of a module follows from its tensors' names, dtypes and shapes; the config must
agree, or the difference is told; every tensor of the checkpoint is consumed by a module or a
parameter, or ignored by a named rule. Nothing falls back to "unquantised".
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from lora_compile.checkpoints.block_scales import (
    SCALE_SUFFIX,
    check_block_scale,
    read_block_shape,
)
from lora_compile.checkpoints.skip_list import SkipList
from lora_compile.checkpoints.source import WeightSource
from lora_compile.errors import (
    CheckpointInvalid,
    FaultList,
    LoraCompileError,
    SchemeUnsupported,
    TensorMissing,
    TensorShape,
    TensorUnexpected,
)

SchemeName = Literal["none", "fp8_block"]
SCHEMES: tuple[str, ...] = ("none", "fp8_block")
FLOAT_DTYPES = ("BF16", "F16", "F32")
FP8 = "F8_E4M3"


class NamedScheme(Protocol):
    """All that a survey needs of a quantisation scheme."""

    @property
    def name(self) -> str: ...


@dataclass(frozen=True)
class ModuleSpec:
    """One projection that the architecture says the model has."""

    module: str
    """Full path, e.g. `model.layers.0.self_attn.q_proj`."""
    out_features: int
    in_features: int
    has_bias: bool
    tied_to: str | None
    """The module whose weight is used when the checkpoint has none under this module's name."""
    group: str | None = None
    """Full path of the fused site, since skip lists may name that instead of the part."""


@dataclass(frozen=True)
class ModuleFormat:
    """How one projection is stored."""

    scheme: SchemeName
    weight_dtype: str
    """The stored weight's dtype as safetensors spells it."""
    block_shape: tuple[int, int] | None
    """(rows, columns) of a scale block, from the config; None when there are no scales."""
    keys: tuple[str, ...]
    """Keys in the checkpoint: the weight first, then its scale, then its bias, as far as any."""
    why: str

    @property
    def weight_key(self) -> str:
        return self.keys[0]

    @property
    def bias_key(self) -> str | None:
        last = self.keys[-1]
        return last if last.endswith(".bias") else None


@dataclass(frozen=True)
class Survey:
    """What a checkpoint holds, seen from the model's side."""

    source: str
    scheme: str
    """The scheme that the checkpoint's config declares."""
    formats: Mapping[str, ModuleFormat]
    """Module path -> how it is stored, for every projection that was asked for."""
    other: tuple[str, ...]
    """Parameters that belong to no projection (norms and the like), in the caller's order."""
    ignored: Mapping[str, str]
    """Tensor that is left out on purpose -> why."""


def survey(
    source: WeightSource,
    modules: Iterable[ModuleSpec],
    scheme: NamedScheme,
    *,
    quantization_config: Mapping[str, Any] | None,
    other: Mapping[str, tuple[int, ...]],
    ignored: Mapping[str, str],
) -> Survey:
    """Find every projection's tensors and account for all tensors of `source`.

    Args:
        source: the checkpoint or live model.
        modules: the projections, each once.
        scheme: the scheme that the checkpoint's config resolved to.
        quantization_config: that config, or None for an unquantised checkpoint.
        other: parameters and buffers outside projections -> their shapes.
        ignored: regular expressions, matched against whole tensor names -> why they are left out.

    Reads headers, and the scale tensors themselves (NaN, Inf and values <= 0 are found here).

    Raises:
        SchemeUnsupported, CheckpointInvalid, TensorMissing, TensorUnexpected, TensorShape,
        TensorNotFinite; several come together as Faults.
    """
    if scheme.name not in SCHEMES:
        raise SchemeUnsupported(
            f"no reader for the scheme {scheme.name}",
            file=source.name,
            expected=" or ".join(SCHEMES),
            found=scheme.name,
        )
    work = _Surveyor(source, scheme.name, quantization_config)
    formats: dict[str, ModuleFormat] = {}
    for spec in modules:
        found = work.module(spec)
        if found is not None:
            formats[spec.module] = found
    work.scheme_is_used(formats)
    work.parameters(other)
    left_out = work.leftovers(ignored)
    work.faults.raise_if_any()
    return Survey(source.name, scheme.name, formats, tuple(other), left_out)


class _Surveyor:
    """State of one survey: the tensors accounted for so far, and the faults."""

    def __init__(self, source: WeightSource, scheme: str, config: Mapping[str, Any] | None) -> None:
        self.source = source
        self.headers = source.headers
        self.scheme = scheme
        self.faults = FaultList()
        self.taken: set[str] = set()
        self.skip = SkipList(())
        try:
            self.skip = SkipList.from_config(config or {}, file=source.name)
        except LoraCompileError as error:
            self.faults.add(error)
        self.block_shape: tuple[int, int] | None = None
        if scheme == "fp8_block" or any(key.endswith(SCALE_SUFFIX) for key in self.headers):
            try:
                self.block_shape = read_block_shape(source, config)
            except LoraCompileError as error:
                self.faults.add(error)

    def module(self, spec: ModuleSpec) -> ModuleFormat | None:
        own = f"{spec.module}.weight"
        scale = f"{spec.module}{SCALE_SUFFIX}"
        bias = tuple(f"{spec.module}.bias" for _ in range(spec.has_bias))
        shape = (spec.out_features, spec.in_features)
        for key in bias:
            self._expect(key, (spec.out_features,), spec.module)
        if own not in self.headers and spec.tied_to is not None:
            tied = f"{spec.tied_to}.weight"
            if not self._expect(tied, shape, spec.module):
                return None
            why = f"no {own} in the checkpoint: the weight is {tied}"
            dtype = self.headers[tied].dtype
            return ModuleFormat("none", dtype, None, (tied, *bias), why)
        if own not in self.headers:
            self._weight_missing(spec, own)
            return None
        if scale in self.headers:
            return self._fp8_block(spec, own, scale, bias)
        if self.headers[own].dtype == FP8:
            self.taken.add(own)
            self.faults.add(
                TensorMissing(
                    "an FP8 weight without its scales",
                    file=self.headers[own].file,
                    where=spec.module,
                    tensor=scale,
                    expected=f"F32 block scales beside {own}",
                    found=self._siblings(spec.module, own),
                )
            )
            return None
        if not self._expect(own, shape, spec.module):
            return None
        why = self._why_unquantised(spec, own)
        return ModuleFormat("none", self.headers[own].dtype, None, (own, *bias), why)

    def _fp8_block(
        self, spec: ModuleSpec, own: str, scale: str, bias: tuple[str, ...]
    ) -> ModuleFormat | None:
        self.taken |= {own, scale}
        header = self.headers[own]
        shape = (spec.out_features, spec.in_features)
        if header.dtype != FP8 or header.shape != shape:
            self.faults.add(
                TensorShape(
                    "a weight that has block scales is not the FP8 weight they belong to",
                    file=header.file,
                    where=spec.module,
                    tensor=own,
                    expected=f"{FP8} {list(shape)}",
                    found=f"{header.dtype} {list(header.shape)}",
                )
            )
            return None
        if self.block_shape is None:
            return None  # told once, for the whole config
        try:
            check_block_scale(self.source, scale, shape, self.block_shape, where=spec.module)
        except LoraCompileError as error:
            self.faults.add(error)
            return None
        why = f"{FP8} weight with {list(self.block_shape)} block scales"
        if (entry := self.skip.entry_for(spec.module, spec.group)) is not None:
            why += f"; the config lists it as not converted ({entry}), and the tensors decide"
        return ModuleFormat("fp8_block", FP8, self.block_shape, (own, scale, *bias), why)

    def _why_unquantised(self, spec: ModuleSpec, own: str) -> str:
        dtype = self.headers[own].dtype
        why = f"{dtype} weight without scales"
        if spec.tied_to is not None:
            why += f"; tied to {spec.tied_to} by the config, but the checkpoint has both weights"
        if self.scheme == "none":
            return why
        entry = self.skip.entry_for(spec.module, spec.group)
        if entry is not None:
            return f"{why}; not converted, as the config says ({entry})"
        return f"{why}; the config does not list it as not converted, and the tensors decide"

    def _expect(self, key: str, shape: tuple[int, ...], where: str | None) -> bool:
        """Take a floating-point tensor of this shape, or note what is wrong with it."""
        self.taken.add(key)
        header = self.headers.get(key)
        if header is None:
            self.faults.add(
                TensorMissing(
                    "the checkpoint lacks a tensor of the model",
                    file=self.source.name,
                    where=where,
                    tensor=key,
                    expected=f"shape {list(shape)}",
                    fix="check that the checkpoint is complete and of this architecture",
                )
            )
            return False
        if header.shape == shape and header.dtype in FLOAT_DTYPES:
            return True
        self.faults.add(
            TensorShape(
                "a tensor of the wrong shape"
                if header.shape != shape
                else "a tensor of a dtype that is not read unquantised",
                file=header.file,
                where=where,
                tensor=key,
                expected=f"{'/'.join(FLOAT_DTYPES)} {list(shape)}",
                found=f"{header.dtype} {list(header.shape)}",
            )
        )
        return False

    def _weight_missing(self, spec: ModuleSpec, own: str) -> None:
        siblings = self._siblings(spec.module, own)
        # They are named in this fault; telling each again as unexpected would bury it.
        self.taken |= {key for key in self.headers if key.startswith(f"{spec.module}.")}
        self.faults.add(
            TensorMissing(
                "the checkpoint lacks the weight of a projection",
                file=self.source.name,
                where=spec.module,
                tensor=own,
                expected=f"shape {[spec.out_features, spec.in_features]}",
                found=siblings,
                fix="check that the checkpoint is complete, of this architecture, and of a scheme "
                f"that is read ({', '.join(SCHEMES)})",
            )
        )

    def _siblings(self, module: str, own: str) -> str:
        prefix = f"{module}."
        names = sorted(k.removeprefix(prefix) for k in self.headers if k.startswith(prefix))
        names = [name for name in names if prefix + name != own]
        return f"beside it: {', '.join(names)}" if names else "no other tensor of this module"

    def scheme_is_used(self, formats: Mapping[str, ModuleFormat]) -> None:
        """A config that declares a scheme which no tensor has contradicts its files."""
        if self.scheme != "fp8_block" or self.faults:
            return
        if not any(found.scheme == "fp8_block" for found in formats.values()):
            self.faults.add(
                CheckpointInvalid(
                    "the config declares block FP8, but no projection is stored in it",
                    file=self.source.name,
                    expected=f"{FP8} weights with `weight_scale_inv`",
                    found=", ".join(sorted({found.weight_dtype for found in formats.values()})),
                    fix="remove `quantization_config` from config.json if the weights are meant to "
                    "be unquantised",
                )
            )

    def parameters(self, other: Mapping[str, tuple[int, ...]]) -> None:
        for key, shape in other.items():
            self._expect(key, tuple(shape), None)

    def leftovers(self, ignored: Mapping[str, str]) -> dict[str, str]:
        """Name -> why of the ignored tensors; all others that nobody took are faults."""
        rules = [(re.compile(pattern), why) for pattern, why in ignored.items()]
        left_out: dict[str, str] = {}
        for key in sorted(self.headers.keys() - self.taken):
            rule = next((why for pattern, why in rules if pattern.fullmatch(key)), None)
            if rule is not None:
                left_out[key] = rule
                continue
            header = self.headers[key]
            self.faults.add(
                TensorUnexpected(
                    "a tensor that no part of the model takes",
                    file=header.file,
                    tensor=key,
                    found=f"{header.dtype} {list(header.shape)}",
                    fix="if it may be left out, say so in the architecture file's ignored tensors",
                )
            )
        return left_out
