"""Write the table of measurements in README.md from its JSON: python benchmarks/readme_table.py [--check]"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks/results/nvidia-h200/grouped_gemm.json"
START, END = f"<!-- table: {RESULTS.relative_to(ROOT)} -->\n", "<!-- end of table -->\n"
PROVIDERS = {  # column head: provider
    "`grouped_gemm`": "grouped_gemm",
    "basic": "basic",
    "persistent": "persistent",
    "persistent, table made beforehand": "persistent, table made beforehand",
    "loop of `torch.mm`": "loop of torch.mm",
    "one dense `torch.mm`": "one dense torch.mm, same FLOPs",
}


def table(results: dict[str, Any]) -> str:
    """The README's paragraph and table for one file of results."""
    meta, by = results["meta"], {}
    for r in results["records"]:
        by.setdefault((r["case"], r["layout"]), {})[r["provider"], r["timing"]] = r
    lines = [
        f"{meta['gpu']}, driver {meta['driver']}, torch {meta['torch']}, triton {meta['triton']}, helion "
        f"{meta['helion']}, {meta['date']}, bfloat16. Columns marked x: so many times as fast as `torch._grouped_mm` "
        "in the same run, as CUDA-graph replays with a cold L2 cache. Below 1 is slower.",
        "",
        "| case (G, M, N, K) | B | `torch._grouped_mm` us | "
        + " | ".join(f"{head} x" for head in PROVIDERS)
        + " | `grouped_gemm` TFLOP/s | GB/s | host us | torch's |",
        "|---" * (len(PROVIDERS) + 7) + "|",
    ]
    for (case, layout), r in by.items():
        base, ours = r["torch._grouped_mm", "graph"], r["grouped_gemm", "graph"]
        host = [r[provider, "eager"]["host_us"] for provider in ("grouped_gemm", "torch._grouped_mm")]
        dims = ", ".join(str(base[d]) for d in "GMNK")
        ratios = [f"{base['us'] / r[provider, 'graph']['us']:.2f}" for provider in PROVIDERS.values()]
        cells = [f"{case} ({dims})", f"`{layout}`", f"{base['us']:.0f}", *ratios]
        cells += [f"{ours['tflops']:.0f}", f"{ours['gbps']:.0f}", *(f"{us:.0f}" for us in host)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", f"Made by `{meta['command']}`.", ""])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="only say whether README.md matches, by the exit status")
    args = parser.parse_args()
    path = ROOT / "README.md"
    readme = path.read_text()
    before, rest = readme.split(START)
    after = rest.split(END)[1]
    wanted = before + START + table(json.loads(RESULTS.read_text())) + END + after
    if args.check:
        return int(wanted != readme)
    path.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
