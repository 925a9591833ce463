"""The `@helion.kernel` functions. Importing this package imports Helion, which takes seconds: do it at first use."""

from moe_kernels import requirements

requirements.require()

from moe_kernels.kernels.grouped_gemm import jagged, jagged_persistent  # noqa: E402
from moe_kernels.kernels.grouped_gemm_tails import jagged_tails  # noqa: E402
from moe_kernels.kernels.grouped_gemm_tall import jagged_tall  # noqa: E402
from moe_kernels.kernels.scaled_gemm import fast_persistent, promoted_persistent, scaled_jagged  # noqa: E402
from moe_kernels.kernels.tiles import tile_table  # noqa: E402
from moe_kernels.kernels.uniform_gemm import uniform  # noqa: E402
from moe_kernels.kernels.varied_gemm import varied  # noqa: E402
