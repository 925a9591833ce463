"""`python -m moe_kernels tune`: search configs for the layers of a model on this GPU, and keep them as data.

A task of any operator has a problem, choices to try for it, and calls under a choice. The choices are timed in turns.
Then follow choices near the fastest, or the result of Helion's autotuner, which starts from these and has a share of
the time, over several routings at once. The best choices are timed in turns with the rule's config once more. The
fastest is stored if it is faster than the rule's; otherwise the rule's is, which marks the problem as tuned.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import math
import os
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import geometric_mean
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from moe_kernels import requirements, rules
from moe_kernels.models import MODELS, gemms, positive, shape
from moe_kernels.ops.batched import UNIFORM_GROUPED_GEMM, VariedLaunch, varied_launch
from moe_kernels.ops.products import GROUPED_GEMM
from moe_kernels.packing import group_offsets_from_sizes
from moe_kernels.rules import grouped, uniform, varied
from moe_kernels.rules.config import Config
from moe_kernels.runtime import cache, targets, torch_internals
from moe_kernels.runtime.attributes import replaced
from moe_kernels.runtime.plan import Builder, Request
from moe_kernels.runtime.signature import Operator, symbolic
from moe_kernels.runtime.symbolic import INT32_MAX, SymbolicInt, SymbolicTensor, value
from moe_kernels.testing import SizeKind, group_sizes_for, make_inputs
from moe_kernels.timing import Call, gpu_is_lost, interleaved
from moe_kernels.tuning import entries
from moe_kernels.tuning.entries import Bucket, Entry

if TYPE_CHECKING:
    import helion

TOKENS = (16, 512, 8192)
ROUTINGS: tuple[SizeKind, ...] = ("softmax", "zipf", "uniform")
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
GAIN = 1.01  # the speedup over the rule's config that a config needs to replace it
FIRST_ROUNDS, ROUNDS = 7, 21
_FINALISTS = 5
_LEAST_SEARCH = 20  # seconds that Helion's first round of configs takes

HELP = """\
Searches a config for each GEMM of a model's expert layers, or for given shapes, on this GPU. The fastest config, or the
rule's if none is faster, is written to <output>/<gpu>.json. The next process finds it in the default folder; for
another folder, set MOE_KERNELS_CONFIG_DIR to it. Needs a CUDA GPU that nothing else uses.

The remaining time is divided evenly between the remaining problems. A problem first tries neighbours of the rule's
config, then Helion's autotuner from the best of them, under softmax-skewed, zipf-skewed and uniform routing at once. At
the end the winner and the rule's config are timed in turns. Helion checks the clock only between rounds, so a problem
may take a minute longer than its share. It searches with fewer groups if weights have 2**31 elements or more, but all
times are of all groups. Entries of the file for these versions of triton and helion are skipped (--force tunes them
again). Ctrl-C keeps what is done, and the same command continues. With --op uniform or varied, a grid of configs (and
torch.bmm) is timed in turns, without a search.

Exits with 0 if all is done or the time is over, 2 without a GPU or for wrong arguments, 130 after Ctrl-C, otherwise
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
    op: str = "grouped_gemm"  # for "uniform" and "varied", M is the number of rows per group or product

    def __str__(self) -> str:
        layout = "[G, N, K] transposed" if self.transposed else "[G, K, N]"
        return f"{self.op} G={self.G} M={self.M} N={self.N} K={self.K} {self.dtype}, B {layout}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `tune`."""
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--model", choices=MODELS, help="both GEMMs of this model's experts, for several token counts")
    what.add_argument(
        "--shapes", nargs="+", type=shape, metavar="G,M,N,K", help="groups, total rows, columns, contraction"
    )
    parser.add_argument(
        "--op",
        choices=WORKLOADS,
        default="grouped_gemm",
        help="the product of --shapes; for uniform and varied, G products of one size with M rows each",
    )
    parser.add_argument("--tokens", nargs="+", type=positive, help="token counts for --model (default: 16 512 8192)")
    parser.add_argument(
        "--dtype", choices=DTYPES, default="bfloat16", help="of operands and result (default: bfloat16)"
    )
    parser.add_argument(
        "--layout",
        choices=("gnk", "gkn", "both"),
        default="gnk",
        help="memory layout of B: gnk is a transposed view of [G, N, K], as in modules (default); gkn is [G, K, N]",
    )
    parser.add_argument("--budget", type=seconds, default=600.0, help="time for all problems: 90s, 10m (default) or 2h")
    parser.add_argument(
        "--output",
        type=os.path.expanduser,
        metavar="DIR",
        help="default: the folder in MOE_KERNELS_CONFIG_DIR, or else the user's cache folder, see `info`",
    )
    parser.add_argument("--force", action="store_true", help="tune existing entries again")


def main(options: argparse.Namespace) -> int:
    """Run the command and return the exit code."""
    if (reason := _no_gpu()) is not None:
        print(f"tune needs a CUDA GPU: {reason}.", file=sys.stderr)
        return 2
    if options.model and options.op != "grouped_gemm":
        print(f"--model has shapes for grouped_gemm, not for {options.op}: give --shapes.", file=sys.stderr)
        return 2
    if options.shapes and options.tokens:
        print("--tokens is for --model; in --shapes, M is the number of rows.", file=sys.stderr)
        return 2
    if options.output == "":
        print("--output: expected a folder, got an empty name.", file=sys.stderr)
        return 2
    warnings.filterwarnings("ignore", "moe_kernels: no config has been tuned")
    device = torch.device("cuda", torch.cuda.current_device())
    gpu = targets.of_device(device.type, device.index).name
    folders = entries.folders() if options.output is None else [Path(options.output)]
    if not folders:
        print("The user has no home folder: give --output.", file=sys.stderr)
        return 2
    return tune(tasks(options), entries.file_in(folders[0], gpu), gpu, device, options.budget, options.force)


def tasks(options: argparse.Namespace) -> list[Task]:
    """Return the tasks of the command line, one for each entry that they lead to."""
    shapes: list[tuple[int, int, int, int]] = options.shapes or []
    if options.model:
        H, width, E, top_k = MODELS[options.model]
        shapes = [(E, tokens * top_k, N, K) for tokens in options.tokens or TOKENS for N, K in gemms(H, width).values()]
    layouts = {"gkn": (False,), "gnk": (True,), "both": (False, True)}[options.layout]
    found: dict[Bucket, Task] = {}
    for sizes, transposed in itertools.product(shapes, layouts):
        task = Task(*sizes, options.dtype, transposed, options.op)
        first = found.setdefault(bucket(task), task)
        if first != task:
            print(f"{task}: has the same entry as M={first.M}")
    return list(found.values())


def tune(todo: Sequence[Task], file: Path, gpu: str, device: torch.device, budget: float, force: bool = False) -> int:
    """Tune `todo` within `budget` seconds, write each result to `file` immediately, and return the exit code."""
    begun = time.monotonic()
    deadline = begun + budget
    print(f"Tuning {len(todo)} problems for {gpu} within {_duration(budget)}, into {file}", flush=True)
    failed = 0
    try:
        for i, task in enumerate(todo):
            name = f"[{i + 1}/{len(todo)}] {task}"
            tuned = {} if force else _tuned(file, gpu)  # each time, as another process may add entries
            if (known := tuned.get(bucket(task))) is not None:
                print(f"{name}: already tuned with M={known.M}, {known.us:.1f} us (--force tunes it again)", flush=True)
                continue
            left, remaining = deadline - time.monotonic(), sum(bucket(one) not in tuned for one in todo[i:])
            if left <= 0:
                print(f"The time is over; {remaining} problems are left. The same command continues.")
                break
            share = left / remaining
            print(f"{name}: {_duration(share)} of the remaining {_duration(left)}", flush=True)
            try:
                entries.write(file, gpu, [])  # what would fail after the search fails before it
                entry = tune_one(task, device, share)
                entries.write(file, gpu, [entry])
            except Exception as error:
                failed += 1
                print(f"  failed: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
                if gpu_is_lost(device):
                    print("  The GPU does not respond any more. The same command continues.", file=sys.stderr)
                    break
                continue
            print(
                f"  {entry.us:.1f} us, the rule's config {entry.rule_us:.1f} us "
                f"(speedup {entry.rule_us / entry.us:.3f}): {entry.kernel}, block_m {entry.block_m}, "
                f"{entry.config}",
                flush=True,
            )
    except KeyboardInterrupt:
        print(f"\nInterrupted. Finished entries are in {file}; the same command continues.", file=sys.stderr)
        return 130
    cache.reload()
    where = f"Entries are in {file}." if file.exists() else "There are no entries."
    print(f"{_duration(time.monotonic() - begun)} in all. {where}")
    return int(failed > 0)


@dataclass(frozen=True)
class Workload:
    """The parts of an operator that tuning needs. A choice is a `Choice` of the operator's rules."""

    choices: Sequence[Any]  # to try; the first is the rule's
    calls: Callable[[Any], Sequence[Call]]  # choice -> its calls, one per routing; each returns the result
    near: Callable[[Sequence[Any], float], Iterable[Any]]  # working choices, fastest first, and deadline -> more
    stored: Callable[[Any], dict[str, Any]]  # choice -> kernel, block_m, tma and config of its entry


def tune_one(task: Task, device: torch.device, share: float) -> Entry:
    """Return the best entry for `task` that is found in about `share` seconds."""
    until = time.monotonic() + share
    work = WORKLOADS[task.op](task, device)
    trials = Trials(work, device, until)
    trials.add(work.choices, at_least=3)
    times = trials.times(FIRST_ROUNDS)
    rule, best = work.choices[0], sorted(times, key=lambda choice: times[choice])
    if best:
        of = work.stored(best[0])
        by_rule = f"{times[rule]:.1f} us" if rule in times else "does not work"
        print(f"  {of['kernel']}, block_m {of['block_m']}: {times[best[0]]:.1f} us; the rule's config: {by_rule}")
    found = trials.add(work.near(best, until), at_least=1)
    times = trials.times(ROUNDS, [rule, *best[:_FINALISTS], *found])
    if not times:
        raise RuntimeError("no config works, not even the rule's")
    winner = min(times, key=lambda choice: times[choice])
    rule_us = times.get(rule, times[winner])
    if rule in times and times[winner] * GAIN > rule_us:
        winner = rule
    return entry_for(task, work.stored(winner), round(times[winner], 2), round(rule_us, 2))


def entry_for(task: Task, chosen: dict[str, Any], us: float = math.nan, rule_us: float = math.nan) -> Entry:
    """Return the entry of `task` with the fields of a choice, as `stored` returns them, and its times if it has any."""
    return Entry(
        bucket=bucket(task),
        us=us,
        rule_us=rule_us,
        M=task.M if task.op == "grouped_gemm" else task.G * task.M,
        versions=entries.installed_versions(),
        date=datetime.date.today().isoformat(),
        command=command(task),
        **chosen,
    )


class Trials:
    """The choices tried so far, and the calls of those that work, to be timed in turns."""

    def __init__(self, work: Workload, device: torch.device, until: float):
        self.work, self.device, self.until = work, device, until
        self.tried: set[Any] = set()
        self.calls: dict[Any, Sequence[Call]] = {}
        self.expected: list[Tensor] = []

    def add(self, choices: Iterable[Any], at_least: int) -> list[Any]:
        """Prepare calls of the new choices; return those that work with the result of the first one.

        The first `at_least` new choices are tried even after the deadline.
        """
        listed = [choice for choice in dict.fromkeys(choices) if choice not in self.tried]
        for i, choice in enumerate(listed):
            if i >= at_least and time.monotonic() > self.until:
                print(f"  the time is over: {len(listed) - i} of {len(listed)} configs were not timed")
                break
            self.tried.add(choice)
            try:
                self.calls[choice] = self._checked(choice)
            except Exception as error:
                of, reason = self.work.stored(choice), str(error).split("\n")[0][:200]
                print(f"  does not work: {of['kernel']}, {of['config']} ({type(error).__name__}: {reason})", flush=True)
                if gpu_is_lost(self.device):
                    raise
        return [choice for choice in listed if choice in self.calls]

    def _checked(self, choice: Any) -> Sequence[Call]:
        with _poisoned():
            outs = [call() for call in self.work.calls(choice)]
        for out, right in zip(outs, self.expected or outs, strict=True):
            check_close(out, right)
        self.expected = self.expected or [out.clone() for out in outs]
        calls = self.work.calls(choice)
        for call in calls:
            call()
        return calls

    def times(self, rounds: int, choices: Iterable[Any] | None = None) -> dict[Any, float]:
        """Map choices to microseconds per call: geometric means, over routings, of medians, timed in turns."""
        chosen = [choice for choice in dict.fromkeys(choices or self.calls) if choice in self.calls]
        calls = {(choice, j): call for choice in chosen for j, call in enumerate(self.calls[choice])}
        medians = interleaved(calls, rounds, self.device)
        return {choice: geometric_mean(medians[choice, j] for j in range(len(self.calls[choice]))) for choice in chosen}


@contextmanager
def _poisoned() -> Iterator[None]:
    """Fill new floating-point tensors of plans with NaN in this context, to detect configs that skip elements."""
    allocator = torch_internals.allocator

    def poisoned(device: torch.device) -> Callable[..., Tensor]:
        allocate = allocator(device)

        def allocated(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            made = allocate(shape, strides, dtype)
            return made.fill_(math.nan) if dtype.is_floating_point else made

        return allocated

    with replaced(torch_internals, allocator=poisoned):
        yield


def check_close(actual: Any, expected: Any) -> None:
    """Raise AssertionError if one config's result differs from another's by more than rounding.

    Helion also calls this for the tuple of all arguments, which is ignored: only `out` changes, which is the result.
    """
    if not isinstance(actual, Tensor):
        return
    tolerance = max(4 * torch.finfo(actual.dtype).eps, 1e-4)
    allowed = expected.abs().float().add_(1).mul_(tolerance)
    if not bool(((actual.float() - expected).abs_() <= allowed).all()):
        raise AssertionError("the result differs from that of the rule's config")


@dataclass(frozen=True)
class Inputs:
    """Calls of an operator that share a plan: the tensors of each routing, and the options."""

    operator: Operator
    tensors: Sequence[tuple[Any, ...]]
    options: Any

    def steps(self) -> list[Any]:
        """Return the steps of the plan, with requests in place of binaries; nothing is compiled."""
        first = self.tensors[0]
        inputs = symbolic(self.operator, first, self.options)
        builder, _ = cache.build_steps(self.operator, inputs, self.options, targets.of_tensor(first[0]))
        return builder.steps

    def problem(self) -> Any:
        """Return the problem for which the plan first requests a choice."""
        with rules.record() as made:
            self.steps()
        return made[0][0]

    def calls(self, choice: Any) -> list[Call]:
        """Return the calls with `choice` forced; their plan stays out of the plan cache."""
        with cache.isolated(), rules.force(choice):
            run = cache.find(self.operator, self.tensors[0], self.options)
        return [partial(run, *tensors) for tensors in self.tensors]


def grouped_inputs(task: Task, device: torch.device) -> Inputs:
    """Return the calls of `grouped_gemm`, with one A_packed and B, and the offsets of each routing."""
    dtype = DTYPES[task.dtype]
    sizes = [group_sizes_for(kind, task.G, task.M) for kind in ROUTINGS]
    A, B, _ = make_inputs(sizes[0], task.N, task.K, dtype=dtype, device=device, transposed=task.transposed)
    offsets = [group_offsets_from_sizes(torch.tensor(s, dtype=torch.int32, device=device)) for s in sizes]
    # Variant "auto" computes a single weight by one dense product instead of a kernel.
    return Inputs(GROUPED_GEMM, [(A, B, each, None) for each in offsets], (dtype, "persistent"))


def grouped_workload(task: Task, device: torch.device) -> Workload:
    """Return the workload of `grouped_gemm`."""
    inputs = grouped_inputs(task, device)
    problem = inputs.problem()

    def near(best: Sequence[rules.Choice], until: float) -> list[rules.Choice]:
        # `jagged_tails` and `jagged_tall` have a single config, so the search starts from another kernel's.
        start = next((choice for choice in best if choice.variant in ("basic", "persistent")), None)
        if start is None:
            return []
        seeds = [start, *neighbours(start, problem)]
        if min(problem.N, problem.K) < 16:  # no block fits: see `within`
            return seeds
        budget = int(0.75 * (until - time.monotonic())) - 10  # Helion exceeds its budget by up to one round
        if budget < _LEAST_SEARCH:
            print("  too little time for Helion's autotuner: only neighbours of that config")
            return seeds
        found = None
        try:
            found = search_a_part(task, inputs, problem, seeds, budget, device)
        except Exception as error:
            print(f"  Helion's autotuner failed: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            if gpu_is_lost(device):
                raise
        return seeds if found is None else [found]

    return Workload(
        choices=[grouped.rule(problem), grouped.choose(problem), *alternatives(problem)],
        calls=inputs.calls,
        near=near,
        stored=stored,
    )


def search_a_part(
    task: Task,
    inputs: Inputs,
    problem: grouped.Problem,
    seeds: Sequence[rules.Choice],
    budget: int,
    device: torch.device,
) -> rules.Choice | None:
    """Return the result of Helion's autotuner for as many groups of `task` as it can take, in a form for all of them.

    None if the config of seeds[0] cannot be used for so few groups, or the result not for all.
    """
    part = fitting_part(task, device)
    searched, problem_of_part = inputs, problem
    if part != task:
        limits = "weights of fewer elements than 2**31, and memory"
        print(f"  searched with G={part.G} M={part.M}: Helion's autotuner needs {limits}")
        searched = grouped_inputs(part, device)
        problem_of_part = searched.problem()
    starts = [grouped.adapted(entry_for(task, stored(seed)), problem_of_part) for seed in seeds]
    if starts[0] is None:
        print("  so few groups need another kind of config: only neighbours of that config")
        return None
    print(f"  Helion's autotuner, from {len(seeds)} configs: {_duration(budget)}", flush=True)
    found = search(problem_of_part, [start for start in starts if start is not None], searched, budget)
    return grouped.adapted(entry_for(part, stored(found)), problem)


def stored(choice: rules.Choice) -> dict[str, Any]:
    """Return the fields of an entry for a choice."""
    config = varied.stored(choice) if choice.variant == "varied" else concise(choice.config.config)
    return {"kernel": choice.variant, "block_m": choice.block_m, "tma": choice.addressing.tma, "config": config}


def alternatives(problem: grouped.Problem) -> list[rules.Choice]:
    """Return the rule's choices for `problem` with each kernel and several tile heights."""
    found = [grouped.rule(problem, "persistent", block_m) for block_m in (64, 128) if problem.rows >= 32]
    two_sizes = [grouped.rule(problem, variant) for variant in ("tails", "tall") if problem.rows >= 32]
    found += [choice for choice in two_sizes if choice.addressing.tma_A]
    by_rule = grouped.rule(problem, "basic").block_m
    heights = {by_rule // 2, by_rule, by_rule * 2} & {16, 32, 64, 128}
    found += [grouped.rule(problem, "basic", block_m) for block_m in sorted(heights)]
    return [choice for choice in found if grouped.why_illegal(choice, problem) is None]


def neighbours(choice: rules.Choice, problem: grouped.Problem) -> list[rules.Choice]:
    """Return choices with configs near that of `choice`, of the same kernel and tile height."""
    values: dict[str, Any] = choice.config.config
    found = [_with(choice, l2_groupings=[size]) for size in (1, 4, 8, 16)]
    found += [_with(choice, num_stages=values["num_stages"] + more) for more in (-1, 1) if values["num_stages"] > 1]
    blocks = values["block_sizes"]
    for i in (0 if choice.variant == "persistent" else 1, len(blocks) - 1):  # along N, and along K
        for size in (blocks[i] // 2, blocks[i] * 2):
            found.append(_with(choice, block_sizes=[*blocks[:i], size, *blocks[i + 1 :]]))
    found += [_with(choice, num_warps=warps) for warps in (4, 8)]
    return [near for near in dict.fromkeys(found) if near != choice and grouped.why_illegal(near, problem) is None]


def search(problem: grouped.Problem, seeds: Sequence[rules.Choice], inputs: Inputs, budget: int) -> rules.Choice:
    """Return the result of Helion's autotuner after about `budget` seconds, with the kernel and height of seeds[0]."""
    import helion

    seed, tma_out = seeds[0], seeds[0].addressing.tma_out
    if tma_out:
        # Helion copies arguments, which the overlapping windows of TMA stores forbid: search with masked stores.
        problem = replace(problem, tma_out=False)
        seeds = [storing(choice, tma_out=False) for choice in seeds]
    seeds = [within(choice, problem) for choice in seeds]
    start = seeds[0]
    kernel, arg_sets = kernel_calls(start, inputs)
    kept = {name: start.config.config[name] for name in _ADDRESSING if name in start.config.config}

    def usable(config: helion.Config) -> helion.Config | None:
        # `block_m` is fixed by the arguments, as a constant or through the number of tiles.
        choice = replace(start, config=Config(**config.config))
        fits = grouped.why_illegal(choice, problem) is None and within(choice, problem) == choice
        return config if fits else None

    def baseline(*args: Any) -> Any:
        return tuned.bind(args).compile_config(helion.Config(**start.config.config))(*args)

    tuned: helion.Kernel[Any] = helion.kernel(
        kernel.fn,
        backend=kernel.settings.backend,
        ref_mode=kernel.settings.ref_mode,
        static_shapes=False,
        index_dtype=torch.int64 if start.addressing.int64_index else torch.int32,
        dot_precision=problem.precision,
        autotune_effort="quick",  # small rounds, because the clock is checked only between them
        autotune_max_generations=50,
        autotune_budget_seconds=budget,
        autotune_initial_population_strategy="from_random",
        autotune_seed_configs=[helion.Config(**seed.config.config) for seed in seeds],
        autotune_config_overrides=kept,
        autotune_config_filter=usable,
        # The device computes the number of tiles, so a fixed number of workers must loop over them.
        autotune_force_persistent=start.variant == "persistent",
        autotune_baseline_fn=baseline,
        autotune_baseline_accuracy_check_fn=check_close,
        # `out` is written in place, which Helion's separate benchmark process does not support. No config of these
        # kernels accesses memory out of bounds, so none crashes this process.
        autotune_benchmark_subprocess=False,
        autotune_precompile="fork",
        autotune_ignore_errors=True,
        autotune_progress_bar=True,
        autotune_random_seed=0,
    )
    config = tuned.autotune_multi(arg_sets, cache_tag=f"moe_kernels {start.variant} {start.block_m}")
    parts = seed.config.config.get("epilogue_subtile")
    found = replace(start, config=Config(**kept, **concise(config.config)))
    return storing(found, tma_out=True, epilogue_subtile=parts) if tma_out else found


def within(choice: rules.Choice, problem: grouped.Problem) -> rules.Choice:
    """Return `choice` with blocks that fit into the operands. Helion's search accesses larger ones by pointers, where
    the kernels rely on TMA for what is outside.
    """
    *others, block_k = choice.config.config["block_sizes"]
    along_n = {"basic": 1, "persistent": 0}.get(choice.variant)
    if along_n is not None:
        others[along_n] = rules.block_for(problem.N, others[along_n])
    return _with(choice, block_sizes=[*others, rules.block_for(problem.K, block_k)])


def kernel_calls(choice: rules.Choice, inputs: Inputs) -> tuple[Any, list[tuple[Any, ...]]]:
    """Return the Helion kernel that multiplies under `choice`, and its arguments for each routing, with a zero `out`.

    Helion detects the arguments that a kernel writes by comparing them before and after a call.
    """
    with rules.force(choice):
        request = _last_launch(inputs.steps())
    out = list(request.kernel.signature.parameters).index("out")
    arg_sets = []
    for tensors, call in zip(inputs.tensors, replace(inputs, operator=_ARGUMENTS).calls(choice), strict=True):
        extents = [() if x is None else tuple(x.shape) for x in tensors]
        memory = iter(call())
        args = [_view(x, next(memory), extents) if isinstance(x, SymbolicTensor) else x for x in request.arguments]
        args[out].zero_()
        arg_sets.append(tuple(value(x, extents) if isinstance(x, SymbolicInt) else x for x in args))
    return request.kernel, arg_sets


# The plan of `grouped_gemm` without its last launch.
_ARGUMENTS = replace(GROUPED_GEMM, name="arguments", planner=__name__)


def plan_arguments(
    builder: Builder, tensors: tuple[SymbolicTensor | None, ...], options: tuple[torch.dtype, str]
) -> tuple[SymbolicTensor, ...]:
    """Plan `grouped_gemm` without its last launch, and return the tensors that this launch takes."""
    from moe_kernels.kernels.grouped_gemm import plan_grouped_gemm

    plan_grouped_gemm(builder, tensors, options)
    request = _last_launch(builder.steps)
    builder.steps.remove(request)
    return tuple(x for x in request.arguments if isinstance(x, SymbolicTensor))


def _last_launch(steps: Sequence[Any]) -> Request:
    return [step for step in steps if isinstance(step, Request)][-1]


def _view(x: SymbolicTensor, memory: Tensor, extents: Sequence[tuple[int, ...]]) -> Tensor:
    """Return the view of `memory` that `x` describes. Only windows, which a search does not use, have an offset."""
    assert x.offset == 0
    return memory.as_strided([value(n, extents) for n in x.shape], x.strides)


_ADDRESSING = ("indexing", "host_tensor_descriptors")


def concise(values: dict[str, Any]) -> dict[str, Any]:
    """Return a config without memory addressing and without options that repeat Helion's defaults."""
    item_defaults: dict[str, Any] = {
        "range_unroll_factors": 0,
        "range_num_stages": 0,
        "load_eviction_policies": "",
        "load_cache_modifiers": "",
        "store_cache_modifiers": "",
        "range_flattens": None,
        "range_multi_buffers": None,
        "range_warp_specializes": None,
        "loop_orders": [0, 1],
    }

    def is_default(name: str, given: Any) -> bool:
        if isinstance(given, list):
            return all(name in item_defaults and item == item_defaults[name] for item in given)
        return given is None or (name, given) == ("num_sm_multiplier", 1)

    return {name: x for name, x in values.items() if name not in _ADDRESSING and not is_default(name, x)}


def storing(choice: rules.Choice, *, tma_out: bool, epilogue_subtile: int | None = None) -> rules.Choice:
    """Return `choice` with or without TMA stores, split into `epilogue_subtile` parts."""
    addressing = choice.addressing._replace(tma_out=tma_out)
    indexing = grouped.indexing_of(choice.variant, False, addressing)
    return _with(replace(choice, addressing=addressing), epilogue_subtile=epilogue_subtile, **indexing)


def _with(choice: Any, **changed: Any) -> Any:
    """Return `choice`, of any operator, with changed options of its config, None to remove one."""
    values = {name: given for name, given in {**choice.config.config, **changed}.items() if given is not None}
    return replace(choice, config=Config(**values))


def uniform_workload(task: Task, device: torch.device) -> Workload:
    """Return the workload of `uniform_grouped_gemm`."""
    inputs = Inputs(UNIFORM_GROUPED_GEMM, [_operands(task, device)], (task.G, DTYPES[task.dtype]))
    problem = inputs.problem()
    return Workload(
        choices=[uniform.rule(problem), uniform.choose(problem), *uniform_grid(problem)],
        calls=inputs.calls,
        near=lambda best, until: [
            _with(choice, loop_orders=[order])
            for choice in best[:1]
            if choice.variant != "bmm"
            for order in ([0, 1, 2], [2, 1, 0], [1, 2, 0])
        ],
        stored=stored,
    )


def uniform_grid(problem: uniform.Problem) -> Iterator[rules.Choice]:
    """Yield torch.bmm, if possible, and kernel configs that fit into an H200's shared memory."""
    if problem.bmm:
        yield uniform.BMM
    yield uniform.by_kernel(problem)
    size, extents = problem.dtype.itemsize, (problem.M, problem.N, problem.K)
    for blocks in itertools.product((64, 128), (256, 128, 64, 32), (128, 64, 256)):
        block_m, block_n, block_k = map(rules.fitting, blocks, extents)
        for stages in (3, 4, 5, 6):
            shared = (stages * (block_m + block_n) * block_k) * size + block_m * block_n * problem.out_dtype.itemsize
            if shared <= rules.SHARED_MEMORY:
                warps = 8 if block_m * block_n >= 128 * 128 else 4
                yield uniform.make(problem, (block_m, block_n, block_k), num_warps=warps, num_stages=stages)


def varied_workload(task: Task, device: torch.device) -> Workload:
    """Return the workload of `varied_grouped_gemm`, for products of one size."""
    A, B = _operands(task, device)
    group_A, group_B = list(A), list(B)
    outs = A.new_empty(task.G, task.M, task.N)
    with rules.record() as made:
        varied_launch(group_A, group_B, list(outs))
    problem = made[0][0]
    if not problem.aligned:  # no call would use the entry
        raise ValueError("varied products use entries only if K, and N with --layout gkn, is a multiple of 16 bytes")

    def calls(choice: rules.Choice) -> list[Call]:
        with cache.isolated(), rules.force(choice):
            launch = VariedLaunch(group_A, group_B, list(outs))
        outs.fill_(math.nan)

        def call() -> Tensor:
            launch()
            return outs

        return [call]

    return Workload(
        choices=[varied.rule(problem), varied.choose(problem), *varied_grid(problem)],
        calls=calls,
        near=lambda best, until: [],
        stored=stored,
    )


def varied_grid(problem: varied.Problem) -> Iterator[rules.Choice]:
    """Yield tiles from 32 x 32 to 128 x 256 and 256 x 128, with one or two workers per SM."""
    size = problem.dtype.itemsize
    for block_m, block_n, block_k in itertools.product((128, 64, 32, 256), (256, 128, 64, 32), (64, 32, 128)):
        block_k = block_k * 2 // size
        warps = 8 if block_m * block_n >= 128 * 128 else 4
        for stages, per_sm in ((3, 1), (4, 1), (6, 1), (3, 2), (5, 2)):
            shared = per_sm * stages * (block_m + block_n) * block_k * size
            if block_m * block_n <= 1 << 15 and shared <= rules.SHARED_MEMORY:
                yield varied.make(len(problem.shapes), block_m, block_n, block_k, warps, stages, per_sm)


def _operands(task: Task, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return `A [G, M, K]` and `B [G, K, N]`."""
    sizes, dtype = [task.M] * task.G, DTYPES[task.dtype]
    A, B, _ = make_inputs(sizes, task.N, task.K, dtype=dtype, device=device, transposed=task.transposed)
    return A.view(task.G, task.M, task.K), B


WORKLOADS: dict[str, Callable[[Task, torch.device], Workload]] = {
    "grouped_gemm": grouped_workload,
    "uniform": uniform_workload,
    "varied": varied_workload,
}


def bucket(task: Task) -> Bucket:
    """Return the bucket of the entry for `task`."""
    dtype = DTYPES[task.dtype]
    name = entries.dtype_label(dtype, rules.tf32_allowed(dtype))
    rows = rules.floor_power_of_2(task.M // task.G) if task.op == "grouped_gemm" else task.M
    return Bucket(name, task.transposed and task.K > 1, rows, task.N, task.K, task.G, task.op)


def _tuned(file: Path, gpu: str) -> dict[Bucket, Entry]:
    """Return the entries in `file` for the installed versions."""
    minor = entries.installed_versions().minor
    try:
        found = entries.read(file, gpu)
    except entries.Skipped:
        return {}  # `write` warns about it, and renames the file
    return {entry.bucket: entry for entry in reversed(found) if entry.versions.minor == minor}


def fitting_part(task: Task, device: torch.device) -> Task:
    """Return `task` with G and M halved until B has at most INT32_MAX elements, which Helion's autotuner needs for TMA,
    and a search fits into memory.
    """
    memory = torch.cuda.get_device_properties(device).total_memory

    def size(G: int, M: int) -> int:
        return DTYPES[task.dtype].itemsize * (G * task.N * task.K + M * (task.K + 3 * task.N))

    G, M, others = task.G, task.M, 0  # others: bytes of the inputs with all groups beside those with fewer
    # Helion keeps a copy of the arguments for each routing.
    while G > 1:
        if G * task.N * task.K <= INT32_MAX and others + (2 + len(ROUTINGS)) * size(G, M) < 0.8 * memory:
            break
        G, M, others = G // 2, max(1, M // 2), size(task.G, task.M)
    return replace(task, G=G, M=M)


def seconds(text: str) -> float:
    """Parse "90s", "10m", "2h" or "90" as seconds, for argparse."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text.strip())
    if match is None or not 0 < float(match[1]) < 1e6:
        raise argparse.ArgumentTypeError(f"expected a time such as 90s, 10m or 2h, got {text[:40]!r}")
    return float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[match[2]]


def command(task: Task) -> str:
    """Return a command that tunes only this problem."""
    shape = f"{task.G},{task.M},{task.N},{task.K}"
    layout = "gnk" if task.transposed else "gkn"
    op = [] if task.op == "grouped_gemm" else ["--op", task.op]
    return " ".join([entries.TUNE, *op, "--shapes", shape, "--dtype", task.dtype, "--layout", layout])


def _no_gpu() -> str | None:
    if requirements.interpreted():
        return "TRITON_INTERPRET makes Triton run on the CPU; unset it"
    if not torch.cuda.is_available():
        return "torch finds none (`python -m moe_kernels info` shows what it does find)"
    return None


def _duration(spent: float) -> str:
    minutes, rest = divmod(round(spent), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
