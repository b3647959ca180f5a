"""The ops under torch.compile: one graph, one compile for every batch size, the same numbers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lora_compile.ops.sample import SampleSite, run_base, run_lowered, sample_site
from tests.ops.conftest import RANKS, SCHEMES, RowMap, bound, kernel_of, row_errors
from tests.ops.oracle import site_output

SLOTS = [5, -1, 0, 4, -1, 2, 6, 1, 3]
BATCHES = (3, 9, 2, 7)
COLUMNS = 320
"""Two and a half blocks: the ragged end is where a compiler may go wrong unseen."""


@pytest.fixture(autouse=True)
def fresh_dynamo() -> None:
    torch._dynamo.reset()


def make(scheme: str, seed: int, dtype: torch.dtype = torch.bfloat16) -> SampleSite:
    generator = torch.Generator().manual_seed(seed)
    return sample_site(
        generator, [192, 64, 33], COLUMNS, RANKS, scheme=scheme, dtype=dtype, bias=True
    )


def check(
    function: Callable[[Tensor], Tensor],
    site: SampleSite,
    rows: RowMap,
    tokens: int,
    seed: int,
    *,
    flat: bool = False,
) -> None:
    """Compile for a dynamic batch (and a dynamic length unless it is 1), run without recompiles."""
    compiled = torch.compile(function, fullgraph=True)
    generator = torch.Generator().manual_seed(seed + 1)
    every = rows.slot.clone()
    for number, batch in enumerate(BATCHES):
        rows.slot.copy_(every)[batch:] = -2  # as the runtime binds a batch
        length = tokens + (number if tokens > 1 else 0)
        leading = (batch,) if flat else (batch, length)
        x = torch.randn(*leading, COLUMNS, generator=generator).to(site.dtype)
        for dim in range(1 if flat or tokens == 1 else 2):
            torch._dynamo.mark_dynamic(x, dim)
        stance = "default" if number == 0 else "fail_on_recompile"
        with torch.no_grad(), torch.compiler.set_stance(stance):
            y = compiled(x)
        slots, scales = rows.per_row(batch, 1 if flat else length)
        expected = site_output(site, x, slots, scales)
        assert y.dtype == x.dtype
        errors = row_errors(y.reshape(expected.shape), expected)
        assert (errors <= bound(site.dtype)).all(), (leading, errors)


@pytest.mark.parametrize("kind", ["torch", "aten"])
@pytest.mark.parametrize(
    ("scheme", "tokens"),
    # What differs for one token per sequence is the low-rank path, which all schemes share.
    [("none", 1), ("fp8_block", 1), *((scheme, 4) for scheme in SCHEMES)],
)
def test_lowered_ops(scheme: str, tokens: int, kind: str, seed: int) -> None:
    site = make(scheme, seed)
    rows = RowMap.of(SLOTS, torch.Generator().manual_seed(seed))
    kernel = kernel_of(kind)

    def forward(x: Tensor) -> Tensor:
        return run_lowered(site, x, rows.slot, rows.scale, False, kernel)

    check(forward, site, rows, tokens, seed)


def test_packed_rows(seed: int) -> None:
    site = make("none", seed, torch.float32)
    rows = RowMap.of(SLOTS, torch.Generator().manual_seed(seed))
    kernel = kernel_of("torch")

    def forward(x: Tensor) -> Tensor:
        return run_lowered(site, x, rows.slot, rows.scale, True, kernel)

    check(forward, site, rows, 1, seed, flat=True)


@pytest.mark.parametrize("kind", ["torch", "aten"])
@pytest.mark.parametrize("scheme", ["fp8_block", "fp8_tensor_static"])
def test_sites_without_slots(scheme: str, kind: str, seed: int) -> None:
    site = make(scheme, seed)
    rows = RowMap.of([-1] * 9, torch.Generator().manual_seed(seed))
    kernel = kernel_of(kind)
    check(lambda x: run_base(site, x, kernel), site, rows, 4, seed)


@pytest.mark.parametrize("scheme", ["none", "fp8_block", "fp8_tensor_static"])
def test_markers(scheme: str, seed: int) -> None:
    site = make(scheme, seed)
    rows = RowMap.of(SLOTS, torch.Generator().manual_seed(seed))
    maps = [rows.slot, rows.scale, rows.slot, rows.scale]
    quant = site.quant.model_dump_json()

    def forward(x: Tensor) -> Tensor:
        arguments = (x, site.weight, site.aux, site.bias, site.adapter, maps)
        parts = [
            torch.ops.lora_compile.site_linear(*arguments, part, quant, False) for part in range(3)
        ]
        return torch.cat(parts, -1)

    check(forward, site, rows, 4, seed)


@pytest.mark.parametrize("scheme", ["fp8_block", "fp8_tensor_static", "int8_channel"])
def test_base_rows_keep_their_bits(scheme: str, seed: int) -> None:
    """In one compiled graph, whatever the other rows' slots hold."""
    site = make(scheme, seed)
    generator = torch.Generator().manual_seed(seed)
    rows = RowMap.of([-1] * 6, generator)
    kernel = kernel_of("torch")

    def forward(x: Tensor) -> Tensor:
        return run_lowered(site, x, rows.slot, rows.scale, False, kernel)

    compiled = torch.compile(forward, fullgraph=True)
    x = torch.randn(6, 1, COLUMNS, generator=generator).bfloat16()
    nobody = compiled(x)
    with torch.compiler.set_stance("fail_on_recompile"):
        rows.slot[:6] = torch.tensor([-1, 0, 5, -1, 6, -2])
        live = compiled(x)
        site.lora_a.fill_(float("nan"))
        site.lora_b.fill_(float("nan"))
        poisoned = compiled(x)
    base = [0, 3, 4]  # Slot 6 has no delta here.
    assert torch.equal(live[base], nobody[base])
    assert torch.equal(poisoned[base], nobody[base])
    assert live[[1, 2]].isfinite().all()
    assert not torch.equal(live[[1, 2]], nobody[[1, 2]])
    assert poisoned[[1, 2]].isnan().all()
    assert live[5].isnan().all()


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("torch", torch.float32), ("torch", torch.bfloat16), ("aten", torch.bfloat16)],
)
def test_int8_base_rows_are_those_of_the_eager_marker(
    kind: str, dtype: torch.dtype, seed: int
) -> None:
    site = make("int8_channel", seed, dtype)
    generator = torch.Generator().manual_seed(seed)
    rows = RowMap.of([-1, 0, -1], generator)
    x = torch.randn(3, 2, COLUMNS, generator=generator).to(dtype)
    kernel, quant = kernel_of(kind), site.quant.model_dump_json()

    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        lora = run_lowered(site, x, rows.slot, rows.scale, False, kernel)
        return run_base(site, x, kernel), lora

    base, lora = torch.compile(forward, fullgraph=True)(x)
    tensors = (x, site.weight, site.aux, site.bias)
    eager = torch.ops.lora_compile.site_linear(*tensors, [], [], -1, quant, False)
    assert torch.equal(base, eager)
    assert torch.equal(lora[[0, 2]], eager[[0, 2]])
    assert not torch.equal(lora[1], eager[1])
