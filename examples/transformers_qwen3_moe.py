"""A small random Qwen3-MoE of Hugging Face transformers: logits, a training step and generate with these kernels.

pip install -e '.[transformers]'
python examples/transformers_qwen3_moe.py
"""

from __future__ import annotations

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from moe_kernels.integrations import transformers


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=1000,
        hidden_size=256,
        intermediate_size=512,
        moe_intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        num_experts=16,
        num_experts_per_tok=4,
    )
    model = Qwen3MoeForCausalLM(config).to(device).eval()
    tokens = torch.randint(1000, (2, 32), device=device)
    with torch.no_grad():
        expected = model(tokens).logits

    transformers.register()
    model.set_experts_implementation("moe_kernels")
    out = model(tokens, labels=tokens)
    torch.testing.assert_close(out.logits, expected, rtol=1e-3, atol=1e-3)
    out.loss.backward()
    text = model.generate(tokens[:, :8], max_new_tokens=8, do_sample=False, pad_token_id=0)
    print(f"On {device}: logits agree with transformers' own, loss {out.loss.item():.3f}, generated {list(text.shape)}")


if __name__ == "__main__":
    main()
