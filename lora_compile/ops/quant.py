"""The canonical JSON of a `QuantInfo`, as ops take it, and its meaning in plain fp32."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from lora_compile.errors import FeatureUnsupported
from lora_compile.ops.activations import quantize_groups, quantize_planes, quantize_tokens
from lora_compile.schemas.quant_info import QuantInfo

CODE_DTYPES = {"float8_e4m3fn": torch.float8_e4m3fn, "int8": torch.int8}


@cache
def parse_quant(quant: str) -> QuantInfo:
    """The QuantInfo whose `model_dump_json()` is `quant`.

    Raises:
        FeatureUnsupported: it declares an input transform, which no op here applies.
    """
    info = QuantInfo.model_validate_json(quant)
    if info.input_transforms:
        raise FeatureUnsupported(
            f"scheme {info.scheme!r} transforms the input of its linears",
            expected="no input transforms",
            found=", ".join(info.input_transforms),
            fix="use a checkpoint without them",
        )
    return info


# Blocks and groups below are expanded over whole blocks, and the ragged rest is handled apart. Do
# not expand over padded blocks and slice: Inductor's C++ backend (2.13) splits a loop over
# `k // 128` into 128 x (K // 128) steps without looking at the remainder, and so leaves the last
# columns of a sliced expansion unwritten.


def expand_block_rows(scale: Tensor, part_rows: list[int], block_rows: int) -> Tensor:
    """Block scales, one line per row of the weight.

    Args:
        scale: (sum over parts of ceil(N_p / bn), C); rows restart at each part.
        part_rows: [0, N_0, N_0 + N_1, …, N].
        block_rows: bn.

    Returns:
        (N, C).
    """
    pieces = []
    start = first = 0
    for end in part_rows[1:]:
        rest = (end - start) % block_rows
        if rest == 0 and end != part_rows[-1]:
            continue  # Its blocks are whole, so the next part's rows simply follow.
        blocks = (end - start) // block_rows
        if blocks:
            whole = scale[first : first + blocks].unsqueeze(1)
            whole = whole.expand(blocks, block_rows, scale.shape[1])
            pieces.append(whole.reshape(blocks * block_rows, scale.shape[1]))
        if rest:
            pieces.append(scale[first + blocks : first + blocks + 1].expand(rest, scale.shape[1]))
        start, first = end, first + blocks + (rest > 0)
    return torch.cat(pieces) if len(pieces) > 1 else pieces[0]


def multiply_groups(values: Tensor, scale: Tensor, group: int) -> Tensor:
    """values (..., K) times scale (..., ceil(K / group)), one scale per `group` columns."""
    columns = values.shape[-1]
    blocks = columns // group
    pieces = []
    if blocks:
        whole = torch.unflatten(values[..., : blocks * group], -1, (blocks, group))
        pieces.append((whole * scale[..., :blocks].unsqueeze(-1)).flatten(-2))
    if columns % group:
        pieces.append(values[..., blocks * group :] * scale[..., blocks:])
    return torch.cat(pieces, -1) if len(pieces) > 1 else pieces[0]


def dequantize_blocks(
    weight: Tensor, scale: Tensor, part_rows: list[int], block_shape: list[int]
) -> Tensor:
    """weight (N, K) codes times its block scales: (N, K) float32.

    `scale` is (sum over parts of ceil(N_p / bn), ceil(K / bk)); its rows restart at each part.
    """
    rows = expand_block_rows(scale.float(), part_rows, block_shape[0])
    return multiply_groups(weight.float(), rows, block_shape[1])


def dequantize_part(weight: Tensor, aux: list[Tensor], info: QuantInfo, part: int) -> Tensor:
    """Q(W) of one part: its values.

    Args:
        weight: (N, K) codes of all parts.
        aux: the tensors of `info.aux_names`.

    Returns:
        (N_p, K) float32.
    """
    low, high = info.parts[part].rows
    if info.scale.granularity == "none":
        return weight[low:high].float()
    if info.scale.block_shape is None:
        return weight[low:high].float() * aux[0][low:high].float().unsqueeze(1)
    scale_rows = info.parts[part].scale_rows
    assert scale_rows is not None
    scale = aux[0][slice(*scale_rows)]
    block_shape = list(info.scale.block_shape)
    return dequantize_blocks(weight[low:high], scale, [0, high - low], block_shape)


def scaled_product(xq: Tensor, xs: Tensor, weight: Tensor, weight_scale: Tensor) -> Tensor:
    """(acc * xs) * weight_scale, with acc[l, n] the sum over k of xq[l, k] * weight[n, k].

    Two float32 products in this order, each rounded, so that whoever has the same acc has the same
    bits. acc is exact for int8 codes (as long as K < 2**17, within int32 too) and rounded once to
    float32; for FP8 codes it is a float32 sum.

    Args:
        xq: (L, K) codes.
        xs: (L,) float32.
        weight: (N, K) codes.
        weight_scale: (N,) float32.

    Returns:
        (L, N) float32.
    """
    # Integers of float64 are exact to 2**53, whatever the order of the sum.
    wide = torch.float64 if weight.dtype == torch.int8 else torch.float32
    acc = (xq.to(wide) @ weight.to(wide).T).float()
    return acc * xs.unsqueeze(1) * weight_scale.float()


def quantize_activation(x: Tensor, aux: list[Tensor], info: QuantInfo) -> tuple[Tensor, Tensor]:
    """Codes and scales of x (L, K), as the scheme's lowered quantise op gives them.

    Args:
        aux: the tensors of `info.aux_names`.
    """
    activation = info.activation
    assert activation.dtype is not None
    if activation.handling == "static":
        input_scale = aux[info.aux_names.index("input_scale")]
        return quantize_planes(x, input_scale, CODE_DTYPES[activation.dtype])
    assert activation.min_scale is not None
    if activation.granularity == "token":
        return quantize_tokens(x, CODE_DTYPES[activation.dtype], activation.min_scale)
    assert activation.group is not None
    return quantize_groups(x, activation.group, activation.min_scale)


def base_product(
    x: Tensor, weight: Tensor, aux: list[Tensor], info: QuantInfo, part: int
) -> Tensor:
    """Q(W) q(x) of one part, without bias: what every scheme's base GEMM means.

    Args:
        x: (L, K).
        weight: (N, K) codes of all parts.
        aux: the tensors of `info.aux_names`.

    Returns:
        (L, N_p) float32.
    """
    if info.activation.handling == "none":
        return x.float() @ dequantize_part(weight, aux, info, part).T
    xq, xs = quantize_activation(x, aux, info)
    plane, group = info.planes[part], info.activation.group
    if group is None and info.scale.granularity in ("tensor", "row"):
        low, high = info.parts[part].rows
        return scaled_product(xq[plane], xs[plane], weight[low:high], aux[0][low:high])
    if group is None:
        qx = xq[plane].float() * xs[plane].unsqueeze(1)
    else:
        qx = multiply_groups(xq.float(), xs, group)
    return qx @ dequantize_part(weight, aux, info, part).T
