"""Oracles of the schemes: transformers' model with decoded weights and decoded q(x).

Written with loops and plain float32, and without anything of lora_compile.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import nn

BLOCK = 128

WEIGHT_DTYPE = {
    "fp8_block": torch.float8_e4m3fn,
    "fp8_tensor_static": torch.float8_e4m3fn,
    "fp8_tensor_dynamic": torch.float8_e4m3fn,
    "fp8_channel": torch.float8_e4m3fn,
    "int8_channel": torch.int8,
}
LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}


def to_codes(values: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """values / scale rounded to codes of `dtype`."""
    quotient = (values / scale).clamp(-LARGEST[dtype], LARGEST[dtype])
    return quotient.round().to(dtype) if dtype == torch.int8 else quotient.to(dtype)


def amax_scale(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """One scale over all of `values`. Divided by a tensor: CUDA multiplies by the reciprocal of a
    number, which rounds otherwise."""
    return values.abs().max() / values.new_tensor(LARGEST[dtype])


def encode_weight(weight: torch.Tensor, scheme: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(N, K) float32 -> codes, and scales as files hold them: (1,), (N, 1) or one per block."""
    dtype = WEIGHT_DTYPE[scheme]
    if scheme == "fp8_block":
        rows, columns = -(-weight.shape[0] // BLOCK), -(-weight.shape[1] // BLOCK)
        codes, scales = torch.empty(weight.shape, dtype=dtype), torch.empty(rows, columns)
        for i in range(rows):
            for j in range(columns):
                tile = (slice(i * BLOCK, (i + 1) * BLOCK), slice(j * BLOCK, (j + 1) * BLOCK))
                scales[i, j] = amax_scale(weight[tile], dtype)
                codes[tile] = to_codes(weight[tile], scales[i, j], dtype)
        return codes, scales
    if scheme.startswith("fp8_tensor"):
        scale = amax_scale(weight, dtype)
        return to_codes(weight, scale, dtype), scale.reshape(1)
    scales = torch.stack([amax_scale(row, dtype) for row in weight]).unsqueeze(1)
    return to_codes(weight, scales, dtype), scales


def decode_weight(weight: torch.Tensor, scheme: str) -> torch.Tensor:
    """(N, K) float32 -> what the scheme makes of it, decoded."""
    if scheme == "none":
        return weight
    codes, scales = encode_weight(weight, scheme)
    if scheme != "fp8_block":
        return codes.float() * scales
    decoded = codes.float()
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            decoded[i * BLOCK : (i + 1) * BLOCK, j * BLOCK : (j + 1) * BLOCK] *= scales[i, j]
    return decoded


def decode_block_fp8(weight: torch.Tensor) -> torch.Tensor:
    """(N, K) float32 -> what 128 x 128 block FP8 makes of it, decoded."""
    return decode_weight(weight, "fp8_block")


def decode_input(x: torch.Tensor, scheme: str, input_scale: float | None = None) -> torch.Tensor:
    """(..., K) float32 -> what the scheme makes of an input, decoded."""
    if scheme == "none":
        return x
    dtype = WEIGHT_DTYPE[scheme]
    if scheme == "fp8_tensor_static":
        assert input_scale is not None
        scale = x.new_tensor(input_scale)
        return to_codes(x, scale, dtype).float() * scale
    width = BLOCK if scheme == "fp8_block" else x.shape[-1]
    decoded = torch.empty_like(x)
    for column in range(0, x.shape[-1], width):
        group = x[..., column : column + width]
        largest = group.new_tensor(LARGEST[dtype])
        scale = (group.abs().amax(-1, keepdim=True) / largest).clamp(min=1e-12)
        decoded[..., column : column + width] = to_codes(group, scale, dtype).float() * scale
    return decoded


class FakeQuantLinear(nn.Linear):
    """y = W·q(x) with W decoded; PEFT adds its delta from the unquantised x on top."""

    scheme: str
    input_scale: float | None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        qx = decode_input(x.float(), self.scheme, self.input_scale)
        return nn.functional.linear(qx, self.weight.float(), self.bias).to(x.dtype)


def fake_quantise(
    model: nn.Module,
    scheme: str = "fp8_block",
    keep: tuple[str, ...] = ("lm_head",),
    input_scales: Mapping[str, float] | None = None,
) -> nn.Module:
    """A copy of `model` whose linear layers (but `keep`) act like the scheme.

    Args:
        input_scales: module path -> its static scale, for schemes that have them.
    """
    model = copy.deepcopy(model)
    if scheme == "none":
        return model
    for name, module in list(model.named_modules()):
        if type(module) is not nn.Linear or name.rpartition(".")[2] in keep:
            continue
        fake = FakeQuantLinear(module.in_features, module.out_features, module.bias is not None)
        fake.scheme, fake.input_scale = scheme, (input_scales or {}).get(name)
        decoded = decode_weight(module.weight.data.float(), scheme)
        fake.weight.data = decoded.to(module.weight.dtype)
        if module.bias is not None:
            fake.bias = module.bias
        model.set_submodule(name, fake)
    return model.eval()
