"""Makes configs/deepseek_v3: the config of DeepSeek-V3 at its real widths, and a small adapter.

    python configs/make_deepseek_v3.py

The figures are those of the model's published config.json (huggingface.co/deepseek-ai/DeepSeek-V3).
The adapter is PEFT's own file with random A and B, on the two projections of one layer that the
schema fuses: 1536 and 576 rows.
"""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

FOLDER = Path(__file__).parent / "deepseek_v3"
ADAPTER = Path(__file__).parent / "adapters" / "deepseek_v3" / "q_a_kv_a"

CONFIG = DeepseekV3Config(
    vocab_size=129280,
    hidden_size=7168,
    intermediate_size=18432,
    moe_intermediate_size=2048,
    num_hidden_layers=61,
    first_k_dense_replace=3,
    num_attention_heads=128,
    num_key_value_heads=128,
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_rope_head_dim=64,
    qk_nope_head_dim=128,
    v_head_dim=128,
    n_routed_experts=256,
    n_shared_experts=1,
    num_experts_per_tok=8,
    n_group=8,
    topk_group=4,
    routed_scaling_factor=2.5,
    norm_topk_prob=True,
    rms_norm_eps=1e-6,
    max_position_embeddings=163840,
    rope_parameters={
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    num_nextn_predict_layers=0,
    bos_token_id=0,
    eos_token_id=1,
    tie_word_embeddings=False,
    architectures=["DeepseekV3ForCausalLM"],
)


def main() -> None:
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir()
    CONFIG.save_pretrained(str(FOLDER))
    small = copy.deepcopy(CONFIG)  # all but the two adapted projections as small as may be
    small.update(
        {
            "vocab_size": 32,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 1,
            "num_key_value_heads": 1,
        }
    )
    torch.manual_seed(0)
    model = DeepseekV3ForCausalLM(small).to(torch.bfloat16)
    settings = LoraConfig(
        r=4,
        lora_alpha=8,
        target_modules=["q_a_proj", "kv_a_proj_with_mqa"],
        layers_to_transform=[0],
        task_type="CAUSAL_LM",
    )
    peft = get_peft_model(model, settings, autocast_adapter_dtype=False)
    for key, parameter in peft.named_parameters():
        if "lora_B" in key:  # PEFT starts at zero, which would change nothing
            nn.init.normal_(parameter, std=0.02)
    shutil.rmtree(ADAPTER, ignore_errors=True)
    peft.save_pretrained(str(ADAPTER), save_embedding_layers=False)
    (ADAPTER / "README.md").unlink(missing_ok=True)
    config = json.loads((ADAPTER / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = "deepseek-ai/DeepSeek-V3"
    (ADAPTER / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
    print(sum(f.stat().st_size for f in ADAPTER.iterdir()), "bytes")


if __name__ == "__main__":
    main()
