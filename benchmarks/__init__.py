"""Our kernels, timed beside PyTorch and peers, and the results; not part of the wheel."""
