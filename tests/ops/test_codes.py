"""Quantised inputs, code by code and scale by scale, and what INT8 promises of them: exact sums.

Under TRITON_INTERPRET=1 (see test_triton.py) the same tests run the Triton kernels.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lora_compile.ops.activations import plane_runs
from lora_compile.ops.sample import (
    SampleSite,
    base_op,
    call,
    quantised,
    run_base,
    run_lowered,
    sample_site,
    scaled_arguments,
)
from tests.ops.conftest import INTERPRETED, KINDS, RowMap, kernel_of

FP8, INT8 = torch.float8_e4m3fn, torch.int8
LARGEST = {FP8: 448.0, INT8: 127.0}


def quantisable(columns: int, generator: torch.Generator) -> Tensor:
    """(3, 5, columns). The interpreter does not round, so there every value has an exact code."""
    x = torch.randn(3, 5, columns, generator=generator)
    size = 2.0 ** torch.randint(-9, 9, (3, 5, 1), generator=generator)
    if INTERPRETED:
        x = (x * 100).to(torch.float8_e4m3fn).float()
        x[..., ::64] = -448
    x = x * size
    x[0, 0] = 0
    return x


def nearest(quotient: Tensor, dtype: torch.dtype) -> Tensor:
    """Codes of that dtype, as float32: nearest, ties to even, saturating."""
    if dtype == INT8:
        return quotient.double().round().clamp(-127, 127).float()
    return quotient.clamp(-448, 448).to(FP8).float()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("columns", [64, 128, 200, 576])
def test_groups(columns: int, kind: str, seed: int) -> None:
    x = quantisable(columns, torch.Generator().manual_seed(seed))
    codes, scales = call("quantize_fp8_group", x, 128, 1e-12, kernel=kernel_of(kind))
    assert codes.dtype == torch.float8_e4m3fn
    assert codes.shape == x.shape
    assert scales.shape == (3, 5, -(-columns // 128))
    for column, left in enumerate(range(0, columns, 128)):
        group = x[..., left : left + 128]
        scale = torch.clamp(group.abs().amax(-1) / 448, min=1e-12)
        assert torch.equal(scales[..., column], scale)
        expected = (group / scale[..., None]).to(torch.float8_e4m3fn)
        assert torch.equal(codes[..., left : left + 128].float(), expected.float())
    assert (scales[0, 0] == torch.tensor(1e-12)).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("input_dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("dtype", [FP8, INT8], ids=["fp8", "int8"])
@pytest.mark.parametrize("columns", [40, 576, 5000])
def test_tokens(
    columns: int, dtype: torch.dtype, input_dtype: torch.dtype, kind: str, seed: int
) -> None:
    x = quantisable(columns, torch.Generator().manual_seed(seed)).to(input_dtype)
    codes, scales = call("quantize_token", x, dtype, 1e-12, kernel=kernel_of(kind))
    assert (codes.dtype, scales.dtype) == (dtype, torch.float32)
    assert (codes.shape, scales.shape) == ((1, 3, 5, columns), (1, 3, 5))
    scale = torch.clamp(x.float().abs().amax(-1) / LARGEST[dtype], min=1e-12)
    assert torch.equal(scales[0], scale)
    assert torch.equal(codes[0].float(), nearest(x.float() / scale[..., None], dtype))
    assert codes[0, 0, 0].float().abs().max() == 0
    assert (codes.float().abs().amax(-1).flatten()[1:] == LARGEST[dtype]).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [FP8, INT8], ids=["fp8", "int8"])
@pytest.mark.parametrize("input_scale", [[0.25], [0.25, 32.0], [2.0, 0.125, 16.0]])
def test_static(input_scale: list[float], dtype: torch.dtype, kind: str, seed: int) -> None:
    """Saturation is part of it: some values are far beyond the smaller scales."""
    x = torch.randn(2, 4, 600, generator=torch.Generator().manual_seed(seed)) * 40
    if INTERPRETED:  # It does not round, so every quotient has to be a code.
        x = torch.where(x.abs() < 2, 2.0, x).to(FP8).float()
    x[0, 0, 0], x[0, 0, 1] = 1e5, -1e5
    scale = torch.tensor(input_scale)
    codes, scales = call("quantize_static", x, scale, dtype, kernel=kernel_of(kind))
    assert (codes.dtype, scales.dtype) == (dtype, torch.float32)
    assert (codes.shape, scales.shape) == ((len(scale), 2, 4, 600), (len(scale), 2, 4))
    for plane, one in enumerate(scale):
        assert torch.equal(codes[plane].float(), nearest(x / one, dtype))
        assert (scales[plane] == one).all()
        assert codes[plane, 0, 0, :2].float().tolist() == [LARGEST[dtype], -LARGEST[dtype]]
    scales.zero_()
    assert scale.tolist() == input_scale  # the result is no view of the site's buffer


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("code", [0.5, 1.5, 2.5, -0.5, -1.5, 126.5, 12.5, 13.5])
def test_int8_ties_go_to_even(code: float, kind: str) -> None:
    x = torch.tensor([[127.0, code, -127.0]])
    codes, scales = call("quantize_token", x, INT8, 1e-12, kernel=kernel_of(kind))
    assert scales.tolist() == [[1.0]]
    assert codes.tolist() == [[[127, round(code), -127]]]  # Python rounds ties to even


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "scheme", ["fp8_block", "fp8_tensor_static", "fp8_tensor_dynamic", "int8_channel"]
)
def test_a_nan_of_x_reaches_the_output(scheme: str, kind: str, seed: int) -> None:
    """A row that was bound to no slot is NaN, and no later site may make a number of it."""
    if INTERPRETED and scheme == "fp8_tensor_static":
        pytest.skip("the interpreter has no NaN among its FP8 codes")
    generator = torch.Generator().manual_seed(seed)
    site = sample_site(generator, [40, 24], 160, [8], scheme=scheme, block=32)
    x = torch.randn(3, 160, generator=generator)
    finite = run_base(site, x, kernel_of(kind))
    x[1, 77] = float("nan")
    y = run_base(site, x, kernel_of(kind))
    assert y[1].isnan().all()
    assert torch.equal(y[[0, 2]], finite[[0, 2]])


def int8_site(columns: int, seed: int, dtype: torch.dtype = torch.float32) -> SampleSite:
    generator = torch.Generator().manual_seed(seed)
    parts = [33, 64, 7]
    scheme = "int8_channel"
    return sample_site(generator, parts, columns, [8, 3], scheme=scheme, bias=True, dtype=dtype)


def int8_base(site: SampleSite, x: Tensor) -> Tensor:
    """((acc * xs) * weight_scale) + b in float32 with an exact acc, from Python's whole numbers."""
    codes, scales = quantised(site, x, kernel_of("torch"))
    flat = codes.reshape(-1, codes.shape[-1])
    acc = torch.tensor(
        [
            [sum(map(int.__mul__, row, column)) for column in site.weight.tolist()]
            for row in flat.tolist()
        ]
    )
    if x.shape[-1] > 1040:
        assert 2**24 < acc.abs().max() < 2**31
    y = acc.double().float() * scales.reshape(-1, 1)
    y = y * site.aux[0]
    assert site.bias is not None
    return (y + site.bias.float()).to(x.dtype).reshape(*x.shape[:-1], -1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("columns", [40, 1024, 1041, 2501])
def test_int8_base_rows_have_the_same_bits_everywhere(columns: int, kind: str, seed: int) -> None:
    """Op with and without slots, and the eager marker; sums beyond what float32 holds exactly."""
    site = int8_site(columns, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    x = torch.randn(4, 2, columns, generator=generator)
    x[2] = torch.where(site.weight[5] < 0, -1.0, 1.0)  # so that all products have one sign
    site.weight[5] = (x[2, 0] * 127).to(INT8)
    expected = int8_base(site, x)
    assert torch.equal(run_base(site, x, kernel_of(kind)), expected)
    rows = RowMap.of([-1, 0, -1, 1], generator)
    y = run_lowered(site, x, rows.slot, rows.scale, False, kernel_of(kind))
    assert torch.equal(y[[0, 2]], expected[[0, 2]])
    assert not torch.equal(y[1], expected[1])
    quant, maps = site.quant.model_dump_json(), [rows.slot, rows.scale] * 2
    marker = torch.ops.lora_compile.site_linear
    tensors = (x, site.weight, site.aux, site.bias)
    assert torch.equal(marker(*tensors, [], [], -1, quant, False), expected)
    adapted = marker(*tensors, site.adapter, maps, -1, quant, False)
    assert torch.equal(adapted[[0, 2]], expected[[0, 2]])


@pytest.mark.skipif(INTERPRETED, reason="the interpreter truncates to bf16")
@pytest.mark.parametrize("kind", KINDS)
def test_int8_base_rows_are_rounded_once(kind: str, seed: int) -> None:
    site = int8_site(200, seed, torch.bfloat16)
    x = torch.randn(5, 200, generator=torch.Generator().manual_seed(seed)).bfloat16()
    assert torch.equal(run_base(site, x, kernel_of(kind)), int8_base(site, x))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("planes", [[0, 1, 0], [0, 0, 1], [1, 0, 0], [0, 1, 2], [0, 0, 0]])
def test_each_part_reads_its_plane(planes: list[int], kind: str, seed: int) -> None:
    """Which plane a part reads is data, not the order of the planes."""
    generator = torch.Generator().manual_seed(seed)
    site = sample_site(generator, [33, 20, 70], 96, [8], scheme="fp8_tensor_static", bias=True)
    x = torch.randn(2, 3, 96, generator=generator)
    scale = torch.tensor([0.02, 2.0, 0.3])[: max(planes) + 1]
    qx = call("quantize_static", x, scale, FP8, kernel=kernel_of("torch"))
    scaled = (*scaled_arguments(site, qx)[:-1], planes)
    y = call(base_op(site), *scaled, torch.float32, kernel=kernel_of(kind))
    assert y.shape == (2, 3, 123)
    assert site.bias is not None
    low = 0
    for plane, width in zip(planes, (33, 20, 70), strict=True):
        here = slice(low, low + width)
        values = qx[0][plane].double() * scale[plane].double()
        weight = site.weight[here].double() * site.aux[0][here, None].double()
        expected = values @ weight.T + site.bias[here].double()
        torch.testing.assert_close(y[..., here].double(), expected, rtol=1e-5, atol=1e-5)
        low += width


def test_runs_of_planes() -> None:
    assert plane_runs([0, 4, 6, 9], [0, 0, 0]) == [(0, 0, 9)]
    assert plane_runs([0, 4, 6, 9], [0, 1, 1]) == [(0, 0, 4), (1, 4, 9)]
    assert plane_runs([0, 4, 6, 9], [0, 1, 0]) == [(0, 0, 4), (1, 4, 6), (0, 6, 9)]
