"""The examples and the README's code run as they stand."""

from __future__ import annotations

import os
import re
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


def run(*command: str) -> str:
    env = {key: value for key, value in os.environ.items() if key not in ("TRITON_INTERPRET", "HELION_FORCE_AUTOTUNE")}
    env |= {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": python_path()}
    done = subprocess.run([sys.executable, *command], env=env, capture_output=True, text=True, timeout=300, check=False)
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
    """Both sides of the diff, run as they stand."""
    block = readme_block("loop").splitlines()
    assert len(block) <= 10
    torch.manual_seed(0)
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


@pytest.mark.parametrize("name", ["moe_layer", "transformers_qwen3_moe", "expert_parallel"])
def test_readme_shows_the_example_in_ten_lines(name: str) -> None:
    """The section that links to the example has a block of at most ten lines."""
    sections = [part for part in README.split("\n## ") if f"(examples/{name}.py)" in part]
    assert len(sections) == 1
    blocks = re.findall(r"^```python\n(.*?)^```$", sections[0], re.DOTALL | re.MULTILINE)
    assert blocks and all(len(block.splitlines()) <= 10 for block in blocks)


def test_expert_parallel_example_says_how_to_start_it() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "expert_parallel.py")],
        env={**os.environ, "PYTHONPATH": python_path()},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1 and "torchrun --nproc-per-node 2" in done.stderr


def test_moe_layer_example() -> None:
    losses = re.findall(r"loss (\S+)", run(str(ROOT / "examples" / "moe_layer.py")))
    assert len(losses) == 10
    assert float(losses[-1]) < float(losses[0])


def test_expert_parallel_example() -> None:
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    text = run(*launch, str(ROOT / "examples" / "expert_parallel.py"))
    assert text.count("output and gradient agree") == 2


@pytest.mark.skipif(find_spec("transformers") is None, reason="needs pip install -e '.[transformers]'")
def test_transformers_example() -> None:
    assert "logits agree" in run(str(ROOT / "examples" / "transformers_qwen3_moe.py"))


def test_readme_quickstart() -> None:
    assert run("-c", readme_block("quickstart")) == "[[300, 256], [0, 256], [17, 256], [1, 256]]\n"


def test_readme_quickstart_of_forms() -> None:
    printed = run("-c", readme_block("quickstart of forms"))
    assert printed == "[8, 128, 64] [1024, 64] [[192, 320], [256, 448]]\n"


def test_readme_python_compiles() -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
    assert len(blocks) >= 2
    for block in blocks:
        compile(block, "README.md", "exec")


def test_ci_runs_the_readme_command() -> None:
    """The shell that .ci/run takes the command out of the README with finds the same as the pattern here."""
    extraction = re.search(r"^command=\$\((awk .*)\)$", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    assert extraction
    found = subprocess.run(["bash", "-c", extraction[1]], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert found == readme_block("test-command")
    assert "pytest" in found and len(found.splitlines()) == 1


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "benchmarks/README.md", "benchmarks/notes.md"])
def test_links_lead_somewhere(name: str) -> None:
    page = ROOT / name
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        assert target.startswith("https://") or (page.parent / target).exists(), target


def test_readme_names_every_public_function() -> None:
    import moe_kernels

    for name in moe_kernels.__all__:
        assert f"| `{name}(" in README, name
