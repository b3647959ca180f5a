"""Deployment: what a user writes to serve adapters over a model.

Paths: `model.path` and `adapters[].path` are relative to the YAML's folder; there `~` and `${VAR}`
are expanded, and nowhere else.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from lora_compile.schemas.base import StrictModel
from lora_compile.schemas.deployment_checks import deployment_faults
from lora_compile.schemas.paths import resolve_path
from lora_compile.schemas.yaml_file import Loaded, load_yaml

__all__ = ["Deployment", "load_deployment", "resolve_path"]

Text = Annotated[str, Field(min_length=1)]
AdapterName = Annotated[str, Field(pattern=r"^\S+$", title="a name without spaces")]
Feature = Literal["dora", "bias", "head", "embedding"]
AtLeastOne = Annotated[int, Field(ge=1)]


class ModelSource(StrictModel):
    """Where the base model is, and how it is built."""

    path: Text
    """A checkpoint directory or a GGUF file, relative to this file's folder. `~` and `${VAR}` are
    expanded."""
    weights: Literal["checkpoint", "random", "none"] = "checkpoint"
    """`checkpoint`: those in `path`. `random`: `path` holds a config.json (and a tokenizer) alone;
    weights are drawn once and kept in a cache, for trying things out. `none`: `path` holds a
    config.json alone and nothing is ever loaded: for `check` and `explain`."""
    seed: Annotated[int, Field(ge=0)] = 0
    """With `weights: random`, which ones."""
    package: Text | None = None
    """An installed Python package; `path` is then a file inside it."""
    architecture: Text = "auto"
    """`auto` (by the model type), the name of a shipped architecture, or a YAML file of your own,
    relative to this file's folder."""
    flags: dict[str, bool] = Field(default_factory=dict)
    """Choices of the architecture, e.g. `fuse_qkv_a: false`; those left out keep their defaults."""
    dtype: Literal["float32", "float16", "bfloat16"]
    """Type of activations, unquantised weights and adapters."""


class Quantization(StrictModel):
    """How the base model's weights are kept."""

    scheme: Text
    """`auto`: as the checkpoint says. Else a scheme to quantise to when loading."""
    ignore: tuple[Text, ...] = ()
    """Modules to leave unquantised when quantising at load: full paths or last components."""


class AdapterSource(StrictModel):
    """One adapter to load at the start."""

    name: AdapterName
    """The name by which requests ask for it."""
    path: Text
    """The adapter's directory, relative to this file's folder. `~` and `${VAR}` are expanded."""
    scale: float = 1.0
    """Factor on the whole delta, beside the adapter's own alpha / rank."""
    pinned: bool = False
    """Whether it keeps its slot when others need room."""


class Runtime(StrictModel):
    """What the compiled graph is built for. Changing it means compiling anew."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to run; `auto` takes CUDA where there is a device."""
    max_adapters: AtLeastOne
    """Adapters that can be loaded at once."""
    max_rank: Annotated[int, Field(ge=1, le=256)]
    """The highest rank an adapter may have."""
    max_rows: AtLeastOne = 16
    """Most rows of a batch, beams counted."""
    max_tokens: AtLeastOne = 4096
    """Most tokens of one forward, over all rows."""
    packed: bool = False
    """Whether rows come packed into one sequence, with an adapter for each token."""
    compile: Literal["whole", "layers", "off"] = "whole"
    """`whole`: the model as one graph. `layers`: each layer by itself, for forwards without a
    cache. `off`: eager."""
    mode: Literal["default", "reduce-overhead"] = "default"
    """`reduce-overhead` replays CUDA graphs."""
    sites: Literal["all", "touched"] = "all"
    """Which sites get adapter slots: all, or those that the adapters declared here touch."""
    features: Literal["auto"] | tuple[Feature, ...] = "auto"
    """What adapters may carry beside A and B; `auto`: what those declared here carry."""
    when_full: Literal["error", "wait"] = "error"
    """What to do when no slot is free for an adapter."""
    wait_seconds: Annotated[float, Field(gt=0)] = 30.0
    """With `when_full: wait`, how long to wait before it is an error."""


class GenerationRow(StrictModel):
    """One prompt."""

    prompt: Text
    """The user's text."""
    adapter: str | None = None
    """Name of a declared adapter; null is the base model."""
    scale: float = 1.0
    """Factor on this row's delta."""


class Generation(StrictModel):
    """The batch that `lora-compile run` generates."""

    rows: Annotated[tuple[GenerationRow, ...], Field(min_length=1)]
    """The prompts, one per row."""
    system: str | None = None
    """A system message for every row; needs `chat: true`."""
    chat: bool = True
    """Whether prompts go through the tokenizer's chat template."""
    max_new_tokens: AtLeastOne
    """Tokens to generate for each row."""
    num_beams: AtLeastOne = 1
    """Beams of each row; 1 is greedy."""
    cache: Literal["static", "dynamic"] = "static"
    """The key/value cache: of fixed size, or growing."""


class VerifyRow(StrictModel):
    """A text whose log-probabilities are compared, for the base model and for every adapter."""

    prompt: Text
    """The user's text; through the chat template as under `generation`."""
    completion: Text | None = None
    """What follows it; null: what the reference continues with, with each adapter its own."""


class VerifyLimits(StrictModel):
    """Limits of `lora-compile verify` other than the defaults. A looser one is printed, and marks
    the result."""

    site_output: Annotated[float, Field(gt=0)] | None = None
    """Most relative error of a site's output (default 4e-3)."""
    site_delta: Annotated[float, Field(gt=0)] | None = None
    """Most relative error of a site's delta (default 1e-2)."""
    float32: Annotated[float, Field(gt=0)] | None = None
    """End to end in float32: most of 0.5 mean (Δ log p)² (default 1e-5)."""
    float32_top1: Annotated[float, Field(gt=0, le=1)] | None = None
    """End to end in float32: least share of equal top tokens (default 0.999)."""
    ratio_16bit: Annotated[float, Field(gt=0)] | None = None
    """End to end in 16 bit: most of an adapter's 0.5 mean (Δ log p)² over that of base rows, where
    plain transformers' own such ratio is above 1 as a multiple of it (default 1.5)."""


class Verify(StrictModel):
    """What `lora-compile verify` compares with the reference."""

    rows: tuple[VerifyRow, ...] = ()
    """The texts; empty: the prompts under `generation`, each once."""
    decode_steps: AtLeastOne = 32
    """Decode steps that are compared; completions are cut to one token more, since the first comes
    from the prompt."""
    limits: VerifyLimits = VerifyLimits()
    """Limits other than the defaults."""


class Deployment(StrictModel):
    """A model, its adapters, and how they run together."""

    schema_version: Literal[1]
    """Version of this format."""
    model: ModelSource
    """The base model."""
    quantization: Quantization
    """How its weights are kept."""
    adapters: tuple[AdapterSource, ...] = ()
    """Adapters to load at the start. More can be loaded while running."""
    runtime: Runtime
    """What the compiled graph is built for."""
    generation: Generation | None = None
    """What `lora-compile run` generates."""
    verify: Verify = Verify()
    """What `lora-compile verify` compares."""


def load_deployment(path: str | Path) -> Loaded[Deployment]:
    """Read a deployment.

    Raises:
        Every fault of the file at once: those of `load_yaml`, and those of `deployment_faults`.
    """
    return load_yaml(path, Deployment, deployment_faults)
