"""`verify`: passes on what is right, fails on what is wrong, and its controls are noticed."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import lora_compile as lc
from lora_compile.adapters.pool import AdapterPool
from lora_compile.errors import FeatureUnsupported, InvalidValue
from lora_compile.schemas.deployment import VerifyLimits
from lora_compile.verification.activation import Followed, quantised_activation
from lora_compile.verification.figures import compare
from lora_compile.verification.limits import Limits
from lora_compile.verification.plot import check_plot, draw
from lora_compile.verification.served import Texts, forced_logits
from lora_compile.verification.verify import verify
from tests.runtime.variants import SCHEMES, make_variant
from tests.tiny import llama, make_adapter, peft_logits, prompts, relative


def quiet(_: str) -> None:
    return None


def add_texts(folder: Path, **verification: Any) -> Path:
    """A byte tokenizer beside the model, and texts in the deployment."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<s>", "</s>", *letters])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(str(folder / "model"))
    file = folder / "deployment.yaml"
    data = json.loads(file.read_text())
    data["verify"] = {
        "rows": [
            {"prompt": "a fox"},
            {"prompt": "jumps over", "completion": " the lazy dog, twice"},
        ],
        **verification,
    }
    file.write_text(json.dumps(data))
    return file


SLOW = {
    ("llama", "none"), ("llama", "fp8_tensor_static"), ("llama", "int8_channel"),
    ("deepseek", "none"), ("deepseek", "fp8_tensor_dynamic"),
}  # fmt: skip
"""Left to `make test-all`, so that the suite stays short."""


@pytest.mark.parametrize(
    ("shape", "scheme"),
    [
        pytest.param(shape, scheme, marks=[pytest.mark.slow] if (shape, scheme) in SLOW else [])
        for shape in ("llama", "deepseek")
        for scheme in SCHEMES
    ],
)
def test_gates_hold_and_controls_fail(shape: str, scheme: str, tmp_path: Path) -> None:
    """Prefill and 32 decode steps with the static cache, float32."""
    make_variant(shape, scheme, tmp_path, max_rows=8)
    result = verify(add_texts(tmp_path), progress=quiet)
    assert result.failures == []
    assert result.low is None
    figures = result.float32.figures()
    assert {name for name, _ in figures} == {None, "every", "second", "first"}
    assert all(found.half_mean_square <= 1e-8 for found in figures.values()), figures
    assert figures[None, "decode"].tokens == 32 + 19  # the second completion has 20 tokens
    assert result.float32.followed.wrong == 0
    assert (result.float32.followed.codes > 0) is (scheme != "none")
    faults = {(control.adapter, control.fault.split()[-1]) for control in result.controls}
    assert len(faults) == 9, faults
    for control in result.controls:
        assert control.end_to_end_caught, control
        assert control.site_gate_caught, control
    if (shape, scheme) == ("llama", "fp8_block"):
        draw(result, tmp_path / "plot.svg")
        text = (tmp_path / "plot.svg").read_text()
        assert text.count("<use ") > 100, "one mark for each token"
        json.dumps(result.as_dict())


def test_a_product_that_is_wrong_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Adapters are loaded at 0.9 of their scale: every gate but the row ratio says so."""
    make_variant("llama", "none", tmp_path)
    load = AdapterPool.load

    def weaker(self: AdapterPool, name: str, source: Any, **settings: Any) -> Any:
        return load(self, name, source, **{**settings, "scale": 0.9})

    monkeypatch.setattr(AdapterPool, "load", weaker)
    result = verify(add_texts(tmp_path, decode_steps=2), progress=quiet)
    assert any(text.startswith("site gate: delta") for text in result.failures)
    assert any(text.startswith("float32, every, prefill") for text in result.failures)
    assert not any("base rows" in text.split(":")[0] for text in result.failures)


def test_unnoticed_controls_and_loosened_limits_are_told(tmp_path: Path) -> None:
    limits = Limits.of(VerifyLimits(float32=1e-3, site_delta=1e-3))
    assert limits.loosened == ["verify.limits.float32: 0.001 instead of 1e-05"]
    assert Limits.of(VerifyLimits(float32_top1=0.5)).loosened
    assert Limits().loosened == []


def test_prompt_tokens_of_an_adapters_row(tmp_path: Path) -> None:
    """Log-probabilities of prompt and completion, forced through prefill and decode, are PEFT's."""
    plain = llama(5)
    path = make_adapter(plain, tmp_path / "a", rank=8, seed=1)
    model = lc.wrap(plain, adapters={"a": path})
    prompt, completion = prompts(1, 2, 7), prompts(2, 2, 5)
    mask = torch.ones_like(prompt)
    mask[0, :3] = 0
    texts = Texts(prompt, mask, completion, torch.tensor([5, 3]), torch.tensor([0, 3]))
    found = forced_logits(model, texts, ["a", None], [1.0, 1.0])
    whole = torch.cat([prompt, completion], 1)[:, :-1]
    expected = peft_logits(llama(5), path, whole[:1, 3:])
    assert relative(found[:1, 3:], expected) <= 1e-5
    with torch.no_grad():
        assert relative(found[1:], llama(5)(whole[1:]).logits) <= 1e-5
    assert texts.counted("prefill").sum(1).tolist() == [4, 5]
    assert texts.counted("decode").sum(1).tolist() == [4, 2]


def test_figures_are_their_formulas(seed: int) -> None:
    torch.manual_seed(seed)
    reference, product = torch.randn(6, 9), torch.randn(6, 9)
    following, counted = torch.randint(9, (6,)), torch.tensor([True] * 4 + [False] * 2)
    figures = compare(reference, product, following, counted).figures
    p, q = reference.double().softmax(-1)[:4], product.double().softmax(-1)[:4]
    index = following[:4, None]
    delta = (q.gather(1, index).log() - p.gather(1, index).log()).squeeze(1)
    assert figures.tokens == 4
    assert figures.max_abs == pytest.approx(float(delta.abs().max()))
    assert figures.mean_abs == pytest.approx(float(delta.abs().mean()))
    assert figures.half_mean_square == pytest.approx(float((delta**2).mean() / 2))
    assert figures.kl == pytest.approx(float((p * (p / q).log()).sum(1).mean()))
    assert figures.top1 == pytest.approx(float((p.argmax(1) == q.argmax(1)).double().mean()))


def test_codes_are_followed_only_on_the_border() -> None:
    """1.0625 lies between the FP8 codes 1.0 and 1.125; 1.05 does not."""
    from lora_compile.schemas.quant_info import ActivationInfo

    activation = ActivationInfo(
        handling="static", granularity="tensor", group=None, dtype="float8_e4m3fn", min_scale=None
    )
    x = torch.tensor([[1.0625, 1.05, 2.0]])
    codes = torch.tensor([[1.125, 1.125, 2.0]]).to(torch.float8_e4m3fn)
    tally = Followed()
    found = quantised_activation(activation, x, 1.0, codes=codes, tally=tally)
    assert found.tolist() == [[1.125, 1.0, 2.0]]
    assert dataclasses.astuple(tally) == (3, 1, 1)


def test_what_is_missing_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Callable[..., Any], site: Any
) -> None:
    result = cli("verify", site.file)
    assert result.code == 1
    assert "verify.rows" in result.err
    site.write(lambda data: data.update(verify={"rows": [{"prompt": "a"}]}))
    for command in ("verify", "check"):
        result = cli(command, site.file)
        assert result.code == 1
        assert "has no tokenizer that transformers can read" in result.err
        assert "copy the tokenizer's files into" in result.err
    with pytest.raises(InvalidValue, match=r"\.png or \.svg"):
        check_plot(tmp_path / "plot.gif")
    monkeypatch.setattr("lora_compile.verification.plot.find_spec", lambda name: None)
    with pytest.raises(FeatureUnsupported, match=r"pip install 'lora_compile\[plot\]'"):
        check_plot(tmp_path / "plot.png")
