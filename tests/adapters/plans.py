"""Plans of small models, built by hand: what the planner would decide for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from lora_compile.planning.plan import KeptModules, PartPlan, Plan, SitePlan, SlotPlan, SourceRef
from lora_compile.schemas.quant_info import ActivationInfo, PartRows, QuantInfo, ScaleInfo

FIXTURES = Path(__file__).parents[1] / "fixtures"
PREFIXES = ("base_model.model.", "base_model.", "")
SOURCE = SourceRef(file="by hand", line=1)


def dense_info(in_features: int, parts: list[tuple[str, int]]) -> QuantInfo:
    """QuantInfo of an unquantised site whose parts follow each other without gaps."""
    rows, low = [], 0
    for name, width in parts:
        rows.append(PartRows(name=name, rows=(low, low + width), scale_rows=None, input_scale=None))
        low += width
    return QuantInfo(
        scheme="none",
        weight_dtype="float32",
        packing="none",
        scale=ScaleInfo(granularity="none", dtype=None, block_shape=None),
        zero_point="none",
        activation=ActivationInfo(
            handling="none", granularity=None, group=None, dtype=None, min_scale=None
        ),
        input_transforms=(),
        bias=False,
        in_features=in_features,
        parts=tuple(rows),
    )


def site(
    role: str,
    in_features: int,
    parts: list[tuple[str, int]],
    *,
    parent: str,
    layer: int | None,
    lora: bool = True,
    kind: Any = "linear",
) -> SitePlan:
    """A site at `parent.role` with parts at `parent.<part>`."""
    dot = f"{parent}." if parent else ""
    return SitePlan(
        name=dot + role,
        kind=kind,
        role=role,
        layer=layer,
        in_features=in_features,
        out_features=sum(width for _, width in parts),
        parts=tuple(
            PartPlan(name=name, module=dot + name, out_features=width) for name, width in parts
        ),
        quant=dense_info(in_features, parts),
        lora=lora,
        tied_to=None,
        source=SOURCE,
        why="by hand",
    )


def plan_of(
    sites: list[SitePlan],
    *,
    max_rank: int = 16,
    max_adapters: int = 2,
    dtype: Any = "float32",
    key_prefixes: tuple[str, ...] = PREFIXES,
    model_type: str = "llama",
    kept: tuple[KeptModules, ...] = (),
) -> Plan:
    return Plan(
        architecture=model_type,
        model_type=model_type,
        dtype=dtype,
        device="cpu",
        scheme="none",
        slots=SlotPlan(
            max_adapters=max_adapters,
            max_rank=max_rank,
            rank=-(-max_rank // 16) * 16,
            features=(),
            dtype=dtype,
        ),
        max_rows=8,
        max_tokens=64,
        packed=False,
        layers="model.layers",
        sites=tuple(sites),
        key_prefixes=key_prefixes,
        kept=kept,
    )


def llama_plan(
    *,
    hidden: int = 48,
    inter: int = 40,
    heads: int = 3,
    kv_heads: int = 1,
    head_dim: int = 16,
    layers: int = 2,
    without: tuple[str, ...] = (),
    **slots: Any,
) -> Plan:
    """A Llama-like decoder. The defaults are the sizes of the Llama adapter fixtures.

    `without`: roles that get no adapter slots.
    """
    q, kv = heads * head_dim, kv_heads * head_dim
    sites = []
    for layer in range(layers):
        attention, mlp = f"model.layers.{layer}.self_attn", f"model.layers.{layer}.mlp"
        for role, width, parts, parent in (
            ("qkv_proj", hidden, [("q_proj", q), ("k_proj", kv), ("v_proj", kv)], attention),
            ("o_proj", q, [("o_proj", hidden)], attention),
            ("gate_up_proj", hidden, [("gate_proj", inter), ("up_proj", inter)], mlp),
            ("down_proj", inter, [("down_proj", hidden)], mlp),
        ):
            built = role not in without
            sites.append(site(role, width, parts, parent=parent, layer=layer, lora=built))
    return plan_of(sites, **slots)


def gpt2_plan(config: dict[str, Any]) -> Plan:
    """The projections of a GPT-2 (sizes of a fixture's meta.json)."""
    hidden = config["n_embd"]
    return plan_of(
        [
            site(
                "c_attn",
                hidden,
                [("c_attn", 3 * hidden)],
                parent=f"transformer.h.{i}.attn",
                layer=i,
            )
            for i in range(config["n_layer"])
        ]
        + [
            site(
                "c_proj", 4 * hidden, [("c_proj", hidden)], parent=f"transformer.h.{i}.mlp", layer=i
            )
            for i in range(config["n_layer"])
        ],
        model_type="gpt2",
    )


def experts_plan(config: dict[str, Any]) -> Plan:
    """Experts as separate linear modules, one site per projection."""
    hidden, inter = config["hidden_size"], config["moe_intermediate_size"]
    widths = {
        "gate_proj": (hidden, inter),
        "up_proj": (hidden, inter),
        "down_proj": (inter, hidden),
    }
    return plan_of(
        [
            site(name, k, [(name, n)], parent=f"model.layers.{i}.mlp.experts.{e}", layer=i)
            for i in range(config["num_hidden_layers"])
            for e in range(config["num_experts"])
            for name, (k, n) in widths.items()
        ],
        model_type="qwen3_moe",
    )


def sizes(fixture: str) -> dict[str, Any]:
    """The sizes of the base model, from a fixture's meta.json."""
    return dict(json.loads((FIXTURES / fixture / "meta.json").read_text())["sizes"])


CONFIG = {
    "peft_type": "LORA",
    "r": 4,
    "lora_alpha": 6,
    "base_model_name_or_path": "tiny/base",
    "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
}


def config(**fields: Any) -> dict[str, Any]:
    """A minimal valid config with some fields changed; None takes a field out."""
    changed = CONFIG | fields
    return {key: value for key, value in changed.items() if value is not None}


def tensors(
    plan: Plan,
    modules: list[str] | None = None,
    *,
    rank: int = 4,
    seed: int = 0,
    prefix: str = "base_model.model.",
    dtype: torch.dtype = torch.float32,
) -> dict[str, torch.Tensor]:
    """Random A and B of some modules (default: all projections), under PEFT's keys."""
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for module in modules if modules is not None else list(plan.targets):
        target = plan.targets[module]
        shapes = {"A": (rank, target.site.in_features), "B": (target.part.out_features, rank)}
        for name, shape in shapes.items():
            values = torch.randn(shape, generator=generator)
            made[f"{prefix}{module}.lora_{name}.weight"] = values.to(dtype)
    return made
