"""The markers' eager kernels, that is the reference, against PEFT, transformers and loops."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from lora_compile.errors import FeatureUnsupported, RequestInvalid
from lora_compile.ops.sample import SampleSite, sample_quant, sample_site
from tests.ops.conftest import RANKS, SCHEMES, RowMap, row_errors
from tests.ops.oracle import site_output

OPS = torch.ops.lora_compile


def maps(sequences: RowMap, tokens: RowMap) -> list[Tensor]:
    return [sequences.slot, sequences.scale, tokens.slot, tokens.scale]


def all_parts(site: SampleSite, x: Tensor, rows: list[Tensor], packed: bool = False) -> Tensor:
    """The marker of every part, side by side: (L, N)."""
    quant = site.quant.model_dump_json()
    arguments = (x, site.weight, site.aux, site.bias, site.adapter, rows)
    parts = [
        OPS.site_linear(*arguments, part, quant, packed) for part in range(len(site.quant.parts))
    ]
    assert [part.shape[:-1] for part in parts] == [x.shape[:-1]] * len(parts)
    return torch.cat(parts, -1).reshape(-1, site.weight.shape[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_linear_matches_the_definition(scheme: str, dtype: torch.dtype, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    site = sample_site(generator, [288, 64, 33], 320, RANKS, scheme=scheme, dtype=dtype, bias=True)
    sequences = RowMap.of([5, -1, 0, 4, 6], generator)
    tokens = RowMap.of([0, -1, 3, 3, 5, 2, 1, -1, 4, 4], generator)
    limit = 1e-5 if dtype == torch.float32 else 2**-8
    for leading, packed in (
        ((5, 3), False),
        ((5, 1), False),
        ((5, 1, 2), False),
        ((10,), False),
        ((1, 10), True),
        ((0, 3), False),
    ):
        x = torch.randn(*leading, 320, generator=generator).to(dtype)
        by_token = packed or len(leading) == 1
        count = x[..., 0].numel()
        if by_token:
            slots, scales = tokens.per_row(10, 1)
        else:
            slots, scales = sequences.per_row(leading[0], count // max(leading[0], 1))
        y = all_parts(site, x, maps(sequences, tokens), packed)
        assert y.dtype == dtype
        expected = site_output(site, x, slots, scales)
        assert (row_errors(y, expected) <= limit).all(), leading


def test_linear_without_adapter_does_not_read_the_maps(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    site = sample_site(generator, [64], 48, [8])
    x = torch.randn(2, 3, 48, generator=generator)
    quant = site.quant.model_dump_json()
    y = OPS.site_linear(x, site.weight, [], None, [], [], 0, quant, False)
    torch.testing.assert_close(y, x @ site.weight.T)


class Projections(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(96, 80, bias=True)
        self.embed_tokens = nn.Embedding(50, 24)

    def forward(self, x: Tensor) -> Tensor:
        raise NotImplementedError


def peft_layers(rank: int, alpha: float, seed: int) -> Any:
    """A linear and an embedding with one random PEFT adapter."""
    torch.manual_seed(seed)
    config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=["q_proj", "embed_tokens"])
    model = get_peft_model(Projections(), config)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter)
    return model.base_model.model


@pytest.mark.parametrize("rank", [1, 3, 8])
def test_linear_is_pefts(rank: int, seed: int) -> None:
    layer = peft_layers(rank, 6.0, seed).q_proj
    lora_a = torch.zeros(2, 1, 16, 96)
    lora_b = torch.zeros(2, 80, 16)
    lora_a[1, 0, :rank] = layer.lora_A["default"].weight.detach()
    lora_b[1, :, :rank] = layer.lora_B["default"].weight.detach()
    scale = torch.full((2, 1), layer.scaling["default"])
    adapter = [lora_a, lora_b, scale, torch.tensor([0, rank], dtype=torch.int32)]
    quant = sample_quant("none", [80], 96, torch.float32, True, 128).model_dump_json()
    x = torch.randn(3, 5, 96)
    rows = RowMap.of([1, -1, 1], torch.Generator())
    rows.scale[:] = 1
    weight, bias = layer.base_layer.weight.detach(), layer.base_layer.bias.detach()
    y = OPS.site_linear(x, weight, [], bias, adapter, maps(rows, rows), 0, quant, False)
    with torch.no_grad():
        torch.testing.assert_close(y[[0, 2]], layer(x[[0, 2]]), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(y[1], layer.base_layer(x[1]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rank", [1, 3, 8])
def test_embedding_is_pefts(rank: int, seed: int) -> None:
    layer = peft_layers(rank, 6.0, seed).embed_tokens
    emb_a = torch.zeros(2, 16, 50)
    emb_b = torch.zeros(2, 24, 16)
    emb_a[1, :rank] = layer.lora_embedding_A["default"].detach()
    emb_b[1, :, :rank] = layer.lora_embedding_B["default"].detach()
    scale = torch.full((2, 1), layer.scaling["default"])
    adapter = [emb_a, emb_b, scale, torch.tensor([0, rank], dtype=torch.int32)]
    ids = torch.randint(0, 50, (3, 5))
    rows = RowMap.of([1, -1, 1], torch.Generator())
    rows.scale[:] = 1
    table = layer.base_layer.weight.detach()
    y = OPS.site_embedding(ids, table, adapter, maps(rows, rows), False)
    with torch.no_grad():
        torch.testing.assert_close(y[[0, 2]], layer(ids[[0, 2]]), rtol=1e-5, atol=1e-5)
        assert torch.equal(y[1], table[ids[1]])
    adapter[0][0] = adapter[1][0] = float("nan")
    assert torch.equal(OPS.site_embedding(ids, table, adapter, maps(rows, rows), False), y)
    tokens = RowMap.of([1, -1, 1, -1], torch.Generator())
    tokens.scale[:] = 1
    flat = OPS.site_embedding(ids[0, :4], table, adapter, maps(rows, tokens), False)
    torch.testing.assert_close(flat[[0, 2]], y[0, [0, 2]], rtol=1e-5, atol=1e-5)
    assert torch.equal(flat[[1, 3]], table[ids[0, [1, 3]]])
    assert torch.equal(OPS.site_embedding(ids, table, [], [], False), table[ids])


def experts_case(seed: int) -> tuple[Any, Tensor, Tensor, Tensor]:
    """Qwen3-MoE's experts module (E 6, H 32, I 24), x, top-k ids and weights for 10 tokens."""
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        hidden_size=32, moe_intermediate_size=24, num_experts=6, num_experts_per_tok=2
    )
    config._experts_implementation = "eager"
    experts = Qwen3MoeExperts(config)
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=0.2)
    weights, ids = torch.randn(10, 6).softmax(-1).topk(2, -1)
    return experts, torch.randn(10, 32), ids, weights


def run_experts(
    x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, w2: Tensor, adapter: list[Tensor],
    rows: list[Tensor], layout: str = "halves", activation: str = "silu",
) -> Tensor:  # fmt: skip
    quant13 = sample_quant("none", [24, 24], 32, torch.float32, False, 128).model_dump_json()
    quant2 = sample_quant("none", [32], 24, torch.float32, False, 128).model_dump_json()
    y = OPS.site_experts(
        x, ids, weights, w13, [], None, w2, [], None, adapter, rows, quant13, quant2,
        layout, activation, False,
    )  # fmt: skip
    assert isinstance(y, Tensor)
    return y


def expert_adapter(slots: int, ranks: list[int]) -> list[Tensor]:
    """Random deltas for gate, up and down of 6 experts."""
    tensors = []
    for columns, out in ((32, 24), (32, 24), (24, 32)):
        a, b = torch.randn(slots, 6, 16, columns) * 0.2, torch.randn(slots, 6, out, 16) * 0.2
        for slot, rank in enumerate(ranks):
            a[slot, :, rank:] = 0
            b[slot, :, :, rank:] = 0
        tensors += [a, b]
    return [*tensors, torch.rand(slots, 3) + 0.5, torch.tensor(ranks, dtype=torch.int32)]


def merged(experts: Any, adapter: list[Tensor], slot: int, scale: float) -> tuple[Tensor, Tensor]:
    """w13 and w2 of every expert with one slot's deltas added."""
    gate_a, gate_b, up_a, up_b, down_a, down_b, lora_scale, _ = adapter
    factor = scale * lora_scale[slot]
    gate = gate_b[slot] @ gate_a[slot] * factor[0]
    up = up_b[slot] @ up_a[slot] * factor[1]
    down = down_b[slot] @ down_a[slot] * factor[2]
    w13 = experts.gate_up_proj.detach() + torch.cat([gate, up], 1)
    return w13, experts.down_proj.detach() + down


def test_experts_are_transformers_with_merged_deltas(seed: int) -> None:
    experts, x, ids, weights = experts_case(seed)
    w13, w2 = experts.gate_up_proj.detach().clone(), experts.down_proj.detach().clone()
    adapter = expert_adapter(3, [5, 16, 0])
    tokens = RowMap.of([0, -1, 1, 1, 2, 0, -1, 1, 0, 0], torch.Generator().manual_seed(seed))
    rows = maps(tokens, tokens)
    y = run_experts(x, ids, weights, w13, w2, adapter, rows)
    with torch.no_grad():
        plain = experts(x, ids, weights)
        torch.testing.assert_close(run_experts(x, ids, weights, w13, w2, [], []), plain)
        for row in range(10):
            slot, scale = int(tokens.slot[row]), float(tokens.scale[row])
            if slot in (-1, 2):
                torch.testing.assert_close(y[row], plain[row])
                continue
            new13, new2 = merged(experts, adapter, slot, scale)
            experts.gate_up_proj.copy_(new13)
            experts.down_proj.copy_(new2)
            one = slice(row, row + 1)
            expected = experts(x[one], ids[one], weights[one])[0]
            torch.testing.assert_close(y[row], expected, rtol=1e-4, atol=1e-5)
            assert (expected - plain[row]).abs().max() > 1e-2
            experts.gate_up_proj.copy_(w13)
            experts.down_proj.copy_(w2)


def test_experts_isolate_rows_and_skip_sentinels(seed: int) -> None:
    experts, x, ids, weights = experts_case(seed)
    w13, w2 = experts.gate_up_proj.detach(), experts.down_proj.detach()
    adapter = expert_adapter(2, [5, 16])
    none = RowMap.of([-1] * 10, torch.Generator().manual_seed(seed))
    some = RowMap.of([0, -1] * 5, torch.Generator().manual_seed(seed))
    nobody = run_experts(x, ids, weights, w13, w2, adapter, maps(none, none))
    live = run_experts(x, ids, weights, w13, w2, adapter, maps(some, some))
    assert torch.equal(live[1::2], nobody[1::2])
    assert not torch.equal(live[0::2], nobody[0::2])
    for tensor in adapter[:6]:
        tensor[1] = float("nan")
    assert torch.equal(run_experts(x, ids, weights, w13, w2, adapter, maps(some, some)), live)

    strayed = ids.clone()
    strayed[:5, 0] = -1
    strayed[5:, 0] = 6
    poisoned = weights.clone()
    poisoned[:, 0] = float("nan")
    y = run_experts(x, strayed, poisoned, w13, w2, adapter, maps(some, some))
    alone = run_experts(x, ids[:, 1:], weights[:, 1:], w13, w2, adapter, maps(some, some))
    assert torch.equal(y, alone)
    nothing = torch.full_like(ids, -1)
    y = run_experts(x, nothing, weights, w13, w2, adapter, maps(some, some))
    assert torch.equal(y, torch.zeros_like(x))


def test_interleaved_experts_are_the_halves_reordered(seed: int) -> None:
    experts, x, ids, weights = experts_case(seed)
    w13, w2 = experts.gate_up_proj.detach(), experts.down_proj.detach()
    interleaved = torch.stack(w13.chunk(2, 1), 2).flatten(1, 2)
    adapter = expert_adapter(1, [16])
    rows = maps(*[RowMap.of([0] * 10, torch.Generator().manual_seed(seed))] * 2)
    y = run_experts(x, ids, weights, interleaved, w2, adapter, rows, layout="interleaved")
    torch.testing.assert_close(y, run_experts(x, ids, weights, w13, w2, adapter, rows))


def test_unknown_expert_activation_is_refused_by_name(seed: int) -> None:
    experts, x, ids, weights = experts_case(seed)
    with pytest.raises(FeatureUnsupported, match="'clamped_swiglu'"):
        run_experts(
            x, ids, weights, experts.gate_up_proj.detach(), experts.down_proj.detach(), [], [],
            activation="clamped_swiglu",
        )  # fmt: skip


def test_alternating_rows_with_two_input_scales_are_refused_by_name() -> None:
    """Gate and up alternate, so no range of rows would have one scale; in halves they run."""
    quant13 = sample_quant("fp8_tensor_static", [24, 24], 32, torch.float32, False, 128)
    quant2 = sample_quant("fp8_tensor_static", [32], 24, torch.float32, False, 128)
    assert quant13.planes == [0, 1]
    codes = torch.float8_e4m3fn
    x, ids, weights = torch.randn(3, 32), torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1)
    base = (
        *(x, ids, weights),
        *(torch.ones(1, 48, 32).to(codes), [torch.ones(1, 48), torch.ones(1, 2)], None),
        *(torch.ones(1, 32, 24).to(codes), [torch.ones(1, 32), torch.ones(1, 1)], None),
    )
    rest = ([], [], quant13.model_dump_json(), quant2.model_dump_json())
    assert OPS.site_experts(*base, *rest, "halves", "silu", False).isfinite().all()
    with pytest.raises(FeatureUnsupported, match="'fp8_tensor_static' with input scales"):
        OPS.site_experts(*base, *rest, "interleaved", "silu", False)
    one = sample_quant("fp8_tensor_static", [48], 32, torch.float32, False, 128).model_dump_json()
    base[4][1] = torch.ones(1, 1)
    y = OPS.site_experts(*base, [], [], one, rest[3], "interleaved", "silu", False)
    assert y.isfinite().all()


@pytest.mark.parametrize("stray", [-2, 7])
def test_an_unbound_row_is_refused(stray: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    site = sample_site(generator, [64], 48, RANKS)
    rows = RowMap.of([0, stray], generator)
    x = torch.randn(2, 3, 48, generator=generator)
    with pytest.raises(RequestInvalid, match="row 1 of the batch") as caught:
        all_parts(site, x, maps(rows, rows))
    assert caught.value.found == str(stray)
    ids = torch.zeros(2, 3, dtype=torch.int64)
    adapter = [torch.zeros(7, 16, 50), torch.zeros(7, 24, 16), *site.adapter[2:]]
    with pytest.raises(RequestInvalid, match="row 1 of the batch"):
        OPS.site_embedding(ids, torch.zeros(50, 24), adapter, maps(rows, rows), False)


def test_too_many_rows_are_refused(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    site = sample_site(generator, [64], 48, [8])
    rows = RowMap.of([-1] * 32, generator)
    for x in (torch.randn(33, 1, 48), torch.randn(33, 48)):
        with pytest.raises(RequestInvalid, match=r"33 (rows|tokens) exceed"):
            all_parts(site, x, maps(rows, rows))
