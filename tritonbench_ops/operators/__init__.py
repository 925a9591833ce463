"""Operators of our own: TritonBench loads each folder as `tritonbench.operators.<folder>`."""
