"""Sameness over {llama-like, DeepSeek-V3-like} x every scheme, compiled, in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import lora_compile as lc
from lora_compile.ops.aten import fp8_block as aten_fp8_block
from tests.conftest import SEED
from tests.gate import gate_rows, judge
from tests.runtime.variants import SCHEMES, Variant, make_variant
from tests.tiny import peft_logits, prompts, relative

ROWS: list[str | None] = [None, "every", "second", "first", None]


@pytest.fixture(scope="module", params=["llama", "deepseek"])
def shape(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=SCHEMES)
def variant(
    request: pytest.FixtureRequest, shape: str, tmp_path_factory: pytest.TempPathFactory
) -> Variant:
    return make_variant(shape, request.param, tmp_path_factory.mktemp("variant"))


@pytest.fixture(scope="module")
def model(variant: Variant) -> lc.LoraModel:
    model = lc.load(variant.file)
    if hasattr(model.module, "set_experts_implementation"):
        # Rows that share an expert's GEMM differ in the last bit with who else is in it.
        model.module.set_experts_implementation("batched_mm")
    return model.compile()


def forward(model: lc.LoraModel, ids: torch.Tensor, names: list[str | None]) -> torch.Tensor:
    logits: torch.Tensor = model(ids, adapters=names, use_cache=False).logits
    return logits


def test_a_compiled_graph_and_its_rows(variant: Variant, model: lc.LoraModel) -> None:
    ids = prompts(SEED, 5, 9)
    found = forward(model, ids, ROWS)
    assert torch.equal(found, forward(model, ids, ROWS)), "the same batch twice"
    base = forward(model, ids, [None] * 5)
    for row, name in enumerate(ROWS):
        if name is None:
            assert torch.equal(found[row], base[row]), row
            continue
        assert relative(found[row], base[row]) > 1e-2, name
        alone = forward(model, ids, [n if i == row else None for i, n in enumerate(ROWS)])
        assert relative(found[row], alone[row]) <= 1e-5, name
    # Codes may flip between two evaluations of a model; site by site they do not, see below.
    bound = 1e-5 if variant.scheme == "none" else 1.5e-1
    for row, name in ((1, "every"), (2, "second"), (3, "first")):
        expected = peft_logits(variant.oracle, variant.adapters[name], ids[row : row + 1])
        assert relative(found[row : row + 1], expected) <= bound, name
    assert model.report.graph_breaks == 0
    assert len(model.report.graphs) == 1
    model.backend.graphs[0].lowered.graph.lint()


def test_every_site_on_its_own_input(variant: Variant, model: lc.LoraModel) -> None:
    ids = prompts(SEED, 5, 9)
    rows = gate_rows(model, variant.adapters, ROWS)
    settings: dict[str, Any] = {"input_scales": variant.input_scales, "use_cache": False}
    result = judge(model, variant.plain, rows, ids, ROWS, **settings)
    assert result.output is not None
    assert result.delta is not None
    assert result.output.error <= 1e-5, result.output
    assert result.delta.error <= 1e-5, result.delta
    assert not result.gaps(["prefill"])
    wrong = gate_rows(model, variant.adapters, [None, "second", "every", "first", None])
    worst = judge(model, variant.plain, wrong, ids, ROWS, **settings)
    assert not worst.passed


def test_scales_counted_over_the_fused_rows_are_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """96 + 80 rows: blocks restart at kv_a, so row // 128 over all rows is wrong."""
    variant = make_variant("deepseek", "fp8_block", tmp_path)
    model = lc.load(variant.file).compile()
    ids = prompts(SEED, 5, 9)
    rows = gate_rows(model, variant.adapters, ROWS)
    assert judge(model, variant.plain, rows, ids, ROWS, use_cache=False).passed
    right = aten_fp8_block.expand_block_rows

    def over_all_rows(scale: torch.Tensor, part_rows: list[int], block_rows: int) -> torch.Tensor:
        if part_rows[-1] != 96 + 80:
            return right(scale, part_rows, block_rows)
        return scale.repeat_interleave(block_rows, 0)[: part_rows[-1]]

    monkeypatch.setattr(aten_fp8_block, "expand_block_rows", over_all_rows)
    result = judge(model, variant.plain, rows, ids, ROWS, use_cache=False)
    assert result.output is not None
    assert "fused_qkv_a_proj_with_mqa" in result.output.site
    assert not result.passed
