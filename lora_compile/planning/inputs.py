"""What a deployment names, found on this machine: its model's files, its schema, its device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from lora_compile.checkpoints.gguf import ensure_converted, find_converted, resolve_package_file
from lora_compile.errors import FaultList, FeatureUnsupported, FileMissing
from lora_compile.planning.meta_model import DTYPES
from lora_compile.schemas.architecture import (
    ArchitectureSchema,
    find_architecture,
    load_architecture,
)
from lora_compile.schemas.deployment import Deployment, resolve_path
from lora_compile.schemas.yaml_file import Loaded

Progress = Callable[[str], None]


def refuse_features(deployment: Loaded[Deployment], faults: FaultList) -> None:
    """What a deployment may say but nothing serves yet."""
    if deployment.value.runtime.mode != "default":
        fault = FeatureUnsupported(
            "CUDA graphs are not supported yet",
            file=deployment.source.file,
            line=deployment.source.line(("runtime", "mode")),
            where="runtime.mode",
            expected="default",
            found=deployment.value.runtime.mode,
            fix="leave runtime.mode out; the model is compiled without CUDA graphs",
        )
        faults.add(fault)
    features = deployment.value.runtime.features
    if features != "auto" and features:
        fault = FeatureUnsupported(
            f"adapter features are not supported yet: {', '.join(features)}",
            file=deployment.source.file,
            line=deployment.source.line(("runtime", "features")),
            where="runtime.features",
            expected="auto, or an empty list",
            found=list(features),
            fix="plain LoRA on linear projections is served; adapters that need more are refused "
            "when they are checked",
        )
        faults.add(fault)


def model_files(
    deployment: Loaded[Deployment], convert: bool, progress: Progress
) -> tuple[Path, str | None]:
    """(checkpoint directory, None), or (folder, GGUF file name) where it is not converted."""
    model = deployment.value.model
    place: dict[str, Any] = {
        "file": deployment.source.file,
        "line": deployment.source.line(("model", "path")),
        "where": "model.path",
    }
    try:
        if model.package is not None:
            path = resolve_package_file(model.package, model.path)
        else:
            path = resolve_path(deployment.source.file, model.path)
    except FileMissing as error:
        raise FileMissing(
            error.message, **place, expected=error.expected, found=error.found, fix=error.fix
        ) from error
    if not path.exists():
        raise FileMissing(
            f"the model is not there: {path}",
            **place,
            expected="a Hugging Face checkpoint directory or a .gguf file",
            found="nothing",
            fix="relative paths are relative to the deployment file's folder",
        )
    if path.suffix != ".gguf":
        return path, None
    dtype = DTYPES[model.dtype]
    converted = find_converted(path, dtype=dtype, cache_dir=None)
    if converted is None and convert:
        converted = ensure_converted(path, dtype=dtype, cache_dir=None, progress=progress)
    return (path.parent, path.name) if converted is None else (converted, None)


def architecture_of(
    deployment: Loaded[Deployment], config: Any, model_path: Path
) -> Loaded[ArchitectureSchema]:
    """The schema that the deployment names, or that its model's type has."""
    name = deployment.value.model.architecture
    if name == "auto":
        return find_architecture(config.model_type, file=model_path / "config.json")
    return load_architecture(
        name,
        folder=Path(deployment.source.file).parent,
        file=deployment.source.file,
        line=deployment.source.line(("model", "architecture")),
        where="model.architecture",
    )


def resolve_device(deployment: Loaded[Deployment]) -> str:
    """`auto` -> `cuda` where there is one, else `cpu`."""
    device = deployment.value.runtime.device
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise FeatureUnsupported(
            "runtime.device is cuda, but torch sees no CUDA device",
            file=deployment.source.file,
            line=deployment.source.line(("runtime", "device")),
            where="runtime.device",
            expected="a CUDA build of torch and a GPU",
            found=f"torch {torch.__version__}",
            fix="set runtime.device: cpu or auto",
        )
    return device
