"""A random site with live slots, for tests, benchmarks and self-checks."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor

from lora_compile.ops.source_digest import kernel_name
from lora_compile.schemas.quant_info import (
    ActivationInfo,
    PartRows,
    QuantInfo,
    ScaleInfo,
    WeightDtype,
)

MIN_SCALE = 1e-12
WEIGHT_DTYPES: dict[torch.dtype, WeightDtype] = {
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
}


@dataclass
class SampleSite:
    """The tensors of one site, as the ops take them. See `markers.site_linear` for shapes."""

    part_rows: list[int]
    quant: QuantInfo
    weight: Tensor
    aux: list[Tensor]
    bias: Tensor | None
    lora_a: Tensor
    lora_b: Tensor
    lora_scale: Tensor
    lora_rank: Tensor
    dtype: torch.dtype

    @property
    def adapter(self) -> list[Tensor]:
        return [self.lora_a, self.lora_b, self.lora_scale, self.lora_rank]

    def poisoned(self, slots: list[int]) -> SampleSite:
        """A copy whose listed slots hold NaN in A, B and scale."""
        copy = SampleSite(**vars(self))
        copy.lora_a, copy.lora_b = self.lora_a.clone(), self.lora_b.clone()
        copy.lora_scale = self.lora_scale.clone()
        for tensor in (copy.lora_a, copy.lora_b, copy.lora_scale):
            tensor[slots] = float("nan")
        return copy


def sample_quant(
    scheme: str, parts: list[int], in_features: int, dtype: torch.dtype, bias: bool, block: int
) -> QuantInfo:
    """QuantInfo of a site: `none`, or `fp8_block` with block x block scales and group = block."""
    bounds = [0]
    scale_bounds = [0]
    for rows in parts:
        bounds.append(bounds[-1] + rows)
        scale_bounds.append(scale_bounds[-1] + -(-rows // block))
    scaled = scheme == "fp8_block"
    return QuantInfo(
        scheme=scheme,
        weight_dtype="float8_e4m3fn" if scaled else WEIGHT_DTYPES[dtype],
        packing="none",
        scale=ScaleInfo(
            granularity="block" if scaled else "none",
            dtype="float32" if scaled else None,
            block_shape=(block, block) if scaled else None,
        ),
        zero_point="none",
        activation=ActivationInfo(
            handling="dynamic" if scaled else "none",
            granularity="group" if scaled else None,
            group=block if scaled else None,
            dtype="float8_e4m3fn" if scaled else None,
            min_scale=MIN_SCALE if scaled else None,
        ),
        input_transforms=(),
        bias=bias,
        in_features=in_features,
        parts=tuple(
            PartRows(name=f"part{index}", rows=rows, scale_rows=scale_rows if scaled else None)
            for index, (rows, scale_rows) in enumerate(
                zip(pairwise(bounds), pairwise(scale_bounds), strict=True)
            )
        ),
    )


def sample_site(
    generator: torch.Generator,
    parts: list[int],
    in_features: int,
    ranks: list[int],
    *,
    scheme: str = "none",
    dtype: torch.dtype = torch.float32,
    bias: bool = False,
    block: int = 128,
    device: str = "cpu",
) -> SampleSite:
    """Random tensors. One slot per entry of `ranks` (0 = a slot without a delta here).

    Weights are scaled so that outputs and deltas are both of order one; block scales of
    neighbouring blocks differ by up to 4, so that a wrong scale row shows.
    """
    quant = sample_quant(scheme, parts, in_features, dtype, bias, block)
    count, rank = len(parts), -(-max([*ranks, 1]) // 16) * 16

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    weight = normal(quant.out_features, in_features) / in_features**0.5
    aux = []
    if scheme == "fp8_block":
        shape = (sum(-(-rows // block) for rows in parts), -(-in_features // block))
        scale = (torch.rand(*shape, generator=generator) * 3 + 1) / 448
        weight = (weight * 100).to(torch.float8_e4m3fn)
        aux = [scale]
    else:
        weight = weight.to(dtype)
    lora_a = normal(len(ranks), count, rank, in_features) / in_features**0.5
    lora_b = normal(len(ranks), quant.out_features, rank)
    for slot, true_rank in enumerate(ranks):
        lora_a[slot, :, true_rank:] = 0
        lora_b[slot, :, true_rank:] = 0
    site = SampleSite(
        part_rows=[0, *(part.rows[1] for part in quant.parts)],
        quant=quant,
        weight=weight,
        aux=aux,
        bias=normal(quant.out_features).to(dtype) if bias else None,
        lora_a=lora_a.to(dtype),
        lora_b=lora_b.to(dtype),
        lora_scale=torch.rand(len(ranks), count, generator=generator) + 0.5,
        lora_rank=torch.tensor(ranks, dtype=torch.int32),
        dtype=dtype,
    )
    for name, value in vars(site).items():
        if isinstance(value, Tensor):
            setattr(site, name, value.to(device))
    site.aux = [value.to(device) for value in site.aux]
    return site


def call(name: str, *args: object, kernel: str) -> Any:
    """A lowered op. `kernel` is what `kernel_name` returns, or `aten` for the op's ATen form."""
    ops = torch.ops.lora_compile
    if kernel != "aten":
        return getattr(ops, name)(*args, kernel)
    if name == "linear":
        return ops.linear(*args, kernel_name("torch"))  # It has no other form on a CPU.
    return getattr(ops, f"aten_{name}")(*args)


@torch.no_grad()
def run_lowered(
    site: SampleSite, x: Tensor, slot: Tensor, row_scale: Tensor, per_token: bool, kernel: str
) -> Tensor:
    """The lowered ops that a site with slots becomes. x (..., K) -> (..., N)."""
    factors = (site.lora_a, site.lora_scale, site.lora_rank, slot, row_scale, per_token)
    h = call("lora_shrink", x, *factors, kernel=kernel)
    delta = (h, site.lora_b, site.lora_rank, slot)
    if site.quant.scale.granularity == "none":
        args = (x, site.weight, site.bias, *delta, site.part_rows, per_token)
        return cast(Tensor, call("linear_lora", *args, kernel=kernel))
    args = (*_scaled_arguments(site, x, kernel), *delta, per_token, x.dtype)
    return cast(Tensor, call("fp8_block_linear_lora", *args, kernel=kernel))


@torch.no_grad()
def run_base(site: SampleSite, x: Tensor, kernel: str) -> Tensor:
    """The lowered ops of a site that is built without slots. x (..., K) -> (..., N)."""
    if site.quant.scale.granularity == "none":
        return cast(Tensor, call("linear", x, site.weight, site.bias, kernel=kernel))
    args = (*_scaled_arguments(site, x, kernel), x.dtype)
    return cast(Tensor, call("fp8_block_linear", *args, kernel=kernel))


def _scaled_arguments(site: SampleSite, x: Tensor, kernel: str) -> tuple[object, ...]:
    activation, block_shape = site.quant.activation, site.quant.scale.block_shape
    assert block_shape is not None
    group, min_scale = activation.group, activation.min_scale
    codes, scales = call("quantize_fp8_group", x, group, min_scale, kernel=kernel)
    packed = (codes, scales, site.weight, site.aux[0], site.bias, site.part_rows)
    return (*packed, list(block_shape), group)
