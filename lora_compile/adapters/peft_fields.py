"""Every field of PEFT's `adapter_config.json`, and what becomes of it here.

Source: the fields that PEFT 0.21 writes for `peft_type: LORA`. A field is *read* (it changes the
delta and is honoured), *harmless* (it cannot change the delta; `reason` says why) or *off only*
(it changes the model in a way that is not supported, so only values that switch it off pass).
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

FieldUse = Literal["read", "harmless", "off_only"]


class FieldRule(NamedTuple):
    """What one field of the config means to this reader."""

    use: FieldUse
    reason: str
    off: tuple[Any, ...] = ()
    """For `off_only`: the values that leave the feature switched off."""


_TRAINING_ONLY = "acts while training only"
_NAME_ONLY = "names things; does not change the delta"
_OFF: tuple[Any, ...] = (None, False)
_EMPTY: tuple[Any, ...] = (None, [], {})


def _read(reason: str) -> FieldRule:
    return FieldRule("read", reason)


def _harmless(reason: str) -> FieldRule:
    return FieldRule("harmless", reason)


def _off_only(reason: str, off: tuple[Any, ...] = _OFF) -> FieldRule:
    return FieldRule("off_only", reason, off)


FIELDS: dict[str, FieldRule] = {
    # --- what the delta depends on
    "peft_type": _read("only LORA is read"),
    "r": _read("rank"),
    "lora_alpha": _read("scale = lora_alpha / r"),
    "use_rslora": _read("scale = lora_alpha / sqrt(r)"),
    "rank_pattern": _read("rank per module"),
    "alpha_pattern": _read("lora_alpha per module"),
    "target_modules": _read("which modules are adapted"),
    "exclude_modules": _read("which modules are not adapted"),
    "layers_to_transform": _read("which layers are adapted"),
    "layers_pattern": _read("where a layer's number stands in a module path"),
    "init_lora_weights": _read("some initialisations also change the base weight"),
    # --- what cannot change the delta
    "lora_dropout": _harmless(_TRAINING_ONLY),
    "inference_mode": _harmless(_TRAINING_ONLY),
    "task_type": _harmless("selects the wrapper class, not the delta"),
    "auto_mapping": _harmless("names the class of the base model; nothing is imported from it"),
    "base_model_name_or_path": _harmless(_NAME_ONLY),
    "revision": _harmless(_NAME_ONLY),
    "peft_version": _harmless(_NAME_ONLY),
    "eva_config": _harmless("settings of the `eva` initialisation, which leaves the base as it is"),
    "qalora_group_size": _harmless("a setting of `use_qalora`, which is refused when on"),
    "megatron_core": _harmless("a setting of `megatron_config`, which is refused when set"),
    # --- what is not supported
    "bias": _off_only("the file then holds biases that replace those of the base", (None, "none")),
    "lora_bias": _off_only("lora_B then has a bias"),
    "use_dora": _off_only("DoRA scales every output channel by a trained magnitude"),
    "modules_to_save": _off_only("the file then holds whole modules that replace the base", _EMPTY),
    "trainable_token_indices": _off_only("the file then holds replaced embedding rows", _EMPTY),
    "ensure_weight_tying": _off_only("embedding and head then share one delta"),
    "target_parameters": _off_only("LoRA on bare parameters (such as fused experts)", _EMPTY),
    "fan_in_fan_out": _off_only("the base weight is then stored as (in, out)"),
    "layer_replication": _off_only("layers of the base are then repeated", _EMPTY),
    "megatron_config": _off_only("the base is then a Megatron model", _EMPTY),
    "loftq_config": _off_only("LoftQ changes the base weight", _EMPTY),
    "corda_config": _off_only("CorDA changes the base weight", _EMPTY),
    "lora_ga_config": _off_only("LoRA-GA changes the base weight", _EMPTY),
    "kasa_config": _off_only("KaSA changes the base weight and adds a diagonal", _EMPTY),
    "use_qalora": _off_only("QA-LoRA pools the input before lora_A"),
    "use_bdlora": _off_only("BD-LoRA stores block-diagonal factors", (None, False, {})),
    "alora_invocation_tokens": _off_only("aLoRA acts only after an invocation string", _EMPTY),
    "arrow_config": _off_only("Arrow routes between adapters", _EMPTY),
    "monteclora_config": _off_only("MonteCLoRA samples its factors", _EMPTY),
    "velora_config": _off_only(
        "VeLoRA compresses activations while training; not verified here", _EMPTY
    ),
}

REQUIRED = ("peft_type", "r", "lora_alpha")
"""Fields without which a delta's size is unknown; PEFT's own defaults are not assumed."""

INIT_LEAVES_BASE: tuple[Any, ...] = (None, True, False, "gaussian", "eva", "orthogonal")
"""Values of `init_lora_weights` that leave the base weight as it is, so that scale * B A is the
whole change. PiSSA, OLoRA, CorDA, LoftQ, LoRA-GA and KaSA subtract their first factors from it."""


def same_value(found: Any, accepted: tuple[Any, ...]) -> bool:
    """Whether `found` is one of `accepted`, telling True from 1 and False from 0."""
    return any(type(found) is type(value) and found == value for value in accepted)
