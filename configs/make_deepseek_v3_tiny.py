"""Makes configs/deepseek_v3_tiny: a config and tokenizer for a tiny DeepSeek-V3, and its adapters.

    python configs/make_deepseek_v3_tiny.py

The widths are ragged on purpose: 96 and 80 rows in the fused projection, 48 columns in a value
head. The adapters are PEFT's own files with random A and B. Nothing here is trained: the model's
weights are drawn when the deployment is loaded.
"""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, PreTrainedTokenizerFast

FOLDER = Path(__file__).parent / "deepseek_v3_tiny"
ADAPTERS = Path(__file__).parent / "adapters" / "deepseek_v3_tiny"

CONFIG = DeepseekV3Config(
    vocab_size=320,
    hidden_size=256,
    intermediate_size=384,
    moe_intermediate_size=96,
    num_hidden_layers=2,
    first_k_dense_replace=1,
    num_attention_heads=4,
    num_key_value_heads=4,
    q_lora_rank=96,
    kv_lora_rank=64,
    qk_rope_head_dim=16,
    qk_nope_head_dim=32,
    v_head_dim=48,
    n_routed_experts=8,
    n_shared_experts=1,
    num_experts_per_tok=2,
    n_group=2,
    topk_group=1,
    max_position_embeddings=512,
    rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    num_nextn_predict_layers=0,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
    tie_word_embeddings=False,
    architectures=["DeepseekV3ForCausalLM"],
)

EVERY_SITE = [
    "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj",
    "gate_proj", "up_proj", "down_proj",
]  # fmt: skip
TARGETS: dict[str, dict[str, Any]] = {
    "every_site": {"r": 8, "lora_alpha": 16, "target_modules": EVERY_SITE},
    "kv_a_only": {"r": 4, "lora_alpha": 4, "target_modules": ["kv_a_proj_with_mqa"]},
    "q_a_rslora": {
        "r": 16,
        "lora_alpha": 16,
        "use_rslora": True,
        "target_modules": ["q_a_proj", "o_proj"],
    },
}


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each byte, behind the special tokens."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<s>", "</s>", *letters])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )


def main() -> None:
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir()
    CONFIG.save_pretrained(str(FOLDER))
    make_tokenizer().save_pretrained(str(FOLDER))
    for index, (name, settings) in enumerate(TARGETS.items()):
        torch.manual_seed(index)
        model = DeepseekV3ForCausalLM(CONFIG)
        # Under its own type PEFT takes gate_proj and up_proj to mean the routed experts alone.
        model.config = copy.deepcopy(CONFIG)
        model.config.model_type = "plain"
        peft = get_peft_model(model, LoraConfig(**settings, task_type="CAUSAL_LM"))
        for key, parameter in peft.named_parameters():
            if "lora_B" in key:  # PEFT starts at zero, which would change nothing
                nn.init.normal_(parameter, std=0.1 / settings["r"] ** 0.5)
        target = ADAPTERS / name
        shutil.rmtree(target, ignore_errors=True)
        peft.save_pretrained(str(target), save_embedding_layers=False)
        (target / "README.md").unlink(missing_ok=True)
        config = json.loads((target / "adapter_config.json").read_text())
        config["base_model_name_or_path"] = "deepseek_v3_tiny"
        (target / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
        print(name, sum(f.stat().st_size for f in target.iterdir()), "bytes")


if __name__ == "__main__":
    main()
