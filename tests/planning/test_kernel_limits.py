"""What the Triton kernels cannot run is known when a model is planned, by site and line."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import lora_compile as lc
from lora_compile import api
from lora_compile.checkpoints.codes import encode
from lora_compile.errors import FeatureUnsupported, LoraCompileError
from lora_compile.ops.kernels.launch import HAS_TRITON, BlockScales, RowScales, launch_gemm
from lora_compile.planning.kernel_limits import kernel_faults
from lora_compile.planning.plan import Plan
from lora_compile.planning.prepare import prepare
from lora_compile.schemas.architecture import SHIPPED
from lora_compile.schemas.quant_scheme import find_scheme
from tests.adapters.plans import plan_of, site
from tests.cli.conftest import Site
from tests.cli.conftest import site as deployment  # noqa: F401  (a fixture)

MANY = """\
schema_version: 1
name: many
model_types: [many]
layers: {at: layers, count: depth}
sites:
  - kind: linear
    name: fused
    at: layers.{layer}
    in_features: width
    fuse: true
    parts:
      - {name: a, out_features: width}
      - {name: b, out_features: width}
      - {name: c, out_features: width}
      - {name: d, out_features: width}
      - {name: e, out_features: width}
key_prefixes: [""]
"""


Scales = tuple[int, int] | str | None
"""What a site's scheme is: blocks, the name of a scheme with a scale per row, or unquantised."""


def plan(parts: int, scales: Scales, device: str = "cuda", lora: bool = True) -> Plan:
    """One site of `parts` projections."""
    widths = [(f"p{index}", 40) for index in range(parts)]
    made = site("fused", 256, widths, parent="layers.0", layer=0, lora=lora)
    if scales is not None:
        scheme = find_scheme(scales if isinstance(scales, str) else "fp8_block")
        static = scheme.activation.handling == "static"
        quant = scheme.info(
            weight_dtype=scheme.activation.dtype or "float32",
            block_shape=None if isinstance(scales, str) else scales,
            in_features=256,
            part_widths=widths,
            input_scales=[float(part + 1) for part in range(parts)] if static else None,
            bias=False,
        )
        made = made.model_copy(update={"quant": quant})
    return plan_of([made]).model_copy(update={"device": device})


def launch(parts: int, scales: Scales) -> None:
    """What a compile for the GPU does with the same site: it refuses before a kernel runs."""
    rows = [40 * index for index in range(parts + 1)]
    weight, x = torch.zeros(rows[-1], 256), torch.zeros(1, 256)
    found: BlockScales | RowScales | None = None
    if isinstance(scales, str):
        weight, x = weight.to(torch.int8), x.unsqueeze(0).to(torch.int8)
        found = RowScales(torch.ones(1, 1), torch.ones(rows[-1]), [0] * parts)
    elif scales is not None:
        codes, scale = encode(weight, torch.float8_e4m3fn, "block", scales)
        weight, x = codes, x.to(codes.dtype)
        found = BlockScales(torch.ones(1, -(-256 // scales[1])), scale, list(scales), scales[1])
    launch_gemm(x, weight, None, rows, torch.float32, "triton", scales=found)


@pytest.mark.parametrize(
    "scales", [None, (128, 128), (1, 32), (128, 96), (7, 64), "int8_channel", "fp8_tensor_static"]
)
@pytest.mark.parametrize("parts", [1, 4])
def test_within_the_limits_there_is_no_fault(parts: int, scales: Scales) -> None:
    assert kernel_faults(plan(parts, scales)) == []


@pytest.mark.parametrize(
    ("parts", "scales", "facts"),
    [
        (5, None, ["5 (p0, p1, p2, p3, p4)", "at most 4", "`fuse: false` for site fused"]),
        (5, (128, 128), ["5 (p0, p1, p2, p3, p4)", "at most 4", "`fuse: false` for site fused"]),
        (5, "int8_channel", ["5 (p0, p1, p2, p3, p4)", "at most 4"]),
        (5, "fp8_tensor_static", ["5 (p0, p1, p2, p3, p4)", "at most 4"]),
        (1, (128, 16), ["blocks of 16 columns, groups of 16", ">= 32"]),
        (2, (128, 48), ["blocks of 48 columns, groups of 48", ">= 32"]),  # 48 = 3 x 16
    ],
)
def test_beyond_a_limit_planning_and_launching_both_refuse(
    parts: int, scales: Scales, facts: list[str]
) -> None:
    (fault,) = kernel_faults(plan(parts, scales))
    for fact in ("by hand:1", "layers.0.fused", "cuda", *facts):
        assert fact in str(fault), (fact, str(fault))
    assert kernel_faults(plan(parts, scales, "cuda:1"))
    assert kernel_faults(plan(parts, scales, "cpu")) == []
    if HAS_TRITON:
        with pytest.raises(FeatureUnsupported):
            launch(parts, scales)


def test_only_a_gemm_that_knows_its_parts_is_limited() -> None:
    assert kernel_faults(plan(5, None, lora=False)) == []
    assert kernel_faults(plan(5, (128, 128), lora=False))
    assert kernel_faults(plan(5, "fp8_channel", lora=False))
    both = [str(fault) for fault in kernel_faults(plan(5, (128, 16)))]
    assert len(both) == 2, both


class Many(nn.Module):
    """Two layers with five projections of the same input."""

    def __init__(self) -> None:
        super().__init__()
        names = "abcde"
        self.layers = nn.ModuleList(
            nn.ModuleDict({name: nn.Linear(32, 32, bias=False) for name in names}) for _ in "12"
        )
        self.config = SimpleNamespace(model_type="many", width=32, depth=2)


def test_wrap_on_a_gpu_refuses_and_leaves_the_module_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "many.yaml"
    file.write_text(MANY)
    module = Many()
    kinds = [type(child) for child in module.modules()]
    monkeypatch.setattr(api, "_single_device", lambda module: torch.device("cuda:0"))
    with pytest.raises(FeatureUnsupported, match="fuses more projections") as caught:
        lc.wrap(module, architecture=file)
    assert (caught.value.file, caught.value.line) == (str(file), 6)
    assert caught.value.where == "layers.0.fused and 1 more like it"
    assert [type(child) for child in module.modules()] == kinds

    file.write_text(MANY.replace("fuse: true", "fuse: false"))  # what the fix says
    faults: list[Any] = []
    monkeypatch.setattr(api, "_storages", lambda plan, *_: faults.append(kernel_faults(plan)) or {})
    monkeypatch.setattr(api, "_assemble", lambda *_, **__: None)
    lc.wrap(module, architecture=file)
    assert faults == [[]]


@pytest.mark.parametrize("sites", ["all", "touched"])
def test_check_for_a_gpu_names_the_sites_whose_scales_cannot_be_tiled(
    sites: str,
    deployment: Site,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    deployment.quantise((128, 16))

    def on(device: str) -> list[LoraCompileError]:
        def change(data: dict[str, Any]) -> None:
            data["quantization"].update(scheme="auto")
            data["runtime"].update(device=device, sites=sites)

        deployment.write(change)
        try:
            prepare(deployment.file, make=False, progress=lambda text: None)
        except LoraCompileError as error:
            return list(getattr(error, "faults", (error,)))
        return []

    assert on("cpu") == []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    faults = on("cuda")
    roles = ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]
    lines = (SHIPPED / "llama.yaml").read_text().splitlines()
    assert len(faults) == len(roles)
    for fault, role in zip(faults, roles, strict=True):
        assert isinstance(fault, FeatureUnsupported)
        assert fault.where is not None
        assert fault.where.endswith(f".{role} and 1 more like it")
        assert fault.line is not None
        assert f"name: {role}" in lines[fault.line]  # the line after `- kind: linear`
        assert fault.file is not None
        assert fault.file.endswith("llama.yaml")
