"""One graph per shape, no break, and no recompile whatever happens to the adapters."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import lora_compile as lc
from lora_compile import torch_compat
from lora_compile.errors import AdapterUnknown, FeatureUnsupported, RequestInvalid
from tests.runtime.conftest import Served
from tests.tiny import llama, make_adapter, peft_logits, prompts, relative


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    plain = llama(11)
    return {
        name: make_adapter(plain, folder / name, rank=rank, seed=rank)
        for name, rank in (("a", 4), ("b", 16), ("c", 7))
    }


def test_nothing_recompiles_once_each_shape_was_seen(adapters: dict[str, Path]) -> None:
    """Compiled before any adapter was loaded; then first load, replace, unload, base only."""
    plain = llama(11)
    model = lc.wrap(copy.deepcopy(plain), max_adapters=2, max_rank=16).compile()
    ids = prompts(1, 2, 10)
    settings = {"max_new_tokens": 4, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    model.generate(ids, **settings)
    graphs = len(model.report.graphs)
    assert graphs == 2, model.report

    with torch_compat.fail_on_recompile():
        base = model.generate(ids, **settings)
        model.adapters.load("x", adapters["a"])
        assert _generates(model, ids, settings, "x", plain, adapters["a"])
        model.adapters.replace("x", adapters["b"])
        assert _generates(model, ids, settings, "x", plain, adapters["b"])
        model.adapters.load("y", adapters["c"])
        assert _generates(model, ids, settings, "y", plain, adapters["c"])
        model.adapters.unload("x")
        model.adapters.unload("y")
        assert torch.equal(model.generate(ids, **settings), base)
    assert len(model.report.graphs) == graphs
    assert model.report.graph_breaks == 0


def _generates(
    model: lc.LoraModel, ids: torch.Tensor, settings: dict, name: str, plain: object, path: Path
) -> bool:
    """Row 1 with the adapter goes on as PEFT does, and row 0 as the base."""
    from peft import PeftModel

    peft = PeftModel.from_pretrained(copy.deepcopy(plain), str(path)).eval()
    found = model.generate(ids, adapters=[None, name], **settings)
    with torch.no_grad():
        expected = peft.generate(input_ids=ids, pad_token_id=0, **settings)
        base = plain.generate(ids, pad_token_id=0, **settings)
    assert not torch.equal(expected[1], base[1]), "the adapter changes nothing; a weak test"
    return torch.equal(found[1], expected[1]) and torch.equal(found[0], base[0])


def test_nothing_recompiles_under_fp8(adapters: dict[str, Path]) -> None:
    model = lc.wrap(
        llama(11), quantization="fp8_block", max_adapters=2, max_rank=16
    ).compile()  # fmt: skip
    ids = prompts(1, 2, 10)
    base = model(ids, use_cache=False).logits
    with torch_compat.fail_on_recompile():
        seen = [base]
        for change in (model.adapters.load, model.adapters.replace, model.adapters.replace):
            change("x", adapters["abc"[len(seen) - 1]])
            found = model(ids, adapters=["x", None], use_cache=False).logits
            assert torch.equal(found[1], base[1])
            assert all(relative(found[:1], other[:1]) > 1e-1 for other in seen)
            seen.append(found)
        model.adapters.unload("x")
        assert torch.equal(model(ids, use_cache=False).logits, base)
    assert len(model.report.graphs) == 1


def test_generate_calls_our_graphs_once_per_step(served: Served) -> None:
    ids = prompts(3, 2, 10)
    before = served.model.report.calls
    served.model.generate(
        ids, adapters=[None, served.names[0]], max_new_tokens=7, do_sample=False,
        attention_mask=torch.ones_like(ids), min_new_tokens=7,
    )  # fmt: skip
    assert served.model.report.calls - before == 1 + 6


@pytest.mark.parametrize("scope", ["whole", "layers"])
def test_two_models_with_equal_configs_do_not_share_adapters(
    scope: Any, adapters: dict[str, Path]
) -> None:
    """Dynamo reuses code between backends that compare equal; ours must not."""
    plain = llama(11)
    one = lc.wrap(copy.deepcopy(plain), adapters={"x": adapters["a"]}).compile(scope)
    two = lc.wrap(copy.deepcopy(plain), adapters={"x": adapters["b"]}).compile(scope)
    ids = prompts(2, 3, 10)
    for model, path in ((one, adapters["a"]), (two, adapters["b"]), (one, adapters["a"])):
        found = model(ids, adapters=["x", None, None], use_cache=False).logits
        assert relative(found[:1], peft_logits(plain, path, ids[:1])) <= 1e-5
    assert one.backend != two.backend


@pytest.mark.parametrize("scope", ["whole", "layers"])
def test_a_models_sizes_cost_another_model_no_graph(scope: Any) -> None:
    """Dynamo keeps graphs, and the sizes that it has seen, by code; each model has its own."""
    plain = llama(11)
    one = lc.wrap(copy.deepcopy(plain)).compile(scope)
    two = lc.wrap(copy.deepcopy(plain)).compile(scope)
    for model, rows in ((one, 3), (two, 4), (one, 3), (two, 4)):
        ids = prompts(rows, rows, 10)
        with torch.no_grad():
            expected = plain(ids, use_cache=False).logits
        assert relative(model(ids, use_cache=False).logits, expected) <= 1e-5
    for model in (one, two):
        (graph,) = model.backend.graphs
        inputs = [n for n in graph.lowered.graph.nodes if n.op == "placeholder"]
        assert not any(isinstance(n.meta["example_value"], torch.SymInt) for n in inputs)


def test_off_gives_the_layers_their_forwards_back() -> None:
    plain = llama(11)
    model = lc.wrap(copy.deepcopy(plain))
    first, second = model.module.get_submodule("model.layers").children()
    calls = []
    usual = second.forward

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(len(args))
        return usual(*args, **kwargs)

    second.forward = counted
    ids = prompts(2, 3, 10)
    for scope in ("layers", "layers", "off"):  # a second time compiles anew
        model.compile(scope)
    assert "forward" not in vars(first)
    assert second.forward is counted
    found = model(ids, use_cache=False).logits
    assert (len(calls), len(model.report.graphs)) == (1, 0)
    with torch.no_grad():
        assert relative(found, plain(ids, use_cache=False).logits) <= 1e-5


def test_layer_by_layer_is_whole_without_a_cache(adapters: dict[str, Path]) -> None:
    """Four layers: they must share graphs, or the recompile limit ends it."""
    plain = llama(12, num_hidden_layers=4)
    path = make_adapter(plain, adapters["a"].parent / "four", rank=5, seed=9)
    whole = lc.wrap(copy.deepcopy(plain), adapters={"x": path}).compile()
    layers = lc.wrap(copy.deepcopy(plain), adapters={"x": path}).compile("layers")
    ids = prompts(4, 3, 10)
    names = [None, "x", None]
    expected = whole(ids, adapters=names, use_cache=False).logits
    found = layers(ids, adapters=names, use_cache=False).logits
    assert relative(found, expected) <= 1e-5
    assert relative(found[1:2], peft_logits(plain, path, ids[1:2])) <= 1e-5
    assert len(layers.report.graphs) == 1, layers.report

    with pytest.raises(FeatureUnsupported, match=r"runtime\.compile: whole"):
        layers(ids, adapters=names, use_cache=True)
    with pytest.raises(FeatureUnsupported, match="KV cache"):
        layers.generate(ids, adapters=names, max_new_tokens=2)


def test_one_graph_serves_every_batch_size(adapters: dict[str, Path]) -> None:
    """Rows 2 to 33 are one compile; torch itself always specialises on one row."""
    plain = llama(11)
    model = lc.wrap(copy.deepcopy(plain), adapters={"x": adapters["b"]}, max_rows=33).compile()
    for rows in (2, 33, *range(3, 33)):
        ids = prompts(rows, rows, 6)
        torch_compat.mark_dynamic(ids, 0)
        found = model(ids, adapters=["x"] + [None] * (rows - 1), use_cache=False).logits
        if rows % 11:
            continue
        assert relative(found[:1], peft_logits(plain, adapters["b"], ids[:1])) <= 1e-5
    assert len(model.report.graphs) == 1, model.report
    one = prompts(1, 1, 6)
    found = model(one, adapters=["x"], use_cache=False).logits
    assert relative(found, peft_logits(plain, adapters["b"], one)) <= 1e-5
    assert len(model.report.graphs) == 2, model.report


def test_one_token_of_one_row(served: Served) -> None:
    """Kernels with a minimum tile of 16 rows fail here first."""
    ids = prompts(6, 1, 1)
    name = served.names[4]
    found = served.model(ids, adapters=[name]).logits
    assert relative(found, peft_logits(served.oracle, served.paths[name], ids)) <= served.bound


@pytest.mark.parametrize("keep", [0, 1])
def test_an_adapter_on_lm_head(tmp_path: Path, keep: int) -> None:
    """logits_to_keep makes lm_head see (B, 1, hidden) while the rest sees (B, S, hidden)."""
    plain = llama(13)
    path = make_adapter(plain, tmp_path / "head", targets=("lm_head", "q_proj"), seed=3)
    model = lc.wrap(copy.deepcopy(plain), adapters={"x": path}).compile()
    ids = prompts(5, 3, 9)
    found = model(ids, adapters=[None, "x", None], logits_to_keep=keep).logits
    expected = peft_logits(plain, path, ids[1:2], logits_to_keep=keep)
    assert found.shape[1] == (9 if keep == 0 else 1)
    assert relative(found[1:2], expected) <= 1e-5
    with torch.no_grad():
        base = plain(ids, logits_to_keep=keep).logits
    assert relative(found[::2], base[::2]) <= 1e-5


@pytest.mark.parametrize(
    ("scheme", "dtype", "tied"),
    [
        ("none", torch.bfloat16, False),
        ("fp8_block", torch.bfloat16, True),
        ("fp8_block", torch.float32, False),
    ],
)
def test_an_adapter_on_lm_head_alone(
    scheme: str, dtype: torch.dtype, tied: bool, tmp_path: Path
) -> None:
    """In any dtype and scheme the kept token's logits are the last of all, and a row's change is
    B A times the head's own input."""
    plain = llama(15, tie_word_embeddings=tied).to(dtype)
    path = make_adapter(plain, tmp_path / "head", targets=("lm_head",), seed=3, strength=60.0)
    model = lc.wrap(plain, quantization=scheme, adapters={"x": path}).compile()
    ids = prompts(5, 1, 9).expand(2, 9).contiguous()
    every, kept = (
        model(ids, adapters=["x", None], logits_to_keep=keep, use_cache=False).logits.float()
        for keep in (0, 1)
    )
    step = 2 * torch.finfo(dtype).eps * float(every.abs().max())
    assert float((kept - every[:, -1:]).abs().max()) <= step
    base = model(ids, logits_to_keep=1, use_cache=False).logits.float()
    assert torch.equal(kept[1], base[1])

    hidden: list[torch.Tensor] = []
    head = model.compile("off").module.get_submodule("lm_head")
    hook = head.register_forward_pre_hook(lambda _, args: hidden.append(args[0][:, 0].float()))
    row, bare = model(ids, adapters=["x", None], logits_to_keep=1).logits[:, 0].float()
    hook.remove()
    saved = load_file(path / "adapter_model.safetensors")
    a, b = (next(t.float() for key, t in saved.items() if f"lora_{x}" in key) for x in "AB")
    delta = hidden[0][0] @ a.T @ b.T
    assert float(delta.abs().max()) > 10 * step
    assert float((row - bare - delta).abs().max()) <= step + 1e-2 * float(delta.abs().max())


def test_a_tied_head_and_its_embedding_are_two_sites(tmp_path: Path) -> None:
    plain = llama(14, tie_word_embeddings=True)
    path = make_adapter(plain, tmp_path / "head", targets=("lm_head",), seed=3)
    model = lc.wrap(copy.deepcopy(plain), adapters={"x": path}).compile()
    ids = prompts(5, 2, 9)
    found = model(ids, adapters=["x", None]).logits
    # PEFT warns that the tie may break on merging; unmerged, only the head has the delta.
    assert relative(found[:1], peft_logits(plain, path, ids[:1])) <= 1e-5
    with torch.no_grad():
        assert relative(found[1:], plain(ids[1:]).logits) <= 1e-5


def test_packed_rows(adapters: dict[str, Path]) -> None:
    """Three segments in one row, each with its own adapter, are three rows."""
    plain = llama(11)
    packed = lc.wrap(copy.deepcopy(plain), adapters=adapters, packed=True).compile()
    lengths = [4, 7, 5]
    names = ["a", None, "c"]
    ids = prompts(8, 1, sum(lengths))
    position = torch.cat([torch.arange(n) for n in lengths])[None]
    segment = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))
    mask = (segment[:, None] == segment[None]) & torch.ones(16, 16).tril().bool()
    found = packed(
        ids, adapters=names, lengths=lengths, position_ids=position,
        attention_mask=mask[None, None], use_cache=False,
    ).logits  # fmt: skip
    start = 0
    for length, name in zip(lengths, names, strict=True):
        part = ids[:, start : start + length]
        if name is None:
            with torch.no_grad():
                expected = plain(part).logits
        else:
            expected = peft_logits(plain, adapters[name], part)
        assert relative(found[:, start : start + length], expected) <= 1e-5
        start += length


def test_requests_that_do_not_fit_are_refused(served: Served) -> None:
    model, ids = served.eager, prompts(7, 2, 5)
    with pytest.raises(AdapterUnknown, match="rnak8"):
        model(ids, adapters=["rnak8", None])
    with pytest.raises(RequestInvalid, match="one entry for each row"):
        model(ids, adapters=["rank8"])
    with pytest.raises(RequestInvalid, match="one entry for each row"):
        model(ids, adapters="rank8")
    with pytest.raises(RequestInvalid, match=r"set runtime\.max_rows: 17"):
        model(prompts(7, 17, 2))
    with pytest.raises(RequestInvalid, match=r"set runtime\.max_tokens: 4800"):
        model(prompts(7, 16, 300))


def test_own_torch_compile_call(adapters: dict[str, Path]) -> None:
    """`torch.compile(handle.forward, backend=handle.backend)` inside `bind`."""
    plain = llama(11)
    handle = lc.wrap(copy.deepcopy(plain), adapters={"x": adapters["a"]})
    run = torch.compile(handle.forward, backend=handle.backend, fullgraph=True)
    ids = prompts(2, 2, 10)
    with handle.bind(ids, [None, "x"]), torch.no_grad():
        found = run(ids).logits
    assert relative(found[1:], peft_logits(plain, adapters["a"], ids[1:])) <= 1e-5


PROCESS = """
import json, sys, torch
import lora_compile as lc
from lora_compile import torch_compat
from tests.tiny import llama, prompts
model = lc.wrap(llama(11), adapters={"x": sys.argv[1]}, max_rank=int(sys.argv[3])).compile()
logits = model(prompts(2, 2, 10), adapters=["x", None]).logits
torch.save(logits, sys.argv[2])
print(json.dumps(torch_compat.cache_counters()))
"""


def test_a_second_process_hits_the_caches_and_sees_its_own_adapters(
    adapters: dict[str, Path], tmp_path: Path
) -> None:
    plain, ids = llama(11), prompts(2, 2, 10)
    counters = []
    for name, rank in (("a", 16), ("b", 16), ("b", 32)):
        out = tmp_path / f"{name}.pt"
        run = subprocess.run(
            [sys.executable, "-c", PROCESS, str(adapters[name]), str(out), str(rank)],
            env={
                **os.environ,
                "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"),
                "PYTHONPATH": str(Path(__file__).parents[2]),
            },
            check=True, capture_output=True, text=True,
        )  # fmt: skip
        counters.append(json.loads(run.stdout.splitlines()[-1]))
        found = torch.load(out)
        assert relative(found[:1], peft_logits(plain, adapters[name], ids[:1])) <= 1e-5
    hit, miss = "aot_autograd.autograd_cache_hit", "aot_autograd.autograd_cache_miss"
    assert counters[0].get(hit, 0) == 0, counters
    assert counters[0][miss] == 1, counters
    assert counters[1][hit] == 1, counters
    assert counters[1].get(miss, 0) == 0, counters
    # another max_rank is another graph
    assert counters[2][miss] == 1, counters


def test_another_librarys_pass_still_runs(adapters: dict[str, Path]) -> None:
    """Inductor's hooks hold one object each; we use none of them."""
    from torch._inductor import config
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class Foreign(CustomGraphPass):
        seen = 0

        def __call__(self, graph: torch.fx.Graph) -> None:
            Foreign.seen += 1

        def uuid(self) -> str:
            return f"foreign {os.getpid()}"

    plain, ids = llama(11), prompts(2, 2, 11)
    model = lc.wrap(copy.deepcopy(plain), adapters={"x": adapters["a"]}).compile()
    with config.patch(post_grad_custom_post_pass=Foreign()):
        found = model(ids, adapters=["x", None]).logits
    assert Foreign.seen == 1
    assert relative(found[:1], peft_logits(plain, adapters["a"], ids[:1])) <= 1e-5
