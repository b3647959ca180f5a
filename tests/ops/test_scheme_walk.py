"""Every shipped scheme, through every marker: the exact answer, or a refusal by its name.

A scheme that is added is walked too, and fails until `scheme_oracles.ORACLES` has maths for it.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

import pytest
import torch
from torch import Tensor

from lora_compile.errors import FeatureUnsupported, SchemeUnsupported
from lora_compile.ops import markers
from lora_compile.passes.insert_lora import LOWERINGS
from lora_compile.planning.prepare import require_complete
from lora_compile.schemas.quant_scheme import QuantScheme, all_schemes, find_scheme
from tests.ops.conftest import RowMap, row_errors
from tests.ops.scheme_oracles import ORACLES, pack

OPS = torch.ops.lora_compile
RANKS = [5, 16, 0]
SLOTS = [1, -1, 0, 2, 1, -1]
BASE = [1, 3, 5]
"""Rows without a delta: no adapter, or a slot of rank 0."""
KINDS = {"linear": [150], "fused linear": [150, 64, 33], "experts": None}
"""Widths of the parts."""


def low_rank(x: Tensor, down: Tensor, up: Tensor, slot: int, scale: Tensor) -> Tensor:
    """s B (A x) of one row, by the slot's true rank; 0 without an adapter."""
    rank = RANKS[slot] if slot >= 0 else 0
    return up[:, :rank].double() @ (down[:rank].double() @ x.double()) * float(scale)


def walk_linear(scheme: QuantScheme, widths: list[int], g: torch.Generator) -> None:
    packed = pack(scheme, [torch.randn(n, 200, generator=g) for n in widths], 0.005)
    bias, x = torch.randn(sum(widths), generator=g), torch.randn(len(SLOTS), 200, generator=g)
    a = torch.randn(3, len(widths), 16, 200, generator=g)
    b = torch.randn(3, sum(widths), 16, generator=g)
    scale, rows = torch.rand(3, len(widths), generator=g) + 0.5, RowMap.of(SLOTS, g)
    adapter, maps = [a, b, scale, torch.tensor(RANKS).int()], [rows.slot, rows.scale] * 2
    part = markers.ALL_PARTS if len(widths) > 1 else 0
    tensors, quant = (x, packed.weight, packed.aux, bias), packed.quant
    y = OPS.site_linear(*tensors, adapter, maps, part, quant, False)
    plain = OPS.site_linear(*tensors, [], [], part, quant, False)
    base = packed.base(ORACLES[scheme.name], x) + bias.double()
    expected = base.clone()
    for row, slot in enumerate(SLOTS):
        ends = list(accumulate(widths))
        for index, (width, high) in enumerate(zip(widths, ends, strict=True)):
            here, factor = slice(high - width, high), scale[slot, index] * rows.scale[row]
            expected[row, here] += low_rank(x[row], a[slot, index], b[slot, here], slot, factor)
    assert (row_errors(y, expected) < 1e-5).all()
    assert (row_errors(plain, base) < 1e-5).all()
    assert torch.equal(y[BASE], plain[BASE])


def walk_experts(scheme: QuantScheme, g: torch.Generator) -> None:
    shapes, experts = ((90, 72), (90, 72), (72, 90)), 3  # gate, up, down
    drawn = [[torch.randn(s, generator=g) / s[1] ** 0.5 for s in shapes] for _ in range(experts)]
    packs = [
        (pack(scheme, [gate, up], 0.01 + 0.001 * index), pack(scheme, [down], 0.005))
        for index, (gate, up, down) in enumerate(drawn)
    ]
    (w13, aux13), (w2, aux2) = (
        (
            torch.stack([two[i].weight for two in packs]),
            [torch.stack(aux) for aux in zip(*(two[i].aux for two in packs), strict=True)],
        )
        for i in (0, 1)
    )
    quants = [packed.quant for packed in packs[0]]
    bias13, bias2 = (torch.randn(experts, n, generator=g) for n in (180, 72))
    factors = [torch.randn(3, experts, *shape, generator=g) / shape[1] ** 0.5
               for out, columns in shapes for shape in ((16, columns), (out, 16))]  # fmt: skip
    scale, rows = torch.rand(3, 3, generator=g) + 0.5, RowMap.of(SLOTS, g)
    x, router = torch.randn(len(SLOTS), 72, generator=g), torch.rand(len(SLOTS), 3, generator=g)
    weight, ids = router.topk(2)
    oracle = ORACLES[scheme.name]
    base = (x, ids, weight, w13, aux13, bias13, w2, aux2, bias2)
    adapter, maps = [*factors, scale, torch.tensor(RANKS).int()], [rows.slot, rows.scale] * 2
    y = OPS.site_experts(*base, adapter, maps, *quants, "halves", "silu", False)
    nobody = [RowMap.of([-1] * len(SLOTS), g).slot, rows.scale] * 2
    plain = OPS.site_experts(*base, adapter, nobody, *quants, "halves", "silu", False)
    for row, slot in enumerate(SLOTS):
        expected, slack, one = torch.zeros(72).double(), torch.zeros(72).double(), x[row : row + 1]
        for expert, share in zip(ids[row].tolist(), weight[row].double(), strict=True):

            def delta(i: int, v: Tensor, e: int = expert, s: int = slot, r: int = row) -> Tensor:
                pair = factors[2 * i][s, e], factors[2 * i + 1][s, e]
                return low_rank(v, *pair, s, scale[s, i] * rows.scale[r])

            first, second = packs[expert]
            gate, up = (first.base(oracle, one)[0] + bias13[expert].double()).chunk(2)
            gate, up = gate + delta(0, one[0]), up + delta(1, one[0])
            hidden = (gate * gate.sigmoid() * up).float()
            (scale2,) = second.input_scales
            low, high = (
                oracle.activation(hidden[None], n, scale2)[0] for n in (1 - 1e-5, 1 + 1e-5)
            )
            down = second.base(oracle, hidden[None])[0] + bias2[expert].double() + delta(2, hidden)
            expected += share * down
            # fp32 may put a quotient this close to a tie on either side of it.
            slack += share * ((high - low).abs() @ second.dense.abs().T)
        assert ((y[row] - expected).abs() <= 1e-5 * expected.abs().max() + slack).all()
    assert torch.equal(y[BASE], plain[BASE])


def refused(scheme: QuantScheme) -> bool:
    """Whether it is refused as a whole, by its name."""
    try:
        require_complete(scheme)
    except (FeatureUnsupported, SchemeUnsupported) as refusal:
        return f"`{scheme.name}`" in refusal.message
    return False


def walk(scheme: QuantScheme, kind: str, seed: int) -> None:
    if scheme.name not in ORACLES:
        if refused(scheme):
            return
        pytest.fail(f"scheme {scheme.name} runs, but no maths of its own checks it: see ORACLES")
    generator, widths = torch.Generator().manual_seed(seed), KINDS[kind]
    if widths is None:
        walk_experts(require_complete(scheme), generator)
    else:
        walk_linear(require_complete(scheme), widths, generator)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scheme", all_schemes(), ids=lambda scheme: scheme.name)
def test_every_scheme_answers_exactly_or_refuses_by_name(
    scheme: QuantScheme, kind: str, seed: int
) -> None:
    walk(scheme, kind, seed)


@pytest.mark.parametrize("kind", KINDS)
def test_the_walk_notices_what_it_cannot_vouch_for(
    kind: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = find_scheme("fp8_block")
    new = whole.model_copy(update={"name": "new"})
    monkeypatch.delitem(LOWERINGS, whole.ops.base)
    walk(new, kind, seed)  # refused by its name: it has no lowering
    monkeypatch.undo()
    with pytest.raises(pytest.fail.Exception, match="scheme new runs"):
        walk(new, kind, seed)
    with pytest.raises(FeatureUnsupported, match="scheme 'fp8_block' transforms the input"):
        walk(whole.model_copy(update={"input_transforms": ("g_idx",)}), kind, seed)
    unquantised = replace(ORACLES["fp8_block"], activation=lambda x, *_: x.double())
    monkeypatch.setitem(ORACLES, "fp8_block", unquantised)
    with pytest.raises(AssertionError):
        walk(whole, kind, seed)
