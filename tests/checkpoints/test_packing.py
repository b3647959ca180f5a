"""Packed sites: part by part what the file says, with scale rows that restart at each part."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from lora_compile.checkpoints.codes import decode, encode
from lora_compile.checkpoints.other import load_other
from lora_compile.checkpoints.packing import SiteWeights, dense_part, pack_site
from lora_compile.checkpoints.source import ModuleWeights
from lora_compile.checkpoints.survey import ModuleSpec, survey
from lora_compile.errors import (
    CheckpointInvalid,
    Faults,
    SiteMissing,
    TensorMissing,
    TensorNotFinite,
    TensorShape,
)
from lora_compile.planning.plan import SitePlan

FP8 = "hf-fp8-deepseekv3-mla"
ATTENTION = "model.layers.0.self_attn"
QKV_A = [("q_a_proj", 96), ("kv_a_proj_with_mqa", 80)]
BLOCK = (128, 128)


def _decode(site: SitePlan, packed: SiteWeights, index: int) -> torch.Tensor:
    """One part out of the packed tensors, element by element from the formula."""
    place = site.quant.parts[index]
    weight = packed.weight[slice(*place.rows)].to(torch.float32)
    if place.scale_rows is None:
        return weight
    high, wide = site.quant.scale.block_shape or (0, 0)
    scale = packed.aux[0][slice(*place.scale_rows)]
    rows = torch.arange(weight.shape[0]) // high
    columns = torch.arange(weight.shape[1]) // wide
    return weight * scale[rows][:, columns]


def test_ragged_parts_of_mla(make_site: Callable, survey_fixture: Callable, fixtures: Path) -> None:
    index, found = survey_fixture(FP8)
    site = make_site(ATTENTION, QKV_A, 136, scheme="fp8_block", block_shape=BLOCK)
    packed = pack_site(site, index, found, dtype=torch.bfloat16, device="cpu")
    assert packed.weight.shape == (176, 136)
    assert packed.weight.dtype == torch.float8_e4m3fn
    assert [tuple(tensor.shape) for tensor in packed.aux] == [(2, 2)]
    assert packed.bias is None
    reference = load_file(fixtures / FP8 / "reference.safetensors")
    for i, part in enumerate(site.parts):
        assert torch.equal(_decode(site, packed, i), reference[part.module])
        assert torch.equal(dense_part(site, i, index, found).weight, reference[part.module])
    # Block rows counted over the fused rows would read part 1 with part 0's scales up to row 128.
    naive = (
        packed.weight.float()
        * packed.aux[0].repeat_interleave(128, 0)[:176].repeat_interleave(128, 1)[:, :136]
    )
    assert not torch.equal(naive[96:], reference[site.parts[1].module])


def test_unquantised_group(make_site: Callable, survey_fixture: Callable, fixtures: Path) -> None:
    index, found = survey_fixture("base-llama")
    parts = [("q_proj", 48), ("k_proj", 16), ("v_proj", 16)]
    prefix = "model.layers.1.self_attn"
    stored = load_file(fixtures / "base-llama" / "model.safetensors")
    expected = torch.cat([stored[f"{prefix}.{name}.weight"] for name, _ in parts])
    for dtype in ("bfloat16", "float32"):
        site = make_site(prefix, parts, 48, scheme="none", dtype=dtype)
        target = getattr(torch, dtype)
        packed = pack_site(site, index, found, dtype=target, device="cpu")
        assert packed.aux == []
        assert torch.equal(packed.weight, expected.to(target))


def test_quantise_at_load(make_site: Callable, survey_fixture: Callable, fixtures: Path) -> None:
    index, found = survey_fixture("base-llama")
    prefix = "model.layers.0.mlp"
    parts = [("gate_proj", 40), ("up_proj", 40)]
    site = make_site(prefix, parts, 48, scheme="fp8_block", block_shape=(32, 32))
    packed = pack_site(site, index, found, dtype=torch.bfloat16, device="cpu")
    stored = load_file(fixtures / "base-llama" / "model.safetensors")
    assert packed.aux[0].shape == (4, 2)
    for i, (name, _) in enumerate(parts):
        dense = dense_part(site, i, index, found).weight
        assert torch.equal(_decode(site, packed, i), dense)
        source = stored[f"{prefix}.{name}.weight"].float()
        assert not torch.equal(dense, source)
        step = packed.aux[0][2 * i : 2 * i + 2].max() * 2.0**-10
        assert ((dense - source).abs() <= (source.abs() * 2.0**-4 + step) * 1.001).all()


def test_tied_head(make_site: Callable, survey_fixture: Callable, fixtures: Path) -> None:
    index, found = survey_fixture("base-llama-tied")
    site = make_site("", [("lm_head", 72)], 48, scheme="none", tied_to="model.embed_tokens")
    packed = pack_site(site, index, found, dtype=torch.bfloat16, device="cpu")
    stored = load_file(fixtures / "base-llama-tied" / "model.safetensors")
    assert torch.equal(packed.weight, stored["model.embed_tokens.weight"])


def _survey(tensors: Callable, scheme: Callable, data: dict, specs: list, config: Any) -> Any:
    source = tensors(data)
    block = () if config is None else (tuple(config["weight_block_size"]),)
    return source, survey(
        source,
        specs,
        scheme("none" if config is None else "fp8_block", *block),
        quantization_config=config,
        other={},
        ignored={},
    )


def test_biases_of_some_parts(make_site: Callable, tensors: Callable, scheme: Callable) -> None:
    data = {
        "a.weight": torch.randn(3, 4),
        "b.weight": torch.randn(2, 4),
        "b.bias": torch.tensor([1.5, -2.0]),
    }
    specs = [ModuleSpec("a", 3, 4, False, None), ModuleSpec("b", 2, 4, True, None)]
    source, found = _survey(tensors, scheme, data, specs, None)
    site = make_site("", [("a", 3), ("b", 2)], 4, scheme="none", dtype="float32", bias=True)
    packed = pack_site(site, source, found, dtype=torch.float32, device="cpu")
    assert packed.bias is not None
    assert packed.bias.tolist() == [0, 0, 0, 1.5, -2.0]
    without = make_site("", [("a", 3), ("b", 2)], 4, scheme="none", dtype="float32")
    with pytest.raises(CheckpointInvalid, match=r"b\.bias"):
        pack_site(without, source, found, dtype=torch.float32, device="cpu")


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=4),
    st.integers(1, 30),
    st.tuples(st.integers(1, 12), st.integers(1, 12)),
    st.lists(st.booleans(), min_size=4, max_size=4),
    st.integers(0, 2**31 - 1),
)
def test_scales_restart_at_each_part(
    make_site: Callable,
    tensors: Callable,
    scheme: Callable,
    widths: list[int],
    columns: int,
    block: tuple[int, int],
    at_load: list[bool],
    draw: int,
) -> None:
    """Parts of any width, stored in FP8 or quantised at load, decode as each does alone."""
    generator = torch.Generator().manual_seed(draw)
    data: dict[str, torch.Tensor] = {}
    expected: list[torch.Tensor] = []
    for i, width in enumerate(widths):
        weight = torch.randn(width, columns, generator=generator) * 10.0**i
        codes, scale = encode(weight, torch.float8_e4m3fn, "block", block)
        if at_load[i]:
            data[f"p{i}.weight"] = weight
        else:
            data[f"p{i}.weight"], data[f"p{i}.weight_scale_inv"] = codes, scale
        expected.append(decode(codes, scale, block))
    specs = [ModuleSpec(f"p{i}", width, columns, False, None) for i, width in enumerate(widths)]
    stored_fp8 = not all(at_load[: len(widths)])
    config = {"weight_block_size": list(block)} if stored_fp8 else None
    source, found = _survey(tensors, scheme, data, specs, config)
    parts = [(f"p{i}", width) for i, width in enumerate(widths)]
    site = make_site("", parts, columns, scheme="fp8_block", block_shape=block)
    packed = pack_site(site, source, found, dtype=torch.bfloat16, device="cpu")
    assert packed.aux[0].shape[0] == sum(-(-width // block[0]) for width in widths)
    for i, dense in enumerate(expected):
        assert torch.equal(_decode(site, packed, i), dense)
        assert torch.equal(dense_part(site, i, source, found).weight, dense)


def test_plan_and_checkpoint_that_disagree(make_site: Callable, survey_fixture: Callable) -> None:
    index, found = survey_fixture(FP8)

    def refused(site: SitePlan, dtype: torch.dtype = torch.bfloat16) -> str:
        with pytest.raises(CheckpointInvalid) as caught:
            pack_site(site, index, found, dtype=dtype, device="cpu")
        return str(caught.value)

    plain = make_site(ATTENTION, QKV_A, 136, scheme="none")
    assert "fp8_block" in refused(plain)
    assert "float16" in refused(plain, torch.float16)
    other_block = make_site(ATTENTION, QKV_A, 136, scheme="fp8_block", block_shape=(64, 64))
    assert "(128, 128)" in refused(other_block)
    unknown = make_site(ATTENTION, [("x_proj", 4)], 136, scheme="none")
    assert f"{ATTENTION}.x_proj" in refused(unknown)
    narrow = make_site(ATTENTION, [("q_a_proj", 64)], 136, scheme="fp8_block", block_shape=BLOCK)
    assert "[96, 136]" in refused(narrow)
    site = make_site(ATTENTION, QKV_A, 136, scheme="fp8_block", block_shape=BLOCK)
    rows = site.quant.parts[1].model_copy(update={"scale_rows": (0, 1)})
    quant = site.quant.model_copy(update={"parts": (site.quant.parts[0], rows)})
    assert "scale rows (1, 2)" in refused(site.model_copy(update={"quant": quant}))


def test_weights_that_the_packed_dtype_cannot_hold(
    make_site: Callable, tensors: Callable, scheme: Callable
) -> None:
    weight = torch.ones(3, 4)
    weight[1, 2] = 1e6
    specs = [ModuleSpec("a", 3, 4, False, None)]
    source, found = _survey(tensors, scheme, {"a.weight": weight}, specs, None)
    half = make_site("", [("a", 3)], 4, scheme="none", dtype="float16")
    with pytest.raises(TensorNotFinite, match=r"\[1, 2\]"):
        pack_site(half, source, found, dtype=torch.float16, device="cpu")
    weight[1, 2] = float("nan")
    blocks = make_site("", [("a", 3)], 4, scheme="fp8_block", block_shape=(2, 2))
    with pytest.raises(TensorNotFinite, match=r"nan at \[1, 2\]"):
        pack_site(blocks, source, found, dtype=torch.bfloat16, device="cpu")


class Router(torch.nn.Module):
    _keep_in_fp32_modules_strict = ("correction",)

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(4, bias=False)
        self.register_buffer("correction", torch.zeros(3))
        self.register_buffer("steps", torch.zeros(1, dtype=torch.int64))


def test_other_parameters_by_name() -> None:
    donor = Router()
    with torch.no_grad():
        donor.norm.weight.copy_(torch.tensor([1.0, 2.5, -3.0, 0.1]))
        donor.correction.fill_(0.1)
        donor.steps.fill_(7)
    source = ModuleWeights(donor)
    with torch.device("meta"):
        model = Router()
    load_other(model, source, ["norm.weight", "correction", "steps"], torch.bfloat16)
    assert torch.equal(model.norm.weight, donor.norm.weight.to(torch.bfloat16))
    assert isinstance(model.norm.weight, torch.nn.Parameter)
    assert not model.norm.weight.requires_grad
    assert model.correction.dtype == torch.float32
    assert torch.equal(model.correction, donor.correction)
    assert model.correction.data_ptr() != donor.correction.data_ptr()
    assert model.steps.tolist() == [7]
    assert dict(model.named_buffers()).keys() == {"correction", "steps"}


def test_other_parameters_that_do_not_fit(tensors: Callable) -> None:
    model = Router()
    before = model.norm.weight
    source = tensors({"norm.weight": torch.zeros(5), "gate.weight": torch.zeros(2)})
    with pytest.raises(Faults) as caught:
        load_other(model, source, ["norm.weight", "gate.weight", "correction"], torch.bfloat16)
    assert [type(fault) for fault in caught.value.faults] == [
        TensorShape,
        SiteMissing,
        TensorMissing,
    ]
    assert model.norm.weight is before
