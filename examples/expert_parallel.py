"""A layer of eight experts spread over ranks, compared with the whole layer on each rank; then the same in fp8.

    torchrun --nproc-per-node 2 examples/expert_parallel.py

With a GPU for each rank this runs in bfloat16 with NCCL; with fewer, on the CPU with gloo, in float32.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from moe_kernels import grouped_gemm, moe_mlp, swiglu_ffn, topk_softmax
from moe_kernels.expert_parallel import combine, dispatch

E, TOP_K, T, H, I = 8, 2, 100, 256, 128  # noqa: E741


def main() -> None:
    if "RANK" not in os.environ:
        raise SystemExit("start this with: torchrun --nproc-per-node 2 examples/expert_parallel.py")
    rank = int(os.environ["RANK"])
    on_gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    dtype = torch.bfloat16 if on_gpu else torch.float32
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")

    torch.manual_seed(0)  # the same weights on all ranks; each rank uses those of its own experts
    w_gate_up = torch.randn(E, 2 * I, H).div(H**0.5).to(device, dtype)
    w_down = torch.randn(E, H, I).div(I**0.5).to(device, dtype)
    mine = slice(rank * E // dist.get_world_size(), (rank + 1) * E // dist.get_world_size())
    torch.manual_seed(rank + 1)  # different tokens on each rank
    hidden = torch.randn(T + rank, H).to(device, dtype).requires_grad_()
    topk_ids, topk_weights = topk_softmax(torch.randn(T + rank, E, device=device), TOP_K, renormalize=True)

    rows, exchange = dispatch(hidden, topk_ids, topk_weights, E)
    act = swiglu_ffn(rows, w_gate_up[mine], exchange.group_offsets)
    out = combine(grouped_gemm(act, w_down[mine].mT, exchange.group_offsets), exchange)
    upstream = torch.randn_like(out)
    (d_hidden,) = torch.autograd.grad(out, hidden, upstream)

    whole = moe_mlp(hidden, topk_ids, topk_weights, w_gate_up, w_down)
    (d_whole,) = torch.autograd.grad(whole, hidden, upstream)
    tolerance = 3e-2 if on_gpu else 1e-4
    torch.testing.assert_close(out, whole, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(d_hidden, d_whole, rtol=tolerance, atol=tolerance)

    rows, exchange = dispatch(hidden.detach(), topk_ids, topk_weights, E)
    ids = exchange.expert_ids
    ones = torch.ones_like(ids, dtype=torch.float32)
    rows = moe_mlp(rows, ids, ones, w_gate_up[mine], w_down[mine], compute="fp8_block")
    in_fp8 = combine(rows, exchange)
    whole = moe_mlp(hidden.detach(), topk_ids, topk_weights, w_gate_up, w_down, compute="fp8_block")
    torch.testing.assert_close(in_fp8, whole, rtol=tolerance, atol=tolerance)
    print(f"rank {rank}: {sum(exchange.sent)} rows sent, {len(rows)} received; outputs and gradient agree", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
