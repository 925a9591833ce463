"""A layer of 16 experts, two for each token, trained for a few steps and compared with plain PyTorch.

    python examples/moe_layer.py

With a GPU this runs the kernels in bfloat16; without one it runs plain PyTorch in float32.
"""

from __future__ import annotations

import torch

from moe_kernels import MoE


def plain(layer: MoE, hidden: torch.Tensor) -> torch.Tensor:
    """Return the layer's output `[T, H]` in float32, computed by a loop over the experts."""
    scores = torch.softmax(hidden @ layer.router.T, dim=-1, dtype=torch.float32)
    weights, ids = scores.topk(layer.top_k)  # [T, top_k]
    if layer.renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    out = torch.zeros_like(hidden, dtype=torch.float32)
    for expert, (w_gate_up, w_down) in enumerate(zip(layer.w_gate_up, layer.w_down, strict=True)):
        token, slot = torch.where(ids == expert)
        gate, up = (hidden[token] @ w_gate_up.T).chunk(2, dim=-1)
        rows = (torch.nn.functional.silu(gate) * up) @ w_down.T
        out.index_add_(0, token, weights[token, slot, None] * rows)
    return out


def main() -> None:
    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 128, "num_experts": 16}
    layer = MoE(**sizes, top_k=2, renormalize=True, device=device, dtype=dtype)
    print(layer)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=3e-3)
    hidden = torch.randn(512, 256, device=device, dtype=dtype)
    target = torch.roll(hidden, 1, dims=1)
    for step in range(10):
        out = layer(hidden)
        loss = torch.nn.functional.mse_loss(out.float(), target.float())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step}: loss {loss.item():.4f}")

    with torch.no_grad():
        difference = (layer(hidden).float() - plain(layer, hidden)).abs().max().item()
    print(f"largest difference from plain PyTorch: {difference:.1e}")
    assert difference < (5e-2 if dtype == torch.bfloat16 else 1e-4)


if __name__ == "__main__":
    main()
