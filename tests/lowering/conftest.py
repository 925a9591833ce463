"""These tests make torch believe in a GPU: ../test_lowering.py starts them in a process of their own."""

import os

if os.environ.get("MOE_KERNELS_LOWERING") != "1":
    collect_ignore_glob = ["test_*.py"]
