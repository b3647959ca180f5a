"""Which format each projection is stored in, decided from the tensors and checked with the config.

Rules: the scheme of a module follows from its tensors' names, dtypes and shapes; the config must
agree, or the difference is told; every tensor of the checkpoint is consumed by a module or a
parameter, or ignored by a named rule. Nothing falls back to "unquantised".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lora_compile.checkpoints.ledger import FLOAT_DTYPES, Ledger
from lora_compile.checkpoints.scales import STORED_NAMES, check_scale_values, check_stored
from lora_compile.checkpoints.skip_list import SkipList
from lora_compile.checkpoints.source import WeightSource
from lora_compile.checkpoints.stacked import (
    NO_RULES,
    ParameterRules,
    Stack,
    is_stored_in_pieces,
)
from lora_compile.errors import (
    CheckpointInvalid,
    LoraCompileError,
    TensorMissing,
)
from lora_compile.schemas.quant_detect import Detected


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

    scheme: str
    weight_dtype: str
    """The stored weight's dtype as safetensors spells it."""
    block_shape: tuple[int, int] | None
    """(rows, columns) of a scale block, from the config; None when there are no block scales."""
    keys: tuple[str, ...]
    """Keys in the checkpoint: the weight first, its bias last, as far as any."""
    why: str
    reader: str = "none"
    """Module of `checkpoints.readers` that reads it."""
    aux: Mapping[str, str] = field(default_factory=dict)
    """The other tensors of the weight: the ops' name -> the key in the checkpoint."""
    input_scale: float | None = None
    """The static scale of the input, where the scheme has one."""

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
    stacks: Mapping[str, Stack] = field(default_factory=dict)
    """Those of `other` that are stored piece by piece."""


def survey(
    source: WeightSource,
    modules: Iterable[ModuleSpec],
    detected: Detected,
    *,
    quantization_config: Mapping[str, Any] | None,
    other: Mapping[str, tuple[int, ...]],
    ignored: Mapping[str, str],
    rules: ParameterRules = NO_RULES,
) -> Survey:
    """Find every projection's tensors and account for all tensors of `source`.

    Args:
        source: the checkpoint or live model.
        modules: the projections, each once.
        detected: what the checkpoint's config resolved to.
        quantization_config: that config, or None for an unquantised checkpoint.
        other: parameters and buffers outside projections -> their shapes.
        ignored: regular expressions, matched against whole tensor names -> why they are left out.
        rules: parameters that may be stored piece by piece, and modules that must be unquantised.

    Reads headers, and the scale tensors themselves (NaN, Inf and values <= 0 are found here).

    Raises:
        CheckpointInvalid, SchemeUnsupported, TensorMissing, TensorUnexpected, TensorShape,
        TensorNotFinite; several come together as Faults.
    """
    ledger = Ledger(source)
    work = _Surveyor(ledger, detected, quantization_config)
    formats: dict[str, ModuleFormat] = {}
    for spec in modules:
        found = work.module(spec)
        if found is not None:
            formats[spec.module] = found
    work.scheme_is_used(formats)
    ledger.parameters(other, rules)
    left_out = ledger.leftovers(ignored)
    ledger.faults.raise_if_any()
    return Survey(
        source.name,
        detected.scheme.name,
        formats,
        tuple(other),
        left_out,
        {name: s for name, s in rules.stacks.items() if is_stored_in_pieces(s, source)},
    )


class _Surveyor:
    """Decides the format of one projection after the other."""

    def __init__(
        self, ledger: Ledger, detected: Detected, config: Mapping[str, Any] | None
    ) -> None:
        self.ledger = ledger
        self.source, self.headers, self.faults = ledger.source, ledger.headers, ledger.faults
        self.detected = detected
        self.scheme = detected.scheme.name
        tensors = detected.form.tensors
        self.weight = tensors["weight"]
        self.beside = {name: spec for name, spec in tensors.items() if name != "weight"}
        self.skip = SkipList(())
        with self.faults.collecting():
            self.skip = SkipList.from_config(detected.skipped(config), file=self.source.name)

    def module(self, spec: ModuleSpec) -> ModuleFormat | None:
        own = f"{spec.module}.weight"
        bias = tuple(f"{spec.module}.bias" for _ in range(spec.has_bias))
        for key in bias:
            self.ledger.expect(key, (spec.out_features,), spec.module)
        if own not in self.headers:
            if spec.tied_to is not None:
                return self._tied(spec, own, bias)
            self._weight_missing(spec, own)
            return None
        scales = {name: f"{spec.module}.{tensor.suffix}" for name, tensor in self.beside.items()}
        present = [key for key in scales.values() if key in self.headers]
        coded = self.headers[own].dtype not in FLOAT_DTYPES
        if present or (coded and self._codes_of_some_scheme(own)):
            return self._quantised(spec, own, scales, bias)
        if coded and self.scheme == "none":
            self._undeclared(spec, own)
            return None
        if not self.ledger.expect(own, (spec.out_features, spec.in_features), spec.module):
            return None
        why = self._why_unquantised(spec, own)
        return ModuleFormat("none", self.headers[own].dtype, None, (own, *bias), why)

    def _codes_of_some_scheme(self, own: str) -> bool:
        """Whether the weight has the dtype of codes that the declared scheme has."""
        dtypes = [STORED_NAMES[dtype] for dtype in self.weight.dtypes]
        return self.headers[own].dtype in dtypes

    def _undeclared(self, spec: ModuleSpec, own: str) -> None:
        siblings = self._siblings(spec.module, own)
        self.ledger.taken |= {key for key in self.headers if key.startswith(f"{spec.module}.")}
        self.faults.add(
            CheckpointInvalid(
                "a weight is stored in codes, but no quantization_config says how to read them",
                file=self.headers[own].file,
                where=spec.module,
                tensor=own,
                expected=f"{'/'.join(FLOAT_DTYPES)}, or a quantization_config in config.json",
                found=f"{self.headers[own].dtype}, {siblings}",
                fix="add the quantization_config that the checkpoint was written with",
            )
        )

    def _tied(self, spec: ModuleSpec, own: str, bias: tuple[str, ...]) -> ModuleFormat | None:
        tied = f"{spec.tied_to}.weight"
        if not self.ledger.expect(tied, (spec.out_features, spec.in_features), spec.module):
            return None
        why = f"no {own} in the checkpoint: the weight is {tied}"
        return ModuleFormat("none", self.headers[tied].dtype, None, (tied, *bias), why)

    def _quantised(
        self, spec: ModuleSpec, own: str, scales: Mapping[str, str], bias: tuple[str, ...]
    ) -> ModuleFormat | None:
        self.ledger.taken |= {own, *(key for key in scales.values() if key in self.headers)}
        missing = [key for key in scales.values() if key not in self.headers]
        for key in missing:
            self.faults.add(
                TensorMissing(
                    f"a {self.headers[own].dtype} weight without its scales",
                    file=self.headers[own].file,
                    where=spec.module,
                    tensor=key,
                    expected=f"{', '.join(scales.values())} beside {own}, as {self.scheme} has",
                    found=self._siblings(spec.module, own),
                    fix="check that the checkpoint is complete, and what its config declares",
                )
            )
        if missing:
            return None
        shape, blocks = (spec.out_features, spec.in_features), self.detected.block_shape
        values = {}
        try:
            check_stored(
                self.source,
                own,
                self.weight,
                shape,
                blocks,
                what="a weight that has scales is not the weight they belong to",
                where=spec.module,
            )
            for name, key in scales.items():
                check_stored(
                    self.source,
                    key,
                    self.beside[name],
                    shape,
                    blocks,
                    what="scales of the wrong shape or dtype",
                    where=spec.module,
                )
                values[name] = check_scale_values(self.source, key, where=spec.module)
        except LoraCompileError as error:
            self.faults.add(error)
            return None
        dtype = self.headers[own].dtype
        granularity = f"{list(blocks)} block scales" if blocks else "scales"
        why = f"{dtype} weight with {granularity}, as {self.scheme} has them"
        if (entry := self.skip.entry_for(spec.module, spec.group)) is not None:
            why += f"; the config lists it as not converted ({entry}), and the tensors decide"
        static = values.get("input_scale")
        return ModuleFormat(
            scheme=self.scheme,
            weight_dtype=dtype,
            block_shape=blocks,
            keys=(own, *scales.values(), *bias),
            why=why,
            reader=str(self.detected.form.reader),
            aux=dict(scales),
            input_scale=None if static is None else float(static),
        )

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

    def _weight_missing(self, spec: ModuleSpec, own: str) -> None:
        siblings = self._siblings(spec.module, own)
        # They are named in this fault; telling each again as unexpected would bury it.
        self.ledger.taken |= {key for key in self.headers if key.startswith(f"{spec.module}.")}
        self.faults.add(
            TensorMissing(
                "the checkpoint lacks the weight of a projection",
                file=self.source.name,
                where=spec.module,
                tensor=own,
                expected=f"shape {[spec.out_features, spec.in_features]}",
                found=siblings,
                fix="check that the checkpoint is complete, of this architecture, and of the "
                f"scheme that its config declares ({self.scheme})",
            )
        )

    def _siblings(self, module: str, own: str) -> str:
        prefix = f"{module}."
        names = sorted(k.removeprefix(prefix) for k in self.headers if k.startswith(prefix))
        names = [name for name in names if prefix + name != own]
        return f"beside it: {', '.join(names)}" if names else "no other tensor of this module"

    def scheme_is_used(self, formats: Mapping[str, ModuleFormat]) -> None:
        """A config that declares a scheme which no tensor has contradicts its files."""
        if self.scheme == "none" or self.faults:
            return
        if not any(found.scheme == self.scheme for found in formats.values()):
            suffixes = ", ".join(f"`{tensor.suffix}`" for tensor in self.beside.values())
            self.faults.add(
                CheckpointInvalid(
                    f"the config declares {self.scheme}, but no projection is stored in it",
                    file=self.source.name,
                    expected=f"{'/'.join(STORED_NAMES[d] for d in self.weight.dtypes)} weights "
                    f"with {suffixes}",
                    found=", ".join(sorted({found.weight_dtype for found in formats.values()})),
                    fix="remove `quantization_config` from config.json if the weights are meant to "
                    "be unquantised",
                )
            )
