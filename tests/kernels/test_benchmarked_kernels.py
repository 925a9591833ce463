"""The launches that `benchmarks` makes itself, and on a GPU the whole command."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks import __main__ as cli
from benchmarks import fp8, run
from benchmarks.operators import OPERATORS
from benchmarks.suites import Case, layer


@pytest.mark.parametrize("layout", ["gkn", "gnk"])
def test_the_kernel_without_its_table(device: str, layout: str) -> None:
    operator, where = OPERATORS["grouped_gemm"], torch.device(device)
    case = Case("case", 3, 40, 32, 24, layout=layout, dtype="float32")
    inputs = operator.inputs(case, operator.weights(case, where), where)
    call = operator.providers["no-table"].make(inputs)
    out = call()
    operator.check(out, inputs)
    out.zero_()
    operator.check(call(), inputs)


@pytest.mark.gpu
def test_the_kernels_of_fp8_by_themselves(device: str) -> None:
    """Quantising in permute, and weights' gradients of prequantised operands, overwrite results set to zero."""
    [case], where = fp8.TINY_LAYERS, torch.device(device)
    layer = fp8.layer_of(case, where)
    calls = fp8.layer_calls(layer) | fp8.training_calls(layer)
    calls = {label: call for label, call in calls.items() if label.startswith(("permute", "wgrad"))}
    made = {label: call() for label, call in calls.items()}
    for label in ("permute, rowwise", "permute, 1x128"):
        made[label].data.view(torch.uint8).zero_()
    for name in ("gate and up", "down"):
        made[f"wgrad of {name}, fp8, quantised beforehand"].zero_()
    errors: dict[str, str] = {}
    right = fp8.prepared_right(calls, fp8.check_of(), errors, where)
    assert len(right) == 9 and not errors


@pytest.mark.gpu
def test_smoke(tmp_path: Path) -> None:
    file = tmp_path / "smoke.json"
    assert cli.main(["--suite", "smoke", "--jobs", "2", "--json", str(file), "--plot", str(tmp_path)]) == 0
    results = run.Results.read(file)
    records = [record for record in results.records if record["provider"] in ("grouped_gemm", "basic", "persistent")]
    assert len(records) == 6 * 2 * 3 and not results.skipped
    assert all(record["error"] is None and 0 < record["us"] < 1e4 for record in records)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["ffn", "ffn-train"])
def test_layers(name: str) -> None:
    """Eager and graph timings of our provider, with forward and backward captured, and peak memory."""
    operator, where = OPERATORS[name], torch.device("cuda")
    case = layer("small", 100, 256, 128, 8, 2)
    inputs = operator.inputs(case, operator.weights(case, where), where)
    eager, graph = run.measure(name, case, operator, ["ours"], inputs, 3, ["eager", "graph"], where)
    assert eager["error"] is graph["error"] is None and eager["us"] > 0 and graph["us"] > 0
    assert eager["peak_mb"] is None if name == "ffn" else eager["peak_mb"] > 1, eager["peak_mb"]


@pytest.mark.gpu
def test_gating() -> None:
    """All providers, compiled PyTorch among them, choose the same experts with the same weights."""
    operator, where = OPERATORS["gating"], torch.device("cuda")
    for case in (Case("groups", 32, 100, 4, 8), Case("softmax", 32, 100, 4, 0)):
        inputs = operator.inputs(case, operator.weights(case, where), where)
        records = run.measure("gating", case, operator, [*operator.providers], inputs, 3, ["eager", "graph"], where)
        assert len(records) == 6
        assert all(record["error"] is None and record["us"] > 0 and record["gbps"] > 0 for record in records)
