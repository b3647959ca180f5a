"""ArchitectureSchema: where a model takes low-rank deltas, declared in YAML.

One file describes every model that has the same module tree. The planner lays it over the tree and
refuses what does not fit, so a wrong file cannot go unnoticed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from lora_compile.errors import ArchitectureUnknown
from lora_compile.schemas.architecture_checks import architecture_faults
from lora_compile.schemas.architecture_rules import CheckpointRules, Flag, KeptRule, ModulePath
from lora_compile.schemas.base import StrictModel
from lora_compile.schemas.expressions import ExpressionText
from lora_compile.schemas.skeleton import skeleton
from lora_compile.schemas.yaml_faults import nearest
from lora_compile.schemas.yaml_file import Loaded, load_yaml, missing_file

SHIPPED = Path(__file__).parent / "architectures"

Name = Annotated[
    str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", title="a name of letters, digits and _")
]
ParentPath = Annotated[
    str,
    Field(
        pattern=r"^([A-Za-z0-9_{}]+(\.[A-Za-z0-9_{}]+)*)?$",
        title='a module path such as `model.layers.{layer}.mlp`, or "" for the model itself',
    ),
]


class Layers(StrictModel):
    """Where the decoder layers are and how many there are."""

    at: ModulePath
    """Path of the list of decoder layers, e.g. `model.layers`."""
    count: ExpressionText
    """How many layers the model has."""


class LinearPart(StrictModel):
    """One projection of a linear site."""

    name: Name
    """Name of the module below the site's `at`, e.g. `q_proj`."""
    out_features: ExpressionText
    """Rows of the projection's weight."""


class LinearSite(StrictModel):
    """A projection, or several projections of the same input that can run as one GEMM."""

    kind: Literal["linear"]
    """`linear`: y = W x."""
    name: Name
    """The site's own name, unique at its `at`; that of its only part where there is but one."""
    at: ParentPath
    """The module that holds the parts. `{layer}` stands for each layer's index."""
    in_features: ExpressionText
    """Columns of every part's weight."""
    parts: Annotated[tuple[LinearPart, ...], Field(min_length=1)]
    """The projections, in the order of their rows in the fused weight."""
    fuse: ExpressionText = "False"
    """Whether the parts share one weight and run as one GEMM: true, false, or an expression such
    as the name of a flag. Where it is false each part is a projection by itself."""
    quantise_at_load: bool = True
    """Whether a scheme that quantises at load may quantise this site."""
    tied_to: ModulePath | None = None
    """The embedding whose weight this site shares when `tied_if` holds."""
    tied_if: ExpressionText | None = None
    """When the weight is shared, e.g. `tie_word_embeddings`."""
    when: ExpressionText | None = None
    """The site exists only where this is true; absent means always. May use `layer`, the index of
    the layer, where `at` has `{layer}`."""


class EmbeddingSite(StrictModel):
    """A lookup table of token vectors."""

    kind: Literal["embedding"]
    """`embedding`: a table with one row per token id."""
    name: Name
    """Name of the module below `at`, e.g. `embed_tokens`."""
    at: ParentPath
    """The module that holds the table."""
    num_embeddings: ExpressionText
    """Rows of the table."""
    embedding_dim: ExpressionText
    """Columns of the table."""
    quantise_at_load: bool = False
    """Whether a scheme that quantises at load may quantise this table."""
    when: ExpressionText | None = None
    """The site exists only where this is true; absent means always. May use `layer`, the index of
    the layer, where `at` has `{layer}`."""


Site = Annotated[LinearSite | EmbeddingSite, Field(discriminator="kind")]


class ArchitectureSchema(StrictModel):
    """Every place of one family of models where a low-rank delta may act."""

    schema_version: Literal[1]
    """Version of this format."""
    name: Name
    """Name of the architecture; that of the file for shipped ones."""
    model_types: Annotated[tuple[str, ...], Field(min_length=1)]
    """The `model_type` values of `config.json` that this file serves."""
    layers: Layers
    """The decoder layers."""
    flags: dict[Name, Flag] = Field(default_factory=dict)
    """Choices that a deployment may make; expressions may use them by name."""
    let: dict[Name, ExpressionText] = Field(default_factory=dict)
    """Values derived from the config and the flags, in order; later expressions may use them."""
    sites: Annotated[tuple[Site, ...], Field(min_length=1)]
    """The sites, in the order in which a forward runs them."""
    kept: tuple[KeptRule, ...] = ()
    """Modules that stay as transformers runs them, which neither adapters nor quantised
    checkpoints may change."""
    key_prefixes: Annotated[tuple[str, ...], Field(min_length=1)]
    """What adapter files may put before a module path; "" where nothing is allowed too."""
    checkpoint: CheckpointRules = CheckpointRules()
    """How tensors of the checkpoint are treated."""


@lru_cache
def all_architectures() -> tuple[Loaded[ArchitectureSchema], ...]:
    """Every architecture that is shipped, by name."""
    paths = sorted(SHIPPED.glob("*.yaml"))
    return tuple(load_yaml(path, ArchitectureSchema, architecture_faults) for path in paths)


def shipped_names() -> tuple[str, ...]:
    """Names of the shipped architectures, without reading them."""
    return tuple(sorted(path.stem for path in SHIPPED.glob("*.yaml")))


def locate_architecture(
    name_or_path: str,
    *,
    folder: Path | None = None,
    file: object = None,
    line: int | None = None,
    where: str | None = None,
) -> Path:
    """The file of a shipped name, or of a path to a YAML file.

    Args:
        folder: what a relative path is relative to; the working directory when None.
        file, line, where: the place that names it, for errors.

    Raises:
        ArchitectureUnknown: neither a shipped name nor a `.yaml` path.
        FileMissing: a path to a file that is not there.
    """
    place: dict[str, Any] = {"file": file, "line": line, "where": where}
    if name_or_path in shipped_names():
        return SHIPPED / f"{name_or_path}.yaml"
    if Path(name_or_path).suffix not in (".yaml", ".yml"):
        near = nearest(name_or_path, shipped_names())
        raise ArchitectureUnknown(
            f"no architecture is called `{name_or_path}`",
            **place,
            expected=f"auto, {', '.join(shipped_names())}, or the path of a .yaml file",
            found=name_or_path,
            fix=f"did you mean `{near}`?" if near else "use one of these names",
        )
    path = (folder or Path()) / name_or_path
    if not path.is_file():
        raise missing_file(path, **place)
    return path


def load_architecture(
    name_or_path: str | Path,
    *,
    folder: Path | None = None,
    file: object = None,
    line: int | None = None,
    where: str | None = None,
) -> Loaded[ArchitectureSchema]:
    """Read a shipped architecture by name, or one's own file by path.

    Raises:
        ArchitectureUnknown, FileMissing: see `locate_architecture`.
        The errors of `load_yaml`, and those of `architecture_faults`.
    """
    path = locate_architecture(str(name_or_path), folder=folder, file=file, line=line, where=where)
    return load_yaml(path, ArchitectureSchema, architecture_faults)


def find_architecture(model_type: str, *, file: object = None) -> Loaded[ArchitectureSchema]:
    """The shipped architecture that serves `model_type`.

    Args:
        model_type: that of the checkpoint's `config.json`.
        file: the config's path, for the error.

    Raises:
        ArchitectureUnknown: none does. It lists those that there are and holds a file to start
            from.
    """
    for loaded in all_architectures():
        if model_type in loaded.value.model_types:
            return loaded
    raise ArchitectureUnknown(
        f"no architecture schema serves model type `{model_type}`",
        file=file,
        expected=f"one of {', '.join(_served(all_architectures()))}",
        found=f"model_type: {model_type}",
        fix=(
            f"write one: save the text below as `{file_name(model_type)}`, correct what its "
            f"comments ask for, check it with `lora-compile schema lint`, and set "
            f"`model.architecture: {file_name(model_type)}` in the deployment\n\n"
            + skeleton(model_type)
        ),
    )


def file_name(model_type: str) -> str:
    """A file name for the schema of `model_type`."""
    return re.sub(r"[^A-Za-z0-9_]", "_", model_type) + ".yaml"


def _served(architectures: Iterable[Loaded[ArchitectureSchema]]) -> list[str]:
    return [
        f"{model_type} ({loaded.value.name})"
        for loaded in architectures
        for model_type in loaded.value.model_types
    ]
