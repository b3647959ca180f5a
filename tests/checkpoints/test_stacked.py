"""Routed experts: stored one by one or as a whole, strictly counted, never quantised."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

from lora_compile.checkpoints.index import CheckpointIndex
from lora_compile.checkpoints.other import load_other
from lora_compile.checkpoints.source import TensorHeader
from lora_compile.checkpoints.stacked import Stack, read_stack
from lora_compile.checkpoints.survey import Survey
from lora_compile.errors import (
    Faults,
    LoraCompileError,
    SchemeUnsupported,
    TensorMissing,
    TensorShape,
    TensorUnexpected,
)
from lora_compile.planning.meta_model import meta_model, read_config
from lora_compile.planning.prepare import survey_checkpoint
from lora_compile.planning.rules import find_rules
from lora_compile.planning.sites import find_sites
from lora_compile.schemas.architecture import find_architecture

FIXTURES = Path(__file__).parents[1] / "fixtures"
BASE = FIXTURES / "base-deepseekv3"
EXPERTS = "model.layers.1.mlp.experts"
GATE_UP, DOWN = f"{EXPERTS}.gate_up_proj", f"{EXPERTS}.down_proj"

Edit = Callable[[dict[str, torch.Tensor]], object]


@dataclass
class Read:
    index: CheckpointIndex
    module: nn.Module
    survey: Survey


def read(path: Path, **changes: Any) -> Read:
    """Survey a checkpoint as `load` does. `changes`: of its config, e.g. the number of layers."""
    config = read_config(path)
    for name, value in changes.items():
        setattr(config, name, value)
    module = meta_model(config, "float32")
    architecture = find_architecture(config.model_type)
    found = find_sites(architecture, config, module)
    rules = find_rules(architecture, config, module)
    index = CheckpointIndex.open(path)
    return Read(index, module, survey_checkpoint(index, found, module, rules))


@pytest.fixture
def edited(tmp_path: Path) -> Callable[..., Path]:
    """A copy of a checkpoint with other tensors."""

    def edit(change: Edit, base: Path = BASE) -> Path:
        path = tmp_path / "edited"
        shutil.copytree(base, path)
        tensors = load_file(path / "model.safetensors")
        change(tensors)
        (path / "model.safetensors").unlink()
        save_file(tensors, path / "model.safetensors")
        return path

    return edit


def faults(call: Callable[[], object]) -> list[LoraCompileError]:
    with pytest.raises(LoraCompileError) as caught:
        call()
    error = caught.value
    return list(error.faults) if isinstance(error, Faults) else [error]


def whole(tensors: dict[str, torch.Tensor], name: str = GATE_UP, keep: bool = False) -> None:
    """Put the pieces of one parameter together."""
    parts = ("gate_proj", "up_proj") if name == GATE_UP else ("down_proj",)
    keys = [[f"{EXPERTS}.{e}.{part}.weight" for part in parts] for e in range(4)]
    tensors[name] = torch.stack([torch.cat([tensors[k] for k in row]) for row in keys])
    for key in (k for row in keys for k in row):
        if not keep:
            del tensors[key]


def test_pieces_become_the_parameter_that_transformers_makes() -> None:
    got = read(BASE)
    load_other(got.module, got.index, got.survey.other, torch.float32, stacks=got.survey.stacks)
    oracle = AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32)
    state = got.module.state_dict()
    for name in got.survey.other:
        assert torch.equal(state[name], oracle.state_dict()[name]), name
    assert {GATE_UP, DOWN} <= set(got.survey.stacks) & set(got.survey.other)


def test_the_correction_bias_stays_in_float32_and_the_rest_does_not() -> None:
    got = read(BASE)
    load_other(got.module, got.index, got.survey.other, torch.float16, stacks=got.survey.stacks)
    state = got.module.state_dict()
    assert state["model.layers.1.mlp.gate.e_score_correction_bias"].dtype == torch.float32
    for name in (GATE_UP, DOWN, "model.layers.1.mlp.gate.weight", "model.norm.weight"):
        assert state[name].dtype == torch.float16, name


def test_a_whole_parameter_is_taken_as_it_is(edited: Callable[..., Path]) -> None:
    expected = read(BASE)
    got = read(edited(lambda t: (whole(t), whole(t, DOWN))))
    assert got.survey.stacks == {}
    for one in (expected, got):
        load_other(one.module, one.index, one.survey.other, torch.float32, stacks=one.survey.stacks)
    for name in (GATE_UP, DOWN):
        assert torch.equal(got.module.state_dict()[name], expected.module.state_dict()[name])


def test_one_parameter_whole_and_another_in_pieces(edited: Callable[..., Path]) -> None:
    got = read(edited(lambda t: whole(t, DOWN)))
    assert set(got.survey.stacks) == {GATE_UP}


def test_whole_and_pieces_together_are_refused(edited: Callable[..., Path]) -> None:
    (fault,) = faults(lambda: read(edited(lambda t: whole(t, keep=True))))
    assert type(fault) is TensorUnexpected
    assert f"{EXPERTS}.0.gate_proj.weight (and 7 more)" in str(fault)
    assert GATE_UP in str(fault)


def test_one_missing_expert_is_named(edited: Callable[..., Path]) -> None:
    key = f"{EXPERTS}.2.up_proj.weight"
    (fault,) = faults(lambda: read(edited(lambda t: t.pop(key))))
    assert type(fault) is TensorMissing
    assert (fault.tensor, fault.where) == (key, GATE_UP)
    assert "1 of 8" in fault.message
    assert "[20, 48]" in (fault.expected or "")


def test_no_expert_at_all_is_one_fault_a_parameter(edited: Callable[..., Path]) -> None:
    def strip(tensors: dict[str, torch.Tensor]) -> None:
        for key in [k for k in tensors if k.startswith(EXPERTS)]:
            del tensors[key]

    found = faults(lambda: read(edited(strip)))
    assert [type(f) for f in found] == [TensorMissing, TensorMissing]
    assert {f.where for f in found} == {GATE_UP, DOWN}


def test_an_expert_too_many_is_unexpected(edited: Callable[..., Path]) -> None:
    key = f"{EXPERTS}.4.up_proj.weight"
    (fault,) = faults(lambda: read(edited(lambda t: t.update({key: torch.zeros(20, 48)}))))
    assert (type(fault), fault.tensor) == (TensorUnexpected, key)


@pytest.mark.parametrize("shape", [(21, 48), (20, 47), (48, 20), (20, 48, 1)])
def test_a_piece_of_another_shape_is_named(
    edited: Callable[..., Path], shape: tuple[int, ...]
) -> None:
    key = f"{EXPERTS}.3.gate_proj.weight"
    path = edited(lambda t: t.update({key: torch.zeros(shape)}))
    (fault,) = faults(lambda: read(path))
    assert (type(fault), fault.tensor) == (TensorShape, key)
    assert fault.file == str(path / "model.safetensors")
    assert "[20, 48]" in (fault.expected or "")
    assert str(list(shape)) in (fault.found or "")


def test_a_whole_parameter_of_another_shape(edited: Callable[..., Path]) -> None:
    def transposed(tensors: dict[str, torch.Tensor]) -> None:
        whole(tensors)
        tensors[GATE_UP] = tensors[GATE_UP].transpose(1, 2).contiguous()

    (fault,) = faults(lambda: read(edited(transposed)))
    assert (type(fault), fault.tensor) == (TensorShape, GATE_UP)


@pytest.mark.parametrize("how", ["fp8 with scales", "int8", "a scale alone", "whole with scales"])
def test_quantised_experts_are_refused_by_name(edited: Callable[..., Path], how: str) -> None:
    key = f"{EXPERTS}.1.down_proj.weight"

    def quantise(tensors: dict[str, torch.Tensor]) -> None:
        if how == "fp8 with scales":
            tensors[key] = tensors[key].to(torch.float8_e4m3fn)
        if how == "int8":
            tensors[key] = tensors[key].to(torch.int8)
        if how == "whole with scales":
            whole(tensors)
            tensors[f"{GATE_UP}_scale_inv"] = torch.ones(4, 1, 1)
        elif how != "int8":
            tensors[f"{key}_scale_inv"] = torch.ones(1, 1)

    path = edited(quantise)
    (fault,) = faults(lambda: read(path))
    assert type(fault) is SchemeUnsupported
    assert "routed experts" in fault.message
    assert fault.file == str(path / "model.safetensors")
    assert "experts" in (fault.tensor or "")
    assert "routed experts are not quantised" in (fault.fix or "")


def test_a_quantised_router_is_refused_by_name(edited: Callable[..., Path]) -> None:
    key = "model.layers.1.mlp.gate.weight"
    path = edited(lambda t: t.update({key: t[key].to(torch.float8_e4m3fn)}))
    (fault,) = faults(lambda: read(path))
    assert (type(fault), fault.tensor) == (SchemeUnsupported, key)
    assert fault.message.startswith("router")


def test_an_fp8_checkpoint_with_fp8_experts_is_refused_once() -> None:
    (fault,) = faults(lambda: read(FIXTURES / "hf-fp8-deepseekv3-moe"))
    assert type(fault) is SchemeUnsupported
    assert f"{'model.layers.0.mlp.experts'}.0.down_proj.weight (and 23 more)" == fault.tensor
    assert "F8_E4M3 [136, 24]" in (fault.found or "")


def test_the_layer_that_predicts_ahead_is_left_out(edited: Callable[..., Path]) -> None:
    extra = {
        "model.layers.2.eh_proj.weight": torch.zeros(48, 96),
        "model.layers.2.mlp.experts.0.gate_proj.weight": torch.zeros(2, 2).to(torch.float8_e4m3fn),
    }
    got = read(edited(lambda t: t.update(extra)))
    assert set(got.survey.ignored) == set(extra)
    assert all("ahead" in why for why in got.survey.ignored.values())


def test_a_real_layer_is_never_left_out(edited: Callable[..., Path]) -> None:
    """A config with fewer layers than the checkpoint has: only one may be one that looks ahead."""
    key = "model.layers.3.input_layernorm.weight"
    (fault,) = faults(lambda: read(edited(lambda t: t.update({key: torch.ones(48)}))))
    assert (type(fault), fault.tensor) == (TensorUnexpected, key)
    (fault, *_) = faults(lambda: read(BASE, num_hidden_layers=1, num_nextn_predict_layers=0))
    assert type(fault) is TensorUnexpected
    assert (fault.tensor or "").startswith("model.layers.1.")


class Counting:
    """A source that notes which tensors are alive at once."""

    name = "<counting>"

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors
        self.asked: list[str] = []

    @property
    def headers(self) -> dict[str, TensorHeader]:
        return {k: TensorHeader(self.name, "F32", tuple(t.shape)) for k, t in self.tensors.items()}

    def tensor(self, key: str) -> torch.Tensor:
        self.asked.append(key)
        return self.tensors[key]


def test_rows_follow_the_order_of_the_pieces(seed: int) -> None:
    """Uneven pieces, so that an exchange of rows or experts shows; each is read once."""
    torch.manual_seed(seed)
    stack = Stack("p", (3, 7, 5), (("e.{expert}.a", 2), ("e.{expert}.b", 4), ("e.{expert}.c", 1)))
    tensors = {name: torch.randn(shape) for name, shape in stack.all_tensors()}
    source = Counting(tensors)
    found = read_stack(stack, source, dtype=torch.bfloat16, device="cpu")
    assert source.asked == list(tensors)
    for expert in range(3):
        rows = torch.cat([tensors[f"e.{expert}.{part}"] for part in "abc"])
        assert torch.equal(found[expert], rows.to(torch.bfloat16))
