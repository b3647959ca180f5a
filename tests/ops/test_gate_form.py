"""The site gate works out q(x) and the delta apart from the ops; they are those of the ops."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from lora_compile.ops.sample import base_op, call, quantised, sample_site, scaled_arguments
from lora_compile.runtime.site_gate import _delta, quantised_activation
from tests.ops.conftest import RANKS, SCALED, SCHEMES, RowMap, kernel_of
from tests.ops.oracle import decode_activation

PARTS, COLUMNS = [33, 64, 20], 200


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_quantised_input_of_each_part(scheme: str, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    site = sample_site(generator, PARTS, COLUMNS, [8], scheme=scheme, block=64)
    x = torch.randn(7, COLUMNS, generator=generator).bfloat16().float()
    for index, part in enumerate(site.quant.parts):
        scale = None if part.input_scale is None else float(site.aux[1][part.input_scale])
        found = quantised_activation(site.quant.activation, x, scale)
        torch.testing.assert_close(
            found.double(), decode_activation(site, x, index), rtol=1e-6, atol=0
        )


@pytest.mark.parametrize("kind", ["torch", "aten"])
@pytest.mark.parametrize("scheme", ["none", *SCALED])
def test_the_delta_of_a_lowered_op(scheme: str, kind: str, seed: int) -> None:
    """In float32, though the op is called with 16-bit tensors."""
    generator = torch.Generator().manual_seed(seed)
    dtype = torch.bfloat16
    site = sample_site(generator, PARTS, COLUMNS, RANKS, scheme=scheme, dtype=dtype, bias=True)
    rows = RowMap.of([5, -1, 0, 6], generator)
    x = torch.randn(4, 2, COLUMNS, generator=generator).to(dtype)
    factors = (site.lora_a, site.lora_scale, site.lora_rank, rows.slot, rows.scale, False)
    h = call("lora_shrink", x, *factors, kernel=kernel_of("torch"))
    delta = (h, site.lora_b, site.lora_rank, rows.slot)
    args: tuple[object, ...] = (x, site.weight, site.bias, *delta, site.part_rows, False)
    name = "linear_lora"
    if scheme != "none":
        scaled = scaled_arguments(site, quantised(site, x, kernel_of("torch")))
        name, args = f"{base_op(site)}_lora", (*scaled, *delta, False, dtype)
    ops = torch.ops.lora_compile
    if kind == "aten":
        found = _delta(getattr(ops, f"aten_{name}").default, args)
    else:
        found = _delta(getattr(ops, name).default, (*args, kernel_of("torch")))
    expected = torch.zeros(4, 2, sum(PARTS), dtype=torch.float64)
    for row, slot in ((0, 5), (2, 0)):
        for part, (low, high) in enumerate(pairwise(site.part_rows)):
            values = h.reshape(4, 2, 3, -1)[row, :, part].double()
            expected[row, :, low:high] = values @ site.lora_b[slot, low:high].double().T
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)
    assert (found[[1, 3]] == 0).all()
