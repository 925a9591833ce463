"""Turn a planner's requests into a plan. Helion is imported here, by the kernels, the search of configs and `info`.

Helion generates a Triton function and a host function that launches it. The host function is run on symbolic tensors,
which gives the launch's grid and arguments as expressions. Triton compiles the function for a specialization: the types
of the arguments, and the divisibility of strides and extents. All plans with the same specialization share a binary.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import json
import os
import sys
import threading
import types
import warnings
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import helion
import helion.language as hl
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from moe_kernels import requirements
from moe_kernels.runtime import store, torch_internals
from moe_kernels.runtime.attributes import module_or_empty, one_at_a_time, replaced
from moe_kernels.runtime.plan import TYPES, Alloc, Builder, Call, Constant, Descriptor, Launch, Plan, Pointer, Request
from moe_kernels.runtime.symbolic import INT32_MAX, SymbolicInt, SymbolicTensor, least, most
from moe_kernels.runtime.targets import Gpu

helion_environment = module_or_empty("helion._compiler.compile_environment")
helion_lowering = module_or_empty("helion._compiler.inductor_lowering")
helion_types = module_or_empty("helion._compiler.type_propagation")
SAME = "{0}"  # inline Triton of a product's operand that is zero where its tile exceeds the tensor
_EXAMPLE_NUMBER = 3
_EXAMPLE_ROWS = 256  # rows of example tensors: a TMA descriptor's block may not have more rows than its tensor
_OPTIONS = ("num_warps", "num_stages", "maxnreg", "launch_pdl", "launch_cooperative_grid", "waves_per_eu")
_TRITON = requirements.minor(triton.__version__) or (0, 0)
# Register limits per thread, by kernel; for other kernels the limit that ptxas chooses is the best. From Triton 3.9 on,
# it chooses one for some kernels that spills a few bytes. With Triton 3.8 it chooses 72 for `first_half`, with which
# fewer programs fit into an SM.
_MOST_REGISTERS = {"first_half": 64} if _TRITON == (3, 8) else {}
if _TRITON >= (3, 9):
    _MOST_REGISTERS |= {"jagged": 232, "swiglu_persistent": 232, "promoted_persistent": 255, "scaled_wgrad": 255}


@dataclass(frozen=True)
class Specialization:
    """The source of a binary: a Triton function and the types of its arguments."""

    key: str
    function: Any  # Triton's JITFunction or InterpretedFunction
    signature: tuple[str, ...]
    constants: Mapping[tuple[int, ...], Any]
    attributes: Mapping[tuple[int, ...], Any]
    options: Mapping[str, Any]


def to_plan(
    builder: Builder, results: Sequence[SymbolicTensor], begin: Callable[[Specialization], None] = lambda one: None
) -> tuple[Plan, dict[str, Specialization]]:
    """Return the plan built on `builder`, and the sources of its binaries. `begin` is called with each source."""
    steps: list[Alloc | Call | Launch] = []
    specialized: dict[str, Specialization] = {}
    for step in builder.steps:
        if isinstance(step, Request):
            launch, made = lower(step, builder.gpu)
            specialized[made.key] = made
            begin(made)
            steps.append(launch)
        else:
            steps.append(step)
    plan = Plan(builder.inputs, tuple(steps), tuple(x.variable for x in results))
    # An allocation that is the last to use its variable is not needed.
    pairs = zip(plan.steps, plan.no_longer_used, strict=True)
    needed = tuple(step for step, ended in pairs if not (isinstance(step, Alloc) and ended))
    return replace(plan, steps=needed), specialized


def lower(request: Request, gpu: Gpu) -> tuple[Launch, Specialization]:
    """Return the launch of `request` as data, and the source of its binary.

    Raises RuntimeError if Helion's code reads by pointers what only TMA reads without leaving it, `tma_clipped`.
    """
    host = _host_function(request, gpu)
    made: list[tuple[Any, tuple[Any, ...], tuple[Any, ...], dict[str, Any]]] = []
    host(*request.arguments, _launcher=lambda fn, grid, *args, **options: made.append((fn, grid, args, options)))
    ((function, grid, arguments, options),) = made
    if gpu.backend == "cuda" and request.kernel.name in _MOST_REGISTERS:
        of_an_sm = 65536 // (32 * options.get("num_warps", 4))
        options = {"maxnreg": min(_MOST_REGISTERS[request.kernel.name], of_an_sm)} | options
    specialized = _specialize(function, arguments, request.kernel.signature.parameters, options, gpu)
    pointers = [x for x in arguments if isinstance(x, SymbolicTensor)]
    if any(x.tma_clipped for x in pointers):
        raise RuntimeError(f"{request.kernel.name}: what relies on TMA to clip it is accessed by pointers")
    return Launch(specialized.key, tuple(grid), tuple(_argument(x) for x in arguments)), specialized


def _argument(x: Any) -> Any:
    if isinstance(x, SymbolicTensor):
        return Pointer(x.variable, x.offset)
    return x if type(x) is int or isinstance(x, (Descriptor, SymbolicInt)) else Constant(x)


def _descriptor(base: SymbolicTensor, shape: Sequence[Any], strides: Sequence[Any], block: Sequence[Any]) -> Descriptor:
    """Return the TMA descriptor of a plan, in place of the one that Helion's host function would create."""
    steps, block_shape = (tuple(int(n) for n in numbers) for numbers in (strides, block))
    return Descriptor(base.variable, base.offset, tuple(shape), steps, block_shape, base.dtype)


def _specialize(
    function: Any, arguments: Sequence[Any], numbers: Container[str], options: Mapping[str, Any], gpu: Gpu
) -> Specialization:
    """Specialize on the arguments as Triton does at a launch, except that `numbers`, and integers which change from
    call to call, are not specialized as 1 or as multiples of 16.
    """
    kept = {name: value for name, value in options.items() if name in _OPTIONS and value is not None}
    if gpu.backend == "interpreter":
        return Specialization(f"interpreted{id(function)}", function, (), {}, {}, kept)
    signature: list[str] = []
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    for i, (parameter, x) in enumerate(zip(function.params, arguments, strict=True)):
        kind, divisible = _type_of(x), False
        if isinstance(x, SymbolicTensor):
            divisible = x.aligned
        elif parameter.is_constexpr:
            kind, constants[i,] = "constexpr", x
        elif type(x) is int and parameter.name not in numbers:
            if x == 1:
                kind, constants[i,] = "constexpr", x
            divisible = x % 16 == 0
        signature.append(kind)
        if divisible:
            attributes[i,] = [["tt.divisibility", 16]]
    content = (function.cache_key, signature, sorted(constants.items()), sorted(attributes), sorted(kept.items()))
    key = hashlib.sha256(repr((*content, gpu.backend, gpu.arch, store.public_version("triton"))).encode()).hexdigest()
    return Specialization(key, function, tuple(signature), constants, attributes, kept)


def _type_of(x: Any) -> str:
    if isinstance(x, SymbolicTensor):
        return "*" + TYPES[x.dtype]
    if isinstance(x, Descriptor):
        return f"tensordesc<{TYPES[x.dtype]}{list(x.block_shape)}>"
    if isinstance(x, bool):
        return "i1"
    if type(x) is int or isinstance(x, SymbolicInt):
        return "i32" if most(x) <= INT32_MAX and least(x) >= -INT32_MAX else "i64"
    return "fp32" if isinstance(x, float) else "constexpr"


def binary(specialized: Specialization, gpu: Gpu, fewer_stages: bool = False, replace: bool = False) -> store.Binary:
    """Compile a binary by `within_shared_memory`, and store it, perhaps to `replace` one that is there."""
    compiled = within_shared_memory(specialized, gpu, fewer_stages)
    made = store.Binary(
        key=specialized.key,
        signature=specialized.signature,
        constants=tuple(place[0] for place in specialized.constants),
        metadata=json.dumps(compiled.metadata._asdict(), default=vars),
        extension={"cuda": "cubin", "hip": "hsaco"}.get(gpu.backend, "spv"),
        code=compiled.kernel,
    )
    return store.write_binary(made, replace)


def within_shared_memory(specialized: Specialization, gpu: Gpu, fewer_stages: bool = True) -> Any:
    """Return a `compiled_kernel` with the given stages of loads or, with `fewer_stages`, as many of them as fit into
    the GPU's memory.

    The same stages take more shared memory on some GPUs. On a B200, accumulators are in a memory of their own, and
    results pass through shared memory that the loads cannot use.

    Raises:
        triton.OutOfResources: it needs more shared memory than a program can have.
    """
    compiled = compiled_kernel(specialized, gpu)
    while compiled.metadata.shared > gpu.shared_memory:
        if not fewer_stages or compiled.metadata.num_stages <= 1:
            raise triton.OutOfResources(compiled.metadata.shared, gpu.shared_memory, "shared memory")
        options = {**specialized.options, "num_stages": compiled.metadata.num_stages - 1}
        compiled = compiled_kernel(replace(specialized, options=options), gpu)
    return compiled


def compiled_kernel(specialized: Specialization, gpu: Gpu) -> Any:
    """Return Triton's `CompiledKernel`, from Triton's own cache if it is there."""
    names = specialized.function.arg_names
    source = ASTSource(
        fn=specialized.function,
        signature=dict(zip(names, specialized.signature, strict=True)),
        constexprs=dict(specialized.constants),
        attrs=dict(specialized.attributes),
    )
    target = GPUTarget(gpu.backend, gpu.arch, gpu.warp_size)
    # Triton 3.6 instruments by the setting, but names instrumented code in its cache by the option alone.
    mode = getattr(triton.knobs.compilation, "instrumentation_mode", "")
    options: dict[str, Any] = {"instrumentation_mode": mode} if mode else {}
    if "TRITON_DEFAULT_FP_FUSION" not in os.environ:
        options["enable_fp_fusion"] = True  # as by default up to Triton 3.9, which warns that 3.10 has another default
    return triton.compile(source, target=target, options=options | dict(specialized.options))


class Compiling:
    """Compiles the binaries of a plan that the store lacks, or all of them to `replace` those of the store.

    They are compiled in parallel, while Helion generates the next kernel's code. Triton's compiler mostly waits for its
    own threads and for ptxas.
    """

    def __init__(self, gpu: Gpu, replace: bool = False):
        self.gpu, self.replace, self.pool = gpu, replace, ThreadPoolExecutor(8)
        self.found = False  # whether a binary was in the store
        self.begun: dict[str, tuple[Specialization, Future[store.Binary]]] = {}

    def begin(self, one: Specialization) -> None:
        if one.key not in self.begun:
            self.begun[one.key] = one, self.pool.submit(self._binary, one)

    def _binary(self, one: Specialization, fewer_stages: bool = False) -> store.Binary:
        if not self.replace and (known := store.read_binary(one.key)) is not None:
            self.found = True
            store.renew(binaries=[one.key])  # which the new plan needs
            return known
        return binary(one, self.gpu, fewer_stages, self.replace)

    def binaries(self, fewer_stages: bool) -> dict[str, store.Binary]:
        """Wait for all compilations that have begun, and return the binaries by key. With `fewer_stages`, what needs
        too much shared memory is compiled with fewer stages of loads.
        """
        made = {}
        try:
            for key, (one, future) in self.begun.items():
                try:
                    made[key] = future.result()
                except triton.OutOfResources:
                    if not fewer_stages:
                        raise
                    made[key] = self._binary(one, fewer_stages)
            return made
        finally:
            self.pool.shutdown()


_hosts: dict[tuple[Any, ...], Callable[..., Any]] = {}


def _host_function(request: Request, gpu: Gpu) -> Callable[..., Any]:
    """Return Helion's generated host function for arguments like those of `request`, with any number of rows."""
    static = request.kernel.settings.static_shapes
    parameters = request.kernel.signature.parameters.values()
    # Generated code depends on the values of `hl.constexpr` integers only.
    arguments = [
        _EXAMPLE_NUMBER if type(x) is int and "constexpr" not in str(parameter.annotation) else x
        for x, parameter in zip(request.arguments, parameters, strict=True)
    ]
    examples = [_example_of(x, static) for x in arguments]
    config = _supported(request.config.config, gpu)
    by_tma = bool(config.get("host_tensor_descriptors"))
    described = [x if static or not isinstance(x, _Example) else x.dynamic(by_tma) for x in examples]
    key = (request.kernel.fn, repr(config), request.int64_index, request.precision, gpu, tuple(map(repr, described)))
    with one_at_a_time:
        if key not in _hosts:
            _hosts[key] = _generate(request, config, examples, gpu)
        return _hosts[key]


@dataclass(frozen=True)
class _Example:
    """Example tensor to compile for, without dimensions of size 1, on which Helion would specialize. Exceptions are
    `few_groups`, `example_shape`, and static shapes beyond the first extent.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def dynamic(self, by_tma: bool) -> tuple[Any, ...]:
        """The properties that generated code depends on if shapes are not static."""
        if not by_tma:
            return self.dtype, tuple(min(n, 2) for n in self.shape), tuple(min(s, 2) for s in self.strides)
        strides = tuple(s if s < 2 else (s * self.dtype.itemsize % 16 == 0) for s in self.strides)
        blocks = tuple(min(n, _EXAMPLE_ROWS) for n in self.shape)  # descriptors' blocks are compared with them
        return self.dtype, strides, blocks


def _example_of(x: Any, static: bool) -> Any:
    if isinstance(x, SymbolicInt):
        return _EXAMPLE_NUMBER
    if not isinstance(x, SymbolicTensor):
        return x
    shape = [_EXAMPLE_ROWS if isinstance(n, SymbolicInt) else n for n in x.example_shape or x.shape]
    # The example of a symbolic stride is not a multiple of 16 bytes.
    strides = tuple(_EXAMPLE_ROWS + 1 if isinstance(n, SymbolicInt) else n for n in x.strides)
    if x.example_shape is not None:
        assert not static, "static shapes are those of the call"
        return _Example(x.dtype, tuple(shape), strides)
    first = [min(2, n) if x.few_groups else max(2, n) for n in shape[:1]]
    return _Example(x.dtype, (*first, *(n if static else max(2, n) for n in shape[1:])), strides)


def _generate(request: Request, config: Mapping[str, Any], examples: Sequence[Any], gpu: Gpu) -> Callable[..., Any]:
    with ExitStack() as stack:
        stack.enter_context(_thread_state_restored())
        tensors = stack.enter_context(_example_tensors(gpu))
        stack.enter_context(torch_internals.without_symmetric_memory())
        if not hasattr(hl.inline_triton, "_get_masked_value"):
            raise requirements.lacks("helion", "inline_triton._get_masked_value")
        stack.enter_context(replaced(hl.inline_triton, _get_masked_value=_value_outside))
        stack.enter_context(_bodies_visited_once())
        stack.enter_context(_handlers_created_once())
        # PyTorch 2.15 warns of the graphs in which Helion splits a store.
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", "Raw SymInt value")
        args = tuple(tensors(x) if isinstance(x, _Example) else x for x in examples)
        bound = _variant(request.kernel, request.int64_index, request.precision).bind(args)
        code = bound.to_triton_code(helion.Config(**config))
    module: Any = _import(code)
    # Generated code asks the device for its number of SMs, which is wrong in plans for another GPU or the interpreter.
    module.helion = types.SimpleNamespace(
        runtime=types.SimpleNamespace(get_num_sm=lambda device, **_: gpu.multiprocessors)
    )
    module._helion_tensor_descriptor = _descriptor
    return getattr(module, request.kernel.fn.__name__)


@contextmanager
def _thread_state_restored() -> Iterator[None]:
    """Restore Helion's state of this thread, mostly stacks, after the block. With what Ctrl-C can leave there, Helion
    would refuse all later kernels.
    """
    helion_modules = [module for name, module in sys.modules.items() if name.partition(".")[0] == "helion"]
    states = [vars(x) for module in helion_modules for x in vars(module).values() if isinstance(x, threading.local)]
    before = [{name: list(x) if isinstance(x, list) else x for name, x in state.items()} for state in states]
    try:
        yield
    finally:
        for state, values in zip(states, before, strict=True):
            state.clear()
            state.update(values)


@contextmanager
def _bodies_visited_once() -> Iterator[None]:
    """Within the block, Helion infers types once instead of twice in the body of a loop on the device, if each name
    assigned there either had no value before, or is a tensor of the same dtype and shape before and after: a second
    visit would find the same types. An inner loop is visited at each visit of the outer one, so few visits are left. If
    Helion lacks the function, code generation takes longer.
    """
    propagation = getattr(helion_types, "TypePropagation", None)
    visit = getattr(propagation, "_loop_body", None)
    found: dict[int, Any] = {}  # the scope after a visit, by the id of the list of statements

    def loop_body(self: Any, statements: list[ast.stmt]) -> Any:
        assert visit is not None
        if self.device_loop_depth == 0:
            return visit(self, statements)
        if id(statements) in found:
            return found.pop(id(statements))
        nodes = [node for statement in statements for node in ast.walk(statement)]
        targets = {node.target.id for node in nodes if isinstance(node, ast.For) and isinstance(node.target, ast.Name)}
        names = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)} - targets
        before = {name: value for name in names if (value := self.scope.maybe_get(name)) is not None}
        scope = visit(self, statements)
        if all(_same_tensors(value, scope.variables.get(name, value)) for name, value in before.items()):
            found[id(statements)] = scope.clone()
        return scope

    with replaced(propagation, _loop_body=loop_body):
        yield


def _handlers_created_once() -> AbstractContextManager[None]:
    """Within the block, Helion lowers all pointwise operations of a kernel with one set of Inductor's handlers, which
    it creates anew for each. If Helion lacks the names, code generation takes longer.
    """
    names = ("FakeGraphLowering", "TritonKernel")
    return replaced(helion_lowering, **{name: _created_once(getattr(helion_lowering, name, None)) for name in names})


def _created_once(create: Any) -> Callable[..., Any]:
    created: list[Any] = []

    def once(*args: Any, **options: Any) -> Any:
        if not created:
            created.append(create(*args, **options))
        return created[0]

    return once


def _same_tensors(a: Any, b: Any) -> bool:
    """Whether two of Helion's types are tensors of the same dtype and shape. Comparing sizes themselves would make
    PyTorch assume that symbols are equal where their examples are.
    """
    kind = getattr(helion_types, "TensorType", ())  # without it, types are taken to differ
    if not isinstance(a, kind) or not isinstance(b, kind):
        return False
    one, other = ((x.fake_value.dtype, str(x.fake_value.size())) for x in (a, b))
    return bool(one == other)


def _value_outside(node: Any) -> float | None:
    """Return the value of inline Triton where its tile exceeds the tensor, None if unknown. Helion 1.5.1 masks unknown
    values, which takes operands of WGMMA through registers: slow, and not sound with Triton 3.6 (Triton's issue 9433).
    """
    return 0 if node.args[0] == SAME else None


def _supported(config: Mapping[str, Any], gpu: Gpu) -> dict[str, Any]:
    """Return the options of a config that a GPU supports: Triton's interpreter has neither TMA nor flattened loops."""
    if gpu.backend != "interpreter":
        return dict(config)
    unknown = ("indexing", "host_tensor_descriptors", "range_flattens")
    return {name: value for name, value in config.items() if name not in unknown}


@functools.cache
def _variant(kernel: Any, int64_index: bool, precision: str) -> Any:
    return helion.kernel(
        kernel.fn,
        backend=kernel.settings.backend,
        ref_mode=kernel.settings.ref_mode,
        static_shapes=kernel.settings.static_shapes,
        index_dtype=torch.int64 if int64_index else torch.int32,
        dot_precision=precision,
    )


_folder = store.temporary_folder()


def _import(code: str) -> types.ModuleType:
    """Import generated code as a module, from a file because Triton reads the source there."""
    global _folder
    name = f"moe_kernels_{hashlib.sha256(code.encode()).hexdigest()[:32]}"
    # A cleaner of /tmp removes it, and so does the process that this one was forked from, at its end.
    if not os.path.isdir(_folder) or os.stat(_folder).st_uid != os.getuid():
        _folder = store.temporary_folder()
    path = os.path.join(_folder, f"{name}.py")
    with open(path, "w") as file:
        file.write(code)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@contextmanager
def _example_tensors(gpu: Gpu) -> Iterator[Callable[[_Example], torch.Tensor]]:
    """Yield a function that creates example tensors. They are fake: no GPU is needed."""
    # The current GPU, because PyTorch 2.11 allocates a little on the device of a fake tensor.
    index = torch.cuda.current_device() if torch.cuda.is_available() else 0
    device = torch.device("cpu") if gpu.backend == "interpreter" else torch.device(gpu.device_type, index)
    FakeTensor, FakeTensorMode = torch_internals.fake_tensors()
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    environment = getattr(helion_environment, "CompileEnvironment", None)
    to_fake = getattr(environment, "_to_fake_tensor", None)
    if to_fake is None:
        raise requirements.lacks("helion", "CompileEnvironment._to_fake_tensor")

    def symbolic_fake(self: Any, tensor: Any, source: Any) -> Any:
        """Give fake tensors symbolic sizes where shapes are not static, as real ones would have."""
        if not isinstance(tensor, FakeTensor) or self.settings.static_shapes or self.fake_mode.is_our_fake(tensor):
            return to_fake(self, tensor, source)
        with torch_internals.without_modes():
            meta = torch.empty_strided(tuple(tensor.size()), tuple(tensor.stride()), dtype=tensor.dtype, device="meta")
        sizes, strides, _ = self.shape_env.create_symbolic_sizes_strides_storage_offset(meta, source)
        with self.fake_mode:
            result = torch.empty_strided(sizes, strides, dtype=tensor.dtype, device=tensor.device)
        self.input_sources[result] = source
        return result

    def alignment(value: Any) -> tuple[bool, bool]:
        """Report tensors as aligned: Helion takes fake tensors to be unaligned, and would never use TMA for them."""
        return (isinstance(value, torch.Tensor),) * 2

    def make(x: _Example) -> torch.Tensor:
        with mode:
            return torch.empty_strided(x.shape, x.strides, dtype=x.dtype, device=device)

    with (
        # Helion would refuse 32-bit indices for tensors with more elements, but groups and windows have their own.
        replaced(sys.modules[helion.Kernel.__module__], _resolve_index_dtype=lambda settings, _: settings.index_dtype),
        replaced(environment, _to_fake_tensor=symbolic_fake),
        replaced(helion_environment, tensor_descriptor_runtime_alignment_signature=alignment),
        replaced(FakeTensor, data_ptr=lambda self: self.storage_offset() * self.element_size()),
    ):
        yield make
