"""`generate` against transformers' own, with PEFT: caches, sampling, padding, and rsLoRA."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import nn
from transformers import CompileConfig, DynamicCache, GenerationConfig

import lora_compile as lc
from lora_compile.runtime.attach import SiteBuffers
from tests.conftest import SEED
from tests.runtime.conftest import Served
from tests.tiny import llama, make_adapter, peft_logits, prompts, relative

# Under FP8 a flipped code may change a token.
unquantised = pytest.mark.parametrize("served", ["none"], indirect=True)
GREEDY: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}


def peft_generate(
    plain: nn.Module, path: Path | None, ids: torch.Tensor, settings: dict[str, Any], seed: int = 0
) -> torch.Tensor:
    """What transformers and PEFT generate, every row with the one adapter (None: the base)."""
    model: nn.Module = copy.deepcopy(plain)
    if path is not None:
        model = PeftModel.from_pretrained(model, str(path))
    config = GenerationConfig(pad_token_id=0, **settings)
    torch.manual_seed(seed)  # making the adapter's layers draws too
    with torch.no_grad():
        found: torch.Tensor = model.eval().generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=config
        )
    return found


@unquantised
def test_both_caches_generate_what_peft_generates(served: Served, seed: int) -> None:
    model, names = served.eager, [None, served.names[2], served.names[4]]
    ids = prompts(seed, 3, 10)
    mask = torch.ones_like(ids)
    static, dynamic = (
        model.generate(ids, adapters=names, attention_mask=mask, cache=cache, **GREEDY)
        for cache in ("static", "dynamic")
    )
    assert torch.equal(static, dynamic)
    for row, name in enumerate(names):
        path = None if name is None else served.paths[name]
        one = ids[row : row + 1]
        assert torch.equal(dynamic[row : row + 1], peft_generate(served.oracle, path, one, GREEDY))
    base = peft_generate(served.oracle, None, ids, GREEDY)
    assert not torch.equal(dynamic[1:], base[1:]), "weak adapters; a weak test"


@dataclass
class Run:
    """A short compiled run with a dynamic cache: an rsLoRA row beside a base row."""

    plain: nn.Module
    path: Path
    model: lc.LoraModel
    ids: torch.Tensor
    settings: dict[str, Any]
    found: Any


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Run:
    plain = llama(SEED, num_hidden_layers=1)
    path = make_adapter(
        plain, tmp_path_factory.mktemp("rs") / "a", rank=16, seed=SEED, lora_alpha=16,
        use_rslora=True,
    )  # fmt: skip
    model = lc.wrap(copy.deepcopy(plain), adapters={"rs": path}).compile()
    ids = prompts(SEED, 2, 10)
    # Two tokens, since the cache grows with each: prefill and one step of decoding.
    settings = {"max_new_tokens": 2, "do_sample": False}
    found = model.generate(
        ids, adapters=["rs", None], attention_mask=torch.ones_like(ids), cache="dynamic",
        output_logits=True, return_dict_in_generate=True, **settings,
    )  # fmt: skip
    return Run(plain, path, model, ids, settings, found)


def test_a_dynamic_cache_compiled(compiled: Run) -> None:
    found, ids = compiled.found.sequences, compiled.ids
    for row, path in ((0, compiled.path), (1, None)):
        one = ids[row : row + 1]
        expected = peft_generate(compiled.plain, path, one, compiled.settings)
        assert torch.equal(found[row : row + 1], expected)
    assert isinstance(compiled.found.past_key_values, DynamicCache)
    assert (len(compiled.model.report.graphs), compiled.model.report.calls) == (2, 2)


def test_rslora_of_rank_16_and_alpha_16_is_scaled_by_4(compiled: Run) -> None:
    """16 / sqrt(16), compiled, where plain LoRA has 16 / 16."""
    prefill = compiled.found.logits[0]
    expected = peft_logits(compiled.plain, compiled.path, compiled.ids[:1])[:, -1]
    assert relative(prefill[:1], expected) <= 1e-3
    with torch.no_grad():
        base = compiled.plain(compiled.ids).logits[:, -1]
    assert relative(prefill[1:], base[1:]) <= 1e-5
    assert relative(expected, base[:1]) > 1e-1
    modules = compiled.model.module.modules()
    scales = [
        m.get_buffer("lora_scale")[0]
        for m in modules
        if isinstance(m, SiteBuffers) and m.slot_names
    ]
    # lm_head has slots, but no delta of this adapter.
    assert {float(scale) for row in scales for scale in row} <= {0.0, 4.0}
    assert sum(bool((row == 4.0).all()) for row in scales) == 4


@unquantised
def test_seeded_sampling_draws_what_peft_draws(served: Served, seed: int) -> None:
    """One row; and in a batch each row what PEFT draws there, with its adapter on all rows."""
    model = served.eager
    settings: dict[str, Any] = {"max_new_tokens": 8, "do_sample": True, "top_k": 0}

    def draw(ids: torch.Tensor, names: list[str | None], number: int) -> torch.Tensor:
        torch.manual_seed(number)
        mask = torch.ones_like(ids)
        found: torch.Tensor = model.generate(ids, adapters=names, attention_mask=mask, **settings)
        return found

    def expect(ids: torch.Tensor, name: str | None) -> torch.Tensor:
        path = None if name is None else served.paths[name]
        return peft_generate(served.oracle, path, ids, settings, seed)

    name = served.names[3]
    one = prompts(seed, 1, 9)
    found = draw(one, [name], seed)
    assert torch.equal(found, expect(one, name))
    assert torch.equal(found, draw(one, [name], seed))
    assert not torch.equal(found, draw(one, [name], seed + 1))

    names = [None, name, served.names[5]]
    ids = prompts(seed + 1, 3, 9)
    batch = draw(ids, names, seed)
    for row, own in enumerate(names):
        assert torch.equal(batch[row], expect(ids, own)[row]), own
    assert torch.equal(batch, draw(ids, names, seed))


@unquantised
@pytest.mark.parametrize("cache", ["static", "dynamic"])
def test_a_prompt_of_one_token_beside_one_of_nine(served: Served, cache: Any, seed: int) -> None:
    model, name = served.eager, served.names[3]
    ids = prompts(seed, 2, 9)
    ids[0, :8] = 0
    mask = (ids != 0).long()
    for names in ([name, None], [None, name]):
        found = model.generate(ids, adapters=names, attention_mask=mask, cache=cache, **GREEDY)
        for row, (own, prompt) in enumerate(zip(names, (ids[:1, 8:], ids[1:]), strict=True)):
            new, length = found[row, 9:], prompt.shape[1]
            path = None if own is None else served.paths[own]
            expected = peft_generate(served.oracle, path, prompt, GREEDY)
            assert torch.equal(new, expected[0, length:]), own
            alone = model.generate(
                prompt, adapters=[own], attention_mask=torch.ones_like(prompt), cache=cache,
                **GREEDY,
            )  # fmt: skip
            assert torch.equal(new, alone[0, length:]), own


@unquantised
def test_transformers_does_not_compile_beside_us(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would when it sees a static cache on CUDA; `_compile_all_devices` makes it on a CPU."""

    def trap(self: nn.Module, config: CompileConfig | None) -> None:
        raise AssertionError("transformers compiles")

    monkeypatch.setattr(type(served.oracle), "get_compiled_call", trap)
    everywhere = CompileConfig()
    everywhere._compile_all_devices = True
    ids = prompts(1, 2, 5)
    settings = {
        "attention_mask": torch.ones_like(ids), "compile_config": everywhere, **GREEDY,
    }  # fmt: skip
    with pytest.raises(AssertionError, match="transformers compiles"):
        served.oracle.generate(ids, cache_implementation="static", pad_token_id=0, **settings)
    found = served.eager.generate(ids, adapters=[None, served.names[0]], **settings)
    assert found.shape == (2, 5 + GREEDY["max_new_tokens"])
