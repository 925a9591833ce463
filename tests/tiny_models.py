"""Tiny random models of transformers, and tokens for them."""

from __future__ import annotations

from typing import Any

import torch
import transformers

_SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 60,
}
MODELS: dict[str, dict[str, Any]] = {
    "Mixtral": {"intermediate_size": 24, "num_local_experts": 5, "num_experts_per_tok": 2},
    "Qwen3Moe": {
        "intermediate_size": 48,
        "moe_intermediate_size": 24,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "head_dim": 8,
    },
    "DeepseekV3": {
        "num_key_value_heads": 4,
        "intermediate_size": 48,
        "moe_intermediate_size": 24,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
    },
    "GptOss": {
        "intermediate_size": 24,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "head_dim": 8,
        "sliding_window": 4,
    },
}
TOKENS = torch.arange(14).view(2, 7) * 5 % 61


def make(name: str, std: float = 0.2, **sizes: int) -> Any:
    """Return one of MODELS, with `sizes` changed and weights of standard deviation `std`."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**_SIZES | MODELS[name] | sizes)
    model = getattr(transformers, f"{name}ForCausalLM")._from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "norm" not in parameter_name:
                parameter.normal_(std=std)
    return model.eval()
