"""A layer compiled ahead on this machine, and used by another process on its GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from processes import python_path

SIZES = (64, 32, 4, 2)  # H, I, E, top_k

# Runs a layer and a training step, and prints their largest errors relative to the reference's results, and what the
# process has imported of the compiler.
USE = """
import json, sys
import torch
from moe_kernels import moe_mlp, reference
from moe_kernels.testing import make_experts, make_tokens
H, I, E, top_k, T = json.loads(sys.argv[1])
weights = make_experts(E, H, I, dtype=torch.float16, device="cuda")
tokens = make_tokens(T, H, E, top_k, dtype=torch.float16, device="cuda")

def results(layer):
    hidden, ids, topk_weights = tokens
    leaves = [x.detach().requires_grad_() for x in (hidden, topk_weights, *weights)]
    with torch.no_grad():
        alone = layer(*tokens, *weights)
    out = layer(leaves[0], ids, leaves[1], *leaves[2:])
    return [alone, out, *torch.autograd.grad(out.float().square().mean(), leaves)]

pairs = zip(results(moe_mlp), results(reference.moe_mlp), strict=True)
errors = [float((x - y).abs().max() / y.abs().max()) for x, y in pairs]
print(json.dumps([errors, [name for name in ("helion", "torch._inductor") if name in sys.modules]]))
"""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_process_on_this_gpu_compiles_nothing(tmp_path: Path) -> None:
    """The folder is made for this machine's GPU. There is no C compiler when it is used."""
    dropped = ("MOE_KERNELS_CACHE_DIR", "MOE_KERNELS_CACHE_READONLY")
    env = {name: value for name, value in os.environ.items() if name not in dropped} | {"PYTHONPATH": python_path()}
    layer = ["--layer", ",".join(map(str, SIZES)), "--dtype", "float16", "--tokens", "9:9", "--training"]
    made = [sys.executable, "-m", "moe_kernels", "compile", *layer, "--output", str(tmp_path / "folder")]
    env["TRITON_CACHE_DIR"] = str(tmp_path / "one")
    subprocess.run(made, env=env, capture_output=True, text=True, timeout=300, check=True)
    env |= {"TRITON_CACHE_DIR": str(tmp_path / "other"), "MOE_KERNELS_CACHE_READONLY": str(tmp_path / "folder")}
    env |= {"MOE_KERNELS_CACHE_DIR": str(tmp_path / "own"), "CC": str(tmp_path / "none"), "PATH": ""}
    use = [sys.executable, "-c", USE, json.dumps([*SIZES, 9])]
    used = subprocess.run(use, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert used.returncode == 0, used.stderr
    errors, imported = json.loads(used.stdout)
    assert all(error < 0.02 for error in errors)
    assert not imported
    assert not [path for path in (tmp_path / "own").rglob("*") if path.is_file()]
