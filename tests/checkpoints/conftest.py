"""Sites built by hand, and small checkpoints to damage."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from lora_compile.checkpoints.index import CheckpointIndex
from lora_compile.checkpoints.source import TensorHeader
from lora_compile.checkpoints.survey import ModuleSpec, Survey, survey
from lora_compile.planning.plan import PartPlan, SitePlan, SourceRef
from lora_compile.schemas.quant_detect import Detected, detect_scheme
from lora_compile.schemas.quant_info import ActivationInfo, PartRows, QuantInfo, ScaleInfo

FIXTURES = Path(__file__).parents[1] / "fixtures"
MLA = "model.layers.0.self_attn"


@dataclass
class Tensors:
    """A weight source over a dict, so that tests need no files."""

    data: dict[str, torch.Tensor]
    name: str = "<tensors>"
    dtypes: Mapping[torch.dtype, str] = field(
        default_factory=lambda: {
            torch.float32: "F32",
            torch.bfloat16: "BF16",
            torch.float16: "F16",
            torch.float8_e4m3fn: "F8_E4M3",
            torch.int8: "I8",
        }
    )

    @property
    def headers(self) -> dict[str, TensorHeader]:
        return {
            key: TensorHeader(self.name, self.dtypes[tensor.dtype], tuple(tensor.shape))
            for key, tensor in self.data.items()
        }

    def tensor(self, key: str) -> torch.Tensor:
        return self.data[key]


def _site(
    prefix: str,
    parts: list[tuple[str, int]],
    in_features: int,
    *,
    scheme: str,
    block_shape: tuple[int, int] | None = None,
    dtype: str = "bfloat16",
    bias: bool = False,
    tied_to: str | None = None,
) -> SitePlan:
    rows: list[PartRows] = []
    row = scale_row = 0
    for name, width in parts:
        blocks = 0 if block_shape is None else -(-width // block_shape[0])
        scale_rows = None if block_shape is None else (scale_row, scale_row + blocks)
        rows.append(
            PartRows(name=name, rows=(row, row + width), scale_rows=scale_rows, input_scale=None)
        )
        row, scale_row = row + width, scale_row + blocks
    blocked = block_shape is not None
    quant = QuantInfo(
        scheme=scheme,
        weight_dtype="float8_e4m3fn" if blocked else dtype,
        packing="none",
        scale=ScaleInfo(
            granularity="block" if blocked else "none",
            dtype="float32" if blocked else None,
            block_shape=block_shape,
        ),
        zero_point="none",
        activation=ActivationInfo(
            handling="none", granularity=None, group=None, dtype=None, min_scale=None
        ),
        input_transforms=(),
        bias=bias,
        in_features=in_features,
        parts=tuple(rows),
    )
    dot = prefix and prefix + "."
    return SitePlan(
        name=f"{dot}site",
        kind="linear",
        role="site",
        layer=None,
        in_features=in_features,
        out_features=row,
        parts=tuple(
            PartPlan(name=name, module=f"{dot}{name}", out_features=width) for name, width in parts
        ),
        quant=quant,
        lora=True,
        tied_to=tied_to,
        source=SourceRef(file="test.yaml", line=1),
        why="built by hand",
    )


@pytest.fixture(scope="session")
def make_site() -> Callable[..., SitePlan]:
    return _site


@pytest.fixture(scope="session")
def tensors() -> type[Tensors]:
    return Tensors


@pytest.fixture(scope="session")
def scheme() -> Callable[[str], Detected]:
    """What a config of that scheme resolves to; block FP8 in blocks of 128 x 128."""

    def make(name: str, block_shape: tuple[int, int] = (128, 128)) -> Detected:
        config: dict[str, object] = {"quant_method": "fp8", "weight_block_size": [*block_shape]}
        found = detect_scheme(None if name == "none" else config)
        assert found.scheme.name == name
        return found

    return make


@pytest.fixture
def copied(tmp_path: Path) -> Callable[..., Path]:
    """A fixture's checkpoint copied, with its tensors and config edited in place."""

    def make(
        name: str,
        edit: Callable[[dict[str, torch.Tensor]], object] | None = None,
        edit_config: Callable[[dict], object] | None = None,
    ) -> Path:
        target = tmp_path / name
        target.mkdir()
        for file in ("config.json", "model.safetensors"):
            shutil.copyfile(FIXTURES / name / file, target / file)
        if edit is not None:
            data = load_file(target / "model.safetensors")
            edit(data)
            save_file(data, target / "model.safetensors", metadata={"format": "pt"})
        if edit_config is not None:
            config = json.loads((target / "config.json").read_text())
            edit_config(config)
            (target / "config.json").write_text(json.dumps(config))
        return target

    return make


def _specs(directory: Path) -> list[ModuleSpec]:
    """Projections by the undamaged fixture's own 2-D weights."""
    with safe_open(directory / "model.safetensors", "pt") as file:
        shapes = {key: file.get_slice(key).get_shape() for key in file.keys()}  # noqa: SIM118
    specs = [
        ModuleSpec(key.removesuffix(".weight"), *shape, has_bias=False, tied_to=None)
        for key, shape in shapes.items()
        if len(shape) == 2 and key.endswith(".weight") and "embed" not in key
    ]
    if "lm_head.weight" not in shapes:
        rows, columns = shapes["model.embed_tokens.weight"]
        specs.append(ModuleSpec("lm_head", rows, columns, False, "model.embed_tokens"))
    return specs


@pytest.fixture
def survey_fixture() -> Callable[..., tuple[CheckpointIndex, Survey]]:
    """Survey a (possibly damaged) copy with the projections and norms of the fixture itself."""

    def make(
        name: str, path: Path | None = None, ignored: Mapping[str, str] | None = None
    ) -> tuple[CheckpointIndex, Survey]:
        index = CheckpointIndex.open(FIXTURES / name if path is None else path)
        specs = _specs(FIXTURES / name)
        whole = CheckpointIndex.open(FIXTURES / name)
        other = {
            key: header.shape
            for key, header in whole.headers.items()
            if len(header.shape) == 1 or "embed" in key
        }
        found = survey(
            index,
            specs,
            detect_scheme(index.quantization_config, file=index.quantization_source),
            quantization_config=index.quantization_config,
            other=other,
            ignored=ignored or {},
        )
        return index, found

    return make


@pytest.fixture
def fixtures() -> Path:
    return FIXTURES
