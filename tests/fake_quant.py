"""An oracle for block FP8: transformers' model with decoded weights and decoded q(x).

Written with loops and plain float32, and without anything of lora_compile.
"""

from __future__ import annotations

import copy

import torch
from torch import nn

BLOCK = 128


def decode_block_fp8(weight: torch.Tensor) -> torch.Tensor:
    """(N, K) float32 -> what 128 x 128 block FP8 makes of it, decoded."""
    decoded = torch.empty_like(weight)
    for row in range(0, weight.shape[0], BLOCK):
        for column in range(0, weight.shape[1], BLOCK):
            block = weight[row : row + BLOCK, column : column + BLOCK]
            scale = block.abs().max() / block.new_tensor(448.0)
            codes = (block / scale).to(torch.float8_e4m3fn)
            decoded[row : row + BLOCK, column : column + BLOCK] = codes.float() * scale
    return decoded


def decode_group_fp8(x: torch.Tensor) -> torch.Tensor:
    """(..., K) float32 -> what 1 x 128 group FP8 makes of it, decoded."""
    decoded = torch.empty_like(x)
    for column in range(0, x.shape[-1], BLOCK):
        group = x[..., column : column + BLOCK]
        # By a tensor: CUDA multiplies by the reciprocal of a number, which rounds otherwise.
        scale = (group.abs().amax(-1, keepdim=True) / group.new_tensor(448.0)).clamp(min=1e-12)
        codes = (group / scale).to(torch.float8_e4m3fn)
        decoded[..., column : column + BLOCK] = codes.float() * scale
    return decoded


class FakeQuantLinear(nn.Linear):
    """y = W·q(x) with W decoded; PEFT adds its delta from the unquantised x on top."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = nn.functional.linear(decode_group_fp8(x.float()), self.weight.float(), self.bias)
        return y.to(x.dtype)


def fake_quantise(model: nn.Module, keep: tuple[str, ...] = ("lm_head",)) -> nn.Module:
    """A copy of `model` whose linear layers (but `keep`) act like block FP8."""
    model = copy.deepcopy(model)
    for name, module in list(model.named_modules()):
        if type(module) is not nn.Linear or name.rpartition(".")[2] in keep:
            continue
        fake = FakeQuantLinear(module.in_features, module.out_features, module.bias is not None)
        fake.weight.data = decode_block_fp8(module.weight.data.float()).to(module.weight.dtype)
        if module.bias is not None:
            fake.bias = module.bias
        model.set_submodule(name, fake)
    return model.eval()
