"""The examples run as they stand, and the README's loop and commands do what they say."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import python_path

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()


def start(*command: str) -> subprocess.CompletedProcess[str]:
    env = {key: value for key, value in os.environ.items() if key not in ("TRITON_INTERPRET", "HELION_FORCE_AUTOTUNE")}
    env |= {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": python_path()}
    command = (sys.executable, *command)
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)


def run(*command: str) -> str:
    done = start(*command)
    assert done.returncode == 0, done.stderr
    return done.stdout


def readme_block(marker: str) -> str:
    found = re.search(rf"^<!-- {marker} -->\n```\w+\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
    assert found, f"README.md has no block after <!-- {marker} -->"
    return found[1]


def test_grouped_gemm_example() -> None:
    text = run(str(ROOT / "examples" / "grouped_gemm.py"))
    assert "No GPU" in text
    for kernel in ("grouped_gemm_jagged agrees", "grouped_gemm_jagged_persistent agrees"):
        assert text.count(kernel) == 4


def test_readme_loop_gives_the_same_as_the_layer() -> None:
    """Both sides of the diff run unchanged and give the same result."""
    block = readme_block("loop").splitlines()
    assert len(block) <= 10
    names: dict[str, Any] = {"torch": torch, "router": torch.nn.Linear(8, 4, bias=False)}
    names["experts"] = [
        torch.nn.Sequential(torch.nn.Linear(8, 6, bias=False), torch.nn.ReLU(), torch.nn.Linear(6, 8, bias=False))
        for _ in range(4)
    ]
    hidden, outs = torch.randn(9, 8), []
    for sign in "-+":
        exec("\n".join(line[1:] for line in block if line[0] in (" ", sign)), names)
        outs.append(names["moe"](hidden))
    assert outs[0].any()
    torch.testing.assert_close(*outs)


def test_expert_parallel_example_says_how_to_start_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit, match="torchrun --nproc-per-node 2"):
        runpy.run_path(str(ROOT / "examples" / "expert_parallel.py"), run_name="__main__")


def test_moe_layer_example() -> None:
    losses = re.findall(r"loss (\S+)", run(str(ROOT / "examples" / "moe_layer.py")))
    assert len(losses) == 10
    assert float(losses[-1]) < float(losses[0])


def test_moe_layer_example_compares_with_something_else() -> None:
    """The example detects a fault in the code that the layer runs without a GPU."""
    faulty = f"""
import runpy
from moe_kernels import reference
right = reference.grouped_linear
reference.grouped_linear = lambda *args: right(*args) * 1.01
runpy.run_path({str(ROOT / "examples" / "moe_layer.py")!r}, run_name="__main__")
"""
    done = start("-c", faulty)
    assert done.returncode == 1 and "assert difference <" in done.stderr, done.stderr


def test_expert_parallel_example() -> None:
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    text = run(*launch, str(ROOT / "examples" / "expert_parallel.py"))
    assert text.count("outputs and gradient agree") == 2


@pytest.mark.skipif(find_spec("transformers") is None, reason="needs pip install -e '.[transformers]'")
def test_transformers_example() -> None:
    assert "logits agree" in run(str(ROOT / "examples" / "transformers_qwen3_moe.py"))


def test_readme_quickstart() -> None:
    assert run("-c", readme_block("quickstart")) == "[[300, 256], [0, 256], [17, 256], [1, 256]]\n"


def test_ci_runs_the_readme_command() -> None:
    """The shell command with which .ci/run reads the README finds the same as this file's pattern."""
    extraction = re.search(r"^command=\$\((awk .*)\)$", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    assert extraction
    found = subprocess.run(["bash", "-c", extraction[1]], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert found == readme_block("test-command")
    assert "pytest" in found and len(found.splitlines()) == 1
