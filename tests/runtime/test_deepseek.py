"""DeepSeek-V3 and its relatives, unquantised: latent attention and MoE, against PEFT."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from peft import PeftModel
from safetensors.torch import load_file
from torch import nn
from transformers import DeepseekV2Config

import lora_compile as lc
from lora_compile.errors import FeatureUnsupported
from lora_compile.runtime.backend import Backend
from tests.conftest import SEED
from tests.deepseek import deepseek, deepseek_adapter, for_peft
from tests.tiny import peft_logits, prompts, relative

FIXTURES = Path(__file__).parents[1] / "fixtures"
TARGETS: dict[str, tuple[str, ...]] = {
    "q_a": ("q_a_proj",),
    "kv_a": ("kv_a_proj_with_mqa",),
    "both": ("q_a_proj", "kv_a_proj_with_mqa"),
}
PARTS = ("q_a_proj", "kv_a_proj_with_mqa")


def peft_or_base(
    plain: nn.Module, paths: dict[str, Path], name: str | None, ids: torch.Tensor
) -> torch.Tensor:
    if name is not None:
        return peft_logits(for_peft(plain), paths[name], ids)
    with torch.no_grad():
        logits: torch.Tensor = plain(ids).logits
    return logits


def check_rows(
    found: torch.Tensor,
    plain: nn.Module,
    paths: dict[str, Path],
    ids: torch.Tensor,
    names: list[str | None],
) -> None:
    for row, name in enumerate(names):
        expected = peft_or_base(plain, paths, name, ids[row : row + 1])
        assert relative(found[row : row + 1], expected) <= 1e-5, (row, name)


@dataclass
class Served:
    plain: nn.Module
    paths: dict[str, Path]
    eager: lc.LoraModel
    model: lc.LoraModel
    """Compiled as a whole."""


NAMES: list[str | None] = [None, "rank3", "rank8", None, "kv_a", "rank3"]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    """With transformers' `batched_mm` for the experts: a token's result there has the same bits
    whatever other tokens its experts get. The default, `grouped_mm`, promises no such thing."""
    folder = tmp_path_factory.mktemp("deepseek")
    plain = deepseek(SEED, num_hidden_layers=2)
    settings: dict[str, dict[str, Any]] = {
        "rank3": {"rank": 3},
        "rank8": {"rank": 8, "rank_pattern": {"kv_a_proj_with_mqa": 2}},
        "kv_a": {"rank": 4, "targets": TARGETS["kv_a"]},
    }
    paths = {
        name: deepseek_adapter(plain, folder / name, seed=SEED + index, **given)
        for index, (name, given) in enumerate(settings.items())
    }
    plain.set_experts_implementation("batched_mm")
    eager = lc.wrap(copy.deepcopy(plain), adapters=paths)
    model = lc.wrap(copy.deepcopy(plain), adapters=paths).compile()
    return Served(plain, paths, eager, model)


def test_each_row_gets_what_peft_gives(served: Served, seed: int) -> None:
    ids = prompts(seed, len(NAMES), 11)
    found = served.eager(ids, adapters=NAMES).logits
    check_rows(found, served.plain, served.paths, ids, NAMES)
    for name in served.paths:
        row = NAMES.index(name)
        assert relative(found[row], peft_or_base(served.plain, {}, None, ids[row : row + 1])) > 0.02


def test_compiled_is_peft_without_a_break(served: Served, seed: int) -> None:
    ids = prompts(seed, len(NAMES), 11)
    found = served.model(ids, adapters=NAMES).logits
    check_rows(found, served.plain, served.paths, ids, NAMES)
    assert served.model.report.graph_breaks == 0
    for record in served.model.backend.graphs:
        record.lowered.graph.lint()
        assert set(record.sites) == set(served.model.plan.by_name)


def test_base_rows_keep_their_bits(served: Served, seed: int) -> None:
    ids = prompts(seed, len(NAMES), 11)
    for model in (served.eager, served.model):
        live = model(ids, adapters=NAMES).logits
        base = model(ids, adapters=[None] * len(NAMES)).logits
        rows = [row for row, name in enumerate(NAMES) if name is None]
        assert torch.equal(live[rows], base[rows])
        assert not torch.equal(live, base)


def test_base_rows_are_those_of_a_model_without_adapters(served: Served, seed: int) -> None:
    ids = prompts(seed, len(NAMES), 11)
    live = served.model(ids, adapters=NAMES).logits
    for name in served.paths:
        served.model.adapters.unload(name)
    empty = served.model(ids).logits
    for name, path in served.paths.items():
        served.model.adapters.load(name, path)
    rows = [row for row, name in enumerate(NAMES) if name is None]
    assert torch.equal(live[rows], empty[rows])


def test_the_default_experts_compile_and_are_right(tmp_path: Path, seed: int) -> None:
    """`grouped_mm` multiplies each expert's tokens at once, so base rows agree but for rounding."""
    plain = deepseek(seed, num_hidden_layers=2)
    assert plain.config._experts_implementation == "grouped_mm"
    paths = {"a": deepseek_adapter(plain, tmp_path / "a", rank=6, seed=seed)}
    names: list[str | None] = [None, "a", None]
    ids = prompts(seed, len(names), 11)
    model = lc.wrap(copy.deepcopy(plain), adapters=paths)
    eager = model(ids, adapters=names).logits
    check_rows(eager, plain, paths, ids, names)
    found = model.compile()(ids, adapters=names).logits
    check_rows(found, plain, paths, ids, names)
    assert relative(found, eager) <= 1e-5
    assert model.report.graph_breaks == 0
    base = model(ids).logits
    assert relative(found[[0, 2]], base[[0, 2]]) <= 1e-5


def test_generation_with_the_static_cache_is_pefts(served: Served, seed: int) -> None:
    """Decode projects every position of the latent cache again: kv_b reads (rows, 1, all, rank)."""
    names = NAMES[:3]
    ids = prompts(seed, len(names), 11)
    found = served.model.generate(ids, adapters=names, max_new_tokens=8, do_sample=False)
    for row, name in enumerate(names):
        oracle: nn.Module = for_peft(served.plain)
        if name is not None:
            oracle = PeftModel.from_pretrained(oracle, str(served.paths[name])).eval()
        expected = oracle.generate(ids[row : row + 1], max_new_tokens=8, do_sample=False)
        assert torch.equal(found[row], expected[0]), (row, name)
    assert served.model.report.graph_breaks == 0


RELATIVES: dict[str, dict[str, Any]] = {
    "V2-Lite form": {"q_lora_rank": None},
    "tied head": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True},
    "all layers dense": {"first_k_dense_replace": 3},
    "all layers MoE": {"first_k_dense_replace": 0, "n_shared_experts": 2},
    "V2": {"config_class": DeepseekV2Config, "n_group": None, "topk_group": None},
    "V2-Lite": {
        "config_class": DeepseekV2Config, "q_lora_rank": None, "n_group": None, "topk_group": None
    },
}  # fmt: skip


@pytest.mark.parametrize("form", RELATIVES)
def test_one_schema_serves_its_relatives(form: str, tmp_path: Path, seed: int) -> None:
    plain = deepseek(seed, **RELATIVES[form])
    paths = {"a": deepseek_adapter(plain, tmp_path / "a", rank=5, seed=seed)}
    model = lc.wrap(copy.deepcopy(plain), adapters=paths)
    site = model.plan.targets["model.layers.1.self_attn.kv_a_proj_with_mqa"].site
    first = "q_proj" if model.module.config.q_lora_rank is None else "q_a_proj"
    assert [part.name for part in site.parts] == [first, "kv_a_proj_with_mqa"]
    ids = prompts(seed, 2, 9)
    check_rows(model(ids, adapters=["a", None]).logits, plain, paths, ids, ["a", None])


def test_the_flag_gives_separate_projections_and_the_same_logits(served: Served, seed: int) -> None:
    model = lc.wrap(copy.deepcopy(served.plain), adapters=served.paths, flags={"fuse_qkv_a": False})
    for part in PARTS:
        site = model.plan.targets[f"model.layers.0.self_attn.{part}"].site
        assert (site.name, len(site.parts)) == (f"model.layers.0.self_attn.{part}", 1)
    ids = prompts(seed, len(NAMES), 11)
    found = model(ids, adapters=NAMES).logits
    check_rows(found, served.plain, served.paths, ids, NAMES)
    assert relative(found, served.eager(ids, adapters=NAMES).logits) <= 1e-5


class Pair(nn.Module):
    """The two projections of the attention's input, as one graph."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.q_a = attention.q_a_proj
        self.kv_a = attention.kv_a_proj_with_mqa

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.q_a(x), self.kv_a(x)


Run = Callable[[torch.Tensor, list[str | None]], tuple[torch.Tensor, torch.Tensor]]


def pair(model: lc.LoraModel, compiled: bool) -> tuple[nn.Module, Run]:
    """The attention of layer 1 and a function (x, adapter of each row) -> (q_a, kv_a)."""
    attention = model.module.get_submodule("model.layers.1.self_attn")
    site = model.plan.by_name["model.layers.1.self_attn.fused_qkv_a_proj_with_mqa"]
    weight = attention.q_a_proj.site.weight
    run: Callable[..., Any] = Pair(attention)
    if compiled:
        backend = Backend(model.plan, {id(weight): site}, whole=False)
        run = torch.compile(run, backend=backend, fullgraph=True, dynamic=True)

    def call(x: torch.Tensor, names: list[str | None]) -> tuple[torch.Tensor, torch.Tensor]:
        ids = torch.full(x.shape[:2], 5)
        with model.bind(ids, names), torch.no_grad():
            outputs: tuple[torch.Tensor, torch.Tensor] = run(x)
        return outputs

    return attention, call


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_part_without_a_delta_keeps_its_bits(
    compiled: bool, dtype: torch.dtype, tmp_path: Path, seed: int
) -> None:
    """An adapter on q_a alone, then on kv_a alone: the other one's zero has its own width."""
    plain = deepseek(seed, dtype)
    paths = {
        name: deepseek_adapter(
            plain, tmp_path / name, rank=4, seed=seed, strength=1.0, targets=TARGETS[name]
        )
        for name in ("q_a", "kv_a")
    }
    _, call = pair(lc.wrap(copy.deepcopy(plain), adapters=paths), compiled)
    x = torch.randn(3, 5, 256, dtype=dtype)
    base_q, base_kv = call(x, [None, None, None])
    assert (base_q.shape[-1], base_kv.shape[-1]) == (96, 80)
    with_q, kept_kv = call(x, ["q_a", None, "q_a"])
    kept_q, with_kv = call(x, [None, "kv_a", "kv_a"])
    assert torch.equal(kept_kv, base_kv)
    assert torch.equal(kept_q, base_q)
    for live, base, rows in ((with_q, base_q, (0, 2)), (with_kv, base_kv, (1, 2))):
        for row in range(3):
            assert torch.equal(live[row], base[row]) is (row not in rows)
            changed = relative(live[row].float(), base[row].float())
            assert row not in rows or changed > 0.05


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_the_delta_is_there_at_every_number_of_tokens(
    compiled: bool, tmp_path: Path, seed: int
) -> None:
    """1 to 17 tokens in bf16: no fast path for small batches goes past the adapter."""
    plain = deepseek(seed, torch.bfloat16)
    path = deepseek_adapter(
        plain, tmp_path / "a", rank=4, seed=seed, strength=1.0, targets=TARGETS["both"]
    )
    model = lc.wrap(copy.deepcopy(plain), adapters={"a": path})
    _, call = pair(model, compiled)
    merged = PeftModel.from_pretrained(for_peft(plain).float(), str(path)).merge_and_unload()
    oracle = merged.get_submodule("model.layers.1.self_attn")
    base = plain.get_submodule("model.layers.1.self_attn")
    for tokens in range(1, 18):
        x = torch.randn(1, tokens, 256, dtype=torch.bfloat16)
        for found, name in zip(call(x, ["a"]), PARTS, strict=True):
            with torch.no_grad():
                expected = getattr(oracle, name)(x.float())
                without = torch.nn.functional.linear(x.float(), getattr(base, name).weight.float())
            assert relative(expected, without) > 0.05, "the delta is too small to be missed"
            assert relative(found.float(), expected) < 0.01, (tokens, name)


def test_one_to_seventeen_tokens_through_the_whole_model(tmp_path: Path, seed: int) -> None:
    plain = deepseek(seed, torch.bfloat16, num_hidden_layers=1)
    path = deepseek_adapter(
        plain, tmp_path / "a", rank=4, seed=seed, strength=1.0, targets=TARGETS["both"]
    )
    model = lc.wrap(copy.deepcopy(plain), adapters={"a": path})
    exact = copy.deepcopy(plain).float()
    for tokens in range(2, 18):
        ids = prompts(seed + tokens, 1, tokens)
        found = model(ids, adapters=["a"]).logits.float()
        expected = peft_or_base(exact, {"a": path}, "a", ids)
        assert relative(found, expected) < 0.05
        # The first token attends to itself alone, so only its values show the delta.
        delta, wanted = found - model(ids).logits.float(), expected - exact(ids).logits
        assert (delta - wanted).norm() < 0.3 * wanted.norm(), tokens


# --- from a checkpoint on disk ------------------------------------------------------------------


def deployment(folder: Path, model: Path, adapters: dict[str, Path], **extra: Any) -> Path:
    path = folder / "deployment.yaml"
    content = {
        "schema_version": 1,
        "model": {"path": str(model), "dtype": "float32", **extra},
        "quantization": {"scheme": "none"},
        "adapters": [{"name": name, "path": str(p)} for name, p in adapters.items()],
        "runtime": {"device": "cpu", "max_adapters": 4, "max_rank": 8, "compile": "off"},
    }
    path.write_text(yaml.safe_dump(content))
    return path


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("name", ["mla", "q-a-only", "kv-a-only"])
def test_a_checkpoint_on_disk_gives_the_producers_logits(
    name: str, fuse: bool, tmp_path: Path
) -> None:
    folder = FIXTURES / f"peft-deepseekv3-{name}"
    path = deployment(
        tmp_path, FIXTURES / "base-deepseekv3", {"a": folder}, flags={"fuse_qkv_a": fuse}
    )
    model = lc.load(path)
    logits = load_file(folder / "logits.safetensors")
    ids = logits["input_ids"]
    rows = len(ids)
    for names, expected in (([None] * rows, "base"), (["a"] * rows, "adapted")):
        assert relative(model(ids, adapters=names).logits, logits[expected]) <= 1e-5
    assert relative(logits["adapted"], logits["base"]) > 1e-3


def test_a_saved_model_loads_as_it_was(tmp_path: Path, seed: int) -> None:
    """transformers saves the experts one by one; biases of the router stay in float32."""
    plain = deepseek(seed)
    plain.save_pretrained(tmp_path / "model")
    keys = load_file(tmp_path / "model" / "model.safetensors")
    assert "model.layers.1.mlp.experts.3.up_proj.weight" in keys
    model = lc.load(deployment(tmp_path, tmp_path / "model", {}))
    ids = prompts(seed, 2, 9)
    with torch.no_grad():
        assert relative(model(ids).logits, plain(ids).logits) <= 1e-5


def explain(path: Path, *options: str) -> str:
    command = [sys.executable, "-m", "lora_compile", "explain", str(path), *options]
    environment = {**os.environ, "COLUMNS": "160"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_explain_shows_the_sites_of_a_saved_model(tmp_path: Path, seed: int) -> None:
    plain = deepseek(seed)
    plain.save_pretrained(tmp_path / "model")
    adapter = deepseek_adapter(plain, tmp_path / "a", rank=4, seed=seed, targets=TARGETS["q_a"])
    path = deployment(tmp_path, tmp_path / "model", {"q": adapter})
    text = explain(path)
    for fact in (
        "model.layers.{0-2}.self_attn.fused_qkv_a_proj_with_mqa x 3",
        "model.layers.0.mlp.gate_up_proj  none",
        "model.layers.{1-2}.mlp.shared_experts.gate_up_proj x 2",
        "kv_a_proj_with_mqa  rows     96 to 176    of 256",
        "routed experts: as transformers runs them",
    ):
        assert fact in text
    data = json.loads(explain(path, "--graphs", "--json"))
    assert data["plan"]["kept"][0]["what"] == "routed experts"
    (site,) = (
        s
        for s in data["plan"]["sites"]
        if s["name"] == "model.layers.2.self_attn.fused_qkv_a_proj_with_mqa"
    )
    assert [part["rows"] for part in site["quant"]["parts"]] == [[0, 96], [96, 176]]
    assert "lora" in data["graphs"]["verify_graph"]


def test_an_expert_adapter_stops_the_deployment(tmp_path: Path) -> None:
    path = deployment(
        tmp_path, FIXTURES / "base-deepseekv3", {"e": FIXTURES / "peft-v4-deepseekv3"}
    )
    with pytest.raises(FeatureUnsupported, match="routed experts"):
        lc.load(path)
