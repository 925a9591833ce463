"""Tables, plots and pages of the measurements of `benchmarks` and TritonBench."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

from test_benchmarks import META, record

from benchmarks import plots, report, run, tables
from tritonbench_ops import plots as tritonbench


def results_of(*records: run.Record) -> run.Results:
    return run.Results(META, list(records))


def test_the_summary_lists_what_is_slower() -> None:
    base, ours = tables.roles("table")
    text = tables.summary(
        results_of(
            *(record(case, base, 100.0) for case in "abc"),
            record("a", ours, 50.0),
            record("b", ours, 200.0),
            record("c", ours, None, error="RuntimeError: no"),
        )
    )
    expected = "grouped_gemm has a speedup of 1.000 over torch._grouped_mm (geometric mean of 2 cases, lowest 0.500)"
    assert expected in text
    assert "slower: 0.500  b (8, 64, 32, 16), B [G, K, N]" in text and "  a (8" not in text
    assert "failed: grouped_gemm on c: RuntimeError: no" in text


def test_markdown_of_cases() -> None:
    base, ours = tables.roles("table")
    found = results_of(
        record("a", base, 120.0),
        record("a", ours, 100.0),
        record("a", "loop of torch.mm", None, error="no"),
        record("a", base, 150.0, "eager", host_us=14.4, host_prepared_us=9.0),
        record("a", ours, 130.0, "eager", host_us=15.6, host_prepared_us=7.0),
    )
    lines = tables.markdown(found).splitlines()
    [head] = [line for line in lines if line.startswith("| case")]
    [row] = [line for line in lines if line.startswith("| a (8, 64, 32, 16)")]
    cells = dict(zip(*([cell.strip() for cell in line.strip("|").split("|")] for line in (head, row)), strict=True))
    assert cells["`torch._grouped_mm` us"] == "120" and cells["`grouped_gemm` speedup"] == "1.20"
    assert cells["loop of `torch.mm` speedup"] == "-"
    assert cells["`grouped_gemm` host us"] == "16" and cells["`torch._grouped_mm` host us, prepared"] == "9"
    assert "new rows" not in head
    found.records[-1]["host_new_rows_us"] = 21.0
    assert "| `grouped_gemm` host us, new rows |" in tables.markdown(found)


def test_a_short_table() -> None:
    """At most eight columns: no second function of ours, no provider that computes something else, no host times."""
    base, ours = tables.roles("table")
    times = {
        base: 120.0,
        ours: 100.0,
        "basic": 110.0,
        "loop of torch.mm": 240.0,
        "one dense torch.mm, same FLOPs": 50.0,
    }
    peers = {f"peer{i}": 60.0 for i in range(5)}
    found = results_of(*(record("a", p, us) for p, us in times.items()), record("a", ours, 130.0, "eager", host_us=9.0))
    text = tables.markdown(found, short=True)
    head = "| case (G, M, N, K) | weight layout | `torch._grouped_mm` us | `grouped_gemm` us | `grouped_gemm` speedup |"
    assert head in text
    assert "| a (8, 64, 32, 16) | `[G, K, N]` | 120 | 100 | 1.20 | 0.50 | " in text
    assert "basic" not in text and "dense" not in text and "host" not in text and "Measured by" not in text
    found.records += [record("a", p, us) for p, us in peers.items()]
    assert all(line.count("|") == 9 for line in tables.markdown(found, short=True).splitlines() if line[:1] == "|")


def test_labels_in_headings() -> None:
    for label, shown in (
        ("torch._grouped_mm, bfloat16", "`torch._grouped_mm` (bfloat16)"),
        ("loop of torch.mm", "loop of `torch.mm`"),
        ("persistent, table made beforehand", "persistent kernel (list of tiles built before timing)"),
        ("triton_kernels, metadata made beforehand", "triton_kernels (metadata built before timing)"),
        ("varied_grouped_gemm, planned", "`varied_grouped_gemm` (with a plan)"),
        ("step, fp8_block, bfloat16 wgrad", "step (fp8_block, bfloat16 weight gradients)"),
    ):
        assert tables._code(label) == shown


def test_the_seconds_of_start_up(tmp_path: Path) -> None:
    """The table has a number for each part and state, and the report writes it into a page."""
    parts = {
        "layer": ("first grouped_gemm", "25 calls", "worst of them"),
        "training": ("first step", "first step of another T"),
    }
    states = ("nothing cached", "caches filled", "compiled on a machine without a GPU")
    seconds = iter(range(1, 100))
    measured: dict[str, Any] = {name: name for name in ("gpu", "torch", "triton", "helion", "date")}
    for part, keys in parts.items():
        for state in states:
            measured[f"{part}, {state}"] = {key: next(seconds) + 0.004 for key in keys}
    measured["torch, caches filled"] = {"first product": 17.0}
    measured["quack, caches filled"] = {"first product": 16.0}
    (tmp_path / "start_up.json").write_text(json.dumps(measured))
    page = tmp_path / "page.md"
    page.write_text("<!-- table: start_up.json -->\n<!-- end of table -->\n")
    assert report.main([str(page)]) == 0 and report.main([str(page), "--check"]) == 0
    rows = [line.split(" | ")[1:] for line in page.read_text().splitlines() if line.startswith("| ")][1:]
    assert [[cell.removesuffix(" |") for cell in row] for row in rows] == [
        ["1.00", "4.00", "7.00"],
        ["2.00", "5.00", "8.00"],
        ["3.00", "6.00", "9.00"],
        ["10.00", "12.00", "14.00"],
        ["11.00", "13.00", "15.00"],
        ["-", "16.00", "-"],
        ["-", "17.00", "-"],
    ]


def test_the_overview_names_the_best_of_what_was_timed(tmp_path: Path) -> None:
    layers = {"transformers": 300.0, "transformers, compiled": 200.0, "moe_mlp": 100.0}
    for suite, names in (
        ("ffn", ("qwen3_30b, T = 8192", "qwen3_30b, T = 16")),
        ("ffn-train", ("qwen3_30b, T = 8192",)),
    ):
        records = [record(name, p, us, suite=suite, layout="[E, 2I, H]") for name in names for p, us in layers.items()]
        results_of(*records).write(tmp_path / f"{suite}.json")
    base, ours = tables.roles("table")
    products = {base: 50.0, ours: 40.0, "loop of torch.mm": 60.0, "basic": 30.0, "one dense torch.mm, same FLOPs": 20.0}
    records = [record("qwen3_up", p, us, layout="[G, N, K] transposed") for p, us in products.items()]
    results_of(*records).write(tmp_path / "table.json")
    (tmp_path / "start_up.json").write_text(json.dumps({"layer, caches filled": {"first grouped_gemm": 0.254}}))
    lines = tables.overview(tmp_path).splitlines()
    layer = "| **100 us** | 200 us, transformers (compiled) | 300 us, transformers |"
    assert [line.partition(" | ")[2] for line in lines[2:5]] == [layer.removeprefix("| ")] * 3
    baseline = "50.0 us, `torch._grouped_mm`"  # faster than the loop, so it is also the fastest other
    assert lines[5].endswith(f"| **40.0 us** | {baseline} | {baseline} |")
    assert lines[6].endswith("| **0.25 s** | not measured | not measured |")
    measured = {"layer, caches filled": {"first grouped_gemm": 0.254}, "torch, caches filled": {"first product": 0.3}}
    measured |= {"quack, caches filled": {"first product": 0.2}, "deepgemm, caches filled": {"error": 1.0}}
    (tmp_path / "start_up.json").write_text(json.dumps(measured))
    assert tables.overview(tmp_path).splitlines()[6].endswith("| 0.20 s, quack | 0.30 s, `torch._grouped_mm` |")
    assert "cold L2 cache, in short bursts. The" in tables.overview(tmp_path)
    for suite in ("ffn", "ffn-train", "table"):
        loaded = run.Results.read(tmp_path / f"{suite}.json")
        loaded.meta["load"] = True
        loaded.write(tmp_path / f"{suite}.json")
    assert "cold L2 cache, under sustained load. The" in tables.overview(tmp_path)


def test_records_of_older_files() -> None:
    base, ours = tables.roles("table")
    old = [record("a", p, 9.0, "eager", host_us=5.0, host_prepared_us=4.0, rel_err=1e-3) for p in (base, ours)]
    for found in old:
        del found["host_new_rows_us"], found["peak_mb"]
    assert " 5.0         -       4.0" in tables.case_text(old)
    [first, _] = csv.DictReader(tables.csv_text(results_of(*old)).splitlines())
    assert (first["host_us"], first["host_new_rows_us"], first["host_prepared_us"]) == ("5.0", "", "4.0")


def wide_results() -> run.Results:
    """Return 12 cases: ours has a speedup of 1.25 over the best other, except one of 0.5 and one without a time."""
    base, ours = tables.roles("wide")
    records: list[run.Record] = [
        {"suite": "wide", "case": name, "G": 8, "M": M, "N": 32, "K": 16, "sizes": sizes, "rounds": 5, "errors": {}}
        | {"us": {base: 150.0, ours: 80.0, "quack": 100.0}}
        for M in (64, 1024)
        for name in ("model up", "model down")
        for sizes in ("uniform", "zipf", "half-empty")
    ]
    records[4]["us"][base] = 40.0
    records[9] |= {"us": {base: 50.0}, "errors": {ours: "RuntimeError: no"}}
    return results_of(*records)


def test_markdown_of_the_wide_set() -> None:
    found = wide_results()
    assert [round(ratio, 2) for ratio, _ in tables.worst_first(found)] == [0.5] + [1.25] * 10
    lines = tables.markdown(found).splitlines()
    head = (
        "| cases | number of cases | mean speedup over the fastest other | lowest over the fastest other "
        "| mean speedup over `torch._grouped_mm` | lowest over `torch._grouped_mm` | mean speedup over quack |"
    )
    assert head in lines
    assert lines[0].endswith(
        "Routings: uniform: groups of equal size; zipf: strong skew; half-empty: every second group is empty."
    )
    assert "Times are medians of 5 rounds. The table has" in lines[0]
    found.records[2]["rounds"] = 20
    again = (
        "In 1 cases the speedup of `grouped_gemm` was below 0.95 over the fastest other provider, or below 0.99 over "
        "`torch._grouped_mm`. These were timed again, with 20 rounds"
    )
    assert f"medians of 5 rounds. {again}" in tables.markdown(found)
    assert "The others, 1 of them slower than another provider, were not timed again" in tables.markdown(found)
    [everything] = [line for line in lines if line.startswith("| all |")]
    assert everything == "| all | 11 | 1.15 | 0.50 | 1.66 | 0.50 | 1.25 |"
    assert "| M = 1024 | 5 | 1.25 | 1.25 | 1.88 | 1.88 | 1.25 |" in lines
    assert "| zipf | 4 | 0.99 | 0.50 | 1.35 | 0.50 | 1.25 |" in lines
    worst = lines.index("The 11 cases with the lowest speedups, out of 11 cases:") + 4
    assert lines[worst] == "| model down (8, 64, 32, 16) | zipf | 80.0 | 40.0 | 100 | 0.50 |"
    assert "Not timed in 1 of the cases: `grouped_gemm`: RuntimeError: no." in lines


def test_markdown_of_fp8() -> None:
    """The mean leaves out decoding, a layer has a baseline of its own, and targets are in brackets."""
    names = ("torch._grouped_mm, bfloat16", "grouped_gemm, rowwise", "DeepGEMM", "quantize, rowwise")
    sizes = {"G": 8, "M": 64, "N": 32, "K": 16, "sizes": "softmax", "suite": "fp8", "errors": {}}
    products = [
        sizes | {"part": "product", "case": case, "us": dict(zip(names, us, strict=False))} | {"quantize_gbps": rates}
        for case, us, rates in (
            ("a_up", (100.0, 50.0, 40.0, 9.0), {"rowwise": 3000.4, "copy": 4000.0}),
            ("b_up", (80.0, 10.0, 40.0, 9.0), {"rowwise": 2000.0}),
            ("c_up", (80.0,), {"rowwise": 2000.0}),
            ("decode_dsv3", (90.0, 30.0, 40.0, 9.0), {"rowwise": 100.0}),
        )
    ]
    products[0] |= {"rel_err": {"grouped_gemm, rowwise": 1e-3}, "host_us": {"grouped_gemm, rowwise": 20.0}}
    products[1] |= {"rel_err": {"grouped_gemm, rowwise": 3e-3}, "host_us": {"grouped_gemm, rowwise": 30.0}}
    products[2]["errors"] = {"grouped_gemm, rowwise": "RuntimeError: no"}
    us = {"transformers, bfloat16": 30.0, "moe_mlp, rowwise": 20.0, "moe_mlp, 128x128": 15.0}
    layer = sizes | {"part": "layer", "case": "qwen3_30b, T = 16", "us": us}
    moved = {"permute, bfloat16": 10.0, "permute, rowwise": 12.0}
    layers = [layer, layer | {"case": "mixtral, T = 4096", "us": us | moved}]
    step = {"part": "training", "case": "mixtral, T = 4096", "us": {"step, bfloat16": 30.0, "step, fp8_block": 20.0}}
    rates = {"wgrad of down, bfloat16": 600, "wgrad of down, fp8, quantised beforehand": 790}
    found = results_of(*products, *layers, sizes | step | {"wgrad_tflops": rates})
    lines = tables.markdown(found).splitlines()
    for line in (
        "| a_up (8, 64, 32, 16) | 100 | 2.00 |",
        "| c_up (8, 64, 32, 16) | 80.0 | - |",
        "| decode_dsv3 (8, 64, 32, 16) | 90.0 | 3.00 (2.9) |",
        "| geometric mean without decoding |  | 4.00 (1.5) |",
        "| largest error of a row, relative to its norm |  | 3.0e-03 |",
        "| a_up (8, 64, 32, 16) | 100 | 2.50 |",
        "| geometric mean without decoding |  | 2.24 |",
        "| a_up (64, 16) | 3000 (3700) | 4000 |",
        "| decode_dsv3 (64, 16) | 100 | - |",
        "| qwen3_30b, T = 16 (8, 64, 32, 16) | 30.0 | 1.50 | 2.00 | 15.0 (95) |",
        "| mixtral, T = 4096 (8, 64, 32, 16) | 30.0 | 1.50 (2.4) | 2.00 (2.1) | 15.0 |",
        "| mixtral, T = 4096 (8, 64, 32, 16) | 10.0 | +20% (+10%) | - (+10%) |",
        "| mixtral, T = 4096 (8, 64, 32, 16) | 30.0 | 1.50 (1.25) |",
        "| mixtral, T = 4096 (8, 64, 32, 16) | 600 | 790 (800) |",
        "| `grouped_gemm` (rowwise) | 25 | 30 |",
        "Not timed in some cases: `grouped_gemm` (rowwise): RuntimeError: no.",
    ):
        assert line in lines, line
    short = tables.markdown(found, short=True).splitlines()
    head = "| speedup over `torch._grouped_mm` (bfloat16) | geometric mean of 3 cases without decoding | decode_dsv3 |"
    rows = ["| `grouped_gemm` (rowwise) | 4.00 (2 of 3) | 3.00 |", "| DeepGEMM | 2.24 (2 of 3) | 2.25 |"]
    assert [line for line in short if line.startswith("| ")] == [head, *rows]
    products[1]["host_new_rows_us"] = {"grouped_gemm, rowwise": 41.0}
    assert "| `grouped_gemm` (rowwise) | 25 | 30 | 41 | 41 |" in tables.markdown(found)
    steps = ["| speedup over step (bfloat16) | mixtral, T = 4096 |", "| step (fp8_block) | 1.50 |"]
    assert [line for line in tables.fp8_steps(found).splitlines() if line.startswith("| ")] == steps


def test_records_of_earlier_runs_name_their_command(tmp_path: Path) -> None:
    """A file's date, command and peers are those of the last run; parts that other runs measured keep theirs."""
    file = tmp_path / "fp8.json"
    part = {"suite": "fp8", "case": "a", "G": 8, "M": 64, "N": 32, "K": 16, "sizes": "softmax", "errors": {}}
    part |= {"us": {"step, bfloat16": 30.0, "step, fp8_block": 20.0}, "wgrad_tflops": {"wgrad of down, fp8": 600}}
    for day, parts in enumerate((("product", "layer", "training"), ("training",), ("training",), ("layer",)), 1):
        meta = META | {"date": f"day {day}", "command": f"run {day}", "peers": {"peer": str(day)}}
        found = run.Results(meta)
        for name in parts:
            found.records.append(part | {"part": name})
            found.keep(file, "part")
            found.write(file)
    read = run.Results.read(file)
    assert sorted(record["part"] for record in read.records) == ["layer", "product", "training"]
    assert read.meta["kept"] == {
        "product": {"date": "day 1", "command": "run 1", "peers": {"peer": "1"}},
        "training": {"date": "day 3", "command": "run 3", "peers": {"peer": "3"}},
    }
    last = "Measured by `run 4`. On day 1: product, by `run 1`. On day 3: training, by `run 3`."
    assert last in tables.markdown(read).splitlines()


def test_what_failed_in_the_first_case_of_fp8_has_a_column() -> None:
    part = {"suite": "fp8", "part": "training", "G": 8, "M": 64, "N": 32, "K": 16, "sizes": "softmax"}
    us = {"step, bfloat16": 30.0, "quantize_weight for fp8_block": 7.0}
    failed = part | {"case": "a", "us": {"step, bfloat16": 30.0}, "wgrad_tflops": {}, "errors": {"wgrad": "no"}}
    right = part | {"case": "b", "us": us, "wgrad_tflops": {"wgrad of down, fp8": 600}, "errors": {}}
    lines = tables.markdown(results_of(failed, right)).splitlines()
    for number in ("7.0", "600"):
        assert f"| b (8, 64, 32, 16) | {number} |" in lines and "| a (8, 64, 32, 16) | - |" in lines


def convergence_results() -> run.Results:
    """Return results of three ways to compute, one of which has no run with the second seed."""
    finals = {"bfloat16": (1.5, 1.53), "fp8_block": (1.52, 1.54), "fp8_rowwise": (1.6,)}
    records = [
        {"suite": "convergence", "case": f"{seed}:{compute}", "seed": seed, "compute": compute, "final": final}
        | {"held_out": [[step, final + 40 / step] for step in (50, 100, 150)]}
        for compute, losses in finals.items()
        for seed, final in enumerate(losses)
    ]
    names = ("layers", "experts", "top_k", "width", "inner", "batch", "length", "steps")
    training = dict(zip(names, (4, 8, 2, 256, 512, 32, 64, 150), strict=True))
    return run.Results(META | {"python": "3.12.1", "training": training}, records[::-1])


def test_markdown_of_convergence() -> None:
    """A difference is that of runs with the same seeds."""
    lines = tables.markdown(convergence_results()).splitlines()
    assert "after 150 training steps with batches of 32 x 64 bytes from the source" in lines[0]
    assert "of the standard library of Python 3.12.1." in lines[0]
    head = "| compute | seed 0 | seed 1 | mean | highest - lowest | mean difference from `bfloat16` |"
    assert [line for line in lines if line.startswith("| ")] == [
        head,
        "| `bfloat16` | 1.5000 | 1.5300 | 1.5150 | 0.0300 | - |",
        "| `fp8_block` | 1.5200 | 1.5400 | 1.5300 | 0.0200 | +0.0150 |",
        "| `fp8_rowwise` | 1.6000 | - | 1.6000 | 0.0000 | +0.1000 |",
    ]


def test_a_provider_without_a_time_is_not_compared() -> None:
    base, ours = tables.roles("wide")
    for us, expected in (({base: 50.0, ours: 40.0}, 1.25), ({ours: 40.0}, None), ({base: 50.0}, None), ({}, None)):
        assert tables.over_best({"us": us}) == expected
    assert tables.over_best({"us": {base: 50.0, ours: 40.0}}, ["quack"]) is None


def test_plots(tmp_path: Path) -> None:
    """Plots of the wide set, of cases with a missing time, and of convergence identify the results that they show."""
    base, ours = tables.roles("table")
    cases = results_of(*(record(c, p, us) for c in "ab" for p, us in ((base, 10.0), (ours, 8.0), ("basic", None))))
    for found, number in ((wide_results(), 1), (cases, 2), (convergence_results(), 1)):
        plots.draw(found, tmp_path)
        pictures = plots.pictures(found, tmp_path)
        assert len(pictures) == number and all(tritonbench.is_of(picture, found) for picture in pictures)
        found.records[0]["case"] += "?"
        assert not any(tritonbench.is_of(picture, found) for picture in pictures)


def test_a_plot_over_n(tmp_path: Path) -> None:
    base, ours = tables.roles("varied")
    times = [(f"4 x {N}^3", p, us) for N in (128, 256) for p, us in ((base, 20.0), (ours, 10.0 + N))]
    records = [record(case, p, us, suite="varied") for case, p, us in [*times, ("mix", base, 5.0), ("mix", ours, 4.0)]]
    found = results_of(*records, record("4 x 128^3", ours, 3.0, "warm", suite="varied"))
    assert plots._cubes(found) == {base: {128: 0.02, 256: 0.02}, ours: {128: 0.138, 256: 0.266}}
    plots.draw(found, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"varied.png", "varied-roofline.png", "varied-cubes.png"}


def test_only_what_multiplies_has_a_roofline(tmp_path: Path) -> None:
    base, ours = tables.roles("table")
    found = results_of(record("a", base, 10.0), record("a", ours, 8.0))
    assert [path.name for path in plots.pictures(found, tmp_path)] == ["table.png", "table-roofline.png"]
    for one in found.records:
        one["tflops"] = 0.0
    assert [path.name for path in plots.pictures(found, tmp_path)] == ["table.png"]


def test_the_readme_is_written_and_checked(tmp_path: Path) -> None:
    """The tables of two suites are written, and the text around them stays."""
    base, ours = tables.roles("table")
    results_of(record("a", base, 10.0), record("a", ours, 8.0)).write(tmp_path / "results/table.json")
    wide_results().write(tmp_path / "results/wide.json")
    page = tmp_path / "README.md"
    marked = "".join(
        f"before {name}\n<!-- table: results/{name}.json -->\nwhat stood here\n<!-- end of table -->\nafter\n"
        for name in ("table", "wide")
    )
    page.write_text(marked)
    assert report.main([str(page), "--check"]) == 1 and page.read_text() == marked
    assert report.main([str(page)]) == 0
    text = page.read_text()
    assert "what stood here" not in text and text.count("after") == 2 and "before wide" in text
    assert "| a (8, 64, 32, 16) |" in text and "| model up (8, 1024, 32, 16) |" in text
    for name in ("table", "table-roofline", "wide"):
        assert f"![{name}](results/{name}.png)" in text and (tmp_path / f"results/{name}.png").exists()
    assert report.main([str(page), "--check"]) == 0
    (tmp_path / "results/wide.png").unlink()
    assert report.main([str(page), "--check"]) == 1
    assert report.main([str(page)]) == 0 and report.main([str(page), "--check"]) == 0
    results_of(record("a", base, 10.0), record("a", ours, 7.0)).write(tmp_path / "results/table.json")
    assert report.main([str(page), "--check"]) == 1


def test_a_second_run_leaves_the_plots_to_the_first(tmp_path: Path) -> None:
    base, ours = tables.roles("table")
    for name, us in (("table", 8.0), ("table-second-run", 7.0)):
        results_of(record("a", base, 10.0), record("a", ours, us)).write(tmp_path / f"{name}.json")
    names = ("table", "table-second-run")
    page = tmp_path / "page.md"
    page.write_text("".join(f"<!-- table: {name}.json -->\n<!-- end of table -->\n" for name in names))
    assert report.main([str(page)]) == 0 and report.main([str(page), "--check"]) == 0
    text = page.read_text()
    assert "| 1.25 |" in text and "| 1.43 |" in text and text.count("![table](table.png)") == 1


TRITONBENCH = """\
(G, sizes);loop-latency;loop-tflops;fast (packed)-latency;fast (packed)-tflops;fast (packed)-speedup;none-latency
(8, 'zipf');0.2;50.0;0.1;100.0;2.0;not supported
(4, 'one');0.0124;1.0;"wrong; by
much";;;not supported
(2, 'one');0.09;10.0;0.18;5.0;0.5;not supported
average;0.1;20.3;0.093;35.0;0.83;
"""


def test_a_csv_of_tritonbench(tmp_path: Path) -> None:
    """A failed input is left out of the mean, and a provider without any number is left out of the table."""
    found = tritonbench.read(TRITONBENCH)
    assert found.names == ["8, zipf", "4, one", "2, one"] and tritonbench.plotted(found) == ["tflops", "speedup"]
    assert found.providers["fast (packed)"]["speedup"] == [2.0, None, 0.5]
    assert tables.of_tritonbench(found).splitlines() == [
        "| G, sizes | loop us | fast (packed) speedup |",
        "|---|---|---|",
        "| 8, zipf | 200 | 2.00 |",
        "| 4, one | 12.4 | - |",
        "| 2, one | 90.0 | 0.50 |",
        "| geometric mean of 2 of 3 inputs |  | 1.00 |",
    ]
    file, page = tmp_path / "op.csv", tmp_path / "page.md"
    file.write_text(TRITONBENCH)
    page.write_text("<!-- table: op.csv -->\n<!-- end of table -->\n")
    assert report.main([str(page)]) == 0 and report.main([str(page), "--check"]) == 0
    assert tables.of_tritonbench(found) in page.read_text() and "![op](op.png)" in page.read_text()
    assert tritonbench.is_of(tmp_path / "op.png", found)
    file.write_text(TRITONBENCH.replace(";50.0;", ";51.0;"))
    assert report.main([str(page), "--check"]) == 1


def test_a_csv_of_tritonbench_without_numbers() -> None:
    for text in ("x_val\naverage\n", "x_val;loop-latency\n1;no\naverage;\n"):
        assert tritonbench.plotted(tritonbench.read(text)) == []


def test_a_csv_of_tritonbench_whose_baseline_failed() -> None:
    text = "(n,);base-latency;ours-latency;ours-speedup;zero-speedup\n(1,);;0.01;nan;0.0\n(2,);;0.02;;0.0\n"
    assert tables.of_tritonbench(tritonbench.read(text)).splitlines() == [
        "| n, | base us | zero speedup |",
        "|---|---|---|",
        "| 1 | - | 0.00 |",
        "| 2 | - | 0.00 |",
        "| geometric mean of 0 of 2 inputs |  | - |",
    ]


def test_means_of_a_csv_of_tritonbench_are_over_the_same_inputs() -> None:
    text = "(x);base-latency;base-speedup;other-latency;other-speedup;ours-latency;ours-speedup;never-speedup\n"
    text += "a;1;;0.5;2;0.5;2;\nb;1;;unsupported;;0.1;10;\n"
    last = tables.of_tritonbench(tritonbench.read(text)).splitlines()[-1]
    assert last == "| geometric mean of 1 of 2 inputs |  | 2.00 | 2.00 |"
    complete = text.replace("unsupported;;", "0.5;2;")
    last = tables.of_tritonbench(tritonbench.read(complete)).splitlines()[-1]
    assert last == "| geometric mean |  | 2.00 | 4.47 |"
