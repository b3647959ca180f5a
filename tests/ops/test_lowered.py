"""The lowered ops against float64 loops, kernel by kernel.

Under TRITON_INTERPRET=1 (see test_triton.py) the same tests run the Triton kernels.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

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
from tests.ops.conftest import (
    INTERPRETED,
    KINDS,
    RANKS,
    SCALED,
    SCHEMES,
    RowMap,
    bound,
    kernel_of,
    row_errors,
)
from tests.ops.oracle import decode_activation, decode_weight, site_output

SITES = {
    "gqa": ([96, 80], 160, 64),
    "ragged": ([192, 192], 576, 128),
    "unequal": ([288, 64, 33], 320, 128),
    "four": ([33, 20, 70, 5], 96, 32),
    "single": ([100], 136, 128),
}
"""Part rows, in_features, block size: whole, half and single ragged blocks in both directions."""
SHAPES = {
    "sequences": (7, 3),
    "decode": (7, 1),
    "one token": (1, 1),
    "nothing": (0, 3),
    "tokens": (9,),
    "kv_b": (5, 1, 2),
}
if INTERPRETED:  # Each takes a second; these are further sizes of the same code.
    del SHAPES["decode"], SHAPES["kv_b"], SITES["single"]
SLOTS = [5, -1, 0, 4, -1, 2, 6, 1, 3]


def skip_slow(scheme: str, dtype: torch.dtype) -> None:
    """Schemes of scaled rows read codes, whatever x was; one of them in fp32 stands for all."""
    row_scaled = scheme not in ("none", "fp8_block")
    if INTERPRETED and row_scaled and (scheme, dtype) != ("int8_channel", torch.float32):
        pytest.skip("interpreting takes a second each, and another case runs the same code")


def skip_truncated(scheme: str) -> None:
    if INTERPRETED and scheme.startswith("fp8"):
        pytest.skip("the interpreter truncates to FP8; test_scaled_gemm feeds it exact codes")


def make(name: str, scheme: str, dtype: torch.dtype, seed: int) -> SampleSite:
    parts, columns, block = SITES[name]
    generator = torch.Generator().manual_seed(seed)
    return sample_site(
        generator, parts, columns, RANKS, scheme=scheme, dtype=dtype, bias=True, block=block
    )


def activation(site: SampleSite, leading: tuple[int, ...], seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed + 1)
    return torch.randn(*leading, site.quant.in_features, generator=generator).to(site.dtype)


def run(site: SampleSite, x: Tensor, rows: RowMap, kind: str, packed: bool = False) -> Tensor:
    per_token = packed or x.dim() == 2
    y = run_lowered(site, x, rows.slot, rows.scale, per_token, kernel_of(kind))
    assert y.shape == (*x.shape[:-1], site.weight.shape[0])
    assert y.dtype == x.dtype
    return y.reshape(-1, y.shape[-1])


def flat_rows(x: Tensor, rows: RowMap, packed: bool = False) -> tuple[list[int], list[float]]:
    tokens = x[..., 0].numel() // x.shape[0] if x.shape[0] else 1
    if packed:
        return rows.per_row(x[..., 0].numel(), 1)
    return rows.per_row(x.shape[0], tokens)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", SITES)
def test_every_shape_matches_the_definition(
    name: str, scheme: str, dtype: torch.dtype, kind: str, seed: int
) -> None:
    skip_truncated(scheme)
    skip_slow(scheme, dtype)
    site = make(name, scheme, dtype, seed)
    rows = RowMap.of(SLOTS, torch.Generator().manual_seed(seed))
    for leading in SHAPES.values():
        x = activation(site, leading, seed)
        y = run(site, x, rows, kind)
        expected = site_output(site, x, *flat_rows(x, rows))
        assert y.shape == expected.shape
        assert (row_errors(y, expected) <= bound(dtype)).all(), leading


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("scheme", SCALED)
@pytest.mark.parametrize("name", SITES)
def test_scaled_gemm(name: str, scheme: str, dtype: torch.dtype, kind: str, seed: int) -> None:
    """Both ops of a scaled scheme on given codes."""
    if INTERPRETED and scheme != "fp8_block" and dtype == torch.bfloat16:
        pytest.skip("interpreting takes a second each, and another case runs the same code")
    site = make(name, scheme, dtype, seed)
    rows = RowMap.of(SLOTS, torch.Generator().manual_seed(seed))
    x = activation(site, (7, 3), seed)
    kernel = kernel_of(kind)
    scaled = scaled_arguments(site, quantised(site, x, kernel_of("torch")))
    factors = (site.lora_a, site.lora_scale, site.lora_rank, rows.slot, rows.scale)
    h = call("lora_shrink", x, *factors, False, kernel=kernel)
    delta = (h, site.lora_b, site.lora_rank, rows.slot, False)
    y = call(f"{base_op(site)}_lora", *scaled, *delta, dtype, kernel=kernel)
    expected = site_output(site, x, *flat_rows(x, rows))
    assert (row_errors(y.reshape(expected.shape), expected) <= bound(dtype)).all()
    base = call(base_op(site), *scaled, dtype, kernel=kernel)
    expected = site_output(site, x, [-1] * 21, [1.0] * 21)
    assert (row_errors(base.reshape(expected.shape), expected) <= bound(dtype)).all()


@pytest.mark.parametrize("kind", KINDS)
def test_packed_rows_use_the_token_map(kind: str, seed: int) -> None:
    site = make("gqa", "none", torch.float32, seed)
    rows = RowMap.of(SLOTS, torch.Generator().manual_seed(seed))
    x = activation(site, (1, 9), seed)
    y = run(site, x, rows, kind, packed=True)
    expected = site_output(site, x, *flat_rows(x, rows, packed=True))
    assert (row_errors(y, expected) <= bound(torch.float32)).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_without_adapters(scheme: str, kind: str, seed: int) -> None:
    skip_truncated(scheme)
    site = make("unequal", scheme, torch.bfloat16, seed)
    x = activation(site, (4, 3), seed)
    y = run_base(site, x, kernel_of(kind)).reshape(12, -1)
    expected = site_output(site, x, [-1] * 12, [1.0] * 12)
    assert (row_errors(y, expected) <= bound(torch.bfloat16)).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("leading", [(6, 3), (6, 1), (18,)], ids=["sequences", "decode", "tokens"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_rows_never_see_a_foreign_slot(
    scheme: str, dtype: torch.dtype, leading: tuple[int, ...], kind: str, seed: int
) -> None:
    skip_slow(scheme, dtype)
    site = make("gqa", scheme, dtype, seed)
    x = activation(site, leading, seed)
    generator = torch.Generator().manual_seed(seed)
    entries = leading[0]
    nobody = run(site, x, RowMap.of([-1] * entries, generator), kind)
    live = RowMap.of([(-1, 2, 0, -1, 5, 6)[entry % 6] for entry in range(entries)], generator)
    among_live = run(site, x, live, kind)
    slots, _ = flat_rows(x, live)
    base = torch.tensor([slot == -1 for slot in slots])
    no_delta = torch.tensor([slot == 6 for slot in slots])
    assert torch.equal(among_live[base], nobody[base])
    assert torch.equal(among_live[no_delta], nobody[no_delta])
    assert not torch.equal(among_live[~base & ~no_delta], nobody[~base & ~no_delta])
    unused = run(site.poisoned([1, 3, 4]), x, live, kind)
    assert torch.equal(unused, among_live)
    every = run(site.poisoned(list(range(7))), x, live, kind)
    assert torch.equal(every[base], nobody[base])
    assert torch.equal(every[no_delta], nobody[no_delta])
    assert every[~base & ~no_delta].isnan().any(1).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scheme", ["fp8_block"] if INTERPRETED else SCHEMES)
def test_row_alone_is_the_row_in_a_batch(scheme: str, kind: str, seed: int) -> None:
    site = make("gqa", scheme, torch.float32, seed)
    generator = torch.Generator().manual_seed(seed)
    x = activation(site, (7, 2), seed)
    rows = RowMap.of(SLOTS, generator)
    batch = run(site, x, rows, kind).reshape(7, 2, -1)
    again = run(site, x, rows, kind).reshape(7, 2, -1)
    assert torch.equal(batch, again)
    for row in range(7):
        one = RowMap(rows.slot[row:].clone(), rows.scale[row:].clone())
        alone = run(site, x[row : row + 1], one, kind)
        assert (row_errors(alone, batch[row]) <= 1e-5).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stray", [-2, len(RANKS)])
@pytest.mark.parametrize("leading", [(4, 3), (4, 1), (4,)], ids=["sequences", "decode", "tokens"])
@pytest.mark.parametrize("scheme", ["none", "fp8_tensor_static", "int8_channel"])
def test_an_unbound_row_is_nan(
    scheme: str, leading: tuple[int, ...], stray: int, kind: str, seed: int
) -> None:
    site = make("gqa", scheme, torch.float32, seed)
    x = activation(site, leading, seed)
    rows = RowMap.of([1, stray, -1, stray], torch.Generator().manual_seed(seed))
    y = run(site, x, rows, kind).reshape(4, -1)
    assert y[[1, 3]].isnan().all()
    assert y[[0, 2]].isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
def test_shrink_is_zero_nan_or_the_product(kind: str, seed: int) -> None:
    site = make("gqa", "none", torch.float32, seed)
    x = activation(site, (4, 2), seed)
    rows = RowMap.of([-1, 5, -2, 6], torch.Generator().manual_seed(seed))
    factors = (site.lora_a, site.lora_scale, site.lora_rank, rows.slot, rows.scale)
    h = call("lora_shrink", x, *factors, False, kernel=kernel_of(kind))
    assert h.shape == (8, 2, 64)
    assert h.dtype == torch.float32
    assert (h[[0, 1, 6, 7]] == 0).all()
    assert h[[4, 5]].isnan().all()
    scale = float(rows.scale[1]) * site.lora_scale[5].double()
    expected = torch.einsum("prk,tk->tpr", site.lora_a[5].double(), x[1].double())
    expected = expected * scale[None, :, None]
    torch.testing.assert_close(h[2:4].double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_scales_restart_at_each_part(kind: str, seed: int) -> None:
    """192 + 192 rows: row 192 belongs to block 2 of 4, though 192 // 128 is 1."""
    site = make("ragged", "fp8_block", torch.float32, seed)
    x = activation(site, (3, 2), seed)
    codes, scales = call("quantize_fp8_group", x, 128, 1e-12, kernel=kernel_of("torch"))
    args = (codes, scales, site.weight, site.aux[0], None, site.part_rows, [128, 128], 128)
    y = call("fp8_block_linear", *args, torch.float32, kernel=kernel_of(kind)).reshape(6, -1)
    q = decode_activation(site, x.reshape(6, -1), 0)
    row, column = torch.arange(384), torch.arange(576)
    by_fused_row = site.aux[0][row // 128][:, column // 128].double()
    wrong = q @ (site.weight.float().double() * by_fused_row).T
    right = q @ decode_weight(site).T
    assert (row_errors(y, right) <= 1e-5).all()
    # Rows 192-255 and 320-383 are where the two readings differ.
    assert row_errors(y[:, 192:256], wrong[:, 192:256]).min() > 0.1
    assert torch.equal(wrong[:, :128], right[:, :128])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scheme", ["none", "fp8_tensor_static"])
def test_too_many_rows_are_refused(scheme: str, kind: str, seed: int) -> None:
    site = make("gqa", scheme, torch.float32, seed)
    rows = RowMap.of([-1] * 32, torch.Generator().manual_seed(seed))
    with pytest.raises(ValueError, match="33 rows exceed the row map of 32"):
        run(site, activation(site, (33, 1), seed), rows, kind)
    with pytest.raises(ValueError, match="33 tokens exceed the row map of 32"):
        run(site, activation(site, (33,), seed), rows, kind)
