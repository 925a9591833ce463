"""Memory that plans for an H200 allocate beside their results. Nothing is compiled."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_kernels.glu import GLUSpec
from moe_kernels.ops.layer import MOE_MLP
from moe_kernels.ops.products import GROUPED_GEMM
from moe_kernels.runtime import cache, targets
from moe_kernels.runtime.plan import Alloc
from moe_kernels.runtime.signature import Operator, symbolic
from moe_kernels.runtime.symbolic import value

pytest.importorskip("helion")  # planners import the kernels
TABLES = 1 << 17  # bytes of offsets, lists of tiles, counters of the routing


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def temporaries(operator: Operator, tensors: tuple[Tensor | None, ...], options: Any) -> int:
    """Return the bytes of all allocations of a plan but its results."""
    builder, results = cache.build_steps(operator, symbolic(operator, tensors, options), options, targets.KNOWN["h200"])
    extents = [() if x is None else tuple(x.shape) for x in tensors]
    kept = {x.variable for x in results}
    allocated = [step for step in builder.steps if isinstance(step, Alloc) and step.variable not in kept]
    return sum(math.prod(value(n, extents) for n in step.shape) * step.dtype.itemsize for step in allocated)


@pytest.mark.parametrize("shape", [(8, 2048, 96, 7168), (128, 65536, 1536, 2048), (8, 300, 96, 40), (128, 64, 768, 64)])
@pytest.mark.parametrize("transposed", [True, False])
def test_a_product_needs_no_memory_beside_its_result(shape: tuple[int, int, int, int], transposed: bool) -> None:
    G, M, N, K = shape
    B = empty(G, N, K).mT if transposed else empty(G, K, N)
    given = empty(M, K), B, empty(G + 1, dtype=torch.int32), None
    assert temporaries(GROUPED_GEMM, given, (torch.bfloat16, "auto")) <= TABLES


@pytest.mark.parametrize("shape", [(8, 2048, 97, 7168), (8, 16384, 4096, 1024), (8, 300, 97, 33), (128, 64, 97, 64)])
def test_an_operand_that_is_copied_needs_its_own_memory(shape: tuple[int, int, int, int]) -> None:
    """Rows of A, not a multiple of 16 bytes apart, and 97 columns of B are copied with padding, or not at all."""
    G, M, N, K = shape
    A, B = empty(M, K + 1)[:, :K], empty(G, K, N)
    copies = 2 * (M * -(-K // 16) * 16 + G * K * -(-N // 16) * 16)
    given = A, B, empty(G + 1, dtype=torch.int32), None
    assert temporaries(GROUPED_GEMM, given, (torch.bfloat16, "auto")) <= copies + TABLES


@pytest.mark.parametrize("T", [1, 2, 16, 512, 8192])
def test_a_layer_has_no_temporary_per_expert_and_token(T: int) -> None:
    """There are T * top_k rows: activated, then multiplied. Tokens are read in place, and two maps are in int32."""
    H, width, E, top_k = 2048, 768, 128, 8
    routed = empty(T, top_k, dtype=torch.int64), empty(T, top_k, dtype=torch.float32)
    given = (empty(T, H), *routed, *[None] * 3, empty(E, 2 * width, H), empty(E, H, width), *[None] * 4)
    options = (False, False, False, GLUSpec("silu", True, False, 1.702, 7.0))
    assert temporaries(MOE_MLP, given, options) <= T * top_k * (2 * (width + H) + 8) + TABLES


@pytest.mark.parametrize(("dtype", "T"), [(torch.bfloat16, 512), (torch.float32, 128)], ids=str)
def test_from_how_many_rows_interleaved_weights_are_multiplied_first(dtype: torch.dtype, T: int) -> None:
    """Gathered tokens and the first product are then in memory. Products of float32 are computed as three in tf32."""
    H, width, E, top_k = 256, 512, 8, 2
    weights = empty(E, 2 * width, H, dtype=dtype), empty(E, H, width, dtype=dtype)
    options = (False, False, False, GLUSpec("silu", True, True, 1.702, 7.0))
    for tokens, elements in ((T - 1, width + H), (T, 3 * width + 2 * H)):
        routed = empty(tokens, top_k, dtype=torch.int64), empty(tokens, top_k, dtype=torch.float32)
        given = (empty(tokens, H, dtype=dtype), *routed, *[None] * 3, *weights, *[None] * 4)
        kept = tokens * top_k * (dtype.itemsize * elements + 8)
        assert kept - TABLES <= temporaries(MOE_MLP, given, options) <= kept + TABLES
