"""Benchmarks of the kernels against PyTorch and other libraries, and their results; not part of the wheel."""
