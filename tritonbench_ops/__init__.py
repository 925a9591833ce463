"""The kernels in TritonBench: providers for its `grouped_gemm`, and additional operators.

    python -m tritonbench_ops --op grouped_gemm --metrics latency,tflops,speedup,accuracy
    python run.py --plugin tritonbench_ops.register --op grouped_gemm      in a TritonBench that has --plugin

Importing this package needs no TritonBench; `register()` and the command do.
"""

from tritonbench_ops.providers import (
    grouped_gemm_jagged_persistent_tritonbench,
    grouped_gemm_jagged_tritonbench,
    grouped_gemm_tritonbench,
    preprocessed_grouped_gemm_jagged_persistent_tritonbench,
    preprocessed_grouped_gemm_jagged_tritonbench,
    preprocessed_grouped_gemm_tritonbench,
)
from tritonbench_ops.registration import register

__all__ = [
    "grouped_gemm_jagged_persistent_tritonbench",
    "grouped_gemm_jagged_tritonbench",
    "grouped_gemm_tritonbench",
    "preprocessed_grouped_gemm_jagged_persistent_tritonbench",
    "preprocessed_grouped_gemm_jagged_tritonbench",
    "preprocessed_grouped_gemm_tritonbench",
    "register",
]
