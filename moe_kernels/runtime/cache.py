"""The plan cache: finds the function that runs a call, from the call's tensors. Lookup order:

repeat    the functions of recent calls, guarded in C++
memory    plans by signature
disk      plans of other processes
planner   makes the plan, which imports Helion
"""

from __future__ import annotations

import errno
import gc
import importlib
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from moe_kernels import rules
from moe_kernels.runtime import launch, store, targets, torch_internals
from moe_kernels.runtime.attributes import one_at_a_time, replaced
from moe_kernels.runtime.emit import emit, emit_repeat
from moe_kernels.runtime.plan import Builder, Plan
from moe_kernels.runtime.signature import Operator, Tensors, depends_on_tf32, portable, rows_bounds, signature, symbolic
from moe_kernels.runtime.symbolic import SymbolicTensor
from moe_kernels.runtime.targets import Gpu

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # a full disk, a full share of it, a limit of the process
_MOST_PLANS = 4096
_MOST_REPEATS = 16  # per operator, tried one after another
_MOST_STATES = 8  # repeats per plan, one for each state of a call that its signature leaves out


@dataclass
class _Entry:
    """A plan in memory."""

    run: Callable[..., Any]
    plan: Plan
    launchers: Mapping[str, launch.Launcher]
    repeats: dict[Any, Callable[..., Any] | None] = field(default_factory=dict)  # by state outside the signature


@dataclass
class PlanCache:
    """Plans by signature. The least recently used one is evicted; its kernels and their generated code stay loaded."""

    limit: int = _MOST_PLANS
    entries: OrderedDict[tuple[Any, ...], _Entry] = field(default_factory=OrderedDict)
    recent: dict[str, tuple[Callable[..., Any], ...]] = field(default_factory=dict)
    launchers: dict[tuple[str, torch.device], launch.Launcher] = field(default_factory=dict)
    binaries: dict[str, store.Binary] = field(default_factory=dict)
    lock: Any = field(default_factory=threading.RLock)
    reads_store: bool = True

    def get(self, key: tuple[Any, ...]) -> _Entry | None:
        try:
            self.entries.move_to_end(key)
            return self.entries[key]
        except KeyError:  # unknown, or evicted by another thread meanwhile
            return None

    def put(self, key: tuple[Any, ...], entry: _Entry) -> None:
        with self.lock:
            self.entries[key] = entry
            while len(self.entries) > self.limit:
                self.entries.popitem(last=False)


plans = PlanCache()

# A fork waits for the plan or launch that another thread is making. The child would find these locks held for good, the
# collector disabled, and attributes of Helion and Triton replaced. The lock of plans, the last here, is acquired first.
for _lock in (one_at_a_time, plans.lock):
    os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)


def repeat(operator: Operator, tensors: Tensors, requested: Any) -> Any:
    """The result of a call like a recent one, if bypassing torch.library and autograd is unobservable; else None."""
    if torch.compiler.is_dynamo_compiling() or torch_internals.profiled():
        return None
    recent = plans.recent.get(operator.name, ())
    for i, call in enumerate(recent):
        out = call(requested, *tensors)
        if out is not None:
            if i > 3:
                plans.recent[operator.name] = call, *recent[:i], *recent[i + 1 :]
            return out
    return None


def remember(operator: Operator, tensors: Tensors, requested: Any, options: Any) -> None:
    """Let later calls like this one be repeated.

    `requested` are its options as given, with the types of those that are bools (1 == True), `options` as resolved.
    """
    if torch.compiler.is_dynamo_compiling() or not torch_internals.can_bypass_dispatcher(*tensors):
        return
    first: Any = tensors[0]
    if torch_internals.autocast_enabled() or not torch_internals.on_current_device(first):
        return
    key = signature(operator, tensors, options)
    entry = plans.get(key)
    if entry is None or depends_on_tf32(key):  # a setting that repeats do not check
        return
    states = [None if x is None else (type(x), x.requires_grad, x.is_inference()) for x in tensors]
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch_internals.dispatch_keys()
    state = (requested, modes, *states)
    if state not in entry.repeats:
        if len(entry.repeats) >= _MOST_STATES:
            return
        bounds = rows_bounds(operator.counts(tensors, options))
        entry.repeats[state] = emit_repeat(
            entry.plan, entry.launchers, first.device, tensors, operator, requested, bounds
        )
    made = entry.repeats[state]
    if made is not None:
        others = [call for call in plans.recent.get(operator.name, ()) if call is not made]
        plans.recent[operator.name] = made, *others[: _MOST_REPEATS - 1]


_collectors = threading.local()  # calls of other threads run as usual


@contextmanager
def collecting(collector: Callable[[Operator, Tensors, Any], Any]) -> Iterator[None]:
    """Within the block, this thread's calls, also on meta tensors, go to `collector(operator, tensors, options)`."""
    _collectors.current = collector
    try:
        yield
    finally:
        _collectors.current = None


def collects() -> bool:
    """Whether this thread's calls go to a collector."""
    return getattr(_collectors, "current", None) is not None


def call(operator: Operator, tensors: Tensors, options: Any) -> Any:
    """Run the plan of a call and return a tensor or a tuple of them. No checks, no autograd."""
    collector = getattr(_collectors, "current", None)
    if collector is not None:
        return collector(operator, tensors, options)
    first: Any = tensors[0]
    with torch_internals.entered(first):
        return find(operator, tensors, options)(*tensors)


def find(operator: Operator, tensors: Tensors, options: Any) -> Callable[..., Any]:
    """Return the function that runs calls like this one. The tensors' device must be the current one."""
    key = signature(operator, tensors, options)
    entry = plans.get(key)
    if entry is None:
        with plans.lock:
            entry = plans.get(key) or _make(operator, tensors, options, key)
    return entry.run


def _make(operator: Operator, tensors: Tensors, options: Any, key: tuple[Any, ...]) -> _Entry:
    first: Any = tensors[0]
    device, gpu = first.device, targets.of_tensor(first)

    def attempt() -> _Entry:
        plan, launchers = _load(operator, symbolic(operator, tensors, options), options, portable(key), gpu, device)
        return _Entry(_checked(plan, launchers, device), plan, launchers)

    entry = rules.with_fallback(attempt)
    plans.put(key, entry)
    return entry


def _load(
    operator: Operator, inputs: Sequence[SymbolicTensor | None], options: Any, text: str, gpu: Gpu, device: torch.device
) -> tuple[Plan, dict[str, launch.Launcher]]:
    """Return a plan, from the store or new, and the launchers of its binaries."""
    if gpu.backend == "interpreter":
        from moe_kernels.runtime.interpreter import InterpreterLauncher

        plan, specialized = make_plan(operator, inputs, options, gpu)
        return plan, {name: InterpreterLauncher(one.function) for name, one in specialized.items()}

    def load(made: Mapping[str, store.Binary], sources: Mapping[str, Any]) -> None:
        plans.binaries.update(made)
        new = {name: binary for name, binary in made.items() if (name, device) not in plans.launchers}
        if not new:  # a plan without kernels does not even import Triton
            return
        with launch.libraries(new.values()):
            for name, binary in new.items():
                plans.launchers[name, device] = launch.launcher(_kernel(binary, sources.get(name), gpu))

    plan, _ = plan_of(operator, inputs, options, text, gpu, load)
    return plan, {name: plans.launchers[name, device] for name in plan.binaries}


def _kernel(binary: store.Binary, source: Any, gpu: Gpu) -> Any:
    """Return a binary as Triton's kernel. If its class is not as expected, Triton compiles the kernel from `source`."""
    try:
        return launch.compiled_kernel(binary)
    except launch.UNEXPECTED:
        if source is None:
            raise
        from moe_kernels.runtime import compile as compiler  # imports Helion

        return compiler.within_shared_memory(source, gpu)


def plan_of(
    operator: Operator,
    inputs: Sequence[SymbolicTensor | None],
    options: Any,
    text: str,
    gpu: Gpu,
    load: Callable[[Mapping[str, store.Binary], Mapping[str, Any]], None] = lambda binaries, sources: None,
) -> tuple[Plan, dict[str, store.Binary]]:
    """Return a plan and its binaries for a GPU model, from the store, or new and then stored. The GPU may be absent.

    `load` is called with the binaries and, for a new plan, their sources. If it fails on a stored plan, other than for
    lack of memory, the plan is made again, so that `rules.with_fallback` sees its choices. If it fails on binaries of
    the store, they are compiled again. If it fails on a new plan, the plan is not stored. Plans under a forced choice
    bypass the store.
    """
    kept = rules.forced() is None

    @_collector_paused()
    def made() -> tuple[Plan, dict[str, store.Binary]]:
        launch.ensure_cache()
        try:
            return compiled()
        except OSError as error:
            if error.errno not in _FULL or not launch.leave_cache():
                raise
            return compiled()

    def compiled() -> tuple[Plan, dict[str, store.Binary]]:
        from moe_kernels.runtime import compile as compiler  # imports Helion

        compiling = compiler.Compiling(gpu)
        plan, sources = make_plan(operator, inputs, options, gpu, compiling.begin)
        # A tuned or forced choice that does not fit is an error, so that another one replaces it.
        fewer_stages = kept and not rules.made_by_entry()
        binaries = compiling.binaries(fewer_stages)
        try:
            load(binaries, sources)
        except (torch.OutOfMemoryError, OSError):
            raise
        except Exception:
            if not compiling.found:
                raise
            again = compiler.Compiling(gpu, replace=True)
            for source in sources.values():
                again.begin(source)
            binaries = again.binaries(fewer_stages)
            load(binaries, sources)
        if kept:
            store.write_plan(key, plan, binaries)
        return plan, binaries

    key = store.plan_key(text, gpu, rules.tuned_digest(gpu))
    found = store.read_plan(key, plans.binaries) if kept and plans.reads_store else None
    if found is None:
        return made()
    try:
        load(found[1], {})
    except torch.OutOfMemoryError:
        raise
    except Exception:
        return made()
    return found


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Disable Python's cyclic garbage collector, which takes a fifth of Helion's import and code generation time. The
    lock of plans must be held, so that no other thread enables it meanwhile.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@_collector_paused()
def make_plan(
    operator: Operator,
    inputs: Sequence[SymbolicTensor | None],
    options: Any,
    gpu: Gpu,
    begin: Callable[[Any], None] = lambda one: None,
) -> tuple[Plan, dict[str, Any]]:
    """Make a plan, and return it with the sources of its binaries. `begin` gets each source as soon as it exists."""
    from moe_kernels.runtime import compile as compiler  # imports Helion

    builder, results = build_steps(operator, inputs, options, gpu)
    return compiler.to_plan(builder, results, begin)


def build_steps(
    operator: Operator, inputs: Sequence[SymbolicTensor | None], options: Any, gpu: Gpu
) -> tuple[Builder, Sequence[SymbolicTensor]]:
    """Return a planner's steps and results, with requests in place of binaries. Nothing is compiled."""
    planner = importlib.import_module(operator.planner)
    builder = Builder(gpu, operator.inputs)
    results = getattr(planner, f"plan_{operator.name}")(builder, inputs, options)
    return builder, results if isinstance(results, tuple) else (results,)


def _checked(plan: Plan, launchers: dict[str, launch.Launcher], device: torch.device) -> Callable[..., Any]:
    """Return the function that runs a plan by direct launches, or by public ones if the first call fails."""
    direct = {name: one for name, one in launchers.items() if isinstance(one, launch.DirectLauncher)}
    if not direct:
        return emit(plan, launchers, device)
    public = launchers | {name: launch.TritonLauncher(one.kernel) for name, one in direct.items()}
    chosen: list[Callable[..., Any]] = []

    def first(*tensors: Tensor | None) -> Any:
        if chosen:
            return chosen[0](*tensors)
        try:
            run = emit(plan, launchers, device)
            out = run(*tensors)
        except torch.OutOfMemoryError:
            raise
        except launch.UNEXPECTED:
            run = emit(plan, public, device)
            out = run(*tensors)  # raises again if the direct launches were not the cause
            launchers.update(public)
            plans.launchers.update({(name, device): one for name, one in public.items()})
        chosen.append(run)
        return out

    return first


def clear() -> None:
    """Forget all plans, for example after a change of configs. Loaded binaries are kept."""
    with plans.lock:
        plans.entries.clear()
        plans.recent.clear()


def reload() -> None:
    """Forget all plans and tuned entries, so that the files of tuned entries are read again when next needed."""
    rules.reload()
    clear()


@contextmanager
def isolated() -> Iterator[None]:
    """Within the block, make new plans for all calls, without reading plans on disk. Binaries on disk and kernels that
    are loaded are used as always.
    """
    with replaced(plans, entries=OrderedDict(), recent={}, reads_store=False):
        yield
