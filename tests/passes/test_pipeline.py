"""The passes on real traced graphs: goldens before and after, and the contracts of each pass."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import fx, nn

from lora_compile.errors import CompileIncomplete, Faults, GraphInvalid, SchemeUnsupported
from lora_compile.passes.base import GraphContext, calls
from lora_compile.passes.graph_text import graph_text
from lora_compile.passes.insert_lora import LOWERINGS
from lora_compile.passes.markers import MARKERS
from lora_compile.passes.pipeline import PIPELINE, run_pipeline
from tests.passes.conftest import Traced

Trace = Callable[..., Traced]
GOLDENS = Path(__file__).parent / "goldens"


def check_golden(name: str, text: str) -> None:
    """Compare with the file; LORA_COMPILE_ACCEPT=1 rewrites it."""
    path = GOLDENS / f"{name}.txt"
    if os.environ.get("LORA_COMPILE_ACCEPT") == "1":
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert path.read_text() == text


@pytest.mark.parametrize("scheme", ["none", "fp8_block", "int8_channel", "fp8_tensor_static"])
def test_graph_before_and_after_each_pass(traced: Trace, scheme: str) -> None:
    found = traced(scheme)
    texts: dict[str, str] = {}
    run_pipeline(
        found.gm,
        found.context,
        observe=lambda step, gm: texts.update({step: graph_text(gm, only_sites=True)}),
    )
    assert list(texts) == ["traced", *(step.name for step in PIPELINE)]
    for step, text in texts.items():
        check_golden(f"{scheme}.{step}", text)


@pytest.mark.parametrize("scheme", ["none", "fp8_block", "int8_channel", "fp8_tensor_static"])
def test_graph_is_well_formed_and_reports_say_what_was_done(traced: Trace, scheme: str) -> None:
    found = traced(scheme)
    linted = []

    def lint(step: str, gm: fx.GraphModule) -> None:
        gm.graph.lint()
        linted.append(step)

    report = run_pipeline(found.gm, found.context, observe=lint)
    assert linted == ["traced", *(step.name for step in PIPELINE)]
    matched = {step.name: step.matched for step in report.passes}
    assert matched["collect_sites"] == len(found.plan.targets) == 9
    assert matched["fuse_projections"] == 2
    assert matched["insert_lora"] == matched["verify_graph"] == len(found.plan.sites) == 6
    assert matched["select_kernels"] == (10 if scheme == "none" else 14)


@pytest.mark.parametrize(
    ("scheme", "op"), [("fp8_block", "quantize_fp8_group"), ("int8_channel", "quantize_token")]
)
def test_a_group_with_unlike_parts_is_split_and_shares_its_quantised_input(
    traced: Trace, scheme: str, op: str
) -> None:
    """k stays unquantised: q and v are sites of their own that quantise the same x once."""
    found = traced(scheme, keep=lambda module: module.endswith("k_proj"))
    names = [site.name.rpartition(".")[2] for site in found.plan.sites if site.layer == 0]
    assert names[:3] == ["q_proj", "k_proj", "v_proj"]
    assert "split" in found.plan.sites[1].why
    report = run_pipeline(found.gm, found.context)
    shared = next(step for step in report.passes if step.name == "share_quantisation")
    assert shared.matched == 1, shared
    quantise = [n for n in found.gm.graph.nodes if op in str(n.target)]
    assert len(quantise) == 4  # q and v, o, gate_up, down


def test_static_sites_share_an_input_only_with_the_same_scales(traced: Trace) -> None:
    """Each site's scales are a buffer of its own, so what reads the same x still has two forms."""
    found = traced("fp8_tensor_static", keep=lambda module: module.endswith("k_proj"))
    report = run_pipeline(found.gm, found.context)
    shared = next(step for step in report.passes if step.name == "share_quantisation")
    assert shared.matched == 0
    quantise = [n for n in found.gm.graph.nodes if "quantize_static" in str(n.target)]
    assert len(quantise) == 5  # q, v, o, gate_up, down


def test_a_scheme_whose_op_has_no_lowering_is_refused_by_name(
    traced: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = traced("int8_channel")
    monkeypatch.delitem(LOWERINGS, "lora_compile::scaled_linear")
    with pytest.raises(SchemeUnsupported, match=r"scheme int8_channel of site .* has no lowering"):
        run_pipeline(found.gm, found.context)


def test_every_contract_is_checked(traced: Trace) -> None:
    found = traced("none")
    for step in PIPELINE[1:]:
        with pytest.raises(GraphInvalid, match=f"pass {step.name} runs too early"):
            run_pipeline(found.gm, found.context, passes=[step])


def test_a_site_that_the_forward_never_calls_is_an_error(traced: Trace) -> None:
    def drop_up(module: nn.Module) -> None:
        mlp = module.get_submodule("model.layers.0.mlp")
        mlp.forward = lambda x: mlp.down_proj(mlp.act_fn(mlp.gate_proj(x)))  # type: ignore[assignment]

    found = traced("none", change=drop_up)
    with pytest.raises(CompileIncomplete) as caught:
        run_pipeline(found.gm, found.context)
    text = str(caught.value)
    assert "site model.layers.0.mlp.gate_up_proj is in the plan but not in the compiled" in text
    assert "model.layers.0.mlp.up_proj" in text
    assert "llama.yaml:" in text


def test_a_projection_that_is_called_twice_is_an_error(traced: Trace) -> None:
    def twice(module: nn.Module) -> None:
        mlp = module.get_submodule("model.layers.0.mlp")
        plain = mlp.forward
        mlp.forward = lambda x: plain(plain(x))  # type: ignore[assignment]

    found = traced("none", change=twice)
    with pytest.raises((CompileIncomplete, Faults), match="occurs twice in one graph"):
        run_pipeline(found.gm, found.context)


def test_parts_that_read_different_inputs_are_an_error(traced: Trace) -> None:
    def differ(module: nn.Module) -> None:
        mlp = module.get_submodule("model.layers.0.mlp")
        mlp.forward = lambda x: mlp.down_proj(mlp.gate_proj(x) * mlp.up_proj(x + 1))  # type: ignore[assignment]

    found = traced("none", change=differ)
    with pytest.raises(GraphInvalid, match="cannot run as one GEMM") as caught:
        run_pipeline(found.gm, found.context)
    assert "fuse: false" in str(caught.value)


def test_a_marker_of_an_unknown_tensor_is_an_error(traced: Trace) -> None:
    """A buffer that was replaced after attach is not known to the backend any more."""

    def replace_weight(module: nn.Module) -> None:
        site = module.get_submodule("model.layers.0.self_attn.o_proj.site")
        site.weight = site.weight.clone()

    found = traced("none", change=replace_weight)
    with pytest.raises(Faults, match="carries a weight that is no site of the plan"):
        run_pipeline(found.gm, found.context)


def test_a_site_that_sees_another_batch_dimension_is_an_error(traced: Trace) -> None:
    def fold(module: nn.Module) -> None:
        mlp = module.get_submodule("model.layers.0.mlp")
        down = mlp.down_proj

        def forward(x: torch.Tensor) -> torch.Tensor:
            h = mlp.gate_proj(x) * mlp.up_proj(x)
            rows, tokens, width = h.shape
            return down(h.reshape(rows * tokens, 1, width)).reshape(rows, tokens, -1)

        mlp.forward = forward  # type: ignore[assignment]

    found = traced("none", change=fold)
    with pytest.raises((GraphInvalid, Faults), match="sees another batch dimension"):
        run_pipeline(found.gm, found.context)


def test_a_part_of_the_model_need_not_hold_every_site(traced: Trace) -> None:
    """Layer-by-layer graphs hold some sites; what they hold is still lowered exactly once."""
    found = traced("none", whole=False)
    sites = found.context.placeholder_sites
    context: GraphContext = replace(found.context, plan=found.plan)
    assert len(sites) == len(found.plan.sites)
    run_pipeline(found.gm, context)
    assert not [node for marker in MARKERS for node in calls(found.gm.graph, marker)]
