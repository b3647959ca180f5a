"""Faults between the values of a deployment."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lora_compile.errors import (
    AdapterUnknown,
    FeatureUnsupported,
    InvalidValue,
    LoraCompileError,
    SchemeUnsupported,
)
from lora_compile.schemas.architecture import locate_architecture
from lora_compile.schemas.paths import resolve_path
from lora_compile.schemas.quant_scheme import find_scheme
from lora_compile.schemas.source_map import KeyPath, SourceMap, text_path
from lora_compile.schemas.yaml_faults import nearest

if TYPE_CHECKING:
    from lora_compile.schemas.deployment import (
        AdapterSource,
        Generation,
        ModelSource,
        Quantization,
        Runtime,
    )


def deployment_faults(sections: Mapping[str, Any], source: SourceMap) -> Iterator[LoraCompileError]:
    """Every fault between values that are valid by themselves. `sections`: see `Check`."""
    adapters: tuple[AdapterSource, ...] | None = sections.get("adapters")
    runtime: Runtime | None = sections.get("runtime")
    generation: Generation | None = sections.get("generation")
    if "model" in sections:
        yield from _model(sections["model"], source)
    if "quantization" in sections:
        yield from _quantization(sections["quantization"], source)
    if adapters is not None:
        yield from _adapters(adapters, source)
    if runtime is not None:
        yield from _runtime(runtime, source)
    if adapters is not None and runtime is not None and len(adapters) > runtime.max_adapters:
        yield _fault(
            source,
            ("runtime", "max_adapters"),
            "more adapters are declared than may be loaded",
            expected=f"at least {len(adapters)}",
            found=str(runtime.max_adapters),
            fix=f"set max_adapters: {len(adapters)}, or declare fewer adapters",
        )
    if generation is not None:
        yield from _rows(generation, source)
        if adapters is not None:
            yield from _row_adapters(generation, adapters, source)
        if runtime is not None:
            yield from _generation_fits(generation, runtime, source)


def _place(source: SourceMap, path: KeyPath) -> dict[str, Any]:
    return {"file": source.file, "line": source.line(path), "where": text_path(path)}


def _fault(
    source: SourceMap, path: KeyPath, message: str, *, expected: str, found: str, fix: str
) -> LoraCompileError:
    place = _place(source, path)
    return InvalidValue(message, **place, expected=expected, found=found, fix=fix)


def _resolvable(text: str, path: KeyPath, source: SourceMap) -> Iterator[LoraCompileError]:
    try:
        resolve_path(source.file, text, line=source.line(path), where=text_path(path))
    except InvalidValue as error:
        yield error


def _model(model: ModelSource, source: SourceMap) -> Iterator[LoraCompileError]:
    if model.package is None:
        yield from _resolvable(model.path, ("model", "path"), source)
    yield from _weights(model, source)
    if model.architecture != "auto":
        folder = Path(source.file).parent
        place = _place(source, ("model", "architecture"))
        try:
            locate_architecture(model.architecture, folder=folder, **place)
        except LoraCompileError as error:
            yield error


def _weights(model: ModelSource, source: SourceMap) -> Iterator[LoraCompileError]:
    """`seed` draws random weights; a config alone stands in a folder."""
    if "seed" in model.model_fields_set and model.weights != "random":
        yield _fault(
            source,
            ("model", "seed"),
            f"`seed` has no effect with `weights: {model.weights}`",
            expected="weights: random",
            found=f"seed: {model.seed}",
            fix="remove `seed`, or set weights: random",
        )
    single_file = model.package is not None or model.path.endswith(".gguf")
    if model.weights != "checkpoint" and single_file:
        yield _fault(
            source,
            ("model", "weights"),
            f"`weights: {model.weights}` is for a folder with a config.json",
            expected="a folder under `path`, and no `package`",
            found=f"package: {model.package}" if model.package else f"path: {model.path}",
            fix="set weights: checkpoint, or name a folder",
        )


def _quantization(quantization: Quantization, source: SourceMap) -> Iterator[LoraCompileError]:
    name, path = quantization.scheme, ("quantization", "scheme")
    quantises = False
    if name != "auto":
        try:
            scheme = find_scheme(name, **_place(source, path))
        except SchemeUnsupported as error:
            yield error
            return
        quantises = name != "none"
        if scheme.quantise_at_load is None:
            yield SchemeUnsupported(
                f"scheme `{name}` cannot quantise at load",
                **_place(source, path),
                expected="auto, or a scheme that can",
                found=name,
                fix="write `auto` and use a checkpoint in this scheme",
            )
            return
    if quantization.ignore and not quantises:
        yield _fault(
            source,
            ("quantization", "ignore"),
            f"`ignore` has no effect with `scheme: {name}`",
            expected="a scheme that quantises at load",
            found=f"scheme: {name}",
            fix="remove `ignore`; a quantised checkpoint says itself what it leaves out",
        )


def _adapters(adapters: tuple[AdapterSource, ...], source: SourceMap) -> Iterator[LoraCompileError]:
    lines: dict[str, int] = {}
    for index, adapter in enumerate(adapters):
        path: KeyPath = ("adapters", index, "name")
        if adapter.name in lines:
            yield _fault(
                source,
                path,
                f"two adapters are called `{adapter.name}`",
                expected="each name once",
                found=f"first in line {lines[adapter.name]}",
                fix="rename one of them",
            )
        lines.setdefault(adapter.name, source.line(path))
        yield from _resolvable(adapter.path, ("adapters", index, "path"), source)


def _runtime(runtime: Runtime, source: SourceMap) -> Iterator[LoraCompileError]:
    if runtime.mode == "reduce-overhead" and (runtime.compile == "off" or runtime.device == "cpu"):
        other = "compile: off" if runtime.compile == "off" else "device: cpu"
        yield _fault(
            source,
            ("runtime", "mode"),
            f"`mode: reduce-overhead` has no effect with `{other}`",
            expected="a compiled graph on CUDA",
            found=other,
            fix=f"set mode: default, or change `{other}`",
        )
    if runtime.max_tokens < runtime.max_rows and not runtime.packed:
        yield _fault(
            source,
            ("runtime", "max_tokens"),
            "a batch of `max_rows` rows has more tokens than `max_tokens`",
            expected=f"at least {runtime.max_rows}",
            found=str(runtime.max_tokens),
            fix="raise max_tokens or lower max_rows",
        )
    features = runtime.features if isinstance(runtime.features, tuple) else ()
    for index, feature in enumerate(features):
        if feature in features[:index]:
            yield _fault(
                source,
                ("runtime", "features", index),
                f"feature `{feature}` stands twice",
                expected="each feature once",
                found=feature,
                fix="remove one of them",
            )


def _rows(generation: Generation, source: SourceMap) -> Iterator[LoraCompileError]:
    for index, row in enumerate(generation.rows):
        if row.adapter is None and row.scale != 1.0:
            yield _fault(
                source,
                ("generation", "rows", index, "scale"),
                "`scale` has no effect on a row without an adapter",
                expected="an adapter, or no scale",
                found=f"scale: {row.scale}",
                fix="name an adapter, or remove `scale`",
            )
    if generation.system is not None and not generation.chat:
        yield _fault(
            source,
            ("generation", "system"),
            "`system` has no effect with `chat: false`",
            expected="chat: true",
            found="chat: false",
            fix="set chat: true, or put the text into the prompts",
        )


def _row_adapters(
    generation: Generation, adapters: tuple[AdapterSource, ...], source: SourceMap
) -> Iterator[LoraCompileError]:
    names = [adapter.name for adapter in adapters]
    for index, row in enumerate(generation.rows):
        if row.adapter is None or row.adapter in names:
            continue
        near = nearest(row.adapter, names)
        yield AdapterUnknown(
            f"no adapter is called `{row.adapter}`",
            **_place(source, ("generation", "rows", index, "adapter")),
            expected=f"null, {', '.join(names)}" if names else "null: no adapter is declared",
            found=row.adapter,
            fix=f"did you mean `{near}`?" if near else "declare it under `adapters`",
        )


def _generation_fits(
    generation: Generation, runtime: Runtime, source: SourceMap
) -> Iterator[LoraCompileError]:
    rows = len(generation.rows) * generation.num_beams
    if rows > runtime.max_rows:
        yield _fault(
            source,
            ("generation", "rows"),
            "the batch has more rows than `runtime.max_rows`",
            expected=f"at most {runtime.max_rows} rows, beams counted",
            found=f"{len(generation.rows)} rows x {generation.num_beams} beams = {rows}",
            fix=f"set runtime.max_rows: {rows}, or generate fewer rows",
        )
    if runtime.packed:
        yield FeatureUnsupported(
            "generation does not work on packed rows",
            **_place(source, ("runtime", "packed")),
            expected="packed: false",
            found="packed: true and a `generation` section",
            fix="set packed: false, or remove `generation`",
        )
    if runtime.compile == "layers":
        yield FeatureUnsupported(
            "layer-by-layer compile does not work with the cache that generation needs",
            **_place(source, ("runtime", "compile")),
            expected="whole | off",
            found="layers, and a `generation` section",
            fix="set compile: whole, or remove `generation`",
        )
