"""Bad input to `check`: every fault by name and place, all at once, nothing loaded, exit code 1."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lora_compile.errors import Faults, LoraCompileError
from lora_compile.planning.prepare import Prepared, prepare
from tests.cli.conftest import Result, Site
from tests.fake_quant import fake_quantise
from tests.tiny import llama, make_adapter, peft_logits, prompts, relative

Cli = Callable[..., Result]


def faults_of(file: Path) -> list[LoraCompileError]:
    with pytest.raises(LoraCompileError) as caught:
        prepare(file, make=False, progress=lambda text: None)
    return list(caught.value.faults) if isinstance(caught.value, Faults) else [caught.value]


def only_fault(file: Path, kind: str, *facts: str) -> LoraCompileError:
    (fault,) = faults_of(file)
    assert type(fault).__name__ == kind, fault
    for fact in facts:
        assert fact in str(fault), (fact, str(fault))
    return fault


def good(site: Site) -> Prepared:
    return prepare(site.file, make=False, progress=lambda text: None)


def test_a_good_deployment(site: Site, cli: Cli) -> None:
    result = cli("check", site.file)
    assert result.code == 0, result.err
    assert "ok" in result.out
    data = cli("check", site.file, "--json").data
    assert data["ok"]
    assert data["schemes"] == {"none": 2, "fp8_block": 8}
    assert data["adapters"][0]["modules"] == 14


def test_predicted_bytes_are_those_that_loading_allocates(site: Site) -> None:
    import lora_compile as lc
    from lora_compile.cli.check import summary

    predicted = summary(good(site))
    model = lc.load(site.file)
    seen: dict[int, int] = {}
    slots = 0
    for module in model.module.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.data_ptr() in seen or name.startswith(("seq_", "token_", "inv_", "original")):
                continue
            seen[buffer.data_ptr()] = buffer.nbytes
            slots += buffer.nbytes if name.startswith("lora_") else 0
    assert slots == predicted["slot_bytes"]
    assert sum(seen.values()) - slots == predicted["weight_bytes"]


def test_a_missing_file(site: Site, cli: Cli) -> None:
    result = cli("check", site.folder / "deploymnt.yaml")
    assert result.code == 1
    assert "deploymnt.yaml" in result.err
    assert "deployment.yaml" in result.err  # did you mean


def test_not_yaml(site: Site, cli: Cli) -> None:
    site.file.write_text("model: {path: [\nquantization: }")
    result = cli("check", site.file, "--json")
    assert result.code == 1
    (fault,) = result.data["faults"]
    assert fault["error"] == "YamlSyntax"
    assert fault["line"] == 2


def test_all_faults_of_a_file_in_one_run(site: Site, cli: Cli) -> None:
    def spoil(data: dict[str, Any]) -> None:
        data["quantisation"] = data.pop("quantization")
        data["model"]["dtyp"] = data["model"].pop("dtype")
        data["runtime"]["max_rank"] = "eight"

    site.write(spoil)
    result = cli("check", site.file, "--json")
    assert result.code == 1
    found = {(f["error"], f["where"]) for f in result.data["faults"]}
    assert ("UnknownKey", "quantisation") in found
    assert ("UnknownKey", "model.dtyp") in found
    assert ("InvalidValue", "runtime.max_rank") in found
    text = json.dumps(result.data)
    assert "quantization" in text
    assert all(f["line"] and f["file"] == str(site.file) for f in result.data["faults"])


def test_a_model_that_is_not_there(site: Site) -> None:
    site.write(lambda data: data["model"].update(path="modle"))
    fault = only_fault(site.file, "FileMissing", "modle", "model.path")
    assert fault.line == 3


def test_a_wrong_width(site: Site) -> None:
    """A schema whose expression does not fit this model."""
    from lora_compile.schemas.architecture import SHIPPED

    text = (SHIPPED / "llama.yaml").read_text()
    broken = text.replace(
        "{name: k_proj, out_features: kv_heads * head_dim}",
        "{name: k_proj, out_features: num_attention_heads * head_dim}",
    )
    assert broken != text
    (site.folder / "mine.yaml").write_text(broken)
    site.write(lambda data: data["model"].update(architecture="mine.yaml"))
    faults = faults_of(site.file)
    assert {type(f).__name__ for f in faults} == {"WidthMismatch"}
    assert "mine.yaml" in str(faults[0])
    assert "256 (num_attention_heads * head_dim)" in str(faults[0])
    assert faults[0].found == "64"
    line = broken.splitlines().index(
        "      - {name: k_proj, out_features: num_attention_heads * head_dim}"
    )
    assert faults[0].line == line + 1


@pytest.mark.parametrize("kind", ["misspelt", "lacking"])
def test_a_schema_and_a_model_that_do_not_fit(site: Site, kind: str) -> None:
    from lora_compile.schemas.architecture import SHIPPED

    text = (SHIPPED / "llama.yaml").read_text()
    if kind == "misspelt":
        text = text.replace("name: gate_proj", "name: gate_porj")
    else:  # Phi-3 has one fused projection instead
        text = text.replace("name: up_proj", "name: gate_up_fused")
    (site.folder / "mine.yaml").write_text(text)
    site.write(lambda data: data["model"].update(architecture="mine.yaml"))
    faults = faults_of(site.file)
    assert len(faults) == 2  # one a layer
    for layer, fault in enumerate(faults):
        assert type(fault).__name__ == "SiteMissing"
        wrong = "gate_porj" if kind == "misspelt" else "gate_up_fused"
        assert f"model.layers.{layer}.mlp.{wrong}" in str(fault)
        assert "site gate_up_proj" in str(fault)
        assert fault.line == 1 + next(i for i, t in enumerate(text.splitlines()) if wrong in t)
    if kind == "misspelt":
        assert "did you mean model.layers.0.mlp.gate_proj" in str(faults[0])


def test_an_unknown_architecture_gets_a_skeleton(site: Site) -> None:
    site.edit_json("model/config.json", lambda c: c.update(model_type="gpt_neox"))
    fault = only_fault(site.file, "ArchitectureUnknown", "gpt_neox", "llama", "schema lint")
    assert "sites:" in str(fault)


def test_faults_of_every_room_come_together(site: Site, cli: Cli) -> None:
    """What the deployment asks, its model, its checkpoint and its adapters, in one run."""

    def spoil(data: dict[str, Any]) -> None:
        data["runtime"]["features"] = ["dora"]
        data["adapters"].append({"name": "b", "path": "no-such-adapter"})

    site.write(spoil)
    site.edit_tensors(lambda tensors: tensors.pop("model.layers.1.mlp.down_proj.weight"))
    site.edit_json("adapter/adapter_config.json", lambda c: c.update(use_dora=True))
    result = cli("check", site.file, "--json")
    assert result.code == 1
    text = [f"{f['error']} {f['where']} {f['message']}" for f in result.data["faults"]]
    for wanted in ("runtime.features", "down_proj", "adapters[1].path", "use_dora"):
        assert sum(wanted in line for line in text) == 1, (wanted, text)
    assert len(text) == 4, text


def test_adapters_are_looked_at_when_the_model_is_not_there(site: Site) -> None:
    def spoil(data: dict[str, Any]) -> None:
        data["model"]["path"] = "modle"
        data["adapters"][0]["path"] = "adaptre"

    site.write(spoil)
    assert [fault.where for fault in faults_of(site.file)] == ["model.path", "adapters[0].path"]


def test_nothing_is_loaded_to_find_a_fault(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    from lora_compile.checkpoints.index import CheckpointIndex

    def load(self: object, key: str) -> torch.Tensor:
        raise AssertionError(f"{key} was loaded")

    monkeypatch.setattr(CheckpointIndex, "tensor", load)
    site.edit_tensors(lambda tensors: tensors.update(extra=torch.ones(2)))
    site.edit_json("adapter/adapter_config.json", lambda c: c.update(use_dora=True))
    assert len(faults_of(site.file)) == 2


def test_a_quantised_checkpoint_is_served_as_it_is(site: Site) -> None:
    """Logits of transformers with the file's own decoded weights, with an adapter and without."""
    import lora_compile as lc

    oracle = fake_quantise(llama(21))
    site.quantise((128, 128))
    model = lc.load(site.file)
    ids = prompts(1, 2, 9)
    found = model(ids, adapters=["a", None]).logits
    with torch.no_grad():
        base = oracle(ids[1:]).logits
    assert relative(found[1:], base) <= 1e-5
    expected = peft_logits(oracle, site.folder / "adapter", ids[:1])
    assert relative(found[:1], expected) <= 1e-1  # a flipped code; the site gate has the bound
    assert relative(found[:1], model(ids).logits[:1]) > 1e-1


def test_a_quantised_checkpoint_is_read_as_it_is(site: Site) -> None:
    site.quantise((128, 128))
    plan = good(site).plan
    assert plan.scheme == "fp8_block"
    assert sum(s.quant.scheme == "fp8_block" for s in plan.sites) == 8


@pytest.mark.parametrize(
    ("change", "kind", "fact"),
    [
        (lambda t, k: t.update({k: t[k][:, :1].contiguous()}), "TensorShape", "expected"),
        (lambda t, k: t[k].view(-1)[0].fill_(float("nan")), "TensorNotFinite", "nan"),
        (lambda t, k: t.pop(k), "TensorMissing", "weight_scale_inv"),
        (lambda t, k: t.update(extra=torch.ones(2)), "TensorUnexpected", "extra"),
    ],
    ids=["shape", "nan", "missing", "leftover"],
)
def test_bad_scales(site: Site, change: Any, kind: str, fact: str) -> None:
    site.quantise((128, 128))
    key = "model.layers.1.mlp.down_proj.weight_scale_inv"
    site.edit_tensors(lambda tensors: change(tensors, key))
    fault = faults_of(site.file)[0]
    assert type(fault).__name__ == kind, fault
    assert fact in str(fault).lower()
    if kind != "TensorUnexpected":
        assert "model.layers.1.mlp.down_proj" in str(fault)
    assert "model.safetensors" in str(fault) or "model" in str(fault)


def test_a_scheme_without_a_reader_is_refused_with_the_list_of_those_that_have(site: Site) -> None:
    config = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    site.edit_json("model/config.json", lambda c: c.update(quantization_config=config))
    site.write(lambda data: data["quantization"].update(scheme="auto"))
    only_fault(site.file, "SchemeUnsupported", "gptq", "fp8_block")


def test_a_quantised_checkpoint_is_not_requantised(site: Site) -> None:
    site.quantise((128, 128))
    site.write(lambda data: data["quantization"].update(scheme="none"))
    fault = only_fault(site.file, "SchemeUnsupported", "scheme: auto")
    assert fault.where == "quantization.scheme"


def test_an_adapter_that_is_not_there(site: Site) -> None:
    site.write(lambda data: data["adapters"][0].update(path="adaptor"))
    fault = only_fault(site.file, "FileMissing", "adapter_config.json", "adapters[0].path")
    assert fault.line is not None


def test_an_adapter_for_another_base(site: Site, tmp_path: Path) -> None:
    wide = llama(22, hidden_size=384, num_attention_heads=12, num_key_value_heads=3)
    make_adapter(wide, tmp_path / "adapter", rank=4, seed=2)
    assert {type(f).__name__ for f in faults_of(site.file)} <= {"AdapterForeign", "TensorShape"}
    assert "256" in str(faults_of(site.file)[0])


def test_a_rank_above_max_rank_says_which_value_would_do(site: Site, tmp_path: Path) -> None:
    make_adapter(llama(21), tmp_path / "adapter", rank=24, seed=2)
    only_fault(site.file, "AdapterRankTooHigh", "max_rank: 24", "MiB", "24", "8")


def test_several_adapters_at_fault_show_together(site: Site, tmp_path: Path) -> None:
    make_adapter(llama(21), tmp_path / "b", rank=24, seed=2)
    site.write(
        lambda data: data.update(
            adapters=[{"name": "a", "path": "nowhere"}, {"name": "b", "path": "b"}]
        )
    )
    kinds = [type(f).__name__ for f in faults_of(site.file)]
    assert kinds == ["FileMissing", "AdapterRankTooHigh"]


def test_features_are_refused_by_name(site: Site) -> None:
    site.write(lambda data: data["runtime"].update(features=["dora"]))
    fault = only_fault(site.file, "FeatureUnsupported", "dora", "runtime.features")
    assert fault.line is not None


def test_nothing_is_loaded(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """`check` reads headers and scales, never a weight."""
    from lora_compile.checkpoints.index import CheckpointIndex

    read: list[str] = []
    monkeypatch.setattr(CheckpointIndex, "tensor", lambda self, key: read.append(key))
    good(site)
    assert read == []


def test_sites_touched_builds_slots_only_where_an_adapter_acts(site: Site, tmp_path: Path) -> None:
    make_adapter(llama(21), tmp_path / "adapter", rank=4, seed=2, targets=("k_proj",))
    site.write(lambda data: data["runtime"].update(sites="touched"))
    plan = good(site).plan
    assert {s.role for s in plan.sites if s.lora} == {"qkv_proj"}


def test_used_wrongly_is_exit_code_2(cli: Cli, site: Site) -> None:
    assert cli("check").code == 2
    assert cli("chek", site.file).code == 2
