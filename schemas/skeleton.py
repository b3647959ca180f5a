"""The text that a new architecture schema starts from."""

from __future__ import annotations

import json
import re

_TEXT = """\
# Architecture schema for model type {model_type}. It starts as a Llama-like model: correct what the
# comments ask for, then run `lora-compile schema lint` on this file.
# To see the module paths: print(AutoModelForCausalLM.from_config(config)) on the meta device.
# Layers that differ, mixtures of experts and flags: deepseek_v3.yaml shows `when`, `kept`,
# `checkpoint.stack` and `flags`.
# Expressions use the names of config.json: + - * //, comparisons, and/or/not, `a if c else b`.
schema_version: 1
name: {name}
model_types: [{model_type}]

layers:
  at: model.layers                # the list of decoder layers
  count: num_hidden_layers

let:                              # derived values, used below like names of the config
  head_dim: head_dim or hidden_size // num_attention_heads

sites:
  # Projections that read the same input and can run as one GEMM: list them as parts, in order.
  - kind: linear
    name: qkv_proj
    at: model.layers.{{layer}}.self_attn
    in_features: hidden_size
    fuse: true
    parts:                        # correct the names and widths (rows of each weight)
      - {{name: q_proj, out_features: num_attention_heads * head_dim}}
      - {{name: k_proj, out_features: num_key_value_heads * head_dim}}
      - {{name: v_proj, out_features: num_key_value_heads * head_dim}}
  # A projection by itself is a site with one part of the same name.
  - kind: linear
    name: o_proj
    at: model.layers.{{layer}}.self_attn
    in_features: num_attention_heads * head_dim
    parts:
      - {{name: o_proj, out_features: hidden_size}}
  - kind: linear
    name: gate_up_proj
    at: model.layers.{{layer}}.mlp
    in_features: hidden_size
    fuse: true
    parts:
      - {{name: gate_proj, out_features: intermediate_size}}
      - {{name: up_proj, out_features: intermediate_size}}
  - kind: linear
    name: down_proj
    at: model.layers.{{layer}}.mlp
    in_features: intermediate_size
    parts:
      - {{name: down_proj, out_features: hidden_size}}
  - kind: embedding
    name: embed_tokens
    at: model
    num_embeddings: vocab_size
    embedding_dim: hidden_size
  - kind: linear
    name: lm_head
    at: ""                        # a child of the model itself
    in_features: hidden_size
    quantise_at_load: false
    tied_to: model.embed_tokens   # remove both `tied_` lines if the head is never tied
    tied_if: tie_word_embeddings
    parts:
      - {{name: lm_head, out_features: vocab_size}}

# What adapter files put before a module path; "" accepts files without a prefix.
key_prefixes: ["base_model.model.", ""]

checkpoint:
  ignore: []                      # e.g. [{{pattern: '.*\\.inv_freq', why: not a weight}}]
"""


def skeleton(model_type: str) -> str:
    """A valid architecture schema for `model_type`, with comments that say what to correct."""
    name = re.sub(r"[^A-Za-z0-9_]", "_", model_type)
    if not re.match(r"[A-Za-z_]", name):
        name = f"model_{name}"
    return _TEXT.format(model_type=json.dumps(model_type), name=json.dumps(name))
