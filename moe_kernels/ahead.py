"""Compile plans and binaries before the calls that need them, for the GPU of this machine or for a named one.

A layer runs on meta tensors, once per class of token counts. Nothing is computed: its requests to the plan cache are
collected, and the requested plans are compiled.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
import sys
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from moe_kernels import checks, requirements, rules
from moe_kernels.experts import moe_mlp
from moe_kernels.grouped_gemm import grouped_gemm, grouped_mm
from moe_kernels.models import MODELS, SIGMOID_GATING
from moe_kernels.nn import MoE, quantize_once
from moe_kernels.ops import batched, gating, layer, moves, products, quantized, scaled
from moe_kernels.routing import topk_sigmoid, topk_softmax
from moe_kernels.runtime import cache, store, targets, torch_internals
from moe_kernels.runtime.plan import Request
from moe_kernels.runtime.signature import MAX_ROWS, Counts, Operator, portable, rows_bounds, signature, symbolic
from moe_kernels.runtime.symbolic import SymbolicTensor, value
from moe_kernels.runtime.targets import Gpu

_OPERATORS = {  # by name, which determines the planner
    operator.name: operator
    for module in (batched, gating, layer, moves, products, quantized, scaled)
    for operator in vars(module).values()
    if isinstance(operator, Operator)
}


class LayerShape(NamedTuple):
    """A SwiGLU layer for `compile_ahead`: `hidden_size`, `intermediate_size`, `num_experts`, `top_k` and `dtype`.

    `dtype` is bfloat16 (the default), float16 or float32.
    """

    hidden_size: int
    intermediate_size: int
    num_experts: int
    top_k: int
    dtype: torch.dtype = torch.bfloat16


class PlanRequest(NamedTuple):
    """A kind of call that needs a plan."""

    operator: str
    inputs: tuple[SymbolicTensor | None, ...]
    options: Any
    signature: str


class CompileCounts(NamedTuple):
    """The result of `compile_ahead`: the numbers of `plans`, `binaries` and launcher `libraries` on disk."""

    plans: int
    binaries: int
    libraries: int


def compile_ahead(
    what: nn.Module | LayerShape | str | Iterable[LayerShape | str],
    *,
    tokens: Iterable[int],
    training: bool = False,
    gpu: str | None = None,
    jobs: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> CompileCounts:
    """Compile the plans and binaries of layers for all token counts in `tokens`, and store them on disk.

    Args:
        what: an `MoE`; a module that contains `MoE` layers; a transformers model with
            `experts_implementation="moe_kernels"` after `register()`; a `LayerShape`; the name of a model listed by
            `python -m moe_kernels compile --list`; or several shapes and names.
        tokens: the numbers of tokens in a call, such as `range(1, 8193)`. Numbers of one class share a plan.
        training: whether to compile also the forward pass with gradients and the backward pass.
        gpu: the name of a GPU listed by `python -m moe_kernels compile --list`, which need not be in this machine;
            default: the current GPU.
        jobs: the number of processes that compile at the same time. With more than one, or for a GPU that is not in
            this machine, these processes import the calling script again, so it needs a `__main__` guard.
        progress: a function, called with the number of plans compiled so far and the total number of plans.

    Returns:
        The numbers of plans, binaries and launcher libraries.

    Raises:
        TypeError, ValueError: a size or token count that is not an int or out of range; an unsupported dtype; an
            unknown GPU or model, a module without a layer of this package, or sharded weights.
        RuntimeError: `gpu` is None, and there is no GPU; there is no C compiler; TRITON_INTERPRET is set; or `training`
            is True for weights in fp8, whose layer has no gradients.
        OSError: the folder cannot be written to, or its size limit is too small.
        ImportError: as for `grouped_gemm`.
    """
    if not isinstance(tokens, Iterable):
        raise TypeError(f"tokens: expected ints, such as range(1, 8193), got {type(tokens).__name__}")
    checks.check_bools(training=training)
    checks.check_int("jobs", jobs, 1)
    target = _target(gpu)
    counts = tokens if isinstance(tokens, Sequence) else list(tokens)
    layers: list[Any] = [what]
    if isinstance(what, Iterable) and not isinstance(what, (nn.Module, LayerShape, str)):
        layers = list(what)
    for name, given in (("tokens", counts), ("what", layers)):
        if not given:
            raise ValueError(f"{name}: expected at least one, got none")
    calls = [call for one in layers for call in _calls(one, counts, training)]
    wanted = collect(calls)
    found = [(one, _kept(one, target)) for one in wanted]
    lacking = [one for one, there in found if there is None]
    for one, there in found:
        if lacking and there is not None:  # to be kept, too, when older files make room, from the first write on
            store.renew(plans=[_plan_key(one, target)], binaries=there)
    if lacking and not store.can_write():
        raise OSError(f"{store.folder()}: plans cannot be kept there")
    for done, _ in enumerate(_making(lacking, target, jobs), 1):
        if progress is not None:
            progress(done, len(lacking))
    binaries: dict[str, store.Binary] = {}
    for one in wanted:
        if (kept := _kept(one, target)) is None:
            limit = f"its limit of {store.limit_mb()} MiB (MOE_KERNELS_CACHE_LIMIT_MB)"
            raise OSError(f"{store.folder()}: plans cannot be kept there, were removed again, or are more than {limit}")
        binaries |= kept
    libraries = 0
    if target.backend == "cuda":
        from moe_kernels.runtime.launch import build_libraries  # imports Triton

        with cache.plans.lock:
            libraries = build_libraries([binaries[key] for key in sorted(binaries)], renew=bool(lacking))
    return CompileCounts(len(wanted), len(binaries), libraries)


def _kept(wanted: PlanRequest, gpu: Gpu) -> dict[str, store.Binary] | None:
    """Return the binaries of a plan on disk, or None if the plan is not there."""
    found = store.read_plan(_plan_key(wanted, gpu), {})
    return None if found is None else found[1]


def _plan_key(wanted: PlanRequest, gpu: Gpu) -> str:
    return store.plan_key(wanted.signature, gpu, rules.tuned_digest(gpu))


def _target(gpu: str | None) -> Gpu:
    if requirements.interpreted():
        raise RuntimeError("TRITON_INTERPRET makes Triton run on the CPU, and nothing can be compiled: unset it")
    if gpu is None:
        if (found := targets.current()) is None:
            raise RuntimeError(f"there is no GPU to compile for: name one of {', '.join(targets.KNOWN)} by gpu=")
        return found
    if gpu not in tuple(targets.KNOWN):
        raise ValueError(f"gpu: expected one of {', '.join(targets.KNOWN)}, got {gpu!r}")
    return targets.KNOWN[gpu]


def _calls(what: nn.Module | LayerShape | str, tokens: Sequence[int], training: bool) -> list[Callable[[], None]]:
    """Return functions that run each layer of `what` on meta tensors, one per class of token counts."""
    if isinstance(what, str):
        if what not in MODELS:
            raise ValueError(f"what: expected one of {', '.join(MODELS)}, got {what!r}")
        return _calls(LayerShape(*MODELS[what]), tokens, training)
    if isinstance(what, LayerShape):
        checks.check_dtype("dtype", what.dtype)
        counts = [T for T, *_ in classes(tokens, what.num_experts, what.top_k)]
        calls: list[Callable[[], None]] = [partial(_run_shape, what, T, training) for T in counts]
        for name, gating in SIGMOID_GATING.items():
            if MODELS[name] == what[:4]:
                calls += [partial(_run_sigmoid_gating, what, T, *gating) for T in counts]
        return calls
    if not isinstance(what, nn.Module):
        raise TypeError(f"what: expected a module, a LayerShape or a model's name, got {type(what).__name__}")
    layers = layers_of(what)
    for name, tensor in (each for module in layers for each in _tensors(module)):
        if hasattr(tensor, "placements"):
            raise TypeError(f"{name}: expected weights that are not sharded: compile before fully_shard, or unshard()")
        if tensor.is_floating_point() and tensor.dtype.itemsize > 1:
            checks.check_dtype(name, tensor.dtype)
    found: list[Callable[[], None]] = [
        partial(_run_module, module, T, trains)
        for module in layers
        for T, *_ in classes(tokens, _num_experts(module), _top_k(module))
        for trains in dict.fromkeys((False, training))
    ]
    if not found:
        got = f"got {type(what).__name__}"
        if _asks_for_ours(getattr(what, "config", None)):
            got += ", for whose experts transformers does not support this choice"
        raise ValueError(
            "what: expected an MoE, a module that contains one, or a transformers model with "
            f'experts_implementation="moe_kernels", {got}'
        )
    return found


def classes(tokens: Sequence[int], E: int, top_k: int) -> list[Sequence[int]]:
    """Group the token counts by class, in ascending order."""
    checks.check_int("num_experts", E, 1)
    checks.check_int("top_k", top_k, 1, E)
    ascending = isinstance(tokens, range) and tokens.step > 0  # may be long, so only its ends are looked at
    for T in (*tokens[:1], *tokens[-1:]) if ascending else tokens:
        checks.check_int("tokens", T, 0, MAX_ROWS // top_k)
    rest = tokens if ascending else sorted(set(tokens))
    found = []
    while rest:
        _, highest = rows_bounds(Counts(rest[0], (rest[0] * top_k,), E))
        members = bisect_right(rest, highest)
        found.append(rest[:members])
        rest = rest[members:]
    return found


def layers_of(module: nn.Module) -> list[Any]:
    """Return the layers of a module that run on these kernels, one of each type, options and parameter layouts."""
    found: dict[Any, Any] = {}
    for part in module.modules():
        ours = _asks_for_ours(getattr(part, "config", None)) and hasattr(part, "num_experts")
        if isinstance(part, MoE) or (ours and hasattr(part, "down_proj")):
            kind = tuple((name, tuple(p.shape), p.stride(), p.dtype, p.requires_grad) for name, p in _tensors(part))
            found.setdefault((type(part), part.extra_repr(), _top_k(part), kind), part)
    return list(found.values())


def _asks_for_ours(config: Any) -> bool:
    return getattr(config, "_experts_implementation", None) == "moe_kernels"


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters, then the buffers, such as weights in fp8."""
    yield from module.named_parameters()
    yield from module.named_buffers()


def _num_experts(module: Any) -> int:
    return int(module.w_down.size(0) if isinstance(module, MoE) else module.num_experts)


def _top_k(module: Any) -> int:
    """Return the number of experts per token; if a config lists those of all layers, the largest."""
    if isinstance(module, MoE):
        return module.top_k
    names = ("num_experts_per_tok", "moe_topk", "moe_top_k", "top_k_experts", "top_k")
    found = [value for name in names if (value := getattr(module.config, name, None)) is not None]
    if not found:
        raise ValueError(f"what: {type(module).__name__}: its config has none of {', '.join(names)}")
    return int(max(found[0]) if isinstance(found[0], (list, tuple)) else found[0])


def _meta(x: Tensor, gradient: bool) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta", requires_grad=gradient)


def _run_module(module: Any, T: int, training: bool) -> None:
    """Run a layer on meta tensors for T tokens, and its backward pass if `training`, also within `quantize_once`."""
    parameters = {f"layer.{name}": _meta(p, training and p.requires_grad) for name, p in _tensors(module)}
    routings: list[tuple[Tensor, ...]] = [()]
    if isinstance(module, MoE):
        H, dtype = module.router.size(1), module.router.dtype
    else:
        down = module.down_proj
        H, dtype, top_k = down.size(2 if module.is_transposed else 1), down.dtype, _top_k(module)
        if dtype.itemsize == 1:  # fp8 weights
            dtype = getattr(module.config, "dtype", None) or torch.bfloat16
        ids = torch.empty(T, top_k, dtype=torch.int64, device="meta")
        like: dict[str, Any] = {"device": "meta", "requires_grad": training}
        # Some models keep the router weights in float32.
        kinds = dict.fromkeys((dtype, torch.float32))
        routings = [(ids, torch.empty(T, top_k, dtype=kind, **like)) for kind in kinds]
    quantizes = training and isinstance(module, MoE) and module.format is None and module.compute is not None
    contexts = (nullcontext, quantize_once) if quantizes else (nullcontext,)
    # The hidden states of a model's first layer, or after frozen ones, need no gradient.
    for routing, within, gradient in product(routings, contexts, dict.fromkeys((training, False))):
        hidden = torch.empty(T, H, dtype=dtype, device="meta", requires_grad=gradient)
        out = functional_call(_Forward(module, within), parameters, (hidden, *routing))
        if out.requires_grad:
            out.backward(torch.empty_like(out))


class _Forward(nn.Module):
    """The `forward` of a layer within a context, without its hooks and without what `layer.compile()` made of it."""

    def __init__(self, layer: nn.Module, within: Callable[[nn.Module], AbstractContextManager[Any]]):
        super().__init__()
        self.layer, self.within = layer, within

    def forward(self, *inputs: Tensor) -> Tensor:
        with self.within(self.layer):
            out: Tensor = self.layer.forward(*inputs)
        return out


def _logits(shape: LayerShape, T: int) -> list[Tensor]:
    """Return logits in float32, in which some models have them, and in the layer's dtype."""
    dtypes = dict.fromkeys((torch.float32, shape.dtype))
    return [torch.empty(T, shape.num_experts, dtype=dtype, device="meta") for dtype in dtypes]


def _run_sigmoid_gating(shape: LayerShape, T: int, num_groups: int, top_groups: int, scale: float) -> None:
    """Run a model's own gating on meta tensors, and with the scale 1, which compiled programs apply themselves."""
    bias = torch.empty(shape.num_experts, dtype=torch.float32, device="meta")
    options: dict[str, Any] = {"renormalize": True, "bias": bias, "num_groups": num_groups, "top_groups": top_groups}
    with torch.no_grad():
        for logits, factor in product(_logits(shape, T), dict.fromkeys((scale, 1.0))):
            topk_sigmoid(logits, shape.top_k, scale=factor, **options)


def _run_shape(shape: LayerShape, T: int, training: bool) -> None:
    """Run an `MoE`, `moe_mlp` with the dtypes of ids and topk_weights that models and inference engines have, gating by
    softmax, and each product alone, on meta tensors.
    """
    H, I, E, top_k, dtype = shape  # noqa: E741
    module = MoE(H, I, E, top_k, renormalize=True, device="meta", dtype=dtype)
    for trains in dict.fromkeys((False, training)):
        _run_module(module, T, trains)
        _run_experts(shape, T, dtype, training=trains)
    for weights_dtype in dict.fromkeys((torch.float32, dtype)):
        _run_experts(shape, T, weights_dtype, torch.int32)
    with torch.no_grad():
        for logits, renormalize in product(_logits(shape, T), (True, False)):
            topk_softmax(logits, top_k, renormalize=renormalize)
        offsets, offs = (torch.empty(n, dtype=torch.int32, device="meta") for n in (E + 1, E))
        for weight in (module.w_gate_up.mT, module.w_down.mT):
            rows = weight.new_empty(T * top_k, weight.size(1))
            grouped_gemm(rows, weight, offsets)
            grouped_mm(rows, weight, offs=offs)


def _run_experts(
    shape: LayerShape,
    T: int,
    weights_dtype: torch.dtype,  # of topk_weights
    ids_dtype: torch.dtype = torch.int64,
    training: bool = False,
) -> None:
    """Call `moe_mlp` on meta tensors, and run its backward pass if `training`."""
    H, I, E, top_k, dtype = shape  # noqa: E741
    like: dict[str, Any] = {"device": "meta", "requires_grad": training}
    hidden, w_gate_up, w_down = (
        torch.empty(extents, dtype=dtype, **like) for extents in ((T, H), (E, 2 * I, H), (E, H, I))
    )
    topk_ids = torch.empty(T, top_k, dtype=ids_dtype, device="meta")
    out: Any = moe_mlp(hidden, topk_ids, torch.empty(T, top_k, dtype=weights_dtype, **like), w_gate_up, w_down)
    if training:
        out.backward(torch.empty_like(out))


def collect(calls: Iterable[Callable[[], None]]) -> list[PlanRequest]:
    """Run `calls` on meta tensors and return the plans that they request from the plan cache, without duplicates."""
    wanted: dict[str, PlanRequest] = {}

    def note(operator: Operator, tensors: Sequence[Tensor | None], options: Any) -> Any:
        inputs = symbolic(operator, tensors, options)
        text = portable(signature(operator, tensors, options))
        wanted.setdefault(text, PlanRequest(operator.name, inputs, options, text))
        # Any known GPU will do: the shapes and dtypes of the results do not depend on it.
        _, results = cache.build_steps(operator, inputs, options, targets.KNOWN["h200"])
        extents = [() if x is None else tuple(x.shape) for x in tensors]
        made = [torch.empty(tuple(value(n, extents) for n in x.shape), dtype=x.dtype, device="meta") for x in results]
        return made[0] if len(made) == 1 else tuple(made)

    with cache.collecting(note), torch.inference_mode(False), torch.enable_grad():
        for call in calls:
            call()
    return list(wanted.values())


def _making(wanted: Sequence[PlanRequest], gpu: Gpu, jobs: int) -> Iterator[None]:
    """Compile plans, in this process or in others, and yield after each."""
    here = targets.current() == gpu
    if not wanted or (here and jobs == 1):
        for one in wanted:
            _make(one, gpu)
            yield
        return
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(jobs, context, _initialise, (None if here else gpu,))
    try:
        with _interrupts_ignored():
            futures = [pool.submit(_make, one, gpu) for one in wanted]
        for future in as_completed(futures):
            future.result()
            yield
    except KeyboardInterrupt:
        print("\nWaiting for the plans that are being made.", file=sys.stderr, flush=True)
        raise
    finally:
        pool.shutdown(cancel_futures=True)


@contextmanager
def _interrupts_ignored() -> Iterator[None]:
    """Ignore Ctrl-C, and have processes that start in this context ignore it: a terminal sends it to all, and theirs
    would end in tracebacks. The parent lets them end what they make.
    """
    before = signal.getsignal(signal.SIGINT)
    if before is None or threading.current_thread() is not threading.main_thread():  # it cannot be restored, or changed
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _initialise(absent: Gpu | None) -> None:
    """Initialise a process that compiles, for the GPU of this machine or for one that is absent."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if absent is not None:
        importlib.import_module("moe_kernels.runtime.compile")  # imports Helion, which is to see the GPU that is here
        torch_internals.pretend(absent)


def _end_with_parent() -> None:
    """End this process when its parent does, which cannot end it when it is killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _make(wanted: PlanRequest, gpu: Gpu) -> None:
    operator = _OPERATORS[wanted.operator]
    try:
        with cache.plans.lock:  # as for the plan of a call: no other thread makes one, or forks, meanwhile
            rules.with_fallback(lambda: cache.plan_of(operator, wanted.inputs, wanted.options, wanted.signature, gpu))
    except OSError:
        raise
    except Exception as error:  # some of Helion's cannot be sent to another process
        raise RuntimeError(f"{wanted.operator}: {type(error).__name__}: {error}") from error


@contextmanager
def output(folder: str | None) -> Iterator[None]:
    """Store plans in `folder` in this context and in its child processes, even plans that other folders have."""
    made = {} if folder is None else {"MOE_KERNELS_CACHE_DIR": folder, "MOE_KERNELS_CACHE_READONLY": ""}
    before = {name: os.environ[name] for name in made if name in os.environ}
    os.environ |= made
    try:
        yield
    finally:
        for name in made:
            del os.environ[name]
        os.environ |= before


def requests(tokens: Sequence[int], shape: LayerShape, gpu: Gpu) -> dict[tuple[int, int], list[Any]]:
    """Map (lowest, highest) token counts of each class to the layer's kernel requests; nothing is compiled."""
    found: dict[tuple[int, int], list[Any]] = {}
    for members in classes(tokens, shape.num_experts, shape.top_k):
        launches = found[members[0], members[-1]] = []
        for one in collect([partial(_run_experts, shape, members[0], torch.float32)]):
            builder, _ = cache.build_steps(_OPERATORS[one.operator], one.inputs, one.options, gpu)
            launches += [step for step in builder.steps if isinstance(step, Request)]
    return found


__all__ = ["CompileCounts", "LayerShape", "compile_ahead"]
