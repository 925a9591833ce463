"""The `@helion.kernel` functions. Importing this package imports Helion, which takes seconds: do it at first use."""

from moe_kernels import requirements

requirements.require()

from moe_kernels.kernels.grouped_gemm import jagged, jagged_persistent, tile_table  # noqa: E402
from moe_kernels.kernels.uniform_gemm import uniform  # noqa: E402
from moe_kernels.kernels.varied_gemm import varied  # noqa: E402

__all__ = ["jagged", "jagged_persistent", "tile_table", "uniform", "varied"]
