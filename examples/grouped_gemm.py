"""Jagged grouped GEMM: groups of 64, 128, 192 and 256 rows, packed into one matrix, each times a weight.

    python examples/grouped_gemm.py

With a GPU this runs in bfloat16. Without one it runs the same kernels in Triton's interpreter, in float32, which
takes about 20 seconds. Every result is compared with plain PyTorch.
"""

from __future__ import annotations

import os

import torch

ON_GPU = torch.cuda.is_available()
if not ON_GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported, at the first kernel call

from moe_kernels import grouped_gemm_jagged, grouped_gemm_jagged_persistent, pack_groups, unpack_groups  # noqa: E402

DEVICE, DTYPE = ("cuda", torch.bfloat16) if ON_GPU else ("cpu", torch.float32)
K, N = 256, 128


def run(title: str, sizes: list[int], *, per_group: bool) -> None:
    groups = [torch.randn(rows, K, device=DEVICE, dtype=DTYPE) for rows in sizes]  # each [M_g, K]
    B = torch.randn(*([len(sizes)] if per_group else []), K, N, device=DEVICE, dtype=DTYPE)  # [G, K, N] or [K, N]
    expected = [group @ (B[g] if per_group else B) for g, group in enumerate(groups)]

    A_packed, group_offsets = pack_groups(groups)  # [M, K], [G + 1]
    for kernel in (grouped_gemm_jagged, grouped_gemm_jagged_persistent):
        out = kernel(A_packed, B, group_offsets)  # [M, N]
        for product, reference in zip(unpack_groups(out, group_offsets), expected, strict=True):
            torch.testing.assert_close(product, reference, rtol=1e-2, atol=1e-2)
        print(f"{title}, rows {sizes}, B {list(B.shape)}: {kernel.__name__} agrees", flush=True)


def main() -> None:
    print(f"On {torch.cuda.get_device_name()}" if ON_GPU else "No GPU: kernels in Triton's interpreter", DTYPE)
    torch.manual_seed(0)
    run("one weight for all", [64, 128, 192, 256], per_group=False)
    run("a weight per group", [64, 128, 192, 256], per_group=True)
    run("empty groups", [0, 64, 0, 37, 0], per_group=True)
    run("skewed", [1, 150, 3, 9], per_group=True)


if __name__ == "__main__":
    main()
