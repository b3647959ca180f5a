"""Inductor's own code, site by site: the calls of one layer, compiled, against the eager markers.

Over a whole model a difference of one ulp may flip an FP8 code further on, which hides small
faults; here both sides get the same x, so the bounds hold under every scheme. On a CPU the table
picks opaque ATen calls; the plain PyTorch bodies, which Inductor turns into code, are tested too.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import lora_compile as lc
from lora_compile.passes.select_kernels import KernelKind, KernelRule
from lora_compile.runtime.backend import Backend
from tests.runtime.conftest import Served
from tests.tiny import RANKS, llama, make_adapter, prompts, relative

LAYER = "model.layers.1"
KINDS = {
    "qkv": ("self_attn", ("q_proj", "k_proj", "v_proj"), "self_attn.qkv_proj"),
    "o": ("self_attn", ("o_proj",), "self_attn.o_proj"),
    "gate_up": ("mlp", ("gate_proj", "up_proj"), "mlp.gate_up_proj"),
    "down": ("mlp", ("down_proj",), "mlp.down_proj"),
}
CASES = [("aten", kind, tokens) for kind in KINDS for tokens in (1, 5)]
"""Kernels, kind of site, tokens a row (decoding takes other code)."""
COUNT = itertools.count()

Call = Callable[[torch.Tensor], tuple[torch.Tensor, ...]]


@dataclass
class SiteCall:
    """The projections of one site, called together on one x."""

    name: str
    width: int
    eager: Call
    compiled: Call
    backend: Backend


def site_call(model: lc.LoraModel, kind: str) -> SiteCall:
    parent, names, site = KINDS[kind]
    modules = [model.module.get_submodule(f"{LAYER}.{parent}.{name}") for name in names]

    def call(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(module(x) for module in modules)

    # Dynamo keeps graphs and sizes by code, and each test here compiles one more.
    call.__code__ = call.__code__.replace(co_name=f"call_{next(COUNT)}")
    backend = Backend(model.plan, model._sites_by_tensor, whole=False)
    compiled = torch.compile(call, backend=backend, fullgraph=True)
    plan = model.plan.by_name[f"{LAYER}.{site}"]
    return SiteCall(plan.name, plan.in_features, call, compiled, backend)


def run(
    model: lc.LoraModel, call: Call, x: torch.Tensor, names: list[str | None]
) -> tuple[torch.Tensor, ...]:
    with model.bind(prompts(0, *x.shape[:2]), names), torch.no_grad():
        return call(x)


@pytest.fixture
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> KernelKind:
    """The kernels that every op of a site gets."""
    kernel: KernelKind = request.param
    if kernel == "torch":
        table = (KernelRule(op="*", device="cpu", kernel=kernel),)
        monkeypatch.setattr("lora_compile.passes.select_kernels.TABLE", table)
    return kernel


def check_kernels(site: SiteCall, kernels: KernelKind) -> None:
    """Each graph is of this site alone and ran on these kernels."""
    for graph in site.backend.graphs:
        assert graph.sites == (site.name,)
        assert graph.calls > 0
        (report,) = [r for r in graph.report.passes if r.name == "select_kernels"]
        assert report.details
        assert all(f": {kernels} x " in detail for detail in report.details), report.details


@pytest.mark.parametrize(
    ("kernels", "kind", "tokens"),
    [*CASES, ("torch", "qkv", 5)],
    indirect=["kernels"],
)
def test_inductors_code_gives_what_the_markers_give(
    served: Served, kernels: KernelKind, kind: str, tokens: int, seed: int
) -> None:
    """Base rows and every rank in one batch, float32, row by row."""
    model, names = served.eager, served.mixed
    site = site_call(model, kind)
    torch.manual_seed(seed)
    x = torch.randn(len(names), tokens, site.width)
    expected = run(model, site.eager, x, names)
    found = run(model, site.compiled, x, names)
    bare = run(model, site.eager, x, [None] * len(names))
    assert len(found) == len(KINDS[kind][1])
    for part, (one, other, base) in enumerate(zip(found, expected, bare, strict=True)):
        for row, name in enumerate(names):
            assert relative(one[row], other[row]) <= 1e-5, (part, row, name)
        assert relative(other, base) > 1e-2, "weak adapters; a weak test"
    assert len(site.backend.graphs) == 1
    check_kernels(site, kernels)


@pytest.fixture(scope="module", params=["none", "fp8_block"])
def half(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> lc.LoraModel:
    """In bfloat16, with an adapter of each rank."""
    folder: Path = tmp_path_factory.mktemp("half")
    plain = llama(21, torch.bfloat16)
    # As strong as the base, so that 2 ulp of the sum say something about the delta.
    paths = {
        f"rank{r}": make_adapter(plain, folder / f"rank{r}", rank=r, seed=r, strength=3.0)
        for r in RANKS
    }
    return lc.wrap(
        copy.deepcopy(plain), quantization=request.param, adapters=paths, max_rank=64,
        max_adapters=len(paths),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("kernels", "kind", "tokens"), [*CASES, ("torch", "down", 1)], indirect=["kernels"]
)
def test_bf16_rows_do_not_depend_on_their_neighbours(
    half: lc.LoraModel, kernels: KernelKind, kind: str, tokens: int, seed: int
) -> None:
    """An adapter's row: within 2 ulp of each token's largest value; a base row: equal bits."""
    names: list[str | None] = [None, "rank1", "rank16", None, "rank33", "rank64"]
    site = site_call(half, kind)
    torch.manual_seed(seed)
    x = torch.randn(len(names), tokens, site.width, dtype=torch.bfloat16)
    batch = run(half, site.compiled, x, names)
    base = run(half, site.compiled, x, [None] * len(names))
    assert len(site.backend.graphs) == 1
    assert not any(map(torch.equal, batch, base))
    for row, name in enumerate(names):
        alone = run(half, site.compiled, x[row : row + 1], [name])
        for mixed, bare, single in zip(batch, base, alone, strict=True):
            if name is None:
                assert torch.equal(mixed[row], bare[row]), row
            largest = mixed[row].float().abs().amax(-1, keepdim=True)
            ulp = torch.exp2(torch.floor(torch.log2(largest)) - 7)
            difference = (mixed[row].float() - single[0].float()).abs()
            assert (difference <= 2 * ulp).all(), (row, name, float((difference / ulp).max()))
    check_kernels(site, kernels)
