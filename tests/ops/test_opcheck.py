"""torch.library.opcheck for every op: schema, fake kernel, tracing with dynamic shapes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lora_compile.ops.forms import KERNEL_OPS
from lora_compile.ops.sample import (
    SampleSite,
    base_op,
    call,
    quantise_call,
    quantised,
    sample_quant,
    sample_site,
    scaled_arguments,
)
from tests.ops.conftest import RANKS, RowMap, kernel_of
from tests.ops.test_markers import expert_adapter, experts_case

COLUMNS = 320
OPS_OF = ["none", "fp8_block", "fp8_tensor_static", "int8_channel"]
"""Schemes that run every op between them."""


def make(scheme: str, seed: int) -> SampleSite:
    generator = torch.Generator().manual_seed(seed)
    return sample_site(
        generator, [192, 64, 33], COLUMNS, RANKS, scheme=scheme, dtype=torch.bfloat16, bias=True
    )


def opcheck_arguments(site: SampleSite, x: Tensor, rows: RowMap) -> dict[str, tuple[object, ...]]:
    """Arguments for every op that the site's scheme runs, without the `kernel`."""
    adapter = (site.lora_a, site.lora_scale, site.lora_rank, rows.slot, rows.scale, False)
    maps = [rows.slot, rows.scale, rows.slot, rows.scale]
    h = torch.randn(x[..., 0].numel(), 3, 64)
    delta = (h, site.lora_b, site.lora_rank, rows.slot)
    quant = site.quant.model_dump_json()
    site_tensors = (x, site.weight, site.aux, site.bias, site.adapter)
    found: dict[str, tuple[object, ...]] = {"site_linear": (*site_tensors, maps, 1, quant, False)}
    if site.aux:
        name, *quantise = quantise_call(site, x)
        scaled = scaled_arguments(site, quantised(site, x, kernel_of("torch")))
        return found | {
            name: tuple(quantise),
            base_op(site): (*scaled, torch.bfloat16),
            f"{base_op(site)}_lora": (*scaled, *delta, False, torch.bfloat16),
        }
    ids, table = torch.randint(0, 50, x.shape[:-1]), torch.randn(50, 8)
    embedding = [torch.randn(7, 64, 50), torch.randn(7, 8, 64), site.lora_scale[:, :1]]
    return found | {
        "lora_shrink": (x, *adapter),
        "linear": (x, site.weight, site.bias),
        "linear_lora": (x, site.weight, site.bias, *delta, site.part_rows, False),
        "site_embedding": (ids, table, [*embedding, site.lora_rank], maps, False),
    }


MARKERS = ("site_linear", "site_embedding")


def opcheck(op: object, arguments: tuple[object, ...]) -> None:
    tests = ["test_schema", "test_autograd_registration", "test_faketensor"]
    tests.append("test_aot_dispatch_dynamic")
    if any(isinstance(a, Tensor) and a.dtype == torch.float8_e4m3fn for a in arguments):
        tests.remove("test_schema")  # It compares inputs with an op that ATen lacks for FP8.
    torch.library.opcheck(op, arguments, test_utils=tests)  # type: ignore[arg-type]


@pytest.mark.parametrize("scheme", OPS_OF)
def test_opcheck(scheme: str, seed: int) -> None:
    site = make(scheme, seed)
    generator = torch.Generator().manual_seed(seed)
    # The body for one token per sequence differs in the low-rank path, which all schemes share.
    for leading in ((3, 4), (2, 1)) if scheme == "none" else ((3, 4),):
        rows = RowMap.of([5, -1, 0][: leading[0]], generator)
        x = torch.randn(*leading, COLUMNS, generator=generator).bfloat16()
        for name, arguments in opcheck_arguments(site, x, rows).items():
            if name in MARKERS:
                opcheck(getattr(torch.ops.lora_compile, name), arguments)
                continue
            opcheck(getattr(torch.ops.lora_compile, name), (*arguments, kernel_of("torch")))
            if name != "linear":
                opcheck(getattr(torch.ops.lora_compile, f"aten_{name}"), arguments)


def test_every_lowered_op_is_checked(seed: int) -> None:
    x, rows = torch.randn(2, 1, COLUMNS).bfloat16(), RowMap.of([5, -1], torch.Generator())
    found = {name for scheme in OPS_OF for name in opcheck_arguments(make(scheme, seed), x, rows)}
    lowered = {str(op).removeprefix("lora_compile.") for op in KERNEL_OPS}
    assert found == lowered | set(MARKERS)


@pytest.mark.parametrize("scheme", OPS_OF)
def test_inputs_are_left_alone(scheme: str, seed: int) -> None:
    """What opcheck's schema test would say of the FP8 ops."""
    site = make(scheme, seed)
    generator = torch.Generator().manual_seed(seed)
    rows = RowMap.of([5, -1, 0], generator)
    x = torch.randn(3, 4, COLUMNS, generator=generator).bfloat16()
    for name, arguments in opcheck_arguments(site, x, rows).items():
        tensors = [value for value in arguments if isinstance(value, Tensor)]
        before = [value.view(torch.uint8).clone() for value in tensors]
        if name in MARKERS:
            getattr(torch.ops.lora_compile, name)(*arguments)
        else:
            for kind in ("torch", "aten"):
                call(name, *arguments, kernel=kernel_of(kind))
        for value, bytes_before in zip(tensors, before, strict=True):
            assert torch.equal(value.view(torch.uint8), bytes_before), name


def test_opcheck_experts(seed: int) -> None:
    experts, x, ids, weights = experts_case(seed)
    rows = RowMap.of([0, -1] * 5, torch.Generator().manual_seed(seed))
    maps = [rows.slot, rows.scale, rows.slot, rows.scale]
    quant13 = sample_quant("none", [24, 24], 32, torch.float32, False, 128).model_dump_json()
    quant2 = sample_quant("none", [32], 24, torch.float32, False, 128).model_dump_json()
    w13, w2 = experts.gate_up_proj.detach(), experts.down_proj.detach()
    rest = (expert_adapter(2, [5, 16]), maps, quant13, quant2, "halves", "silu", False)
    op = torch.ops.lora_compile.site_experts
    torch.library.opcheck(op, (x, ids, weights, w13, [], None, w2, [], None, *rest))
