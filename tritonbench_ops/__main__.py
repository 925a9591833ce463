"""`python -m tritonbench_ops --op NAME[,NAME...] [TritonBench's arguments]`: TritonBench with our operators.

Several operators run one after another in this process, because TritonBench would start a process for each, without
loading this package. A provider that raises or has a wrong result is shown as failed, and the others continue.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import importlib.util
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from moe_kernels.commands import run_and_exit
from moe_kernels.runtime.attributes import replaced
from tritonbench_ops.registration import OPERATORS, Refused, register


def run(args: Sequence[str] | None = None) -> int:
    """Run the operators named in `args` (default: the command line) and return the exit code.

    0: all operators ran, even if a provider failed; 1: one could not run; 2: wrong arguments, no TritonBench or no GPU.
    """
    own = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    own.add_argument("--op")
    own.add_argument("--isolate", action="store_true")
    options, theirs = own.parse_known_args(args)
    seen = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    seen.add_argument("--device", "-d", default="cuda")
    for name in ("--output", "--output-json", "--output-dir"):
        seen.add_argument(name)
    for flag in (("--cudagraph",), ("--help", "-h")):
        seen.add_argument(*flag, action="store_true")
    known, _ = seen.parse_known_args(theirs)

    operators = options.op.split(",") if options.op else []
    problem = None
    if "" in operators or not (operators or known.help):
        ours = sorted(file.parent.name for file in OPERATORS.glob("*/__init__.py"))
        problem = f"--op: expected names with commas between them, such as grouped_gemm,{','.join(ours)}"
    elif len(operators) > 1 and (known.output or known.output_json):
        problem = "--output and --output-json are for one operator; --output-dir takes a file of each"
    elif known.device == "cuda" and not torch.cuda.is_available() and not known.help:
        problem = "no CUDA GPU can be used here: add --device cpu, which checks the installation on small inputs"
    elif known.device == "cpu" and known.cudagraph and not known.help:
        problem = "--cudagraph: there are no CUDA graphs with --device cpu"
    elif known.output_dir and os.path.exists(known.output_dir) and not os.path.isdir(known.output_dir):
        problem = f"--output-dir: expected a folder, got the file {known.output_dir!r}"
    for option, file in (("--output", known.output), ("--output-json", known.output_json)):
        if not problem and file and (os.path.isdir(file) or not os.path.isdir(os.path.dirname(file) or ".")):
            problem = f"{option}: expected a file in a folder that exists, got {file!r}"
    if problem:
        print(f"python -m tritonbench_ops: {problem}", file=sys.stderr)
        return 2
    try:
        register()
    except ImportError as error:
        print(error, file=sys.stderr)
        return 2
    try:
        if known.output_dir:
            os.makedirs(known.output_dir, exist_ok=True)
    except OSError as error:
        print(f"python -m tritonbench_ops: --output-dir: {known.output_dir!r}: {error.strerror}", file=sys.stderr)
        return 2
    listed = {name.lower() for name in importlib.import_module("tritonbench.operators.op").list_operators()}
    if unknown := [name for name in operators if name.lower() not in listed]:
        print(f"python -m tritonbench_ops: --op: TritonBench has no {', '.join(unknown)}", file=sys.stderr)
        return 2
    failed, refused = 0, False
    for name in operators or [""]:
        command = [*(["--op", name] if name else []), "--keep-going", *theirs]
        if options.isolate:
            code = subprocess.run([sys.executable, "-m", "tritonbench_ops", *command], check=False).returncode
            failed, refused = failed + (code != 0), refused or code == 2
            continue
        try:
            with replaced(sys, argv=[sys.argv[0], *command]), failures_shown():
                _tritonbench_run()(command)
        except BrokenPipeError:
            raise
        except Refused as error:
            print(f"python -m tritonbench_ops: {error}", file=sys.stderr)
            refused = True
        except Exception:
            traceback.print_exc()
            failed += 1
    return 2 if refused else int(failed > 0)


@contextmanager
def failures_shown() -> Iterator[None]:
    """Show a wrong result as its provider's error, without times, in this context."""
    base: Any = importlib.import_module("tritonbench.utils.triton_op").BenchmarkOperator
    theirs = base.run

    @functools.wraps(theirs)
    def run(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            theirs(self, *args, **kwargs)
        finally:
            for _, providers in self.output.result:
                for metrics in providers.values():
                    if metrics.accuracy is False:
                        metrics.error_msg = "wrong result"
                        metrics.latency = metrics.tflops = metrics.speedup = None

    with replaced(base, run=run):
        yield


def _tritonbench_run() -> Callable[[list[str]], None]:
    """Return the function that runs a command line: in the package since late 2025, before that in run.py beside it."""
    found = importlib.import_module("tritonbench.utils.run_utils")
    if not hasattr(found, "tritonbench_run"):
        file = Path(str(importlib.import_module("tritonbench").__file__)).parents[1] / "run.py"
        spec = importlib.util.spec_from_file_location("tritonbench_run", file)
        assert spec is not None and spec.loader is not None
        found = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(found)
        return found.run
    return found.tritonbench_run


if __name__ == "__main__":
    run_and_exit(run)
