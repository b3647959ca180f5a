"""What a deployment names, found on this machine: model files, schema, tokenizer, device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lora_compile.checkpoints.gguf import ensure_converted, find_converted, resolve_package_file
from lora_compile.checkpoints.random_weights import ensure_random, find_random
from lora_compile.errors import (
    CheckpointInvalid,
    FaultList,
    FeatureUnsupported,
    FileMissing,
    InvalidValue,
)
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


@dataclass(frozen=True)
class ModelFiles:
    """Where a model's config and weights are."""

    path: Path
    """The checkpoint directory, or the folder of the config while there is no checkpoint."""
    gguf_file: str | None = None
    """The GGUF file in `path` that holds the config, while it is not converted."""
    pending: str | None = None
    """Why there is no checkpoint yet; None where there is one."""


def model_files(deployment: Loaded[Deployment], make: bool, progress: Progress) -> ModelFiles:
    """Find the model; convert or draw what is not in the cache yet if `make` is true."""
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
    dtype = DTYPES[model.dtype]
    if model.weights == "none":
        if make:
            raise InvalidValue(
                "model.weights is none, so there are no weights to load",
                file=deployment.source.file,
                line=deployment.source.line(("model", "weights")),
                where="model.weights",
                expected="checkpoint or random",
                found="none",
                fix="use `check` and `explain`, or point model.path to a checkpoint and remove "
                "`weights`",
            )
        return ModelFiles(path, pending="model.weights is none: there are no tensors to check")
    if model.weights == "random":
        drawn = find_random(path, seed=model.seed, dtype=dtype)
        if drawn is None and make:
            progress("drawing random weights (once)")
            drawn = ensure_random(path, seed=model.seed, dtype=dtype)
        return ModelFiles(path, pending=NOT_DRAWN) if drawn is None else ModelFiles(drawn)
    if path.suffix != ".gguf":
        return ModelFiles(path)
    converted = find_converted(path, dtype=dtype, cache_dir=None)
    if converted is None and make:
        converted = ensure_converted(path, dtype=dtype, cache_dir=None, progress=progress)
    if converted is not None:
        return ModelFiles(converted)
    why = f"{path.name} is not converted yet: its tensors are checked when it is loaded"
    return ModelFiles(path.parent, path.name, why)


NOT_DRAWN = "the random weights are not drawn yet; that is done when they are loaded"


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


def tokenizer_of(deployment: Loaded[Deployment], folder: Path) -> Any:
    """The tokenizer in the model's folder, if the deployment has texts; None otherwise.

    Raises:
        CheckpointInvalid: the folder has none, or it lacks the chat template that is asked for.
    """
    generation, rows = deployment.value.generation, deployment.value.verify.rows
    if generation is None and not rows:
        return None
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointInvalid(
            "the model's folder has no tokenizer that transformers can read, but the deployment "
            "has texts",
            file=folder,
            expected="tokenizer.json and tokenizer_config.json, or what stands for them",
            found=(str(error).splitlines() or [type(error).__name__])[0],
            fix=f"copy the tokenizer's files into {folder}, or remove `generation` and "
            "`verify.rows`",
        ) from error
    if generation is not None and generation.chat and tokenizer.chat_template is None:
        raise CheckpointInvalid(
            "the tokenizer has no chat template",
            file=folder,
            expected="a chat template, since generation.chat is true",
            found="none",
            fix="set generation.chat: false, or add the model's chat_template.jinja",
        )
    return tokenizer
