"""PEFT adapters, from a directory or from tensors in memory, to the canonical form.

Both ways run the same checks. Formats and semantics: PEFT 0.21, `adapter_config.json` and
`adapter_model.safetensors`; delta = scale * B A with A (r, in), B (out, r).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from lora_compile.adapters.canonical import CanonicalAdapter, PartDelta, Provenance
from lora_compile.adapters.digest import digest_of
from lora_compile.adapters.finite import all_finite
from lora_compile.adapters.peft_config import CONFIG_NAME, load_config, parse_config
from lora_compile.adapters.peft_keys import TensorHeader
from lora_compile.adapters.peft_resolve import Binding, Resolution, resolve
from lora_compile.adapters.report import AdapterReport
from lora_compile.errors import (
    AdapterFileInvalid,
    FaultList,
    FeatureUnsupported,
    FileMissing,
    TensorNotFinite,
)
from lora_compile.planning.plan import Plan

WEIGHTS_NAME = "adapter_model.safetensors"
IN_MEMORY = "<tensors>"

_DTYPE_NAMES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""safetensors' dtype names to torch's, for those that are read."""


def inspect_adapter(path: str | Path, plan: Plan) -> AdapterReport:
    """What an adapter directory holds and where it goes, from its headers alone.

    Raises:
        Faults or the only fault, as `read_adapter`, except TensorNotFinite.
    """
    with _opened(Path(path), plan) as (resolution, _, _):
        return resolution.report


def read_adapter(path: str | Path, plan: Plan) -> CanonicalAdapter:
    """Read a directory that PEFT's `save_pretrained` wrote.

    Raises:
        FileMissing: no config or no weights.
        FeatureUnsupported: something other than plain LoRA on linear layers; or weights that are
            not safetensors.
        AdapterConfigInvalid, AdapterFileInvalid, AdapterTargetUnknown, AdapterPairIncomplete,
        AdapterRankTooHigh, AdapterForeign, AdapterSiteNotBuilt, TensorShape, TensorUnexpected,
        TensorNotFinite: see their texts. Several faults come as one `Faults`.
    """
    with _opened(Path(path), plan) as (resolution, get, raw):
        return _build(resolution, get, str(path), raw)


def read_adapter_tensors(
    tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any], plan: Plan
) -> CanonicalAdapter:
    """The same from tensors in memory, under the keys that a file would have.

    Args:
        tensors: key -> tensor; copied, on the CPU.
        config: as `adapter_config.json` or `LoraConfig.to_dict()` gives it.

    Raises: as `read_adapter`.
    """
    headers = {
        key: TensorHeader(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        for key, tensor in tensors.items()
    }
    resolution = _resolve(
        config,
        "",
        headers,
        plan,
        source=IN_MEMORY,
        config_file=IN_MEMORY,
        weights_file=IN_MEMORY,
    )
    return _build(
        resolution,
        lambda key: tensors[key].detach().to("cpu", copy=True),
        IN_MEMORY,
        dict(config),
    )


@contextmanager
def _opened(
    directory: Path, plan: Plan
) -> Iterator[tuple[Resolution, Callable[[str], torch.Tensor], dict[str, Any]]]:
    raw, text = load_config(directory)
    weights = _weights_file(directory)
    try:
        with safe_open(weights, framework="pt", device="cpu") as file:
            headers = {}
            for key in file.keys():  # noqa: SIM118  (not a mapping)
                entry = file.get_slice(key)
                dtype = entry.get_dtype()
                headers[key] = TensorHeader(
                    _DTYPE_NAMES.get(dtype, dtype), tuple(entry.get_shape())
                )
            resolution = _resolve(
                raw,
                text,
                headers,
                plan,
                source=str(directory),
                config_file=str(directory / CONFIG_NAME),
                weights_file=str(weights),
            )
            # A copy: the file is mapped, and may be written anew while the adapter is in use.
            yield resolution, lambda key: file.get_tensor(key).clone(), raw
    except SafetensorError as error:
        raise AdapterFileInvalid(f"not a safetensors file: {error}", file=weights) from error


def _weights_file(directory: Path) -> Path:
    weights = directory / WEIGHTS_NAME
    if weights.is_file():
        return weights
    if (directory / "adapter_model.bin").is_file():
        raise FeatureUnsupported(
            "adapter_model.bin is a pickle, which can run code when it is read; it is not opened",
            file=directory / "adapter_model.bin",
            expected=WEIGHTS_NAME,
            fix="save the adapter again with save_pretrained(..., safe_serialization=True)",
        )
    index = directory / f"{WEIGHTS_NAME}.index.json"
    if index.is_file():
        raise FeatureUnsupported(
            "adapters split over several files are not read",
            file=index,
            expected=WEIGHTS_NAME,
            fix="save the adapter as one file",
        )
    raise FileMissing(
        "the adapter has no weights",
        file=weights,
        fix="give the directory that PEFT's save_pretrained wrote",
    )


def _resolve(
    raw: Mapping[str, Any],
    text: str,
    headers: Mapping[str, TensorHeader],
    plan: Plan,
    *,
    source: str,
    config_file: str,
    weights_file: str,
) -> Resolution:
    faults = FaultList()
    config = parse_config(raw, file=config_file, faults=faults, text=text, kept=plan.kept)
    if config is None:
        faults.raise_if_any()
        raise AssertionError("a config that cannot be used has left no fault")
    return resolve(config, headers, plan, file=weights_file, source=source, faults=faults)


def _build(
    resolution: Resolution,
    get: Callable[[str], torch.Tensor],
    source: str,
    config: dict[str, Any],
) -> CanonicalAdapter:
    faults = FaultList()
    deltas: dict[str, PartDelta] = {}
    for binding in resolution.bindings:
        if binding.rank == 0:
            continue
        pair = {key: get(key) for key in (binding.key_A, binding.key_B)}
        for key, tensor in pair.items():
            if not all_finite(tensor):
                bad = int((~torch.isfinite(tensor)).sum())
                faults.add(
                    TensorNotFinite(
                        "the adapter holds NaN or Inf",
                        file=source,
                        tensor=key,
                        expected="finite values",
                        found=f"{bad} of {tensor.numel()} values",
                    )
                )
        deltas |= _split(binding, pair[binding.key_A], pair[binding.key_B], source)
    faults.raise_if_any()
    return CanonicalAdapter(
        digest=digest_of(deltas),
        source=source,
        deltas=deltas,
        warnings=resolution.report.warnings,
        config=config,
    )


def _split(binding: Binding, a: torch.Tensor, b: torch.Tensor, source: str) -> dict[str, PartDelta]:
    """One delta per projection; a fused module's B is cut by its parts' rows, its A shared."""
    module = binding.module
    layout = "fused" if module.fused else "split"
    provenance = tuple(
        Provenance(source, key, layout, module.decided_by) for key in (binding.key_A, binding.key_B)
    )
    widths = [target.part.out_features for target in module.targets]
    return {
        target.part.module: PartDelta(a, rows, binding.scale, provenance)
        for target, rows in zip(module.targets, torch.split(b, widths), strict=True)
    }
