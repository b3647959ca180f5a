"""A random site with live slots, for tests, benchmarks and self-checks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from lora_compile.ops.activations import code_max
from lora_compile.ops.quant import CODE_DTYPES
from lora_compile.ops.source_digest import kernel_name
from lora_compile.schemas.quant_info import QuantInfo, WeightDtype
from lora_compile.schemas.quant_scheme import QuantScheme, find_scheme

WEIGHT_DTYPES: dict[torch.dtype, WeightDtype] = {
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float8_e4m3fn: "float8_e4m3fn",
    torch.int8: "int8",
}
INPUT_SCALES = (0.02, 2.0)
"""Static scales of a sample's parts: a hundredfold apart, for x of order one."""


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
    """QuantInfo of a site of a shipped scheme.

    Args:
        dtype: of the weight, where the scheme does not scale it.
        block: rows and columns of a block, where the scheme has blocks.
    """
    found = find_scheme(scheme)
    static = found.activation.handling == "static"
    return found.info(
        weight_dtype=WEIGHT_DTYPES[weight_dtype(found, dtype)],
        block_shape=(block, block) if found.scale.granularity == "block" else None,
        in_features=in_features,
        part_widths=[(f"part{index}", rows) for index, rows in enumerate(parts)],
        input_scales=[INPUT_SCALES[i % 2] for i in range(len(parts))] if static else None,
        bias=bias,
    )


def weight_dtype(scheme: QuantScheme, dtype: torch.dtype) -> torch.dtype:
    """dtype of a scheme's codes; `dtype` itself where weights are stored as they are."""
    name = scheme.activation.dtype
    return dtype if name is None else CODE_DTYPES[name]


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

    Weights are scaled so that outputs and deltas are both of order one; neighbouring scales differ
    by up to 4, so that a wrong one shows. Static input scales are `INPUT_SCALES` in turn.
    """
    quant = sample_quant(scheme, parts, in_features, dtype, bias, block)
    count, rank = len(parts), -(-max([*ranks, 1]) // 16) * 16

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    weight = normal(quant.out_features, in_features) / in_features**0.5
    codes = weight_dtype(find_scheme(scheme), dtype)
    aux = {}
    if quant.scale.granularity != "none":
        shape, largest = quant.aux_shapes["weight_scale"], code_max(codes)
        aux["weight_scale"] = (torch.rand(*shape, generator=generator) * 3 + 1) / largest
        weight = weight * largest / 4.5
        if codes == torch.int8:
            weight = weight.round().clamp(-largest, largest)
    if "input_scale" in quant.aux_shapes:
        aux["input_scale"] = torch.tensor(INPUT_SCALES[: quant.aux_shapes["input_scale"][0]])
    weight = weight.to(codes)
    lora_a = normal(len(ranks), count, rank, in_features) / in_features**0.5
    lora_b = normal(len(ranks), quant.out_features, rank)
    for slot, true_rank in enumerate(ranks):
        lora_a[slot, :, true_rank:] = 0
        lora_b[slot, :, true_rank:] = 0
    site = SampleSite(
        part_rows=quant.part_rows,
        quant=quant,
        weight=weight,
        aux=[aux[name] for name in quant.aux_names],
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
    args = (*scaled_arguments(site, quantised(site, x, kernel)), *delta, per_token, x.dtype)
    return cast(Tensor, call(f"{base_op(site)}_lora", *args, kernel=kernel))


@torch.no_grad()
def run_base(site: SampleSite, x: Tensor, kernel: str) -> Tensor:
    """The lowered ops of a site that is built without slots. x (..., K) -> (..., N)."""
    if site.quant.scale.granularity == "none":
        return cast(Tensor, call("linear", x, site.weight, site.bias, kernel=kernel))
    args = (*scaled_arguments(site, quantised(site, x, kernel)), x.dtype)
    return cast(Tensor, call(base_op(site), *args, kernel=kernel))


def base_op(site: SampleSite) -> str:
    """Name of the op of a scaled site without slots; that with slots has `_lora` behind it."""
    return "scaled_linear" if site.quant.scale.block_shape is None else "fp8_block_linear"


def quantise_call(site: SampleSite, x: Tensor) -> tuple[Any, ...]:
    """The name of the op that makes q(x), and its arguments without `kernel`."""
    activation = site.quant.activation
    assert activation.dtype is not None
    dtype = CODE_DTYPES[activation.dtype]
    if activation.handling == "static":
        return ("quantize_static", x, site.aux[1], dtype)
    if activation.granularity == "token":
        return ("quantize_token", x, dtype, activation.min_scale)
    return ("quantize_fp8_group", x, activation.group, activation.min_scale)


def quantised(site: SampleSite, x: Tensor, kernel: str) -> tuple[Tensor, Tensor]:
    """Codes and scales of q(x), as the site's GEMM takes them."""
    name, *args = quantise_call(site, x)
    return cast(tuple[Tensor, Tensor], call(name, *args, kernel=kernel))


def scaled_arguments(site: SampleSite, qx: tuple[Tensor, Tensor]) -> tuple[Any, ...]:
    """What both GEMM ops of a scaled site take first."""
    block_shape = site.quant.scale.block_shape
    layout: tuple[Any, ...] = (site.part_rows, site.quant.planes)
    if block_shape is not None:
        layout = (site.part_rows, list(block_shape), site.quant.activation.group)
    return (*qx, site.weight, site.aux[0], site.bias, *layout)
