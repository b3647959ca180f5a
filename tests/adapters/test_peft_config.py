"""Reading of adapter_config.json: every field is honoured, harmless for a reason, or refused."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig
from peft.tuners.tuners_utils import _ExcludedModule, check_target_module_exists
from peft.utils.other import get_pattern_key

from lora_compile.adapters.peft_config import PeftConfig, load_config, parse_config
from lora_compile.adapters.peft_fields import FIELDS
from lora_compile.adapters.peft_rules import pattern_value
from lora_compile.errors import (
    AdapterConfigInvalid,
    AdapterFileInvalid,
    FaultList,
    FeatureUnsupported,
    FileMissing,
    LoraCompileError,
)
from tests.adapters.plans import config

MODULES = [
    f"model.layers.{layer}.{name}"
    for layer in (0, 1, 10, 11)
    for name in (
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.o_proj",
        "mlp.gate_proj",
        "mlp.shared_experts.gate_proj",
        "mlp.experts.1.gate_proj",
    )
] + ["lm_head", "q_proj"]


def parsed(raw: dict[str, Any]) -> PeftConfig:
    faults = FaultList()
    made = parse_config(raw, file="adapter_config.json", faults=faults)
    faults.raise_if_any()
    assert made is not None
    return made


def test_every_field_that_peft_writes_is_known() -> None:
    written = set(LoraConfig().to_dict())
    assert written <= set(FIELDS), written - set(FIELDS)
    assert parsed(LoraConfig(target_modules=["q_proj"]).to_dict()).r == 8


# A value for each field that switches something on, as PEFT would write it.
SWITCHED_ON: dict[str, Any] = {
    "bias": "lora_only",
    "lora_bias": True,
    "use_dora": True,
    "modules_to_save": ["lm_head"],
    "trainable_token_indices": [1, 2],
    "ensure_weight_tying": True,
    "target_parameters": ["mlp.experts.gate_up_proj"],
    "fan_in_fan_out": True,
    "layer_replication": [[0, 2], [1, 3]],
    "megatron_config": {"tensor_model_parallel_size": 2},
    "loftq_config": {"loftq_bits": 4},
    "corda_config": {"corda_method": "kpm"},
    "lora_ga_config": {"scale": "stable"},
    "kasa_config": {"beta": 0.1},
    "use_qalora": True,
    "use_bdlora": {"nblocks": 2},
    "alora_invocation_tokens": [5, 6],
    "arrow_config": {"top_k": 3},
    "monteclora_config": {"num_samples": 8},
    "velora_config": {"num_groups": 64},
}


def test_the_table_of_switches_is_complete() -> None:
    assert set(SWITCHED_ON) == {name for name, rule in FIELDS.items() if rule.use == "off_only"}


@pytest.mark.parametrize("field", sorted(SWITCHED_ON))
def test_an_unsupported_field_is_refused_by_name_value_and_reason(field: str) -> None:
    value = SWITCHED_ON[field]
    with pytest.raises(FeatureUnsupported) as caught:
        parsed(config(**{field: value}))
    assert caught.value.where == field
    assert repr(value) in str(caught.value)
    assert FIELDS[field].reason in str(caught.value)


@pytest.mark.parametrize(
    "value", ["pissa", "pissa_niter_16", "olora", "corda", "loftq", "lora_ga", "kasa", "new", 1]
)
def test_an_initialisation_that_changes_the_base_is_refused(value: Any) -> None:
    with pytest.raises(FeatureUnsupported, match="init_lora_weights"):
        parsed(config(init_lora_weights=value))


@pytest.mark.parametrize("value", [True, False, "gaussian", "Gaussian", "eva", "orthogonal"])
def test_an_initialisation_that_leaves_the_base_is_read(value: Any) -> None:
    assert parsed(config(init_lora_weights=value)).r == 4


def test_harmless_fields_do_no_harm() -> None:
    harmless = {
        "lora_dropout": 0.3,
        "inference_mode": False,
        "task_type": "SEQ_CLS",
        "auto_mapping": {"base_model_class": "os.system", "parent_library": "evil"},
        "base_model_name_or_path": "some/where",
        "revision": "v2",
        "peft_version": "99.0",
        "eva_config": {"rho": 2.0},
        "qalora_group_size": 32,
        "megatron_core": "other.core",
    }
    assert set(harmless) == {name for name, rule in FIELDS.items() if rule.use == "harmless"}
    assert parsed(config(**harmless)).scale("q_proj") == 1.5


@pytest.mark.parametrize("field", ["r", "lora_alpha", "peft_type"])
def test_a_missing_size_is_an_error_that_names_the_field(field: str) -> None:
    with pytest.raises(AdapterConfigInvalid, match=f"{field} is missing"):
        parsed(config(**{field: None}))


def test_alpha_zero_is_read_with_a_warning() -> None:
    made = parsed(config(lora_alpha=0))
    assert made.scale("q_proj") == 0
    assert any("lora_alpha is 0" in warning for warning in made.warnings)


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ({"r": 0}, "r"),
        ({"r": True}, "r"),
        ({"r": "8"}, "r"),
        ({"lora_alpha": "16"}, "lora_alpha"),
        ({"lora_alpha": math.nan}, "lora_alpha"),
        ({"lora_alpha": 1e300}, "lora_alpha"),
        ({"use_rslora": "yes"}, "use_rslora"),
        ({"rank_pattern": {"q_proj": -1}}, "rank_pattern['q_proj']"),
        ({"rank_pattern": {"q_(proj": 2}}, "rank_pattern"),
        ({"rank_pattern": [1]}, "rank_pattern"),
        ({"alpha_pattern": {"q_proj": None}}, "alpha_pattern['q_proj']"),
        ({"target_modules": "q_(proj"}, "target_modules"),
        ({"target_modules": [1]}, "target_modules"),
        ({"exclude_modules": "("}, "exclude_modules"),
        ({"layers_to_transform": ["0"]}, "layers_to_transform"),
        ({"layers_pattern": "layers"}, "layers_pattern"),
        ({"target_modules": ".*q_proj", "layers_to_transform": [0]}, "layers_to_transform"),
        ({"lora_magic": 3}, "lora_magic"),
        ({"use_new": True}, "use_new"),
    ],
)
def test_a_malformed_field_is_named(fields: dict[str, Any], where: str) -> None:
    with pytest.raises(AdapterConfigInvalid) as caught:
        parsed(config(**fields))
    assert caught.value.where == where


def test_all_faults_of_a_config_come_together() -> None:
    with pytest.raises(LoraCompileError) as caught:
        parsed(config(lora_alpha=None, use_dora=True, typo=1, peft_type="LOHA"))
    for word in ("lora_alpha", "use_dora", "typo", "LOHA"):
        assert word in str(caught.value)


def test_an_unknown_field_that_is_off_is_let_through() -> None:
    made = parsed(config() | {"new_a": None, "new_b": {}, "use_new": False})
    assert [w for w in made.warnings if "use_new" in w]


def test_faults_of_a_file_have_its_line(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(
        json.dumps(config() | {"use_dora": True}, indent=2)
    )
    raw, text = load_config(tmp_path)
    faults = FaultList()
    parse_config(raw, file="f", faults=faults, text=text)
    line = faults.faults[0].line
    assert line is not None
    assert '"use_dora"' in text.splitlines()[line - 1]


def test_broken_config_files(tmp_path: Path) -> None:
    path = tmp_path / "adapter_config.json"
    with pytest.raises(FileMissing):
        load_config(tmp_path)
    for content in (b"{", b"[1]", b'{"r": 8, "r": 16}', b'{"a": {"x": 1, "x": 2}}', b"\xff\xfe{"):
        path.write_bytes(content)
        with pytest.raises(AdapterFileInvalid):
            load_config(tmp_path)


# --- PEFT's own rules ------------------------------------------------------------------------

PATTERNS = [
    "q_proj",
    "proj",
    "gate_proj",
    "self_attn.q_proj",
    r"self_attn\.(q|o)_proj",
    r"^model\.layers\.0\.self_attn\.q_proj",
    "layers.1.mlp.gate_proj",
    ".*1.mlp.gate_proj",
    r"layers\.[0-9]+\.mlp\.(gate|up)_proj",
    "model.layers.1",
    "experts.1.gate_proj",
    "lm_head",
    ".*",
]


def test_patterns_resolve_as_in_peft(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(300):
        keys = rng.sample(PATTERNS, rng.randint(1, 5))
        pattern = {key: index + 1 for index, key in enumerate(keys)}
        for module in MODULES:
            expected = pattern.get(get_pattern_key(pattern.keys(), module), 99)
            assert pattern_value(pattern, module, 99) == expected, (pattern, module)


def test_targets_resolve_as_in_peft(seed: int) -> None:
    rng = random.Random(seed)
    names = [
        "q_proj",
        "k_proj",
        "gate_proj",
        "self_attn.o_proj",
        "model.layers.1.mlp.gate_proj",
        "proj",
        "shared_experts.gate_proj",
    ]
    regexes = [r".*\.(q|k)_proj", r"model\.layers\.1\..*", ".*gate_proj", "q_proj", "lm_head"]
    seen = {True: 0, False: 0}
    for _ in range(400):
        targets: Any = rng.choice(regexes) if rng.random() < 0.3 else rng.sample(names, 3)
        fields: dict[str, Any] = {"target_modules": targets}
        if rng.random() < 0.5:
            fields["exclude_modules"] = rng.choice([rng.choice(regexes), rng.sample(names, 2)])
        if isinstance(targets, list) and rng.random() < 0.6:
            fields["layers_to_transform"] = rng.choice([1, [0], [1, 10], []])
            if fields["layers_to_transform"] and rng.random() < 0.5:
                fields["layers_pattern"] = rng.choice(["layers", ["h", "layers"], "experts"])
        theirs = LoraConfig(r=4, lora_alpha=6, **fields)
        ours = parsed(theirs.to_dict()).targets
        for module in MODULES:
            found = check_target_module_exists(theirs, module)
            expected = bool(found) and not isinstance(found, _ExcludedModule)
            assert ours.matches(module) == expected, (fields, module)
            seen[expected] += 1
    assert min(seen.values()) > 1000


def test_scale_of_rslora_and_patterns() -> None:
    """alpha 16 and r 16 with rsLoRA give 4; r 9 gives alpha / 3."""
    assert parsed(config(r=16, lora_alpha=16, use_rslora=True)).scale("q_proj") == 4.0
    assert parsed(config(r=9, lora_alpha=6, use_rslora=True)).scale("q_proj") == 2.0
    assert parsed(config(r=8, lora_alpha=16)).scale("q_proj") == 2.0
    mixed = parsed(
        config(
            r=8,
            lora_alpha=16,
            use_rslora=True,
            rank_pattern={"q_proj": 4},
            alpha_pattern={"k_proj": 1},
        )
    )
    assert mixed.scale("layers.0.q_proj") == 8.0
    assert mixed.scale("layers.0.k_proj") == pytest.approx(1 / math.sqrt(8))
