"""What a row gets does not depend on its neighbours, on compilation or on the batch's shape."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

import lora_compile as lc
from lora_compile import torch_compat
from tests.runtime.conftest import Served
from tests.tiny import llama, make_adapter, peft_logits, prompts, relative


def test_each_rank_gives_what_peft_gives(served: Served, seed: int) -> None:
    names = served.mixed
    ids = prompts(seed, len(names), 12)
    found = served.eager(ids, adapters=names).logits
    for row, name in enumerate(names):
        one = ids[row : row + 1]
        if name is None:
            with torch.no_grad():
                expected = served.oracle(one).logits
        else:
            expected = peft_logits(served.oracle, served.paths[name], one)
        assert relative(found[row : row + 1], expected) <= served.bound, (row, name)


def test_adapters_change_the_output(served: Served, seed: int) -> None:
    """The other tests would pass on a model that ignores adapters, were this one missing."""
    ids = prompts(seed, 1, 12).repeat(len(served.names) + 1, 1)
    logits = served.eager(ids, adapters=[None, *served.names]).logits
    for row in range(1, len(ids)):
        assert relative(logits[row], logits[0]) > 0.05


def test_compiled_is_eager(served: Served, seed: int) -> None:
    ids = prompts(seed, len(served.mixed), 12)
    expected = served.eager(ids, adapters=served.mixed).logits
    found = served.model(ids, adapters=served.mixed).logits
    assert relative(found, expected) <= served.bound
    assert served.model.report.graph_breaks == 0


def test_adapter_row_is_the_same_alone(served: Served, seed: int) -> None:
    names = served.mixed
    ids = prompts(seed, len(names), 12)
    batch = served.model(ids, adapters=names).logits
    for row in (1, 4, len(names) - 1):
        alone = served.model(ids[row : row + 1], adapters=[names[row]]).logits
        assert relative(batch[row : row + 1], alone) <= served.bound


def test_base_rows_keep_their_bits(served: Served, seed: int) -> None:
    names = served.mixed
    ids = prompts(seed, len(names), 12)
    base = served.model(ids, adapters=[None] * len(names)).logits
    live = served.model(ids, adapters=names).logits
    rows = [row for row, name in enumerate(names) if name is None]
    assert torch.equal(live[rows], base[rows])
    assert not torch.equal(live, base)


def test_base_rows_are_those_of_a_model_without_adapters(served: Served, seed: int) -> None:
    ids = prompts(seed, 3, 12)
    live = served.model(ids, adapters=[None, served.names[2], None]).logits
    loaded = {name: served.paths[name] for name in served.names}
    for name in loaded:
        served.model.adapters.unload(name)
    empty = served.model(ids).logits
    for name, path in loaded.items():
        served.model.adapters.load(name, path)
    assert torch.equal(live[[0, 2]], empty[[0, 2]])


def test_the_same_batch_twice_gives_equal_bits(served: Served, seed: int) -> None:
    names = served.mixed
    ids = prompts(seed, len(names), 12)
    first = served.model(ids, adapters=names).logits
    assert torch.equal(first, served.model(ids, adapters=names).logits)


def test_a_row_scale_multiplies_the_delta(tmp_path: Path, seed: int) -> None:
    """Scale 0.5 on a row is PEFT with half of lora_alpha; scale 0 is the base, bit for bit."""
    plain = llama(seed + 5)
    path = make_adapter(plain, tmp_path / "full", rank=8, seed=seed, lora_alpha=16)
    half = make_adapter(plain, tmp_path / "half", rank=8, seed=seed, lora_alpha=8)
    model = lc.wrap(copy.deepcopy(plain), adapters={"a": path})
    ids = prompts(seed, 1, 9).repeat(3, 1)
    found = model(ids, adapters=["a", "a", None], scales=[0.5, 0.0, 1.0]).logits
    assert relative(found[:1], peft_logits(plain, half, ids[:1])) <= 1e-5
    assert torch.equal(found[1], found[2])


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_does_not_matter(served: Served, side: str, seed: int) -> None:
    names = [None, served.names[1], served.names[4]]
    ids = prompts(seed, 3, 12)
    mask = torch.ones_like(ids)
    lengths = [12, 7, 9]
    for row, length in enumerate(lengths):
        pad = slice(0, 12 - length) if side == "left" else slice(length, 12)
        ids[row, pad] = 0
        mask[row, pad] = 0
    position = (mask.cumsum(-1) - 1).clamp(min=0)
    found = served.model(ids, adapters=names, attention_mask=mask, position_ids=position).logits
    for row, length in enumerate(lengths):
        real = slice(12 - length, 12) if side == "left" else slice(0, length)
        alone = served.model(ids[row : row + 1, real], adapters=[names[row]]).logits
        assert relative(found[row : row + 1, real], alone) <= served.bound


# Under FP8 a flipped code may send beam search down another branch, so the scheme is none.
@pytest.mark.parametrize("served", ["none"], indirect=True)
@pytest.mark.parametrize("returned", [1, 2])
def test_beams_expand_the_map_with_the_rows(served: Served, returned: int, seed: int) -> None:
    """Two beams: each row's results are those of PEFT's beam search on the row alone, and other
    adapters on the same rows recompile nothing."""
    ids = prompts(seed, 2, 8)
    mask = torch.ones_like(ids)
    settings = {"max_new_tokens": 6, "min_new_tokens": 6, "num_beams": 2, "do_sample": False}
    settings["num_return_sequences"] = returned
    model = served.model
    model.generate(ids, attention_mask=mask, **settings)
    for names in ([served.names[2], None], [None, served.names[3]]):
        with torch_compat.fail_on_recompile():
            found = model.generate(ids, adapters=names, attention_mask=mask, **settings)
        assert found.shape[0] == 2 * returned
        for row, name in enumerate(names):
            expected = _peft_generate(served, name, ids[row : row + 1], settings)
            assert torch.equal(found[row * returned : (row + 1) * returned], expected)


@pytest.mark.parametrize("served", ["none"], indirect=True)
def test_prompts_of_unequal_length_generate_what_each_gives_alone(
    served: Served, seed: int
) -> None:
    """Left padding: each row's tokens are PEFT's for the unpadded prompt."""
    names = [None, served.names[1], served.names[4]]
    ids = prompts(seed, 3, 10)
    mask = torch.ones_like(ids)
    lengths = [10, 6, 8]
    for row, length in enumerate(lengths):
        ids[row, : 10 - length] = 0
        mask[row, : 10 - length] = 0
    # A row that met its end would be padded to its neighbours' length.
    settings = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    found = served.model.generate(ids, adapters=names, attention_mask=mask, **settings)
    for row, (name, length) in enumerate(zip(names, lengths, strict=True)):
        alone = ids[row : row + 1, 10 - length :]
        expected = _peft_generate(served, name, alone, settings)
        assert torch.equal(found[row, 10:], expected[0, length:])


def _peft_generate(
    served: Served, name: str | None, ids: torch.Tensor, settings: dict[str, Any]
) -> torch.Tensor:
    from peft import PeftModel

    model = copy.deepcopy(served.oracle)
    if name is not None:
        model = PeftModel.from_pretrained(model, str(served.paths[name]))
    config = GenerationConfig(pad_token_id=0, **settings)
    with torch.no_grad():
        return model.eval().generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=config
        )
