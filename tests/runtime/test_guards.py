"""Ways to get wrong numbers in silence, and the errors that stand in their way."""

from __future__ import annotations

import copy
import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import LogitsProcessorList

import lora_compile as lc
from lora_compile.errors import (
    CompileIncomplete,
    FeatureUnsupported,
    InvalidValue,
    LoraCompileError,
    RequestInvalid,
)
from tests.runtime.conftest import Served
from tests.tiny import llama, make_adapter, peft_logits, prompts, relative


@pytest.fixture(scope="module")
def plain() -> nn.Module:
    return llama(31)


@pytest.fixture(scope="module")
def path(plain: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_adapter(plain, tmp_path_factory.mktemp("a") / "a", rank=8, seed=1)


@pytest.fixture
def model(plain: nn.Module, path: Path) -> lc.LoraModel:
    return lc.wrap(copy.deepcopy(plain), adapters={"a": path})


def test_a_call_inside_generate_does_not_drop_the_adapters(model: lc.LoraModel) -> None:
    ids = prompts(1, 2, 8)
    settings: dict[str, Any] = {
        "adapters": ["a", None], "max_new_tokens": 6, "do_sample": False,
        "attention_mask": torch.ones_like(ids),
    }  # fmt: skip

    def nested(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        model(prompts(2, 3, 4))
        return scores

    expected = model.generate(ids, **settings)
    assert not torch.equal(expected[0], model.generate(ids, **{**settings, "adapters": None})[0])
    found = model.generate(ids, logits_processor=LogitsProcessorList([nested]), **settings)
    assert torch.equal(found, expected)


def test_a_row_keeps_its_adapter_to_the_end_of_generate(
    model: lc.LoraModel, plain: nn.Module, tmp_path: Path
) -> None:
    """Replaced and unloaded between its steps, by a callback of `generate`."""
    other = make_adapter(plain, tmp_path / "other", rank=8, seed=2)
    ids = prompts(1, 2, 8)

    def scores(*processors: Any) -> torch.Tensor:
        out = model.generate(
            ids, adapters=["a", None], max_new_tokens=6, min_new_tokens=6, do_sample=False,
            attention_mask=torch.ones_like(ids), logits_processor=LogitsProcessorList(processors),
            output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
        return torch.stack(out.logits)

    expected = scores()
    steps: list[int] = []

    def swap(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        steps.append(len(steps))
        if len(steps) == 1:
            model.adapters.replace("a", other)
        if len(steps) == 3:
            model.adapters.unload("a")
        return scores

    found = scores(swap)
    assert len(steps) == 6
    assert torch.equal(found, expected)
    model.adapters.load("a", other)
    assert not torch.equal(scores(), expected)


def test_forwards_of_one_model_run_one_at_a_time(model: lc.LoraModel) -> None:
    """Another thread's forward waits, or it would find this batch's row maps."""
    ids = prompts(1, 2, 8)
    expected = model(ids).logits
    done = threading.Event()
    found: list[torch.Tensor] = []

    def forward() -> None:
        found.append(model(ids).logits)
        done.set()

    with model.bind(ids, ["a", None]):
        thread = threading.Thread(target=forward)
        thread.start()
        assert not done.wait(1.0)
    thread.join(30)
    assert torch.equal(found[0], expected)


def test_nothing_runs_on_the_last_requests_adapters(model: lc.LoraModel) -> None:
    ids = prompts(1, 2, 8)
    model(ids, adapters=["a", None])
    with pytest.raises(RequestInvalid, match="bound to no adapter slot"):
        model.forward(ids)


def test_an_input_that_is_a_slice_of_the_batch_is_refused(model: lc.LoraModel) -> None:
    head = model.module.get_submodule("lm_head")
    with (
        model.bind(prompts(1, 3, 5), [None, "a", None]),
        pytest.raises(RequestInvalid, match="fewer rows than the batch"),
    ):
        head(torch.randn(3, 256))  # (B, hidden): not one row per token


def test_a_graph_break_is_an_error(model: lc.LoraModel) -> None:
    norm = model.module.get_submodule("model.norm")
    forward = norm.forward

    def breaks(x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        result: torch.Tensor = forward(x)
        return result

    norm.forward = breaks  # type: ignore[assignment]
    with pytest.raises(Exception, match="graph_break"):
        model.compile()(prompts(1, 2, 4), adapters=["a", None])


def test_a_cast_after_attach_is_refused(model: lc.LoraModel) -> None:
    model.module.bfloat16()
    with pytest.raises(CompileIncomplete, match="cast or moved after"):
        model(prompts(1, 2, 4), adapters=["a", None])


def test_generate_needs_to_know_its_length(model: lc.LoraModel) -> None:
    model.module.generation_config.max_length = None
    with pytest.raises(RequestInvalid, match="max_new_tokens"):
        model.generate(prompts(1, 2, 60))


def test_requests_are_checked(model: lc.LoraModel) -> None:
    ids = prompts(1, 2, 5)
    with pytest.raises(RequestInvalid, match="finite"):
        model(ids, adapters=["a", None], scales=[float("nan"), 1.0])
    with pytest.raises(RequestInvalid, match="packed"):
        model(ids, adapters=["a", None], lengths=[2, 3])
    with pytest.raises(InvalidValue, match=r"whole \| layers \| off"):
        model.compile("layrs")  # type: ignore[arg-type]


def test_packed_lengths_are_checked(plain: nn.Module, path: Path) -> None:
    packed = lc.wrap(copy.deepcopy(plain), adapters={"a": path}, packed=True)
    ids = prompts(1, 1, 6)
    for lengths in ([7, -1], [3, 2], [6, 0]):
        with pytest.raises(RequestInvalid, match="length of each segment"):
            packed(ids, adapters=["a", None], lengths=lengths)
    with pytest.raises(RequestInvalid, match="logits_to_keep"):
        packed(ids, adapters=["a", None], lengths=[2, 4], logits_to_keep=1)
    with pytest.raises(FeatureUnsupported, match="packed"):
        packed.generate(ids, max_new_tokens=2)


def test_replace_keeps_the_adapters_own_scale(model: lc.LoraModel, path: Path) -> None:
    ids = prompts(1, 1, 5)
    model.adapters.load("b", path, scale=0.5)
    before = model(ids, adapters=["b"]).logits
    assert relative(before, model(ids, adapters=["a"]).logits) > 1e-2
    model.adapters.replace("b", path)
    assert torch.equal(model(ids, adapters=["b"]).logits, before)


@pytest.mark.parametrize("kind", ["subclass", "hook"])
def test_a_projection_that_is_more_than_linear_is_refused(plain: nn.Module, kind: str) -> None:
    class Scaled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    module = copy.deepcopy(plain)
    down = module.get_submodule("model.layers.1.mlp.down_proj")
    if kind == "subclass":
        module.set_submodule("model.layers.1.mlp.down_proj", Scaled(384, 256, bias=False))
    else:
        down.register_forward_hook(lambda module, args, output: 2 * output)
    with pytest.raises(FeatureUnsupported, match="more than a plain Linear") as caught:
        lc.wrap(module)
    assert "model.layers.1.mlp.down_proj" in str(caught.value)
    assert "llama.yaml" in str(caught.value)


def test_a_model_that_peft_has_wrapped_is_refused(plain: nn.Module, path: Path) -> None:
    """And is served once PEFT has let go of it: every pass leaves a graph that lints."""
    from peft import PeftModel

    wrapped = PeftModel.from_pretrained(copy.deepcopy(plain), str(path))
    for module in (wrapped, wrapped.get_base_model()):
        with pytest.raises(FeatureUnsupported, match="wrapped by PEFT") as caught:
            lc.wrap(module)
        assert "q_proj" in str(caught.value) or "base_model" in str(caught.value)
        assert "`unload()`" in str(caught.value)
    model = lc.wrap(wrapped.unload(), adapters={"a": path}).compile()
    ids = prompts(4, 2, 7)
    found = model(ids, adapters=[None, "a"]).logits
    assert relative(found[1:], peft_logits(plain, path, ids[1:])) <= 1e-5


def test_a_bad_adapter_leaves_the_module_untouched(plain: nn.Module, tmp_path: Path) -> None:
    module = copy.deepcopy(plain)
    bad = make_adapter(plain, tmp_path / "bad", rank=24, seed=1)
    with pytest.raises(LoraCompileError, match="max_rank: 24"):
        lc.wrap(module, adapters={"bad": bad})
    assert isinstance(module.get_submodule("lm_head"), nn.Linear)


def test_a_tied_model_whose_checkpoint_has_its_own_head_is_served_with_it(tmp_path: Path) -> None:
    tied = llama(33, tie_word_embeddings=True)
    tied.save_pretrained(str(tmp_path / "model"))
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    own = torch.randn_like(tensors["model.embed_tokens.weight"])
    save_file({**tensors, "lm_head.weight": own}, file, metadata={"format": "pt"})
    (tmp_path / "d.yaml").write_text(
        "schema_version: 1\nmodel: {path: model, dtype: float32}\n"
        "quantization: {scheme: auto}\nruntime: {device: cpu, max_adapters: 1, max_rank: 8}\n"
    )
    served = lc.load(tmp_path / "d.yaml")
    ids = prompts(1, 2, 5)
    with torch.no_grad():
        hidden = tied.model(ids).last_hidden_state
    assert relative(served(ids).logits, hidden @ own.T) <= 1e-5
    assert served.plan.by_name["lm_head"].tied_to is None


def test_alpha_zero_warns_and_is_exactly_the_base(model: lc.LoraModel, path: Path) -> None:
    config = json.loads((path / "adapter_config.json").read_text())
    config["lora_alpha"] = 0
    tensors = load_file(path / "adapter_model.safetensors")
    with pytest.warns(UserWarning, match="adapter zero"):
        model.adapters.load("zero", tensors, config=config)
    ids = prompts(1, 2, 5)
    found = model(ids, adapters=["zero", None]).logits
    assert torch.equal(found, model(ids).logits)


def test_the_report_counts_what_this_model_did(served: Served) -> None:
    served.model(prompts(1, 2, 12))
    report = served.model.report
    assert report.sites == 10
    assert report.parts == 16
    assert report.graph_breaks == 0
    assert "rank64 (rank 64" in str(report)


def test_lm_head_of_two_rows_alone(model: lc.LoraModel, plain: nn.Module, path: Path) -> None:
    ids = prompts(3, 2, 6)
    found = model(ids, adapters=[None, "a"], logits_to_keep=1).logits
    assert relative(found[1:], peft_logits(plain, path, ids[1:], logits_to_keep=1)) <= 1e-5
