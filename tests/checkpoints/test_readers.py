"""Decoders against what the files' producers decode, and the encoder against its definition."""

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
from lora_compile.checkpoints.readers import reader_for, scaled
from lora_compile.checkpoints.survey import ModuleSpec, survey
from lora_compile.errors import SchemeUnsupported
from lora_compile.schemas.quant_detect import detect_scheme


@pytest.mark.parametrize("name", ["hf-fp8-deepseekv3-mla", "hf-fp8-llama-ue8m0-f32"])
def test_block_fp8_decodes_to_the_producers_values(
    fixtures: Path, survey_fixture: Callable[..., Any], name: str
) -> None:
    index, found = survey_fixture(name)
    reference = load_file(fixtures / name / "reference.safetensors")
    quantised = {m for m, fmt in found.formats.items() if fmt.scheme == "fp8_block"}
    assert quantised == reference.keys()
    for module, expected in reference.items():
        fmt = found.formats[module]
        part = reader_for(fmt.reader).read_part(index, fmt)
        assert part.weight.dtype == torch.float8_e4m3fn
        assert torch.equal(decode(part.weight, part.scale, fmt.block_shape), expected)


def test_ue8m0_scales_stay_as_stored(survey_fixture: Callable[..., Any]) -> None:
    index, found = survey_fixture("hf-fp8-llama-ue8m0-f32")
    module = "model.layers.0.self_attn.q_proj"
    scale = scaled.read_part(index, found.formats[module]).scale
    assert scale is not None
    mantissa, _ = torch.frexp(scale)
    assert not torch.equal(mantissa, torch.full_like(mantissa, 0.5)), "the fixture lost its point"
    assert scale.dtype == torch.float32
    assert torch.equal(scale, index.tensor(f"{module}.weight_scale_inv"))


@pytest.mark.parametrize(
    ("name", "scheme", "dtype"),
    [
        ("llmc-llama-fp8-static", "fp8_tensor_static", torch.float8_e4m3fn),
        ("llmc-llama-fp8-dynamic", "fp8_channel", torch.float8_e4m3fn),
        ("llmc-qwen2-w8a8", "int8_channel", torch.int8),
    ],
)
def test_compressed_tensors_decode_to_the_producers_values(
    fixtures: Path, survey_fixture: Callable[..., Any], name: str, scheme: str, dtype: torch.dtype
) -> None:
    """The producer decodes in bfloat16, the dtype of its scales: equal after that rounding."""
    index, found = survey_fixture(name)
    reference = load_file(fixtures / name / "reference.safetensors")
    quantised = {m for m, fmt in found.formats.items() if fmt.scheme == scheme}
    assert quantised == reference.keys()
    assert {fmt.scheme for m, fmt in found.formats.items() if m not in quantised} <= {"none"}
    for module, expected in reference.items():
        fmt = found.formats[module]
        part = reader_for(fmt.reader).read_part(index, fmt)
        assert part.weight.dtype == dtype
        assert part.scale is not None
        assert (part.scale.dtype, part.scale.shape) == (torch.float32, expected.shape[:1])
        dense = decode(part.weight, part.scale, None)
        assert torch.equal(dense.to(expected.dtype), expected)
        stored = index.headers.get(f"{module}.input_scale")
        assert (fmt.input_scale is None) == (stored is None) == (scheme != "fp8_tensor_static")
        if fmt.input_scale is not None:
            assert fmt.input_scale == float(index.tensor(f"{module}.input_scale"))


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_scales_of_one_element_have_any_shape(
    tensors: Callable[..., Any], shape: tuple[int, ...]
) -> None:
    """AutoFP8 writes scalars, llm-compressor (1,), transformers (1, 1)."""
    codes = torch.randn(6, 5).to(torch.float8_e4m3fn)
    source = tensors(
        {
            "m.weight": codes,
            "m.weight_scale": torch.full(shape, 0.25),
            "m.input_scale": torch.full(shape, 0.125),
        }
    )
    config = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}
    found = survey(
        source,
        [ModuleSpec("m", 6, 5, False, None)],
        detect_scheme(config),
        quantization_config=config,
        other={},
        ignored={},
    )
    fmt = found.formats["m"]
    assert (fmt.scheme, fmt.input_scale) == ("fp8_tensor_static", 0.125)
    part = reader_for(fmt.reader).read_part(source, fmt)
    assert torch.equal(decode(part.weight, part.scale, None), codes.float() * 0.25)


@pytest.mark.parametrize("name", ["base-llama", "base-llama-tied"])
def test_unquantised_weights_are_exact(
    fixtures: Path, survey_fixture: Callable[..., Any], name: str
) -> None:
    index, found = survey_fixture(name)
    stored = load_file(fixtures / name / "model.safetensors")
    reader = reader_for("none")
    for module, fmt in found.formats.items():
        part = reader.read_part(index, fmt)
        key = f"{module}.weight" if f"{module}.weight" in stored else "model.embed_tokens.weight"
        dense = decode(part.weight, part.scale, None)
        assert dense.dtype == torch.float32
        assert torch.equal(dense.to(torch.bfloat16), stored[key])


def test_wrong_scales_are_not_broadcast() -> None:
    codes = torch.zeros(80, 136).to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match="do not fit"):
        decode(codes, torch.ones(1, 1), (128, 128))


def test_no_reader() -> None:
    with pytest.raises(SchemeUnsupported, match="nvfp4"):
        reader_for("nvfp4")


def _blocks(rows: int, columns: int, block: tuple[int, int]) -> list[tuple[int, int, slice, slice]]:
    return [
        (i // block[0], j // block[1], slice(i, i + block[0]), slice(j, j + block[1]))
        for i in range(0, rows, block[0])
        for j in range(0, columns, block[1])
    ]


SHAPES = st.tuples(
    st.integers(1, 40), st.integers(1, 40), st.tuples(st.integers(1, 16), st.integers(1, 16))
)


@settings(max_examples=60, deadline=None)
@given(SHAPES, st.integers(0, 2**31 - 1), st.integers(-30, 30))
def test_encoder_is_its_definition_block_by_block(
    sizes: tuple[int, int, tuple[int, int]], draw: int, exponent: int
) -> None:
    rows, columns, block = sizes
    generator = torch.Generator().manual_seed(draw)
    weight = torch.randn(rows, columns, generator=generator) * 2.0**exponent
    weight[:1] = 0
    codes, scale = encode(weight, torch.float8_e4m3fn, "block", block)
    decoded = decode(codes, scale, block)
    assert scale.shape == (-(-rows // block[0]), -(-columns // block[1]))
    for i, j, high, wide in _blocks(rows, columns, block):
        tile = weight[high, wide]
        amax = tile.abs().max()
        if amax == 0:
            assert scale[i, j] > 0
            assert torch.equal(decoded[high, wide], torch.zeros_like(tile))
            continue
        s = amax / torch.tensor(448.0)
        assert scale[i, j] == s
        expected = (tile / s).to(torch.float8_e4m3fn)
        assert torch.equal(codes[high, wide].view(torch.uint8), expected.view(torch.uint8))
        assert torch.equal(decoded[high, wide], expected.float() * s)
        # e4m3 has 3 mantissa bits: half a step is 2^-4 of a normal number's power of two, and
        # 2^-10 (in units of s) below the smallest normal 2^-6. 1e-6 is for float32 rounding.
        bound = torch.maximum(tile.abs() * 2.0**-4, s * 2.0**-10) * (1 + 1e-6)
        assert ((decoded[high, wide] - tile).abs() <= bound).all()
        assert decoded[high, wide].abs().max() == pytest.approx(float(amax), rel=1e-6)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 40),
    st.integers(1, 40),
    st.sampled_from([torch.float8_e4m3fn, torch.int8]),
    st.sampled_from(["tensor", "row"]),
    st.integers(0, 2**31 - 1),
    st.integers(-30, 30),
)
def test_encoder_per_tensor_and_row(
    rows: int, columns: int, dtype: torch.dtype, granularity: Any, draw: int, exponent: int
) -> None:
    generator = torch.Generator().manual_seed(draw)
    weight = torch.randn(rows, columns, generator=generator) * 2.0**exponent
    weight[:1] = 0
    codes, scale = encode(weight, dtype, granularity, None)
    decoded = decode(codes, scale, None)
    assert (codes.dtype, scale.shape) == (dtype, (rows,))
    largest = 448.0 if dtype == torch.float8_e4m3fn else 127.0
    for row in range(rows):
        amax = (weight if granularity == "tensor" else weight[row]).abs().max()
        if amax == 0:
            assert torch.equal(decoded[row], torch.zeros(columns))
            continue
        s = amax / torch.tensor(largest)
        assert scale[row] == s
        quotient = weight[row] / s
        expected = quotient.round() if dtype == torch.int8 else quotient.to(dtype)
        assert torch.equal(codes[row].float(), expected.float())
        assert torch.equal(decoded[row], expected.float() * s)


@pytest.mark.parametrize("amax", [0.0, 1e-45, 1e-40, 3e-36, 3.4e38])
def test_encoder_at_the_ends_of_float32(amax: float) -> None:
    weight = torch.tensor([[amax, -amax / 2, 0.0]])
    codes, scale = encode(weight, torch.float8_e4m3fn, "block", (128, 128))
    assert torch.isfinite(scale).all()
    assert (scale > 0).all()
    decoded = decode(codes, scale, (128, 128))
    assert torch.isfinite(decoded).all()
    assert decoded[0, 2] == 0
    assert (decoded - weight).abs().max() <= max(amax * 2.0**-4, 2.0**-136)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_encoder_shows_weights_that_are_not_finite(bad: float) -> None:
    weight = torch.ones(4, 4)
    weight[2, 3] = bad
    _, scale = encode(weight, torch.float8_e4m3fn, "block", (2, 2))
    assert torch.isfinite(scale).tolist() == [[True, True], [True, False]]


def test_encoder_takes_float32_only() -> None:
    with pytest.raises(ValueError, match="float32 expected"):
        encode(torch.ones(2, 2, dtype=torch.bfloat16), torch.float8_e4m3fn, "block", (2, 2))


def test_encoder_writes_what_the_producer_wrote(fixtures: Path) -> None:
    # Encoding the producer's decoded weights again must give its codes: amax of a block decodes to
    # 448 s up to rounding, so the scale may differ by an ulp but no code can.
    name = "hf-fp8-deepseekv3-mla"
    stored = load_file(fixtures / name / "model.safetensors")
    for module, dense in load_file(fixtures / name / "reference.safetensors").items():
        codes, scale = encode(dense, torch.float8_e4m3fn, "block", (128, 128))
        assert torch.equal(codes.float(), stored[f"{module}.weight"].float())
        torch.testing.assert_close(
            scale, stored[f"{module}.weight_scale_inv"], rtol=2.0**-22, atol=0
        )
