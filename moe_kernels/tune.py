"""`python -m moe_kernels tune`: search configs for the layers of a model on this GPU, and keep them as data.

For each problem a few neighbours of the rule's config are timed against each other. From the best of them Helion's
autotuner searches on, over several routings at once, within its share of the time. What it finds takes turns with the
rule's config, and is kept if it is faster; else the rule's is, so that the next process knows that this was looked at.
"""

from __future__ import annotations

import argparse
import datetime
import math
import os
import re
import shlex
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch import Tensor

from moe_kernels.models import MODELS, gemms, positive, shape
from moe_kernels.packing import group_offsets_from_sizes
from moe_kernels.testing import SizeKind, group_sizes_for, make_inputs
from moe_kernels.timing import gpu_is_lost, interleaved

if TYPE_CHECKING:
    from moe_kernels.configs import Choice, Problem
    from moe_kernels.configs.store import Bucket, Entry

TOKENS = (16, 512, 8192)
ROUTINGS: tuple[SizeKind, ...] = ("softmax", "zipf", "uniform")
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
GAIN = 1.01  # a config has to be this much faster than the rule's to replace it
_LEAST_SEARCH = 20  # seconds; what Helion's first round of configs takes
ROUNDS = 21
_INT32_MAX = 2**31 - 1

HELP = """\
Searches a config for each GEMM of a model's expert layers, or for given shapes, on this GPU, and writes it, or the
rule's where none is faster, to <out>/<gpu>.json, where the next process finds it. Needs a CUDA GPU that nothing else
uses.

The time is split evenly over what is left to do. Each problem first tries neighbours of the rule's config, then
Helion's own autotuner from the best of them, with softmax-skewed, zipf-skewed and uniform routing at once, and last
times the winner in turns with the rule's config. Helion looks at the clock between rounds only, so a problem may take
a minute longer than its share. What the file has for these versions of triton and helion is skipped (--force does it
anew), and Ctrl-C keeps what is done, so a search can be continued by the same command. With --op uniform or varied a
grid of configs (and torch.bmm) takes turns, in place of a search.

Exits with 0 when all is done or the time is spent, 2 without a GPU or on wrong arguments, 130 after Ctrl-C, otherwise
with 1."""


@dataclass(frozen=True)
class Task:
    """A problem to tune."""

    G: int
    M: int
    N: int
    K: int
    dtype: str
    transposed: bool
    op: str = "grouped_gemm"  # for "uniform" and "varied" M is the rows of each group or product

    def __str__(self) -> str:
        layout = "[G, N, K] transposed" if self.transposed else "[G, K, N]"
        return f"{self.op} G={self.G} M={self.M} N={self.N} K={self.K} {self.dtype}, B {layout}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `tune`."""
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--model", choices=MODELS, help="both GEMMs of this model's experts, for several token counts")
    what.add_argument(
        "--shapes", nargs="+", type=shape, metavar="G,M,N,K", help="groups, rows in all, columns, contraction"
    )
    parser.add_argument(
        "--op",
        choices=("grouped_gemm", "uniform", "varied"),
        default="grouped_gemm",
        help="what --shapes are of; for the last two G products of one size, and M is the rows of each",
    )
    parser.add_argument(
        "--tokens", nargs="+", type=positive, default=list(TOKENS), help="of --model (default: 16 512 8192)"
    )
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument(
        "--layout",
        choices=("gnk", "gkn", "both"),
        default="gnk",
        help="how B lies in memory: [G, N, K] viewed transposed, as modules hold their weights (default), or [G, K, N]",
    )
    parser.add_argument("--budget", type=seconds, default=600.0, help="for all of it: 90s, 10m (default) or 2h")
    parser.add_argument("--out", type=Path, metavar="DIR", help="default: the user's cache folder, see `info`")
    parser.add_argument("--force", action="store_true", help="tune again what is already there")


def main(options: argparse.Namespace) -> int:
    """Run the command; the exit code."""
    if (reason := _no_gpu()) is not None:
        print(f"tune needs a CUDA GPU: {reason}.", file=sys.stderr)
        return 2
    if options.model and options.op != "grouped_gemm":
        print(f"--model has shapes for grouped_gemm, not for {options.op}: give --shapes.", file=sys.stderr)
        return 2
    from moe_kernels.configs import store

    warnings.filterwarnings("ignore", "moe_kernels: no config has been tuned")
    device = torch.device("cuda", torch.cuda.current_device())
    gpu = store.gpu_of(device)
    file = store.file_in(options.out or store.cache_folder(), gpu.name)
    return tune(tasks(options), file, gpu.name, device, options.budget, options.force)


def tasks(options: argparse.Namespace) -> list[Task]:
    """What the command line asks for, no problem twice."""
    shapes: list[tuple[int, int, int, int]] = options.shapes or []
    if options.model:
        H, width, E, top_k = MODELS[options.model]
        shapes = [(E, tokens * top_k, N, K) for tokens in options.tokens for N, K in gemms(H, width).values()]
    layouts = {"gkn": (False,), "gnk": (True,), "both": (False, True)}[options.layout]
    return list(dict.fromkeys(Task(*shape, options.dtype, t, options.op) for shape in shapes for t in layouts))


def tune(todo: Sequence[Task], file: Path, gpu: str, device: torch.device, budget: float, force: bool = False) -> int:
    """Tune `todo` within `budget` seconds and write each result to `file` at once; the exit code."""
    from moe_kernels.configs import store

    deadline = time.monotonic() + budget
    begun = time.monotonic()
    print(f"Tuning {len(todo)} problems for {gpu} within {_duration(budget)}, into {file}", flush=True)
    failed = 0
    try:
        for i, task in enumerate(todo):
            name = f"[{i + 1}/{len(todo)}] {task}"
            if not force and (known := _known(task, file, gpu, device)) is not None:
                print(f"{name}: there already, {known.us:.1f} us (--force tunes it again)", flush=True)
                continue
            left = deadline - time.monotonic()
            if left <= 0:
                print(f"The time is spent; {len(todo) - i} problems are left. The same command goes on.")
                break
            share = left / (len(todo) - i)
            print(f"{name}: {_duration(share)} of the {_duration(left)} that are left", flush=True)
            try:
                entry = tune_one(task, device, share)
            except Exception as error:
                failed += 1
                print(f"  failed: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
                if gpu_is_lost(device):
                    print("  The GPU does not answer any more. The same command goes on.", file=sys.stderr)
                    break
                continue
            store.write(file, gpu, [entry])
            print(
                f"  {entry.us:.1f} us, the rule's config {entry.rule_us:.1f} us "
                f"({entry.rule_us / entry.us:.3f} times as fast): {entry.kernel}, block_m {entry.block_m}, "
                f"{entry.config}",
                flush=True,
            )
    except KeyboardInterrupt:
        print(f"\nInterrupted. What is done is in {file}; the same command goes on.", file=sys.stderr)
        return 130
    store.reload()
    print(f"{_duration(time.monotonic() - begun)} in all. Entries are in {file}.")
    return int(failed > 0)


def tune_one(task: Task, device: torch.device, share: float) -> Entry:
    """The best entry for `task` that is found in about `share` seconds."""
    from moe_kernels import configs, tune_forms
    from moe_kernels.configs import store

    if task.op != "grouped_gemm":
        return tune_forms.tune_one(task, device, share)
    until = time.monotonic() + share
    G, M = _fitting(task, device)
    if (G, M) != (task.G, task.M):
        print(f"  as G={G} M={M}, for which the weights fit")
    inputs = Inputs(replace(task, G=G, M=M), device)
    with configs.noted() as made:
        _plan(None, inputs)
    problem = replace(made[0][0], transposed=task.transposed, device=device)
    by_rule, known = configs.rule(problem), configs.choose(problem)
    start = list(unique([by_rule, known, *alternatives(problem)]))
    times = measure(start, inputs, rounds=7)
    best, us = min(zip(start, times, strict=True), key=lambda pair: pair[1])
    print(f"  {best.variant}, block_m {best.block_m}: {us:.1f} us; the rule's config: {times[0]:.1f} us", flush=True)
    # `jagged_tails` has one config, which another kernel's has to be better than.
    searched = [(choice, us) for choice, us in zip(start, times, strict=True) if choice.variant != "tails"]
    of_search = min(searched, key=lambda pair: pair[1])[0]
    near = [of_search, *neighbours(of_search, problem)]
    finalists = [by_rule, known, best]
    for_search = int(0.75 * (until - time.monotonic())) - 10  # Helion exceeds its budget by up to one round
    if for_search >= _LEAST_SEARCH:
        print(f"  Helion's autotuner, from {len(near)} configs: {_duration(for_search)}", flush=True)
        try:
            finalists.append(search(problem, near, inputs, for_search))
        except Exception as error:
            print(f"  Helion's autotuner failed: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            if gpu_is_lost(device):
                raise
    else:
        print("  too little time for Helion's autotuner: only neighbours of that config")
        finalists += near
    finalists = list(unique(finalists))
    times = measure(finalists, inputs, rounds=ROUNDS, until=math.inf if for_search >= _LEAST_SEARCH else until)
    rule_us = times[0]
    winner, us = min(zip(finalists, times, strict=True), key=lambda pair: pair[1])
    if us * GAIN > rule_us:
        winner, us = by_rule, rule_us
    if not math.isfinite(us):
        raise RuntimeError("no config works, not even the rule's")
    return store.Entry(
        kernel=winner.variant,
        bucket=configs.bucket_of(problem),
        block_m=winner.block_m,
        tma=winner.access.tma,
        config=concise(winner.config.config),
        us=round(us, 2),
        rule_us=round(rule_us, 2) if math.isfinite(rule_us) else round(us, 2),
        M=M,
        versions=store.installed_versions(),
        date=datetime.date.today().isoformat(),
        command=command(task),
    )


class Inputs:
    """The tensors of a task: one A_packed and B, and the offsets of each routing."""

    def __init__(self, task: Task, device: torch.device):
        dtype = DTYPES[task.dtype]
        sizes = [group_sizes_for(kind, task.G, task.M) for kind in ROUTINGS]
        self.A, self.B, _ = make_inputs(
            sizes[0], task.N, task.K, dtype=dtype, device=device, transposed=task.transposed
        )
        self.offsets = [group_offsets_from_sizes(torch.tensor(s, dtype=torch.int32, device=device)) for s in sizes]
        # Zeros, because a search compares what was there before with what a config left.
        self.outs = [torch.zeros(task.M, task.N, dtype=dtype, device=device) for _ in sizes]

    def tensors(self) -> Iterator[tuple[Tensor, Tensor, Tensor, None, Tensor]]:
        """The arguments of a plan, for each routing."""
        for offsets, out in zip(self.offsets, self.outs, strict=True):
            yield self.A, self.B, offsets, None, out


def alternatives(problem: Problem) -> list[Choice]:
    """The rule's choices for `problem` at other heights, and by the other kernel."""
    from moe_kernels import configs

    found = [configs.rule(problem, "persistent", block_m) for block_m in (64, 128) if problem.rows >= 32]
    tails = configs.rule(problem, "tails")
    found += [tails] if problem.rows >= 32 and tails.access.tma_out else []
    by_rule = configs.rule(problem, "basic").block_m
    heights = {by_rule // 2, by_rule, by_rule * 2} & {16, 32, 64, 128}
    found += [configs.rule(problem, "basic", block_m) for block_m in sorted(heights)]
    return [choice for choice in found if configs.why_illegal(choice, problem) is None]


def neighbours(choice: Choice, problem: Problem) -> list[Choice]:
    """Configs near that of `choice`, of the same kernel and height."""
    from moe_kernels import configs

    values: dict[str, Any] = choice.config.config
    n, k = (0 if choice.variant == "persistent" else 1), -1
    found = [_with(choice, l2_groupings=[size]) for size in (1, 4, 8, 16)]
    found += [_with(choice, num_stages=values["num_stages"] + more) for more in (-1, 1) if values["num_stages"] > 1]
    for index in (n, k):
        size = values["block_sizes"][index]
        found += [_with(choice, block=(index, changed)) for changed in (size // 2, size * 2)]
    found += [_with(choice, num_warps=warps) for warps in (4, 8)]
    return [near for near in list(unique([choice, *found]))[1:] if configs.why_illegal(near, problem) is None]


def search(problem: Problem, seeds: Sequence[Choice], inputs: Inputs, budget: int) -> Choice:
    """What Helion's autotuner finds in about `budget` seconds, for the kernel and height of the first of `seeds`."""
    import helion

    from moe_kernels import configs
    from moe_kernels.kernels import launch

    seed, tma_out = seeds[0], seeds[0].access.tma_out
    if tma_out:
        # Helion copies arguments, of which windows overlap: it searches with masked stores.
        problem = replace(problem, tma_out=False)
        seeds = [_storing(choice, tma_out=False) for choice in seeds]
    start = seeds[0]
    kernel, arg_sets = kernel_calls(start, inputs)
    kept = {"indexing": start.config.config["indexing"]}
    if start.config.config.get("host_tensor_descriptors"):
        kept["host_tensor_descriptors"] = True

    def usable(config: helion.Config) -> helion.Config | None:
        # `block_m` is in the arguments: as a constant, or as the number of slots.
        return config if configs.why_illegal(replace(start, config=config), problem) is None else None

    def baseline(*args: Any) -> Any:
        return launch._compiled(launch._variant(kernel, start.access.wide, problem.tf32), args, start.config)(*args)

    tuned: helion.Kernel[Any] = helion.kernel(
        kernel.fn,
        static_shapes=False,
        index_dtype=torch.int64 if start.access.wide else torch.int32,
        dot_precision="tf32" if problem.tf32 else "ieee",
        autotune_effort="quick",  # small rounds: the clock is looked at between them
        autotune_max_generations=50,
        autotune_budget_seconds=budget,
        autotune_initial_population_strategy="from_random",
        autotune_seed_configs=[seed.config for seed in seeds],
        autotune_config_overrides=kept,
        autotune_config_filter=usable,
        # A grid that the device counts has to be walked by a fixed number of workers.
        autotune_force_persistent=start.variant == "persistent",
        autotune_baseline_fn=baseline,
        autotune_baseline_accuracy_check_fn=check_close,
        # `out` is written in place, which Helion's separate benchmark process cannot do. No config of these kernels
        # reaches out of bounds, so none takes this process down.
        autotune_benchmark_subprocess=False,
        autotune_precompile="fork",
        autotune_ignore_errors=True,
        autotune_progress_bar=True,
        autotune_random_seed=0,
    )
    config = tuned.autotune_multi(arg_sets, cache_tag=f"moe_kernels {start.variant} {start.block_m}")
    parts = seed.config.config.get("epilogue_subtile")
    found = replace(start, config=helion.Config(**config.config), entry=None, source="search")
    return _storing(found, tma_out=True, epilogue_subtile=parts) if tma_out else found


def kernel_calls(choice: Choice, inputs: Inputs) -> tuple[Any, list[tuple[Any, ...]]]:
    """The Helion kernel that multiplies under `choice`, and its arguments for each routing."""
    from moe_kernels.kernels import grouped_gemm
    from moe_kernels.kernels.launch import compile_kernel

    calls: list[tuple[Any, tuple[Any, ...]]] = []

    def noting(
        kernel: Any,
        args: Sequence[Any],
        config: Any,
        *,
        prepare: Callable[..., Sequence[Any]] = lambda *args: args,
        **options: Any,
    ) -> Callable[..., Any]:
        run = compile_kernel(kernel, args, config, prepare=prepare, **options)

        def call(*args: Any) -> Any:
            if config is choice.config:
                calls.append((kernel, tuple(prepare(*args))))
            return run(*args)

        return call

    with mock.patch.object(grouped_gemm, "compile_kernel", noting):
        plan = _plan(choice, inputs)
    for tensors in inputs.tensors():
        plan(*tensors)
    for out in inputs.outs:
        out.zero_()
    return calls[0][0], [args for _, args in calls]


def check_close(actual: Any, expected: Any) -> None:
    """Raise AssertionError if one config's result differs from another's by more than roundings.

    Helion compares the result, and then all arguments, of which `out` is the only one that changes and is the result.
    """
    if not isinstance(actual, Tensor):
        return
    tolerance = max(4 * torch.finfo(actual.dtype).eps, 1e-4)
    allowed = expected.abs().float().add_(1).mul_(tolerance)
    if not bool(((actual.float() - expected).abs_() <= allowed).all()):
        raise AssertionError("the result differs from that of the rule's config")


def measure(choices: Sequence[Choice], inputs: Inputs, rounds: int, until: float = math.inf) -> list[float]:
    """Each choice's microseconds, in turns: the geometric mean over the routings of medians.

    inf is for a choice that does not work, has another result than the first that does, or after the time `until`
    would have to be compiled; the first three are looked at whatever the time.
    """
    calls: dict[tuple[int, int], Callable[[], None]] = {}
    expected: list[Tensor] = []
    for i, choice in enumerate(choices):
        if i >= 3 and time.monotonic() > until:
            break
        try:
            plan = _plan(choice, inputs)
            outs = []
            for tensors in inputs.tensors():
                tensors[-1].fill_(math.nan)
                plan(*tensors)
                plan(*tensors)
                outs.append(tensors[-1])
            for out, right in zip(outs, expected or outs, strict=True):
                check_close(out, right)
            expected = expected or [out.clone() for out in outs]
            calls |= {(i, j): _bound(plan, tensors) for j, tensors in enumerate(inputs.tensors())}
        except Exception as error:
            reason = str(error).split("\n")[0][:200]
            print(f"  does not work: {choice.variant}, {choice.config.config} ({type(error).__name__}: {reason})")
    for out in inputs.outs:
        out.zero_()
    medians = interleaved(calls, rounds, inputs.A.device)
    return [
        math.prod(medians[i, j] for j in range(len(ROUTINGS))) ** (1 / len(ROUTINGS)) if (i, 0) in calls else math.inf
        for i in range(len(choices))
    ]


def concise(values: dict[str, Any]) -> dict[str, Any]:
    """A config without how memory is accessed, and without options that only repeat Helion's defaults."""
    neutral: dict[str, tuple[Any, ...]] = {
        "range_unroll_factors": (0,),
        "range_num_stages": (0,),
        "load_eviction_policies": ("",),
        "load_cache_modifiers": ("",),
        "store_cache_modifiers": ("",),
        "range_flattens": (None,),
        "range_multi_buffers": (None,),
        "range_warp_specializes": (None,),
        "loop_orders": ([0, 1],),
    }
    kept = {}
    for name, value in values.items():
        if name in ("indexing", "host_tensor_descriptors"):
            continue
        alone = value is None or value == [] or (name, value) == ("num_sm_multiplier", 1)
        if alone or (isinstance(value, list) and all(item in neutral.get(name, ()) for item in value)):
            continue
        kept[name] = value
    return kept


def unique(choices: Sequence[Choice]) -> Iterator[Choice]:
    """Each choice once, whatever its source."""
    seen = []
    for choice in choices:
        key = (choice.variant, choice.block_m, concise(choice.config.config))
        if key not in seen:
            seen.append(key)
            yield choice


def seconds(text: str) -> float:
    """The seconds in "90s", "10m", "2h" or "90"."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text.strip())
    if match is None or float(match[1]) == 0:
        raise argparse.ArgumentTypeError(f"expected a time such as 90s, 10m or 2h, got {text!r}")
    return float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[match[2]]


def _storing(choice: Choice, *, tma_out: bool, epilogue_subtile: int | None = None) -> Choice:
    """`choice` with or without TMA stores, in so many parts."""
    from moe_kernels import configs

    access = choice.access._replace(tma_out=tma_out)
    indexing = configs._indexing(choice.variant, False, access)
    return _with(replace(choice, access=access), epilogue_subtile=epilogue_subtile, **indexing)


def _with(choice: Choice, *, block: tuple[int, int] | None = None, **changed: Any) -> Choice:
    """`choice` with something of its config changed; `block` is (index, size)."""
    import helion

    values = {name: value for name, value in {**choice.config.config, **changed}.items() if value is not None}
    blocks = list(values["block_sizes"])
    if block is not None:
        blocks[block[0]] = block[1]
    values["block_sizes"] = blocks
    return replace(choice, config=helion.Config(**values))


def _plan(choice: Choice | None, inputs: Inputs) -> Callable[..., None]:
    """What `grouped_gemm` would call for these tensors; under the rule without a choice."""
    from moe_kernels import configs
    from moe_kernels.kernels import grouped_gemm

    with nullcontext() if choice is None else configs.pinned(choice):
        plan: Callable[..., None] = grouped_gemm._plan("auto", *next(inputs.tensors()))
    return plan


def _bound(plan: Callable[..., None], tensors: tuple[Any, ...]) -> Callable[[], None]:
    return lambda: plan(*tensors)


def _bucket(task: Task, G: int, M: int) -> Bucket:
    from moe_kernels import configs
    from moe_kernels.configs import store
    from moe_kernels.kernels.launch import tf32_allowed

    dtype = DTYPES[task.dtype]
    name = store.dtype_label(dtype, tf32_allowed(dtype))
    return store.Bucket(name, task.transposed, configs.floor_power_of_2(M // G), task.N, task.K, G)


def _known(task: Task, file: Path, gpu: str, device: torch.device) -> Entry | None:
    """The entry for `task` that `file` has for the versions installed."""
    from moe_kernels import tune_forms
    from moe_kernels.configs import store

    bucket = _bucket(task, *_fitting(task, device)) if task.op == "grouped_gemm" else tune_forms.bucket(task)
    minor = store.installed_versions().minor
    try:
        entries = store.read(file, gpu)
    except store.Skipped:
        return None  # `write` says so, and puts the file aside
    return next((e for e in entries if e.bucket == bucket and e.versions.minor == minor), None)


def _fitting(task: Task, device: torch.device) -> tuple[int, int]:
    """G and M, both halved until B has no more elements than Helion reads by TMA, and a search fits into memory."""
    memory = torch.cuda.get_device_properties(device).total_memory
    G, M = task.G, task.M
    while G > 1:
        # Helion keeps a copy of the arguments for each routing.
        needed = (2 + len(ROUTINGS)) * DTYPES[task.dtype].itemsize * (G * task.N * task.K + M * (task.K + 3 * task.N))
        if G * task.N * task.K <= _INT32_MAX and needed < 0.8 * memory:
            break
        G, M = G // 2, max(1, M // 2)
    return G, M


def _no_gpu() -> str | None:
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "TRITON_INTERPRET=1 makes Triton run on the CPU; unset it"
    if not torch.cuda.is_available():
        return "torch finds none (`python -m moe_kernels info` shows what it does find)"
    return None


def command(task: Task) -> str:
    """A command that tunes this problem alone."""
    shape = f"{task.G},{task.M},{task.N},{task.K}"
    layout = "gnk" if task.transposed else "gkn"
    op = [] if task.op == "grouped_gemm" else ["--op", task.op]
    words = [*op, "--shapes", shape, "--dtype", task.dtype, "--layout", layout]
    return "python -m moe_kernels tune " + shlex.join(words)


def _duration(spent: float) -> str:
    minutes, rest = divmod(round(spent), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
