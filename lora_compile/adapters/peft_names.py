"""From a tensor's key in an adapter file to what it is.

Keys of plain LoRA (PEFT): PREFIX + module path + `.lora_A` or `.lora_B`, then optionally the
adapter's name, then `.weight`. The prefixes are the plan's (`base_model.model.` as PEFT writes
it, others or none as the architecture's schema allows). A module path may also be the name of a
fused site (`...self_attn.qkv_proj`), for adapters trained on a model whose weights are fused.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Literal

from lora_compile.planning.plan import PartTarget, Plan, SitePlan

Role = Literal["lora_A", "lora_B"]

_LORA = re.compile(r"(?P<head>.+)\.(?P<role>lora_[AB])(?:\.(?P<adapter>[^.]+))?\.weight")

# Tensors of features that are known but not supported: suffix -> what it is.
_FEATURES: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(rf"((?!lora_).)+\.{suffix}"), feature)
    for suffix, feature in (
        (r"lora_magnitude_vector(\..+)?", "DoRA magnitudes (use_dora)"),
        (r"lora_[AB](\.[^.]+)?\.bias", "a bias of a LoRA factor (lora_bias)"),
        (r"lora_embedding_[AB](\.[^.]+)?", "LoRA on an embedding"),
        (r"lora_diag(\..+)?", "a KaSA diagonal (kasa_config)"),
        (r"(token_adapter\.)?trainable_tokens_\w+(\..+)?", "replaced embedding rows"),
        (r"base_layer\.weight", "a full copy of a base weight (save_embedding_layers)"),
        (r"base_layer\.bias", "a replaced bias (bias: all or lora_only)"),
        (r"modules_to_save(\..+)?", "a whole module that replaces the base (modules_to_save)"),
        (r"bias", "a replaced bias (bias: all or lora_only)"),
        (r"weight", "a weight that replaces the base's (modules_to_save)"),
    )
)


@dataclass(frozen=True)
class LoraKey:
    """A key of the plain LoRA form; `head` still carries the prefix."""

    key: str
    head: str
    role: Role
    adapter: str | None


@dataclass(frozen=True)
class FeatureKey:
    """A key that belongs to a feature which is not supported."""

    key: str
    feature: str


@dataclass(frozen=True)
class Module:
    """The projections that one module path of the file stands for.

    More than one when the path is a fused site's own name; their rows follow in this order.
    """

    path: str
    targets: tuple[PartTarget, ...]
    decided_by: str

    @property
    def sites(self) -> tuple[SitePlan, ...]:
        """The sites of the projections; several where the plan has split a fused site."""
        return tuple({target.site.name: target.site for target in self.targets}.values())

    @property
    def in_features(self) -> int:
        return self.targets[0].site.in_features

    @property
    def fused(self) -> bool:
        return len(self.targets) > 1

    @property
    def out_features(self) -> int:
        return sum(target.part.out_features for target in self.targets)


def classify(key: str) -> LoraKey | FeatureKey | None:
    """What a key is by its form alone; None for a form that nothing here knows."""
    found = _LORA.fullmatch(key)
    if found:
        role: Role = "lora_A" if found["role"] == "lora_A" else "lora_B"
        return LoraKey(key, found["head"], role, found["adapter"])
    for pattern, feature in _FEATURES:
        if pattern.fullmatch(key):
            return FeatureKey(key, feature)
    return None


def find_modules(head: str, plan: Plan) -> tuple[Module, ...]:
    """All readings of a key's head as a module of the plan; one is right, several ambiguous."""
    readings: dict[str, Module] = {}
    for prefix in plan.key_prefixes:
        if not head.startswith(prefix):
            continue
        path = head[len(prefix) :]
        how = f"prefix {prefix!r}" if prefix else "no prefix"
        target = plan.targets.get(path)
        group = plan.groups.get(path)
        if target is not None:
            readings.setdefault(path, Module(path, (target,), how))
        elif group is not None:
            readings.setdefault(path, Module(path, group, f"{how}; fused, B split by rows"))
    return tuple(readings.values())


def strip_prefix(head: str, plan: Plan) -> str:
    """The head without the longest prefix that fits, for messages about unknown modules."""
    fitting = [prefix for prefix in plan.key_prefixes if head.startswith(prefix)]
    return head[len(max(fitting, key=len, default="")) :]


class Neighbours:
    """Which module of the plan an unknown name was probably meant to be."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._tails = {_tail(module, plan): module for module in plan.targets}

    def same_tail(self, head: str) -> tuple[str, str] | None:
        """(what stands in front, module) if the name agrees from the layers on.

        A surplus or missing level in front is the usual mistake.
        """
        parts = head.split(".")
        for start in range(len(parts)):
            tail = ".".join(parts[start:])
            if tail in self._tails:
                return ".".join(parts[:start]), self._tails[tail]
        return None

    def nearest(self, head: str) -> str | None:
        """The module whose path looks most like this one; None if none looks like it."""
        same = self.same_tail(head)
        if same is not None:
            return same[1]
        close = get_close_matches(strip_prefix(head, self._plan), list(self._plan.targets), n=1)
        return close[0] if close else None


def _tail(module: str, plan: Plan) -> str:
    """`layers.0.self_attn.q_proj` of `model.layers.0.self_attn.q_proj`; else the whole path."""
    if not module.startswith(plan.layers + "."):
        return module
    return module[len(plan.layers) - len(plan.layers.rsplit(".", 1)[-1]) :]


def beyond_layers(head: str, plan: Plan) -> bool:
    """Whether the path would fit the model if the model had more layers."""
    layers = [site.layer for site in plan.sites if site.layer is not None]
    for prefix in plan.key_prefixes:
        path = head[len(prefix) :] if head.startswith(prefix) else ""
        found = re.fullmatch(rf"{re.escape(plan.layers)}\.(\d+)\.(.+)", path)
        if found and layers and int(found[1]) > max(layers):
            return any(
                f"{plan.layers}.{layer}.{found[2]}" in plan.targets for layer in sorted(set(layers))
            )
    return False
