"""`python -m benchmarks` on a CPU, where `grouped_gemm` runs its reference."""

from __future__ import annotations

import argparse
import csv
import functools
import itertools
import json
import math
import re
import struct
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import moe_kernels
import tritonbench_ops
from benchmarks import __main__ as cli
from benchmarks import fp8, run, tables, timing
from benchmarks.inputs import sample
from benchmarks.operators import OPERATORS, Operator
from benchmarks.suites import SUITES, Case, Suite, layer, of_shapes, several
from moe_kernels import dequantize, requirements
from moe_kernels.scaled import ScaledTensor
from moe_kernels.testing import group_sizes_for
from moe_kernels.timing import Call
from tritonbench_ops import ffn, peers
from tritonbench_ops.baselines import Inputs, Provider

CPU = torch.device("cpu")
GROUPED = OPERATORS["grouped_gemm"]
CASE = Case("case", 3, 20, 16, 24)
META = {
    **dict.fromkeys(("gpu", "driver", "torch", "triton", "helion", "date"), "1"),
    "command": "python -m benchmarks",
    "ceilings": {"tflops": 800.0, "gbps": 4000.0},
}


@pytest.fixture(autouse=True)
def _no_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(run, "_SEEN", {})


def with_providers(monkeypatch: pytest.MonkeyPatch, **providers: Provider) -> Operator:
    operator = replace(GROUPED, providers={**GROUPED.providers, **providers})
    monkeypatch.setitem(OPERATORS, "grouped_gemm", operator)
    return operator


def inputs_of(case: Case, name: str = "grouped_gemm") -> Any:
    operator = OPERATORS[name]
    return operator.inputs(case, operator.weights(case, CPU), CPU)


def measured(operator: Operator, *keys: str, case: Case = CASE) -> list[run.Record]:
    inputs = operator.inputs(case, operator.weights(case, CPU), CPU)
    return run.measure("smoke", case, operator, keys, inputs, 3, ["eager"], CPU)


def record(case: str, provider: str, us: float | None, timing: str = "graph", **more: Any) -> run.Record:
    values = dict.fromkeys(run.FIELDS) | dict(zip("GMNK", (8, 64, 32, 16), strict=True))
    values |= {"suite": "table", "case": case, "provider": provider, "timing": timing, "us": us}
    values |= {"layout": "[G, K, N]", "dtype": "bfloat16", "tflops": us and 1e3 / us, "gbps": us and 1e4 / us}
    return {**values, **more}


def test_the_table_is_that_of_the_targets() -> None:
    cases = SUITES["table"].cases()
    assert len(cases) == 22 and len({case.name for case in cases}) == 11
    assert {case.layout for case in cases if case.name == "olmoe_up"} == {"gkn", "gnk"}
    by_name = {case.name: case for case in cases}
    assert [getattr(by_name["mixtral_down"], d) for d in "GMNK"] == [8, 8192, 4096, 14336]
    assert by_name["qwen3_up_zipf"].sizes == "zipf" and by_name["decode_dsv3"].sizes == "softmax"


@pytest.mark.parametrize("suite", SUITES.values(), ids=SUITES)
def test_cases_with_the_same_weights_follow_one_another(suite: Suite) -> None:
    weights = [case.weights for case in suite.cases()]
    changes = sum(a != b for a, b in itertools.pairwise(weights))
    assert changes == len(set(weights)) - 1
    assert len({(case.name, case.layout) for case in suite.cases()}) == len(weights)


def test_a_layout_that_is_given_counts() -> None:
    assert {case.layout for case in SUITES["table"].cases(["gnk"])} == {"gnk"}


@pytest.mark.parametrize("num_groups", [0, 1, 8])
def test_wrong_gating_is_found(num_groups: int) -> None:
    operator, where = OPERATORS["gating"], torch.device("cpu")
    case = Case("gating", 32, 9, 4, num_groups)
    inputs = operator.inputs(case, operator.weights(case, where), where)
    for name in ("torch", "ours"):
        ids, weights = operator.providers[name].make(inputs)()
        assert operator.check((ids, weights), inputs) < 1e-6
    for wrong in ((ids.roll(1, 0), weights), (ids, weights * 1.001), (ids, torch.zeros_like(weights))):
        with pytest.raises(AssertionError, match=r"experts|weights"):
            operator.check(wrong, inputs)
    more = operator.longer(inputs, 3)
    assert operator.check(operator.providers["ours"].make(more)(), more) < 1e-6 and len(more.logits) == 12


def test_shapes_of_the_command_line() -> None:
    suite = of_shapes([(2, 8, 4, 6), (2, 8, 4, 6), (1, 1, 1, 1)], ["uniform", "zipf"])
    assert [(case.G, case.M, case.N, case.K, case.sizes) for case in suite.cases(["gkn"])] == [
        (2, 8, 4, 6, "uniform"),
        (2, 8, 4, 6, "zipf"),
        (1, 1, 1, 1, "uniform"),
        (1, 1, 1, 1, "zipf"),
    ]


PACKED = ("grouped_gemm", "shared_gemm")


@pytest.mark.parametrize("layout", ["gkn", "gnk"])
@pytest.mark.parametrize("name", PACKED)
def test_inputs(name: str, layout: str) -> None:
    case = replace(CASE, layout=layout, sizes="zipf", G=5)
    inputs = inputs_of(case, name)
    assert inputs.A.shape == (20, 24) and inputs.A.dtype == torch.bfloat16
    assert inputs.B.shape == ((5, 24, 16) if name == "grouped_gemm" else (24, 16))
    assert inputs.B.stride(-1 if layout == "gkn" else -2) == 1
    assert inputs.group_offsets.diff().tolist() == inputs.sizes == group_sizes_for("zipf", 5, 20)
    longer = OPERATORS[name].longer(inputs, 3)
    assert longer.B is inputs.B and torch.equal(longer.A[:20], inputs.A) and len(longer.A) == 23
    assert longer.group_offsets.diff().tolist() == longer.sizes == [*inputs.sizes[:-1], inputs.sizes[-1] + 3]
    flops, bytes_ = OPERATORS[name].work(inputs)
    assert flops == 2 * 20 * 16 * 24
    filled = sum(size > 0 for size in inputs.sizes) if name == "grouped_gemm" else 1
    assert bytes_ == 2 * (20 * 24 + filled * 24 * 16 + 20 * 16)


FORMS = {
    "uniform": Case("case", 3, 20, 16, 24, "uniform"),
    "varied": several("case", [(5, 16, 24), (20, 8, 7), (5, 16, 24)], "random"),
}


@pytest.mark.parametrize("layout", ["gkn", "gnk"])
@pytest.mark.parametrize("name", FORMS)
def test_the_other_forms(name: str, layout: str) -> None:
    """Every provider passes the check, which detects swapped and missing groups, and the work is that of all groups."""
    operator = OPERATORS[name]
    inputs = inputs_of(replace(FORMS[name], layout=layout), name)
    for key in operator.providers.keys() - {"bmm-fp32"}:  # PyTorch has no CPU kernel for it
        provider = operator.providers[key]
        for x in (operator.longer(inputs, 3), inputs):
            made = provider.result(x, provider.make(x)())
            assert operator.check(made, x) < 3e-3
    wrong = [list(made), list(made)] if name == "varied" else [made.clone(), made.clone()]
    wrong[0][0], wrong[0][-1 if name == "varied" else 20] = made[-1 if name == "varied" else 20], made[0]
    wrong[1][0] = torch.zeros_like(made[0])
    for out in wrong:
        with pytest.raises(AssertionError, match="wrong in group"):
            operator.check(out, inputs)
    products = [(20, 16, 24)] * 3 if name == "uniform" else [(5, 16, 24), (20, 8, 7), (5, 16, 24)]
    assert operator.work(inputs) == (
        sum(2 * M * N * K for M, N, K in products),
        sum(2 * (M * K + K * N + M * N) for M, N, K in products),
    )
    assert operator.memory(FORMS[name]) == operator.work(inputs)[1]


def test_the_shapes_that_were_published() -> None:
    shapes = {(c.G, c.M, c.N, c.K) for c in SUITES["uniform"].cases() if c.warm}
    assert {(8, 512, 64, 512), (8, 2048, 64, 2048), (8, 2048, 8, 2048)} <= shapes
    cubes = [c.problems for c in SUITES["varied"].cases() if c.name.startswith("4 x ")]
    assert cubes == [((N, N, N),) * 4 for N in (128, 256, 512, 1024)]
    assert {c.dtype for c in SUITES["varied"].cases() if c.warm} == {"float16"}


LAYER = layer("small", 50, 64, 48, 6, 3)


def test_the_layers_are_those_of_the_targets() -> None:
    shapes = {c.name: (c.M // c.top_k, c.K, c.N, c.G, c.top_k) for c in SUITES["ffn"].cases()}
    assert shapes == {
        "qwen3_30b, T = 8192": (8192, 2048, 768, 128, 8),
        "mixtral, T = 4096": (4096, 4096, 14336, 8, 2),
        "dsv3_ep, T = 4096": (4096, 7168, 2048, 32, 8),
        "olmoe, T = 4096": (4096, 2048, 1024, 64, 8),
        **{f"qwen3_30b, T = {T}": (T, 2048, 768, 128, 8) for T in (1, 16, 64)},
    }
    assert SUITES["ffn-train"].shapes == SUITES["ffn"].shapes[:4]


@pytest.mark.parametrize("layout", ["gkn", "gnk"])
@pytest.mark.parametrize("name", ["ffn", "ffn-train"])
def test_layers(name: str, layout: str) -> None:
    """Providers agree with float64, and typical faults of a layer fail the check."""
    pytest.importorskip("transformers")
    operator, trains = OPERATORS[name], name == "ffn-train"
    inputs = inputs_of(replace(LAYER, layout=layout), name)
    for key in ("transformers", "ours"):
        made = operator.providers[key].make(inputs)()
        assert 1e-3 < operator.check(made, inputs) < 1e-2
    results = made if trains else {"out": made}
    for result, right in results.items():
        wrong = {
            "zeros": torch.zeros_like(right),
            "one row": right.index_fill(0, torch.tensor([inputs.sample.experts[-1] if "w_" in result else 3]), 0),
            "moved": right.roll(1, 0),
            "nan": torch.full_like(right, math.nan),
            "short": right[:-1],
        }
        for how, x in wrong.items():
            with pytest.raises(AssertionError, match="expected shape" if how == "short" else "exceeds the budget"):
                operator.check({**results, result: x} if trains else x, inputs)
    longer = operator.longer(inputs, 2)
    assert longer.trains == trains and len(longer.topk_ids) == len(longer.d_out) == 52
    assert [len(x) for x in longer.leaves.values()] == [52, 52, 6, 6]
    weights, rows = 6 * 3 * 48 * 64, 50 * 64
    assert min(inputs.sizes) > 0 and sum(inputs.sizes) == 150
    times, moved = (3, 2 * weights + 4 * rows) if trains else (1, weights + 2 * rows)
    assert operator.work(inputs) == (times * 2 * 150 * 3 * 48 * 64, 2 * moved)
    assert operator.memory(LAYER) == 2 * ((1 + trains) * weights + 150 * (2 * 64 + 3 * 48))


def test_work_of_a_backward_alone_and_of_experts_without_rows() -> None:
    inputs = inputs_of(layer("few", 2, 16, 8, 32, 3), "ffn-train")
    filled = sum(size > 0 for size in inputs.sizes)
    assert filled <= 6
    flops, moved = ffn.work(inputs, forward=False, backward=True)
    assert flops == 2 * 2 * 6 * 3 * 8 * 16
    assert moved == 2 * (3 * 2 * 16 + (filled + 32) * 3 * 8 * 16)


def test_tokens_of_every_expert_are_checked() -> None:
    inputs = inputs_of(layer("many", 700, 16, 8, 40, 2), "ffn")
    sample = inputs.sample
    assert set(inputs.topk_ids[sample.tokens].flatten().tolist()) == set(range(40))
    assert {0, 699} <= set(sample.tokens.tolist()) and len(sample.tokens) <= 72


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
@pytest.mark.parametrize("name", ["ffn", "ffn-train"])
def test_a_whole_graph_is_compiled(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    inputs = inputs_of(LAYER, name)
    call = OPERATORS[name].providers["compiled"].make(inputs)
    assert OPERATORS[name].check(call(), inputs) < 1e-2


def test_layers_end_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A suite of one small layer: a provider that returns a zero gradient has no time, and peak memory is recorded."""
    pytest.importorskip("transformers")
    operator = OPERATORS["ffn-train"]

    def forgetful(inputs: ffn.Layer) -> Call:
        right = operator.providers["ours"].make(inputs)
        return lambda: (made := right()) | {"topk_weights": torch.zeros_like(made["topk_weights"])}

    providers = {**operator.providers, "bad": Provider("bad", forgetful)}
    monkeypatch.setitem(OPERATORS, "ffn-train", replace(operator, providers=providers))
    monkeypatch.setattr(run, "_peak_megabytes", lambda call, device: 12.5)
    suite = replace(SUITES["ffn-train"], shapes=(LAYER,))
    results = run.Results(META)
    keys = ["transformers", "ours", "bad"]
    [(_, _, reason)] = run.run_suite(suite, suite.cases(), keys, 3, ["eager"], CPU, results)
    assert reason is None
    theirs, mine, bad = results.records
    for found in (theirs, mine):
        assert found["us"] > 0 and found["host_us"] > 0 and found["error"] is None and 1e-3 < found["rel_err"] < 1e-2
        assert found["peak_mb"] == 12.5 and found["host_prepared_us"] is None
        assert [found[d] for d in "GMNK"] == [6, 150, 48, 64] and found["layout"] == "[E, 2I, H]"
        assert found["tflops"] == pytest.approx(3 * 2 * 150 * 3 * 48 * 64 / found["us"] / 1e6, abs=1e-3)
    assert bad["us"] is None and bad["peak_mb"] is None and "gradient of topk_weights: error" in bad["error"]
    assert "peak MB" in tables.case_text(results.records) and "bad, eager: failed" in tables.case_text(results.records)
    text = tables.markdown(results)
    assert "| case (E, T * top_k, I, H) |" in text and "| small, T = 50 (6, 150, 48, 64) |" in text
    assert "| `moe_mlp` peak MB | transformers peak MB |" in text and "prepared" not in text


def test_peak_memory_is_that_of_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    allocated = {"now": 3_000_000, "most": 90_000_000}
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: allocated["now"])
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: allocated["most"])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: allocated.update(most=allocated["now"]))
    assert run._peak_megabytes(lambda: allocated.update(most=5_500_000), torch.device("cuda")) == 2.5


def test_eager_times_are_shown_where_the_baseline_has_no_graph() -> None:
    base, ours = tables.roles("ffn-train")
    records = [record("a", p, 5.0, "eager", suite="ffn-train") for p in (base, ours)]
    graphs = [record("a", p, us, suite="ffn-train") for p, us in ((base, None), (ours, 4.0))]
    assert tables.timing_of([*records, *graphs]) == "eager"
    assert tables.timing_of([records[1], *graphs]) == "graph"


def test_warm_times_are_of_one_call_among_many(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def interleaved(calls: dict[str, Call], rounds: int, device: torch.device, *, cold: bool) -> dict[str, float]:
        asked.append((sorted(calls), cold))
        return dict.fromkeys(calls, 500.0)

    monkeypatch.setattr(run, "captured", lambda call, times: (call, call()))
    monkeypatch.setattr(timing, "interleaved", interleaved)
    operator, case = OPERATORS["varied"], replace(FORMS["varied"], warm=True)
    inputs = inputs_of(case, "varied")
    records = run.measure("varied", case, operator, ["loop", "ours", "call"], inputs, 3, ["eager", "graph"], CPU)
    us = {(r["provider"], r["timing"]): r["us"] for r in records}
    assert us["loop of torch.mm", "graph"] == 500.0 and us["loop of torch.mm", "warm"] == 5.0
    assert asked == [(["call", "loop", "ours"], True), (["loop", "ours"], True), (["loop", "ours"], False)]
    assert us["varied_grouped_gemm", "graph"] is None and not any(r["error"] for r in records)
    text = tables.markdown(run.Results(META, records))
    assert "| loop of `torch.mm` warm us |" in text and "| 5.00 |" in text


def test_under_load_dense_products_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    products: list[torch.Size] = []

    def interleaved(calls: dict[str, Call], rounds: int, device: torch.device, *, cold: bool) -> dict[str, float]:
        for call in calls.values():
            call()
        return dict.fromkeys(calls, 2.0 * rounds)

    monkeypatch.setattr(timing, "interleaved", interleaved)
    monkeypatch.setattr(torch, "mm", lambda a, b, out: products.append(out.shape))
    assert timing.in_turns({"a": lambda: None}, 3, CPU, load=True) == {"a": 6.0} and len(products) == 1
    assert timing.in_turns({"a": lambda: None}, 3, CPU) == {"a": 6.0} and len(products) == 1
    options = cli.arguments(["--load", "--jobs", "1", "--rounds", "1"])
    assert cli._words(options) == ["--rounds", "1", "--load", "--jobs", "1"]
    operator = OPERATORS["grouped_gemm"]
    records = [record("dsv3", provider.label, 2.0) for provider in operator.providers.values() if provider.ours]
    assert "replays with a cold L2 cache, under sustained load" in tables.markdown(
        run.Results(META | {"load": True}, records)
    )


@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize("kind", ["softmax", "empty", "one", "uniform"])
def test_the_reference_passes_the_check(name: str, kind: Any) -> None:
    inputs = inputs_of(replace(CASE, sizes=kind, G=40, M=300), name)
    right = OPERATORS[name].providers["ours"].make(inputs)()
    assert 1e-4 < OPERATORS[name].check(right, inputs) < 3e-3


def spoilt(how: Callable[[torch.Tensor, Inputs], Any]) -> Callable[[Inputs], Call]:
    def make(inputs: Inputs) -> Call:
        right = GROUPED.providers["ours"].make(inputs)

        def call() -> Any:
            return how(right(), inputs)

        return call

    return make


def zeros(out: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    return torch.zeros_like(out)


def last_row(out: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    out[-1] = 0
    return out


def swapped(out: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    return GROUPED.providers["ours"].make(replace(inputs, B=inputs.B.flip(0)))()


def nan(out: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    out[0, 0] = math.nan
    return out


def short(out: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    return out[:-1]


def raises(out: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    raise NotImplementedError("more than 1023 groups\nand a second line")


@pytest.mark.parametrize("how", [zeros, last_row, swapped, nan, short, raises])
def test_what_is_wrong_or_fails_has_no_time(
    how: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    operator = with_providers(monkeypatch, bad=Provider("bad", spoilt(how)))
    records = {r["provider"]: r for r in measured(operator, "torch", "bad", "ours")}
    assert [records[name]["error"] for name in ("torch._grouped_mm", "grouped_gemm")] == [None, None]
    bad = records["bad"]
    assert all(
        bad[name] is None
        for name in ("us", "tflops", "gbps", "host_us", "host_new_rows_us", "host_prepared_us", "rel_err")
    )
    if how is raises:
        assert bad["error"] == "NotImplementedError: more than 1023 groups"
    else:
        assert bad["error"].startswith("AssertionError: ")
    assert f"bad, eager: failed: {bad['error']}" in tables.case_text(list(records.values()))


def test_a_yardstick_of_another_product_is_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    [dense] = measured(GROUPED, "dense")
    assert dense["us"] > 0 and dense["rel_err"] is None and dense["error"] is None


def test_bytes_are_those_that_a_provider_moves() -> None:
    """One dense product reads one weight, and results in float32 are twice as large as those in bfloat16."""
    A, B, out = 20 * 24, 24 * 16, 20 * 16
    moved = {"torch": 2 * (A + 3 * B + out), "dense": 2 * (A + B + out)}
    records = measured(GROUPED, *moved, case=replace(CASE, sizes="uniform"))
    moved |= {"ours": 3 * 2 * (A + B + out), "ours-fp32": 3 * (2 * (A + B) + 4 * out)}
    records += measured(OPERATORS["uniform"], "ours", "ours-fp32", case=FORMS["uniform"])
    for found, bytes_ in zip(records, moved.values(), strict=True):
        assert found["gbps"] == pytest.approx(bytes_ / found["us"] / 1e3, rel=1e-2, abs=1e-3)


def test_a_failed_capture_leaves_the_eager_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def captured(call: Call, times: int) -> tuple[Call, Any]:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(run, "captured", captured)
    eager, graph = run.measure("smoke", CASE, GROUPED, ["ours"], inputs_of(CASE), 3, ["eager", "graph"], CPU)
    assert eager["us"] > 0 and eager["error"] is None
    assert graph["us"] is None and "capturing" in graph["error"]


def test_a_graph_that_lacks_a_kernel_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def captured(call: Call, times: int) -> tuple[Call, Any]:
        out = call()
        out[-1] = float("nan")
        return call, out

    monkeypatch.setattr(run, "captured", captured)
    eager, graph = run.measure("smoke", CASE, GROUPED, ["ours"], inputs_of(CASE), 3, ["eager", "graph"], CPU)
    assert eager["us"] > 0 and eager["error"] is None
    assert graph["us"] is None and graph["error"].startswith("AssertionError")


def test_the_sample_of_groups() -> None:
    assert sample([0, 3, 0, 2]) == [1, 3]
    sizes = [1] * 200
    sizes[0] = sizes[199] = 0
    sizes[77] = 5
    found = sample(sizes)
    assert {1, 77, 198} <= set(found) and len(found) <= 12


def test_a_record() -> None:
    first, second = measured(GROUPED, "torch", "loop")
    assert list(first) == list(run.FIELDS)
    assert (first["suite"], first["case"], first["layout"]) == ("smoke", "case", "[G, K, N]")
    assert second["provider"] == "loop of torch.mm" and second["timing"] == "eager"
    assert first["tflops"] == pytest.approx(2 * 20 * 16 * 24 / first["us"] / 1e6, abs=1e-3)
    assert min(first[name] for name in ("host_us", "host_new_rows_us", "host_prepared_us")) > 0
    assert 0 < first["rel_err"] < 3e-3
    json.dumps(first)


def test_new_rows_are_new(monkeypatch: pytest.MonkeyPatch) -> None:
    """No earlier case has used the row counts timed as new, but this case has used each of their bit lengths."""
    called: list[int] = []

    def make(inputs: Inputs) -> Call:
        def call() -> torch.Tensor:
            called.append(len(inputs.A))
            return inputs.A @ inputs.B[0]

        return call

    batches: list[list[int]] = []

    def host_microseconds(calls: Iterable[Call], device: torch.device) -> float:
        before = len(called)
        for call in calls:
            call()
        batches.append(called[before:])
        return float(len(batches))

    monkeypatch.setattr(run, "host_microseconds", host_microseconds)
    operator = with_providers(monkeypatch, one=Provider("one", make, same_result=False))
    for M in (20, 23, 1):
        start = len(called)
        [found] = measured(operator, "one", case=replace(CASE, M=M))
        assert [found[name] for name in ("host_us", "host_new_rows_us", "host_prepared_us")] == [1, 2, 3]
        cycled, new, prepared = batches
        before = called[: called.index(new[0], start)]
        assert len(new) == len(set(new)) == 9 and not set(new) & set(before)
        assert {rows.bit_length() for rows in new} <= {rows.bit_length() for rows in before[start:]}
        assert set(cycled) <= set(before[: -len(cycled)]) and len(cycled) == 9 and prepared == [M] * 9
        batches.clear()


def test_what_is_compiled_for_one_number_of_rows_is_called_with_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    right = GROUPED.providers["ours"].make
    fixed = Provider("fixed", lambda inputs: made.append(len(inputs.A)) or right(inputs), any_rows=False)
    [found] = measured(with_providers(monkeypatch, fixed=fixed), "fixed")
    assert found["host_us"] > 0 and found["host_new_rows_us"] is None and made == [20]


def test_records_of_two_timings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "captured", lambda call, times: (call, call()))
    records = run.measure("smoke", CASE, GROUPED, ["torch", "ours"], inputs_of(CASE), 3, ["eager", "graph"], CPU)
    assert [(r["timing"], r["host_us"] is None) for r in records] == [("eager", False)] * 2 + [("graph", True)] * 2


def fitting_memory(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    monkeypatch.setattr(run, "_too_large", lambda needed, device: "needs too much" if needed > limit else None)


def test_a_case_that_does_not_fit_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    fitting_memory(monkeypatch, 100_000)
    suite = replace(SUITES["smoke"], shapes=(replace(CASE, name="large", G=1000), CASE))
    results = run.Results(META)
    list(run.run_suite(suite, suite.cases(["gkn"]), ["ours"], 3, ["eager"], CPU, results))
    assert [r["case"] for r in results.records] == ["case"]
    [left_out] = results.skipped
    assert left_out["case"] == "large" and left_out["reason"] == "needs too much"
    assert "left out: large (1000, 20, 16, 24), B [G, K, N]: needs too much" in tables.summary(results)


def test_memory_is_counted() -> None:
    assert GROUPED.memory(CASE) == 2 * (20 * (16 + 24) + 3 * 16 * 24)
    assert OPERATORS["shared_gemm"].memory(CASE) == 2 * (20 * (16 + 24) + 16 * 24)


def test_weights_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def weights(case: Case, device: torch.device) -> Any:
        made.append(case.weights)
        return GROUPED.weights(case, device)

    monkeypatch.setitem(OPERATORS, "grouped_gemm", replace(GROUPED, weights=weights))
    cases = [Case(f"{N} {M}", 4, M, N, K) for N, K in ((16, 16), (16, 8)) for M in (2, 8, 32)]
    suite = replace(SUITES["smoke"], shapes=tuple(cases))
    results = run.Results(META)
    list(run.run_suite(suite, suite.cases(["gnk"]), ["ours"], 3, ["eager"], CPU, results))
    assert len(results.records) == 6 and len(made) == 2


def test_compiling_beforehand_calls_ours_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool runs in this process; after a failure the remaining cases are still compiled."""
    called = []

    def make(key: str) -> Callable[[Inputs], Call]:
        def made(inputs: Inputs) -> Call:
            called.append((key, len(inputs.A)))
            raise RuntimeError("out of memory")

        return made

    class Pool:
        def __init__(self, jobs: int, mp_context: Any):
            assert jobs == 3

        def __enter__(self) -> Pool:
            return self

        def __exit__(self, *_: Any) -> None: ...

        def submit(self, function: Any, *arguments: Any) -> Future[None]:
            done: Future[None] = Future()
            done.set_result(function(*arguments))
            return done

    with_providers(monkeypatch, **{key: replace(GROUPED.providers[key], make=make(key)) for key in ("torch", "ours")})
    monkeypatch.setattr(run, "ProcessPoolExecutor", Pool)
    suite = replace(SUITES["smoke"], shapes=(CASE, replace(CASE, M=7), replace(CASE, M=9, K=8)))
    run.compile_beforehand("grouped_gemm", suite.cases(["gkn"]), ["torch", "ours"], 3, CPU)
    assert called == [("ours", 20), ("ours", 7), ("ours", 9)]


def test_a_lost_gpu_ends_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with_providers(monkeypatch, ours=replace(GROUPED.providers["ours"], make=spoilt(raises)))
    monkeypatch.setattr(run, "gpu_is_lost", lambda device: True)
    assert cli.main(["--suite", "smoke", "--json", str(tmp_path / "r.json")]) == 1
    assert "does not answer" in capsys.readouterr().err
    assert len(run.Results.read(tmp_path / "r.json").skipped) == 1


def test_ctrl_c_keeps_what_is_done(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    original, calls = run.measure, []

    def measure(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return original(*args)

    monkeypatch.setattr(run, "measure", measure)
    file = tmp_path / "r.json"
    assert cli.main(["--suite", "smoke", "--providers", "torch", "ours", "--json", str(file)]) == 130
    captured = capsys.readouterr()
    assert "Interrupted" in captured.err and f"Written: {file}" in captured.out
    assert len(run.Results.read(file).records) == 4
    assert not list(tmp_path.glob("*.part"))


def test_smoke_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = ["--json", str(tmp_path / "a/r.json"), "--csv", str(tmp_path / "b/r.csv"), "--plot", str(tmp_path / "c")]
    assert cli.main(["--suite", "smoke", *files]) == 0
    text = capsys.readouterr().out
    assert "[6/6] one row" in text and "over torch._grouped_mm" in text
    assert "say nothing about the speed" in text and "quack: left out, quack is not installed" in text

    results = run.Results.read(tmp_path / "a/r.json")
    assert len(results.records) == 6 * 5 and not results.skipped
    assert all(r["error"] is None and r["us"] > 0 for r in results.records)
    assert results.meta["torch"] == torch.__version__.split("+")[0] or results.meta["torch"] == torch.__version__
    assert results.meta["command"].startswith("python -m benchmarks --suite smoke --json ")
    with (tmp_path / "b/r.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 30 and list(rows[0]) == list(run.FIELDS)
    assert float(rows[3]["us"]) == results.records[3]["us"]
    for name in ("smoke", "smoke-roofline"):
        picture = (tmp_path / "c" / f"{name}.png").read_bytes()
        assert picture[:4] == b"\x89PNG" and len(picture) < 150_000
        assert min(struct.unpack_from(">II", picture, 16)) > 300


def test_our_failure_is_in_the_exit_status(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with_providers(
        monkeypatch, ours=replace(GROUPED.providers["ours"], make=spoilt(zeros)), bad=Provider("bad", spoilt(zeros))
    )
    arguments = ["--suite", "smoke", "--layout", "gkn", "--providers"]
    assert cli.main([*arguments, "ours"]) == 1
    assert "failed: grouped_gemm on even: AssertionError" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        cli.main([*arguments, "no-such-provider"])


def test_a_peers_failure_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    with_providers(monkeypatch, bad=Provider("bad", spoilt(raises)))
    assert cli.main(["--suite", "smoke", "--layout", "gkn", "--providers", "bad", "ours"]) == 0


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--suite", "table"], "needs a CUDA GPU"),
        (["--shapes", "1,2,3,4"], "needs a CUDA GPU"),
        (["--suite", "smoke", "--shapes", "1,2,3,4"], "exclude each other"),
        (["--suite", "smoke", "--sizes", "zipf"], "--sizes is for --shapes"),
        (["--sizes", "softmax"], "--sizes is for --shapes"),
        (["--suite", "smoke", "--timing", "graph"], "no CUDA graphs"),
        (["--suite", "smoke", "--json", "x", "--csv", "../" + Path.cwd().name + "/x"], "name the same file"),
        (["--suite", "smoke", "--providers", "mm"], "none of the providers mm"),
        (["--suite", "smoke", "--providers", "quack"], "needs other packages for the providers quack"),
    ],
)
def test_refusals(
    arguments: list[str], text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with_providers(monkeypatch, quack=replace(GROUPED.providers["quack"], package="no_such_package"))
    assert cli.main(arguments) == 2
    assert text in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--json", "--csv", "--plot"])
def test_files_and_folders_are_told_apart_before_anything_is_measured(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    wrong, expected = (tmp_path / "file", "folder") if option == "--plot" else (tmp_path, "file")
    with pytest.raises(SystemExit):
        cli.main(["--suite", "smoke", option, ""])
    assert f"argument {option}: expected a {expected}, got" in capsys.readouterr().err
    with pytest.raises(SystemExit) as left:
        cli.main(["--suite", "smoke", option, str(wrong)])
    assert left.value.code == 2
    assert f"argument {option}: expected a {expected}, got the " in capsys.readouterr().err


def test_plots_without_matplotlib(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert cli.main(["--suite", "smoke", "--plot", "somewhere"]) == 2
    assert "pip install -e '.[bench]'" in capsys.readouterr().err


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(requirements, "problems", lambda: {"helion is not installed": "helion"})
    assert cli.main(["--suite", "smoke"]) == 1
    assert requirements.fix() in capsys.readouterr().err


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main(["--help"])
    assert left.value.code == 0
    assert "a provider that fails or is wrong gets no time" in capsys.readouterr().out


def test_neither_package_imports_the_benchmarks() -> None:
    """The benchmarks are not in the wheel."""
    sources = [*Path(moe_kernels.__path__[0]).rglob("*.py"), *Path(tritonbench_ops.__path__[0]).rglob("*.py")]
    pattern = re.compile(r"^\s*(import|from) benchmarks\b", re.MULTILINE)
    assert len(sources) > 40 and not [file for file in sources if pattern.search(file.read_text())]


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--list"]) == 0
    text = capsys.readouterr().out
    for name in (*SUITES, *GROUPED.providers):
        assert name in text
    assert "22 cases" in text and "quack is not installed" in text


@pytest.mark.parametrize(
    "words",
    [
        "--suite smoke shared --layout both --rounds 5",
        "--shapes 1,2,3,4 5,6,7,8 --sizes zipf one --timing eager --jobs 4",
        "--shapes 1,2,3,4 --rounds 3",
        "--providers torch ours --json --csv a.csv --plot b",
        "--csv out.csv --plot .",
    ],
)
def test_the_command_that_is_noted_is_the_one_given(words: str) -> None:
    assert cli._words(cli.arguments(words.split())) == words.split()


def test_where_json_goes_without_a_name() -> None:
    results = run.Results(
        {**META, "gpu": "NVIDIA H200"}, [record("a", "x", 1.0), record("b", "x", 1.0, suite="shared")]
    )
    files = cli._json_files(results, argparse.Namespace(json=Path()))
    folder = Path(run.__file__).parent / "results/nvidia-h200"
    assert files.keys() == {folder / f"{suite}.json" for suite in ("table", "shared")}
    assert all(len(part.records) == 1 for part in files.values())
    results.meta["load"] = True
    loaded = cli._json_files(results, argparse.Namespace(json=Path()))
    assert loaded.keys() == {folder / f"{suite}-load.json" for suite in ("table", "shared")}


def test_a_run_that_measured_nothing_replaces_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    files = [tmp_path / "results.json", tmp_path / "results.csv"]
    for file in files:
        file.write_text("kept")
    monkeypatch.setattr(run, "measure", interrupted)
    assert cli.main(["--suite", "smoke", "--json", str(files[0]), "--csv", str(files[1])]) == 130
    assert [file.read_text() for file in files] == ["kept"] * 2


def test_a_file_has_to_be_named_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--suite", "smoke", "--layout", "gkn", "--providers", "torch", "--json"]) == 2
    captured = capsys.readouterr()
    assert "--json: name a FILE" in captured.err and not captured.out
    assert run.folder(run.meta(CPU, "command")) is None


def test_rows_are_padded_for_deepgemm() -> None:
    positions, groups = peers._padded([3, 0, 5], 4)
    assert positions.tolist() == [0, 1, 2, 4, 5, 6, 7, 8]
    assert groups.tolist() == [0, 0, 0, -1, 2, 2, 2, 2, 2, -1, -1, -1]


class Peer:
    """Stand-in for the packages of all peers, in plain PyTorch."""

    def gemm(self, A: Any, B: Any, *, cu_seqlens_m: Any, tuned: bool) -> Any:
        assert cu_seqlens_m.dtype == torch.int32
        return torch._grouped_mm(A, B, cu_seqlens_m[1:].contiguous())

    def get_mk_alignment_for_contiguous_layout(self) -> int:
        return 8

    def m_grouped_bf16_gemm_nn_contiguous(self, A: Any, B: Any, out: Any, groups: Any) -> None:
        assert B.is_contiguous() and groups.dtype == torch.int32
        for i, g in enumerate(groups.tolist()):
            out[i] = A[i] @ B[g] if g >= 0 else math.nan

    def m_grouped_bf16_gemm_nt_contiguous(self, A: Any, B: Any, out: Any, groups: Any) -> None:
        assert B.is_contiguous()
        self.m_grouped_bf16_gemm_nn_contiguous(A, B.transpose(1, 2).contiguous(), out, groups)

    def m_grouped_fp8_gemm_nt_contiguous(self, a: Any, b: Any, out: Any, groups: Any) -> None:
        assert a[1].mT.is_contiguous() and b[0].is_contiguous() and b[1].is_contiguous()
        W = dequantize(ScaledTensor(*b, "128x128"))
        self.m_grouped_bf16_gemm_nt_contiguous(dequantize(ScaledTensor(*a, "1x128")), W, out, groups)

    def fp8_m_grouped_gemm_nt_masked(self, a: Any, b: Any, out: Any, sizes: Any, expected_rows: int) -> None:
        assert sizes.dtype == torch.int32 and expected_rows > 0 and a[0].shape[:2] == out.shape[:2]
        groups = torch.arange(len(sizes)).int().repeat_interleave(out.size(1))
        flat = a[0].flatten(0, 1), a[1].flatten(0, 1).mT.contiguous().mT
        self.m_grouped_fp8_gemm_nt_contiguous(flat, b, out.flatten(0, 1), groups)
        for rows, size in zip(out, sizes.tolist(), strict=True):
            rows[size:] = math.nan

    def make_ragged_tensor_metadata(self, sizes: Any, rows: int) -> Any:
        assert sizes.dtype == torch.int32 and rows >= sizes.sum()
        return argparse.Namespace(slice_sizes=sizes)

    def matmul(self, a: Any, b: Any, bias: None, a_ragged_metadata: Any, precision_config: Any = None) -> Any:
        ends = a_ragged_metadata.slice_sizes.cumsum(0).int()
        if precision_config is None:
            return torch._grouped_mm(a, b, ends)
        assert b.stride(1) == 1 and a.dtype == b.dtype == torch.float8_e4m3fn
        scale, other = (data.scale for data in vars(precision_config.flex_ctx).values())
        assert scale.shape == other.shape == (1,)
        out = torch._grouped_mm(a.bfloat16(), b.bfloat16(), ends)
        return (out * (scale * other)).to(precision_config.out_dtype)

    InFlexData = FlexCtx = PrecisionConfig = staticmethod(argparse.Namespace)

    def compute_expt_data(self, sizes: Any, experts: int, rows: int) -> Any:
        assert len(sizes) == experts
        return self.make_ragged_tensor_metadata(sizes, rows)

    def RoutingData(self, topk_weights: None, sizes: Any, experts: int, top_k: int, metadata: Any) -> Any:
        assert sizes is metadata.slice_sizes and len(sizes) == experts and top_k == 1
        return metadata

    def matmul_ogs(self, x: Any, w: Any, bias: None, routing_data: Any, precision_config: Any = None) -> Any:
        return self.matmul(x, w, bias, routing_data, precision_config)[None]


@pytest.mark.parametrize("absent", [(), ("triton_kernels.matmul",), ("triton_kernels.matmul", "ragged metadata")])
@pytest.mark.parametrize("layout", ["gkn", "gnk"])
def test_peers_get_what_they_take(layout: str, absent: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    def import_module(name: str) -> Any:
        if name in absent:
            raise ModuleNotFoundError
        return object() if name == "triton_kernels.tensor" and "ragged metadata" in absent else Peer()

    monkeypatch.setattr(peers, "import_module", import_module)
    keys = [key for key, provider in GROUPED.providers.items() if provider.package]
    records = measured(GROUPED, *keys, case=replace(CASE, layout=layout))
    assert len(records) == 4
    for found in records:
        assert found["error"] is None and found["us"] > 0, found


# Groups with more and with fewer rows than DeepGEMM's blocks, and both versions of triton_kernels.
@pytest.mark.parametrize(("M", "absent"), [(40, ()), (20, ("triton_kernels.matmul",))])
def test_peers_get_what_they_take_in_fp8(M: int, absent: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    def import_module(name: str) -> Any:
        if name in absent:
            raise ModuleNotFoundError
        return Peer()

    monkeypatch.setattr(peers, "import_module", import_module)
    installed = {key: replace(provider, package=None) for key, provider in fp8.FP8_PEERS.items()}
    monkeypatch.setattr(fp8, "FP8_PEERS", installed)
    record = fp8.measure_product(replace(fp8.TINY_PRODUCTS[0], M=M), 1, CPU, load=False)
    labels = {provider.label for provider in installed.values()}
    assert not record["errors"] and labels < record["us"].keys() and labels < record["rel_err"].keys()


def test_an_absent_package_is_no_provider() -> None:
    assert not Provider("label", spoilt(zeros), package="no_such_package").installed
