"""`tritonbench_ops` in real checkouts of TritonBench, listed in the environment as TRITONBENCH=path[:path].

Use two: one of August 2025, whose `grouped_gemm` takes and returns lists, and one of 2026.
"""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from processes import python_path

from tritonbench_ops.providers import PROVIDERS
from tritonbench_ops.registration import INSTALL

ROOT = Path(__file__).resolve().parents[1]
CHECKOUTS = [Path(path).resolve() for path in os.environ.get("TRITONBENCH", "").split(os.pathsep) if path]
OURS = {  # by operator: the labels of our providers, by name
    "moe_grouped_gemm": {
        "grouped_gemm": "grouped_gemm",
        "grouped_gemm_jagged": "grouped_gemm_jagged",
        "grouped_gemm_jagged_persistent": "grouped_gemm_jagged_persistent",
    },
    "uniform_grouped_gemm": {
        "uniform_grouped_gemm": "uniform_grouped_gemm",
        "uniform_grouped_gemm_float32": "uniform_grouped_gemm (float32 result)",
        "grouped_gemm": "grouped_gemm (with offsets)",
    },
    "varied_grouped_gemm": {
        "varied_grouped_gemm": "varied_grouped_gemm (table made in the call)",
        "preprocessed_varied_grouped_gemm": "varied_grouped_gemm (table made beforehand)",
    },
    "moe_ffn": {"moe_mlp": "moe_mlp"},
}
MEASURED = "latency,tflops,speedup,accuracy"
RUN = "import sys; from tritonbench_ops.__main__ import run; sys.exit(run())"

pytestmark = pytest.mark.skipif(
    not CHECKOUTS, reason=f"TRITONBENCH=path[:path] names no checkout of TritonBench. To get one: {INSTALL}"
)


@pytest.fixture(params=CHECKOUTS, ids=lambda path: path.name)
def checkout(request: pytest.FixtureRequest) -> Path:
    return request.param


def python(
    checkout: Path | None, cwd: Path, *arguments: str, device: str = "cpu", **env: str
) -> subprocess.CompletedProcess[str]:
    kept = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    env = {
        **kept,
        "PYTHONPATH": python_path(*filter(None, [checkout])),
        **env,
    }
    if device == "cpu":
        env["CUDA_VISIBLE_DEVICES"] = ""
    return subprocess.run([sys.executable, *arguments], cwd=cwd, env=env, capture_output=True, text=True, timeout=600)


def table(
    checkout: Path, cwd: Path, op: str, *arguments: str, before: str = "", device: str = "cpu", **env: str
) -> list[dict[str, str]]:
    """Return the rows of the CSV file, without the row of averages."""
    options = ["--op", op, "--device", device, "--rep", "1", "--warmup", "1", "--csv", "--output-dir", "results"]
    if not (checkout / "tritonbench/utils/plugin_utils.py").exists():
        options[options.index("--rep")] = "--iter"
    done = python(checkout, cwd, "-c", before + RUN, *options, *arguments, device=device, **env)
    assert done.returncode == 0, done.stderr
    with (cwd / "results" / f"{op}.csv").open() as file:
        return list(csv.DictReader(file, delimiter=";"))[:-1]


def test_stock_operator_runs_our_providers_right(checkout: Path, tmp_path: Path) -> None:
    """The inputs are the small ones of a CPU."""
    rows = table(checkout, tmp_path, "grouped_gemm", "--metrics", MEASURED)
    assert [next(iter(row.values())) for row in rows] == ["32", "64"]
    for row in rows:
        for label in PROVIDERS.values():
            assert row[f"{label}-accuracy"] == "1.0"
            assert float(row[f"{label}-latency"]) > 0 and float(row[f"{label}-tflops"]) > 0
            assert float(row[f"{label}-speedup"]) > 0
        theirs = next(name for name in ("triton-latency", "triton_grouped_gemm-latency") if name in row)
        assert row[theirs] in ("not supported", "triton_group_gemm_fn needs a CUDA GPU")


@pytest.mark.parametrize("op", OURS)
def test_our_operators_in_plain_pytorch(op: str, checkout: Path, tmp_path: Path) -> None:
    metrics = f"{MEASURED},gbps,best_config"
    rows = table(checkout, tmp_path, op, "--num-inputs", "2", "--metrics", metrics, "--plot")
    assert (tmp_path / "results" / f"{op}.png").read_bytes().startswith(b"\x89PNG")
    assert len(rows) == 2 and len({next(iter(row.values())) for row in rows}) == 2
    for row in rows:
        for label in OURS[op].values():
            assert row[f"{label}-accuracy"] == "1.0" and row[f"{label}-best_config"] == "plain PyTorch"
            assert min(float(row[f"{label}-{metric}"]) for metric in ("latency", "tflops", "speedup", "gbps")) > 0


@pytest.mark.parametrize("op", OURS)
def test_our_operators_in_the_interpreter(op: str, checkout: Path, tmp_path: Path) -> None:
    options = ("--num-inputs", "1", "--precision", "fp16", "--metrics", "accuracy,best_config")
    only = ",".join(("torch_loop", *OURS[op]))
    (row,) = table(checkout, tmp_path, op, *options, "--only", only, TRITON_INTERPRET="1")
    for label in OURS[op].values():
        assert row[f"{label}-accuracy"] == "1.0"
        assert "block_sizes" in row[f"{label}-best_config"]


@pytest.mark.parametrize(
    "fault", ("lambda A, B, o: A.new_zeros(len(A), B.size(-1))", "lambda A, B, o: 1 / 0"), ids=("zeros", "raises")
)
def test_a_provider_that_fails_shows_as_failed(fault: str, checkout: Path, tmp_path: Path) -> None:
    faulty = f"import moe_kernels; moe_kernels.grouped_gemm_jagged = {fault}\n"
    text = "division by zero" if "1 / 0" in fault else ""
    (row,) = table(checkout, tmp_path, "moe_grouped_gemm", "--num-inputs", "1", "--metrics", MEASURED, before=faulty)
    assert (text or "exceeds the budget") in row["grouped_gemm_jagged-latency"]
    assert not row["grouped_gemm_jagged-speedup"] and not row["grouped_gemm_jagged-tflops"]
    assert row["grouped_gemm_jagged_persistent-accuracy"] == "1.0"

    (row,) = table(checkout, tmp_path, "grouped_gemm", "--num-inputs", "1", "--metrics", MEASURED, before=faulty)
    for label in ("moe_kernels jagged (packing timed)", "moe_kernels jagged (packed beforehand)"):
        assert row[f"{label}-latency"] == (text or "wrong result")
        assert not row[f"{label}-speedup"] and not row[f"{label}-tflops"]
    assert row["moe_kernels grouped_gemm (packing timed)-accuracy"] == "1.0"


def test_the_loop_over_experts_copies_no_output(checkout: Path, tmp_path: Path) -> None:
    """The baseline adds to its output in place; `index_add` would copy the output for every expert."""
    without_copies = "import torch; torch.Tensor.index_add = None\n"
    options = ("--num-inputs", "1", "--only", "torch_loop", "--metrics", "latency")
    (row,) = table(checkout, tmp_path, "moe_ffn", *options, before=without_copies)
    assert float(row["torch_loop (tokens of each expert known beforehand)-latency"]) > 0


@pytest.mark.parametrize("mode", ("bwd", "fwd_bwd"))
def test_layers_run_backward(mode: str, checkout: Path, tmp_path: Path) -> None:
    """A wrong gradient behind a correct result is reported as a failure."""
    options = ("--mode", mode, "--num-inputs", "1", "--metrics", f"{MEASURED},gbps")
    (row,) = table(checkout, tmp_path, "moe_ffn", *options)
    labels = ["moe_mlp", "transformers"] if find_spec("transformers") else ["moe_mlp"]
    for label in labels:
        assert row[f"{label}-accuracy"] == "1.0"
        assert min(float(row[f"{label}-{metric}"]) for metric in ("latency", "tflops", "speedup", "gbps")) > 0

    faulty = """
import moe_kernels
right = moe_kernels.moe_mlp
def twice(*args, **options):
    out = right(*args, **options)
    return 2 * out - out.detach()
moe_kernels.moe_mlp = twice
"""
    (row,) = table(checkout, tmp_path, "moe_ffn", *options, before=faulty)
    assert "gradient of hidden: error" in row["moe_mlp-latency"] and not row["moe_mlp-tflops"]


def test_products_have_no_backward(checkout: Path, tmp_path: Path) -> None:
    options = ["--op", "moe_grouped_gemm", "--device", "cpu", "--mode", "bwd", "--num-inputs", "1"]
    done = python(checkout, tmp_path, "-m", "tritonbench_ops", *options)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "tritonbench_ops: --mode: moe_grouped_gemm has fwd and fwd_no_grad, got bwd" in done.stderr


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--op", "grouped_gemm,nothing"], "--op: TritonBench has no nothing"),
        (["--op", "moe_ffn", "--precision", "fp8"], "--precision: expected bf16, fp16, fp32 or tf32, got fp8"),
        (["--op", "moe_ffn", "--output-dir", "/proc/nothing"], "--output-dir: '/proc/nothing': No such file"),
    ],
    ids=["operator", "precision", "folder"],
)
def test_wrong_arguments(options: list[str], error: str, checkout: Path, tmp_path: Path) -> None:
    done = python(checkout, tmp_path, "-m", "tritonbench_ops", *options, "--device", "cpu")
    assert done.returncode == 2 and f"python -m tritonbench_ops: {error}" in done.stderr
    assert "Traceback" not in done.stderr


def test_peers_join_where_they_are_installed(checkout: Path, tmp_path: Path) -> None:
    peer = """
from tritonbench_ops import baselines
made = baselines.Provider("some peer", lambda inputs: None, package="json")
missing = baselines.Provider("no peer", lambda inputs: None, package="not_to_be_found")
baselines.PEERS.update({"some-peer": made, "no-peer": missing})
"""
    options = ["--op", "moe_grouped_gemm", "--device", "cpu", "--list-backends"]
    done = python(checkout, tmp_path, "-c", peer + RUN, *options)
    assert "some_peer (label: some peer)\n" in done.stdout + "\n", done.stderr
    assert "no_peer (label: no peer) [disabled]" in done.stdout
    assert "no_peer: the package not_to_be_found is not installed" in done.stderr
    (row,) = table(checkout, tmp_path, "moe_grouped_gemm", "--num-inputs", "1", "--metrics", MEASURED, before=peer)
    assert row["some peer-latency"] in ("not supported", "json needs a CUDA GPU")
    assert not any("no peer" in column for column in row)


def test_lists_of_operators_backends_and_metrics(checkout: Path, tmp_path: Path) -> None:
    ops = ",".join(("grouped_gemm", *OURS))
    done = python(
        checkout, tmp_path, "-m", "tritonbench_ops", "--op", ops, "--device", "cpu", "--list-backends", "--list-metrics"
    )
    assert done.returncode == 0, done.stderr
    for name in ("Operator: grouped_gemm", *(f"Operator: {op}" for op in OURS)):
        assert name in done.stdout
    for name in (*(provider.__name__ for provider in PROVIDERS), "torch_loop [baseline]", "dense_ceiling", "gbps"):
        assert name in done.stdout


def test_registering_twice_changes_nothing(checkout: Path, tmp_path: Path) -> None:
    code = """
import tritonbench_ops
tritonbench_ops.register()
from tritonbench.operators import list_operators
from tritonbench.utils.triton_op import BASELINE_BENCHMARKS, REGISTERED_BENCHMARKS
before = list_operators(), list(REGISTERED_BENCHMARKS["grouped_gemm"]), dict(BASELINE_BENCHMARKS)
tritonbench_ops.register()
assert before == (list_operators(), list(REGISTERED_BENCHMARKS["grouped_gemm"]), dict(BASELINE_BENCHMARKS))
assert len(set(before[0])) == len(before[0]) and "moe_grouped_gemm" in before[0]
"""
    done = python(checkout, tmp_path, "-c", code)
    assert done.returncode == 0, done.stderr


def test_plugin_and_launch(checkout: Path, tmp_path: Path) -> None:
    if not (checkout / "tritonbench/utils/plugin_utils.py").exists():
        pytest.skip("this state of TritonBench has no --plugin")
    options = ["--device", "cpu", "--num-inputs", "1", "--metrics", "accuracy"]
    only = ["--only", "grouped_gemm_tritonbench"]
    # TritonBench imports its grouped_gemm before it loads the plugin, and this import fails without a GPU.
    code = f"""
import runpy
from tritonbench_ops import registration
registration._stand_in_for_kernels()
runpy.run_path({str(checkout / "run.py")!r}, run_name="__main__")
"""
    plugin = ["--plugin", "tritonbench_ops.register", "--op", "grouped_gemm", *only]
    done = python(checkout, tmp_path, "-c", code, *plugin, *options)
    assert done.returncode == 0 and "moe_kernels grouped_gemm (packing timed)-accuracy" in done.stdout, done.stderr
    launch = [str(checkout / "run.py"), "--launch", "tritonbench_ops.__main__", "--op", "grouped_gemm,moe_grouped_gemm"]
    done = python(checkout, tmp_path, *launch, *options)
    for column in ("moe_kernels grouped_gemm (packing timed)-accuracy", "grouped_gemm_jagged-accuracy"):
        assert done.returncode == 0 and column in done.stdout, done.stderr


def test_a_clone_in_the_working_directory_is_found(checkout: Path, tmp_path: Path) -> None:
    (tmp_path / "tritonbench").symlink_to(checkout)
    options = ["--op", "moe_grouped_gemm", "--device", "cpu", "--num-inputs", "1", "--metrics", "accuracy"]
    done = python(None, tmp_path, "-m", "tritonbench_ops", *options, "--isolate")
    assert done.returncode == 0 and "grouped_gemm_jagged-accuracy" in done.stdout, done.stderr


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("op", ("grouped_gemm", *OURS))
def test_on_a_gpu(op: str, checkout: Path, tmp_path: Path) -> None:
    # TritonBench's own baseline makes a tensor from a list in each call, which a capture does not allow.
    graph = ("--cudagraph",) if op in OURS else ()
    rows = table(checkout, tmp_path, op, "--num-inputs", "2", "--metrics", MEASURED, *graph, device="cuda")
    labels = OURS[op].values() if op in OURS else PROVIDERS.values()
    copies = "varied_grouped_gemm (table made in the call)"
    if op == "varied_grouped_gemm":
        assert {row[f"{copies}-latency"] for row in rows} <= {
            "not supported",
            "a CUDA graph cannot capture the table's copy to the device",
        }
    labels = [label for label in labels if label != copies]
    labels += ["transformers_compiled"] if op == "moe_ffn" and find_spec("transformers") else []
    for row in rows:
        for label in labels:
            assert row[f"{label}-accuracy"] == "1.0" and float(row[f"{label}-latency"]) > 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("graph", ((), ("--cudagraph",)), ids=("eager", "graph"))
@pytest.mark.parametrize("mode", ("bwd", "fwd_bwd"))
def test_layers_run_backward_on_a_gpu(mode: str, graph: tuple[str, ...], checkout: Path, tmp_path: Path) -> None:
    options = ("--mode", mode, "--num-inputs", "1", "--metrics", MEASURED, *graph)
    (row,) = table(checkout, tmp_path, "moe_ffn", *options, device="cuda")
    labels = ["transformers", "transformers_compiled"] if find_spec("transformers") else []
    for label in ("moe_mlp", *labels):
        assert row[f"{label}-accuracy"] == "1.0" and float(row[f"{label}-latency"]) > 0
