"""Plans and binaries compiled ahead of time, and the commands for it, on a machine without a GPU.

Code that must run without Helion or with Triton's interpreter is a script for a separate process.
"""

from __future__ import annotations

import argparse
import errno
import gc
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import types
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import Mock

import pytest
import torch
from processes import forget_store, python_path, stored_in
from torch import nn

from moe_kernels import MoE, ahead, commands, moe_mlp
from moe_kernels.models import MODELS, SIGMOID_GATING
from moe_kernels.runtime import cache, launch, store, targets
from moe_kernels.runtime.signature import Counts, rows_class

SIZES = (64, 32, 4, 2)  # H, I, E, top_k
TOKENS = range(1, 65)
TRAINED = range(9, 13)
H200 = targets.KNOWN["h200"]
SHAPE = ahead.LayerShape(*SIZES, torch.float16)

# Start of both scripts below: calls on CPU tensors that take the kernel path and get their results from `find`.
REAL_CALLS = """
import json, os, sys
os.environ["TRITON_INTERPRET"] = "1"
import torch
from moe_kernels import MoE, ahead, grouped_gemm, grouped_mm, moe_mlp, topk_softmax
from moe_kernels.runtime import cache, targets
from moe_kernels.runtime.signature import portable, signature, symbolic
from moe_kernels.runtime.symbolic import value

def zeros(tensors, results):
    extents = [() if x is None else tuple(x.shape) for x in tensors]
    made = [torch.zeros([value(n, extents) for n in x.shape], dtype=x.dtype) for x in results]
    return made[0] if len(made) == 1 else tuple(made)

def call_module(module, T, training):
    with torch.set_grad_enabled(training):
        hidden = torch.randn(T, module.router.size(1), dtype=module.router.dtype, requires_grad=training)
        out = module(hidden)
        if training:
            out.backward(torch.randn_like(out))

def call_experts(module, T, training):
    with torch.set_grad_enabled(training):
        w_gate_up, w_down = module.w_gate_up, module.w_down
        ids = torch.zeros(T, module.top_k, dtype=torch.int64)
        hidden, topk_weights = (w_down.new_zeros(T, n, requires_grad=training) for n in (w_down.size(1), module.top_k))
        out = moe_mlp(hidden, ids, topk_weights, w_gate_up, w_down)
        if training:
            out.backward(torch.randn_like(out))
    with torch.no_grad():  # as inference engines call it
        for weights in (topk_weights, topk_weights.float()):
            moe_mlp(hidden, ids.int(), weights, w_gate_up, w_down)

def call_gating(module, T):
    with torch.no_grad():
        for dtype in (module.w_down.dtype, torch.float32):
            for renormalize in (True, False):
                topk_softmax(torch.zeros(T, len(module.w_down), dtype=dtype), module.top_k, renormalize=renormalize)

def call_products(module, T):
    with torch.no_grad():
        w_gate_up, w_down = module.w_gate_up, module.w_down
        (E, H, I), top_k = w_down.shape, module.top_k
        offsets = torch.zeros(E + 1, dtype=torch.int32)
        for width, weight in ((H, w_gate_up.mT), (I, w_down.mT)):
            rows = w_down.new_zeros(T * top_k, width)
            grouped_gemm(rows, weight, offsets)
            grouped_mm(rows, weight, offs=offsets.new_zeros(E))
"""

# Prints the compiler modules that were imported, then the numbers of plans, of plans stored for another GPU, of
# binaries, of launchers that these need, and of missing launchers.
FIND = (
    REAL_CALLS
    + """
import hashlib, types
from moe_kernels import rules
from moe_kernels.runtime import launch, store
from moe_kernels.runtime.plan import Alloc

plans, binaries = set(), {}

def find(operator, tensors, options):
    text = portable(signature(operator, tensors, options))
    inputs = symbolic(operator, tensors, options)
    plan, found = cache.plan_of(operator, inputs, options, text, targets.KNOWN["h200"])
    assert plan.inputs == operator.inputs
    plans.add(text)
    binaries.update(found)
    made = {step.variable: step for step in plan.steps if isinstance(step, Alloc)}
    return zeros(tensors, [made[i] for i in plan.results])

def make_plan(operator, *_):
    raise SystemExit(f"no plan for {operator.name}")

cache.make_plan = make_plan
module = MoE(*json.loads(sys.argv[1]), renormalize=True, dtype=torch.float16)
with cache.collecting(find):
    for T in json.loads(sys.argv[2]):
        call_module(module, T, False)
        call_experts(module, T, False)
        call_gating(module, T)
        call_products(module, T)
    for T in json.loads(sys.argv[3]):
        call_module(module, T, True)
        call_experts(module, T, True)
compilers = ("helion", "torch._inductor", "moe_kernels.kernels", "moe_kernels.runtime.compile")
imported = [name for name in sys.modules if name.startswith(compilers)]
other = targets.KNOWN["h100"]
others = [text for text in plans if store.read_plan(store.plan_key(text, other, rules.tuned_digest(other)), {})]

# As Triton asks for the launcher of each of them.
del os.environ["TRITON_INTERPRET"]
from triton.backends.nvidia import driver
wanted = {open(os.path.join(driver.dirname, "driver.c")).read()}
if hasattr(driver, "make_launcher"):
    driver.compile_module_from_src = lambda src, **_: wanted.add(src) or types.SimpleNamespace(launch=None)
    driver.library_dirs = list
    for binary in binaries.values():
        kernel = launch.compiled_kernel(binary)
        driver.CudaLauncher(kernel.src, kernel.metadata)
missing = [src for src in wanted if store.read_library(hashlib.sha256(src.encode()).hexdigest()) is None]
print(json.dumps([imported, *map(len, (plans, others, binaries, wanted, missing))]))
"""
)

# Prints for each name the signatures of real calls that were not collected ahead, those collected ahead that no real
# call has, and the number of signatures of real calls.
SIGNATURES = (
    REAL_CALLS
    + """
import importlib.util
from functools import partial
seen, found = set(), {}

def find(operator, tensors, options):
    assert all(x is None or x.is_cpu for x in tensors)
    seen.add(portable(signature(operator, tensors, options)))
    _, results = cache.build_steps(operator, symbolic(operator, tensors, options), options, targets.INTERPRETER)
    return zeros(tensors, results)

def compare(name, what, T, training, *calls):
    seen.clear()
    with cache.collecting(find):
        for call in calls:
            call()
    wanted = {one.signature for one in ahead.collect(ahead._calls(what, [T], training))}
    found[name] = [sorted(seen - wanted), sorted(wanted - seen), len(seen)]

for dtype in (torch.bfloat16, torch.float32):
    for gated in (True, False):
        activation = "silu" if gated else "relu_squared"
        module = MoE(64, 32, 4, 2, renormalize=True, dtype=dtype, gated=gated, activation=activation)
        for T in (1, 2, 20, 600):
            for training in (False, True):
                name = f"{dtype}, gated: {gated}, T: {T}, training: {training}"
                calls = [partial(call_module, module, T, trains) for trains in {False, training}]
                compare(name, module, T, training, *calls)

def call_under_autocast(training):
    with torch.autocast("cpu", torch.bfloat16):
        call_module(MoE(64, 32, 4, 2, renormalize=True), 20, training)

module = MoE(64, 32, 4, 2, renormalize=True, dtype=torch.bfloat16, device="meta")
calls = [partial(call_under_autocast, trains) for trains in (False, True)]
compare("float32 under autocast, training: True", module, 20, True, *calls)

module = MoE(64, 32, 4, 2, renormalize=True, dtype=torch.float16)
shape = ahead.LayerShape(64, 32, 4, 2, torch.float16)
inference, training = [lambda: call_products(module, 20), lambda: call_gating(module, 20)], []
for call in (call_module, call_experts):
    inference.append(lambda call=call: call(module, 20, False))
    training.append(lambda call=call: call(module, 20, True))
compare("a shape", shape, 20, False, *inference)
compare("a shape, training: True", shape, 20, True, *inference, *training)

if importlib.util.find_spec("transformers") is not None:
    import transformers
    from moe_kernels.integrations import transformers as integration

    integration.register()
    sizes = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "intermediate_size": 24, "num_local_experts": 5, "num_experts_per_tok": 2}
    for name in ("Mixtral", "GptOss"):
        config = getattr(transformers, f"{name}Config")(**sizes, head_dim=8)
        model = getattr(transformers, f"{name}ForCausalLM")._from_config(config).to(torch.bfloat16)
        model.set_experts_implementation("moe_kernels")
        assert len(ahead.layers_of(model)) == 1

        def call_model(training):
            with torch.set_grad_enabled(training):
                out = model(torch.zeros(2, 7, dtype=torch.int64)).logits
            if training:
                out.backward(torch.randn_like(out))

        calls = [partial(call_model, trains) for trains in (False, True)]
        compare(f"transformers, {name}, training: True", model, 14, True, *calls)
print(json.dumps(found))
"""
)


def without_gpu(**environment: str) -> dict[str, str]:
    """Return the environment of a process that sees no GPU."""
    dropped = ("TRITON_INTERPRET", "MOE_KERNELS_CACHE_DIR", "MOE_KERNELS_CACHE_READONLY", "MOE_KERNELS_CONFIG_DIR")
    env = {name: value for name, value in os.environ.items() if name not in dropped}
    return env | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": python_path()} | environment


def python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a separate process that sees no GPU."""
    env = without_gpu(**environment)
    return subprocess.run(
        [sys.executable, *arguments], env=env, capture_output=True, text=True, timeout=600, check=False
    )


class Stored(NamedTuple):
    """What tells whether a file was written again, which gives it another inode."""

    size: int
    inode: int
    mtime: int


def listing(folder: Path) -> dict[str, Stored]:
    found = [(path, path.stat()) for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): Stored(x.st_size, x.st_ino, x.st_mtime_ns) for path, x in found}


class Made(NamedTuple):
    """Results of three runs of `compile`: inference, the same again, and training for fewer tokens with two jobs.

    Its C compiler links, as Ubuntu's does, only libraries that have a symbol that is used.
    """

    folder: Path
    runs: list[subprocess.CompletedProcess[str]]
    listings: list[dict[str, Stored]]
    compiled: int  # kernels compiled by Triton, counted in its own cache


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    pytest.importorskip("helion")
    base = tmp_path_factory.mktemp("ahead")
    folder, compiler = base / "folder", base / "cc"
    compiler.write_text('#!/bin/sh\nexec gcc -Wl,--as-needed "$@"\n')
    compiler.chmod(0o755)
    environment = {"TRITON_CACHE_DIR": str(base / "triton"), "XDG_CACHE_HOME": str(base), "CC": str(compiler)}
    layer = ["--layer", ",".join(map(str, SIZES)), "--dtype", "float16", "--gpu", "h200", "--output", str(folder)]
    inference = [*layer, "--tokens", f"{TOKENS[0]}:{TOKENS[-1]}"]
    runs, listings = [], []
    training = [*layer, "--tokens", f"{TRAINED[0]}:{TRAINED[-1]}", "--training", "--jobs", "2"]
    for arguments in (inference, inference, training):
        runs.append(python("-m", "moe_kernels", "compile", *arguments, **environment))
        assert runs[-1].returncode == 0, runs[-1].stderr
        listings.append(listing(folder))
    assert not (base / "moe_kernels" / "compiled").exists()
    return Made(folder, runs, listings, len(list((base / "triton").rglob("*.cubin"))))


def counts(run: subprocess.CompletedProcess[str]) -> list[int]:
    """Return the numbers of plans, binaries and libraries that `compile` reports."""
    return [int(word) for word in run.stdout.splitlines()[1].split() if word.isdigit()][:3]


def warnings_in(stderr: str) -> list[str]:
    """Return our warnings, except those about tuned entries measured with another Triton."""
    return [line for line in stderr.splitlines() if "Warning: moe_kernels" in line and "is here: skipped" not in line]


def test_compile_says_what_it_does(made: Made) -> None:
    first, again, training = made.runs
    assert first.stdout.startswith(f"Into {made.folder}, for h200:\n")
    assert "MOE_KERNELS_CACHE_READONLY" in first.stdout
    plans, binaries, libraries = counts(first)
    assert f"{plans} of {plans} plans\n" in first.stderr
    assert counts(again) == [plans, binaries, libraries]
    assert "plans" not in again.stderr  # nothing was left to make
    assert min(counts(training)) > 0
    for each in made.runs:
        assert not warnings_in(each.stderr)


def test_nothing_is_made_twice(made: Made) -> None:
    """Nothing is made twice within a run or by a later run, and a repeated run leaves all files unchanged. Files that a
    run needs beside new ones count as new.
    """
    first, again, training = made.listings
    assert again == first
    assert {name: training[name][:2] for name in first} == {name: file[:2] for name, file in first.items()}
    needed = [name for name in first if training[name].mtime > first[name].mtime]
    assert {Path(name).parent.name for name in needed} == {"plans", "binaries", Path(store._libraries()).name}
    newest = max(file.mtime for file in first.values())
    assert all(training[name].mtime > newest for name in needed)
    for plan in (made.folder / name for name in needed if Path(name).parent.name == "plans"):
        for key in stored_in(plan)[0]["binaries"]:
            assert training[str((plan.parents[1] / "binaries" / key).relative_to(made.folder))].mtime > newest
    kinds = Counter(Path(name).parent.name for name in first)
    plans, binaries, libraries = counts(made.runs[0])
    assert kinds["plans"] == plans
    assert kinds["binaries"] == binaries
    assert kinds[store._libraries().partition("/")[2]] == libraries
    assert made.compiled == len([name for name in training if Path(name).parent.name == "binaries"])
    assert not [name for name in training if name.endswith(".tmp")]


def test_launchers_load_the_driver(made: Made, tmp_path: Path) -> None:
    """They were linked against a stub of its library, which has no symbols."""
    launchers = list((made.folder / store._libraries()).iterdir())
    assert launchers
    for file in launchers:
        launcher = tmp_path / file.name
        launcher.write_bytes(stored_in(file)[1])
        needed = subprocess.run(["readelf", "-d", launcher], capture_output=True, text=True, check=True).stdout
        assert "Shared library: [libcuda.so.1]" in needed


def described(x: Any) -> Any:
    """Return everything about an argument that a specialization may depend on."""
    shape = getattr(x, "shape", None)
    if shape is None:
        return x if isinstance(x, (bool, int, float, str, torch.dtype, type(None))) else "a number"
    return x.dtype, tuple(n if type(n) is int else "a number" for n in shape), x.strides, x.aligned, x.tma_clipped


def specializations(tokens: Sequence[int]) -> set[Any]:
    """Return each kernel with its config and kinds of arguments, over all inference plans of the layer."""
    found = set()
    for one in ahead.collect(ahead._calls(SHAPE, tokens, False)):
        builder, _ = cache.build_steps(ahead._OPERATORS[one.operator], one.inputs, one.options, H200)
        for step in builder.steps:
            if hasattr(step, "kernel"):
                arguments = tuple(map(described, step.arguments))
                found.add((step.kernel.name, repr(step.config), step.int64_index, step.precision, arguments))
    return found


def test_a_binary_for_each_specialization(made: Made) -> None:
    """All plans that launch a specialization share its binary."""
    _, binaries, _ = counts(made.runs[0])
    distinct = specializations(TOKENS)
    assert 0 < binaries <= len(distinct)
    assert binaries >= len({(name, config) for name, config, *_ in distinct})


def test_a_process_that_finds_its_plans_imports_no_compiler(made: Made, tmp_path: Path) -> None:
    """A read-only folder, as in a container image, serves every number of tokens, launchers included."""
    empty = tmp_path / "empty"
    environment = {"MOE_KERNELS_CACHE_DIR": str(empty), "MOE_KERNELS_CACHE_READONLY": str(made.folder)}
    done = python("-c", FIND, *map(json.dumps, (SIZES, [*TOKENS], [*TRAINED])), **environment)
    assert done.returncode == 0, done.stderr
    assert not warnings_in(done.stderr)
    imported, plans, others, binaries, wanted, missing = json.loads(done.stdout)
    assert imported == []
    assert others == 0
    kinds = Counter(Path(name).parent.name for name in made.listings[-1])
    assert plans == kinds["plans"]
    assert binaries == kinds["binaries"]
    assert wanted >= 1  # Triton 3.6 has one per signature, later versions only that of the driver
    assert missing == 0
    assert listing(made.folder) == made.listings[-1]
    assert not empty.exists()


@pytest.fixture
def folder(made: Made, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Use the folder filled by `compile` as the cache of this process, and fail if anything more is made."""
    for name in ("MOE_KERNELS_CACHE_READONLY", "MOE_KERNELS_CONFIG_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(made.folder.parent))
    monkeypatch.setenv("MOE_KERNELS_CACHE_DIR", str(made.folder))
    for name in ("_make", "ProcessPoolExecutor"):
        monkeypatch.setattr(ahead, name, Mock(side_effect=AssertionError("something is made")))
    forget_store()
    ahead.rules.reload()
    yield made.folder
    ahead.rules.reload()
    forget_store()
    assert listing(made.folder) == made.listings[-1]


def bare(*sizes: int, **options: Any) -> MoE:
    return MoE(*(sizes or SIZES), renormalize=True, dtype=torch.float16, **options)  # type: ignore[arg-type,misc]


@pytest.mark.parametrize("training", [False, True])
def test_a_module_on_the_cpu(folder: Path, made: Made, training: bool) -> None:
    """Only the module's shape is used, and the module stays unchanged."""
    module = bare()
    module.router.requires_grad_(False)
    before = {name: (p.data_ptr(), p.requires_grad, p.device, p.clone()) for name, p in module.named_parameters()}
    found = ahead.compile_ahead(module, tokens=TRAINED if training else TOKENS, training=training, gpu="h200")
    plans, _, _ = counts(made.runs[2 if training else 0])
    assert 0 < found.plans < plans  # a LayerShape includes separate calls of the products, too
    assert found.binaries > 0
    assert found.libraries > 0
    for name, parameter in module.named_parameters():
        address, requires_grad, device, content = before[name]
        assert (parameter.data_ptr(), parameter.requires_grad, parameter.device) == (address, requires_grad, device)
        assert torch.equal(parameter, content)
        assert parameter.grad is None


def test_a_module_that_contains_layers(folder: Path) -> None:
    """Identical layers are compiled once."""
    alone = ahead.compile_ahead(bare(), tokens=TOKENS, gpu="h200")
    stack = nn.Sequential(nn.Linear(64, 64), bare(), nn.ModuleDict({"inner": bare()}))
    assert ahead.compile_ahead(stack, tokens=TOKENS, gpu="h200") == alone
    assert ahead.compile_ahead(SHAPE, tokens=TOKENS, gpu="h200").plans > alone.plans
    assert ahead.compile_ahead([SHAPE], tokens=[64, 64, 5], gpu="h200").plans < alone.plans * 4


def test_layers_of_a_module() -> None:
    """One layer of each kind is found: kinds differ in sizes, dtype, top_k and what an expert computes."""
    kinds = [
        bare(),
        bare(64, 32, 4, 1),
        bare(64, 32, 8, 2),
        bare(activation="gelu"),
        bare(gated=False),
        bare().float(),
    ]
    found = ahead.layers_of(nn.ModuleList([*kinds, *[bare() for _ in range(3)], nn.Linear(3, 3)]))
    assert found == kinds
    assert ahead.layers_of(nn.Linear(3, 3)) == []


@pytest.mark.parametrize("training", [False, True])
def test_a_layer_with_hooks_that_was_compiled(training: bool) -> None:
    """Neither its hooks nor its compiled code get meta tensors."""
    layer = MoE(64, 32, 4, 2, renormalize=True, dtype=torch.float16)
    plain = ahead.collect(ahead._calls(layer, [1, 5], training))
    layer.register_forward_pre_hook(lambda *_: pytest.fail("the hook was called"))
    layer.compile()
    found = ahead.collect(ahead._calls(layer, [1, 5], training))
    assert [one.signature for one in found] == [one.signature for one in plain] != []


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("compute", [None, "fp8_rowwise", "fp8_block"])
def test_no_tokens(compute: str | None, training: bool) -> None:
    """Nothing may read values, of which meta tensors have none: on a GPU the host would wait."""
    layer = MoE(64, 32, 4, 2, renormalize=True, compute=compute, device="meta", dtype=torch.bfloat16)
    ahead.collect(ahead._calls(layer, [0], training))


@pytest.mark.parametrize("compute", [None, "fp8_rowwise", "fp8_block"])
def test_training_steps_whose_hidden_states_need_no_gradient(compute: str | None) -> None:
    """Their plans are made, too: such a layer is the first one of a model, or follows frozen ones."""
    layer = MoE(64, 32, 4, 2, renormalize=True, compute=compute, device="meta", dtype=torch.bfloat16)

    def step() -> None:
        out = layer(torch.empty(20, 64, device="meta", dtype=torch.bfloat16))
        out.backward(torch.empty_like(out))

    needed = {one.signature for one in ahead.collect([step])}
    assert len(needed) > 4
    assert needed <= {one.signature for one in ahead.collect(ahead._calls(layer, [20], True))}


@pytest.mark.parametrize("compute", [None, "fp8_rowwise", "fp8_block"])
def test_backward_passes_that_ask_for_some_gradients_need_no_other_plans(compute: str | None) -> None:
    layer = MoE(64, 32, 4, 2, renormalize=True, compute=compute, device="meta", dtype=torch.bfloat16)

    def passes() -> None:
        hidden = torch.empty(20, 64, device="meta", dtype=torch.bfloat16, requires_grad=True)
        out = layer(hidden)
        out.backward(torch.empty_like(out), inputs=[hidden, layer.router], retain_graph=True)
        out.backward(torch.empty_like(out), inputs=[layer.w_gate_up, layer.w_down])

    needed = {one.signature for one in ahead.collect([passes])}
    assert len(needed) > 4
    assert needed <= {one.signature for one in ahead.collect(ahead._calls(layer, [20], True))}


@pytest.mark.parametrize("compute", [None, "fp8_rowwise"])
def test_nor_do_they_with_biases(compute: str | None) -> None:
    """The gradient of tokens' weights in 16 bits is then a sum of two, computed in float32."""
    shapes = {"hidden": (20, 64), "topk_weights": (20, 2), "w_gate_up": (4, 64, 64), "w_down": (4, 64, 32)}
    shapes |= {"gate_up_bias": (4, 64), "down_bias": (4, 64)}

    def passes(*names: str) -> None:
        given = {
            name: torch.empty(shape, device="meta", dtype=torch.bfloat16, requires_grad=True)
            for name, shape in shapes.items()
        }
        out = moe_mlp(topk_ids=torch.empty(20, 2, device="meta", dtype=torch.int64), compute=compute, **given)
        out.backward(torch.empty_like(out), inputs=[given[name] for name in names])

    def plans(*names: str) -> set[str]:
        return {one.signature for one in ahead.collect([partial(passes, *names)])}

    whole, activations = plans(*shapes), ("hidden", "topk_weights")
    for names in (activations, activations[:1], [name for name in shapes if name not in activations]):
        assert len(plans(*names)) > 4 and plans(*names) <= whole


def test_sharded_weights_are_refused() -> None:
    layer = MoE(64, 32, 4, 2, renormalize=True)
    layer.w_down.placements = ("Shard(0)",)  # type: ignore[assignment]  # as those of a DTensor
    with pytest.raises(TypeError, match=r"w_down: expected weights that are not sharded: compile before fully_shard"):
        ahead.compile_ahead(torch.nn.Sequential(layer), tokens=[1], gpu="h200")


def test_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=r"gpu: expected one of a100, .*h200.*, got 'h900'"):
        ahead.compile_ahead(bare(), tokens=[1], gpu="h900")
    with pytest.raises(ValueError, match=r"what: expected one of .*qwen3-30b-a3b.*, got 'qwen9'"):
        ahead.compile_ahead("qwen9", tokens=[1], gpu="h200")
    expected = (
        "what: expected an MoE, a module that contains one, or a transformers model with "
        'experts_implementation="moe_kernels", got Linear'
    )
    model: Any = nn.Linear(3, 3)
    with pytest.raises(ValueError, match=f"^{expected}$"):
        ahead.compile_ahead(model, tokens=[1], gpu="h200")
    model.config = types.SimpleNamespace(_experts_implementation="moe_kernels")  # as of llama4
    model.down_proj = nn.Parameter(torch.ones(2, 3, 3))
    with pytest.raises(ValueError, match=f"^{expected}, for whose experts transformers does not support this"):
        ahead.compile_ahead(model, tokens=[1], gpu="h200")
    with pytest.raises(RuntimeError, match=r"there is no GPU to compile for: name one of a100, .*h200"):
        ahead.compile_ahead(bare(), tokens=[1])
    with pytest.raises(TypeError, match="what: expected a module, a LayerShape or a model's name, got int"):
        ahead.compile_ahead((64, 64, 2, 1), tokens=[1], gpu="h200")
    with pytest.raises(ValueError, match="jobs: expected at least 1"):
        ahead.compile_ahead(bare(), tokens=[1], gpu="h200", jobs=0)
    with pytest.raises(TypeError, match="training: expected True or False, got 1"):
        ahead.compile_ahead(bare(), tokens=[1], gpu="h200", training=1)  # type: ignore[arg-type]
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET makes Triton run on the CPU, and nothing can be"):
        ahead.compile_ahead(bare(), tokens=[1], gpu="h200")


@pytest.mark.parametrize("value", [7.0, "7", None, True])
@pytest.mark.parametrize("field", ["tokens", *ahead.LayerShape._fields])
def test_a_number_or_dtype_of_a_wrong_type_is_refused(field: str, value: Any) -> None:
    what, tokens = (bare(), [8, value]) if field == "tokens" else (SHAPE._replace(**{field: value}), [8])
    with pytest.raises(TypeError, match=f"^{field}: expected .*, got "):
        ahead.compile_ahead(what, tokens=tokens, gpu="h200")


def test_token_counts_out_of_range_are_refused() -> None:
    with pytest.raises(TypeError, match=r"^tokens: expected ints, such as range\(1, 8193\), got int$"):
        ahead.compile_ahead(SHAPE, tokens=8, gpu="h200")  # type: ignore[arg-type]
    for what, count in ((SHAPE, -1), (bare(), 2**29)):
        with pytest.raises(ValueError, match=f"^tokens: expected 0 to {2**29 - 1}, got {count}$"):
            ahead.compile_ahead(what, tokens=[count], gpu="h200")


def test_nothing_to_compile_is_refused() -> None:
    for what, tokens, name in ((SHAPE, [], "tokens"), (SHAPE, range(5, 5), "tokens"), ([], [1], "what")):
        with pytest.raises(ValueError, match=f"^{name}: expected at least one, got none$"):
            ahead.compile_ahead(what, tokens=tokens, gpu="h200")
    with pytest.raises(TypeError, match=r"^what: expected a module, a LayerShape or a model's name, got NoneType$"):
        ahead.compile_ahead(None, tokens=[1], gpu="h200")
    with pytest.raises(TypeError, match=r"^router: expected bfloat16, float16 or float32, got torch\.float64$"):
        ahead.compile_ahead(bare().double(), tokens=[1], gpu="h200")


def test_a_folder_that_cannot_be_written_to_is_found_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("MOE_KERNELS_CACHE_DIR", str(tmp_path / "file" / "kept"))
    monkeypatch.setattr(ahead, "_making", lambda *_: pytest.fail("compiles first"))
    with pytest.warns(RuntimeWarning, match="kept"), pytest.raises(OSError, match=r"plans cannot be kept there$"):
        ahead.compile_ahead(bare(), tokens=[2], gpu="h200")
    monkeypatch.setenv("MOE_KERNELS_CACHE_DIR", str(tmp_path / "kept"))
    assert store.can_write() and not store.contents(tmp_path / "kept")
    plans, elsewhere = tmp_path / "kept" / store.environment() / "plans", tmp_path / "elsewhere"
    plans.rmdir()
    elsewhere.mkdir()
    plans.symlink_to(elsewhere)
    (elsewhere / "probe").touch()
    with pytest.warns(RuntimeWarning, match="plans is a symbolic link"):
        assert not store.can_write()
    assert (elsewhere / "probe").exists()


def test_what_cannot_be_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An OSError is raised, because storing the plans is the only purpose of the call."""
    pytest.importorskip("helion")
    asked: list[str] = []
    monkeypatch.setenv("MOE_KERNELS_CACHE_DIR", str(tmp_path / "kept"))
    monkeypatch.setattr(ahead, "_making", lambda wanted, *_: (asked.append(one.operator) for one in wanted))
    with pytest.raises(OSError, match=f"{tmp_path / 'kept'}: plans cannot be kept there.*LIMIT_MB"):
        ahead.compile_ahead(bare(), tokens=[2], gpu="h200")
    assert asked == ["choose_experts", "moe_mlp"]


def test_what_is_kept_counts_as_new_before_older_files_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first write, by `can_write`, removes the oldest files beyond the limit."""
    pytest.importorskip("helion")
    done, kept = [], iter([{"0" * 64: None}])  # of one plan; the others are made
    monkeypatch.setattr(ahead, "_kept", lambda *_: {} if "made" in done else next(kept, None))
    monkeypatch.setattr(store, "renew", lambda plans, binaries: done.append((len(plans), list(binaries))))
    monkeypatch.setattr(store, "can_write", lambda: done.append("written") or True)
    monkeypatch.setattr(ahead, "_making", lambda *_: done.append("made") or iter(()))
    monkeypatch.setattr(launch, "build_libraries", lambda _, renew: done.append(renew) or 0)
    ahead.compile_ahead(bare(), tokens=[1], gpu="h200")
    assert done == [(1, ["0" * 64]), "written", "made", True]
    ahead.compile_ahead(bare(), tokens=[1], gpu="h200")
    assert done[4:] == ["made", False]


def test_what_is_kept_already_is_not_stored_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """So the folder may be one that is only read. Token counts may come from any iterable."""
    pytest.importorskip("helion")
    monkeypatch.setattr(ahead, "_kept", lambda *_: {})
    monkeypatch.setattr(store, "can_write", lambda: False)
    monkeypatch.setattr(launch, "build_libraries", lambda _, renew: 0)
    found = ahead.compile_ahead(bare(), tokens=[1, 5], gpu="h200")
    assert ahead.compile_ahead(bare(), tokens=iter([1, 5]), gpu="h200") == found


def test_a_models_own_gating_is_compiled() -> None:
    """Sigmoid gating has options of the model, which its name or sizes select."""
    pytest.importorskip("helion")
    for name, (_, _, E, top_k) in MODELS.items():
        gatings = [one for one in ahead.collect(ahead._calls(name, [1], False)) if one.operator == "choose_experts"]
        by_sigmoid = {one.options for one in gatings if not one.options[1]}
        if name not in SIGMOID_GATING:
            assert not by_sigmoid
            continue
        *groups, scale = SIGMOID_GATING[name]
        # With the scale 1 for compiled programs, in which PyTorch multiplies by the scale.
        assert by_sigmoid == {(top_k, False, True, *groups, factor) for factor in (scale, 1.0)}
        assert E % SIGMOID_GATING[name][0] == 0
        found = {one.inputs[0].dtype for one in gatings if not one.options[1] and one.inputs[1].shape == (E,)}
        assert found == {torch.float32, torch.bfloat16}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_command_compiles_a_models_own_gating(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    pytest.importorskip("helion")
    asked: list[ahead.LayerShape | str] = []
    monkeypatch.setattr(commands, "compile_ahead", lambda what, **_: asked.extend(what) or ahead.CompileCounts(0, 0, 0))
    line = ["--gpu", "h200", "--dtype", str(dtype).removeprefix("torch."), "--model", *SIGMOID_GATING]
    assert compile_main(*line) == 0 and len(asked) == len(SIGMOID_GATING)
    for what, (*groups, scale) in zip(asked, SIGMOID_GATING.values(), strict=True):
        gatings = [one for one in ahead.collect(ahead._calls(what, [1], False)) if one.operator == "choose_experts"]
        found = {(one.options[3:], one.inputs[0].dtype) for one in gatings if not one.options[1]}  # type: ignore[union-attr]
        assert found == {((*groups, factor), kind) for factor in (scale, 1.0) for kind in (torch.float32, dtype)}


@pytest.mark.parametrize("what", ["glm-4.5-air", SHAPE], ids=str)
def test_the_default_dtype_changes_no_plan(what: Any) -> None:
    pytest.importorskip("helion")
    calls, before = ahead._calls(what, [1, 20], True), torch.get_default_dtype()
    expected = [one.signature for one in ahead.collect(calls)]
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert [one.signature for one in ahead.collect(calls)] == expected
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("sizes", [SIZES, (64, 32, 5, 3)])
def test_a_class_of_token_counts_shares_its_plans(sizes: tuple[int, int, int, int], training: bool) -> None:
    """The plans collected for one token count of each class are those needed by every token count."""
    pytest.importorskip("helion")
    shape, tokens = ahead.LayerShape(*sizes), range(1, 200)
    every = {one.signature for one in ahead.collect(partial(ahead._run_shape, shape, T, training) for T in tokens)}
    few = ahead.collect(ahead._calls(shape, tokens, training))
    assert {one.signature for one in few} == every
    assert len(few) == len(every)
    assert len(ahead.classes(tokens, *sizes[2:])) < 24


@pytest.mark.parametrize(("E", "top_k"), [(128, 8), (8, 2), (3, 3), (1, 1)])
def test_classes_are_those_of_calls(E: int, top_k: int) -> None:
    every: dict[tuple[int, ...], list[int]] = {}
    for T in range(3000):
        every.setdefault(rows_class(Counts(T, (T * top_k,), E)), []).append(T)
    assert list(map(list, ahead.classes(range(3000), E, top_k))) == list(every.values())
    assert ahead.classes([*range(2999, -1, -1), 7, 7], E, top_k) == list(every.values())
    assert list(map(list, ahead.classes(range(2999, -1, -1), E, top_k))) == list(every.values())


def test_classes_of_a_long_range() -> None:
    found = ahead.classes(range(1, 2**27), 128, 8)
    assert len(found) < 40
    assert [found[0][0], found[-1][-1]] == [1, 2**27 - 1]
    assert all(a[-1] + 1 == b[0] for a, b in pairwise(found))
    with pytest.raises(ValueError, match="tokens: expected 0 to 134217727, got 134217728"):
        ahead.classes(range(1, 2**27 + 1), 128, 8)
    assert ahead.classes([], 128, 8) == ahead.classes(range(0), 128, 8) == []


def test_signatures_are_those_of_real_calls() -> None:
    """Signatures agree for CPU tensors, forward and backward, of modules, a shape, and models of transformers.

    Those of calls under autocast are those of the layer in autocast's dtype.
    """
    pytest.importorskip("helion")
    done = python("-c", SIGNATURES)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found) >= 2 * 2 * 4 * 2 + 3
    for name, (only_real, only_ahead, number) in found.items():
        assert number >= (8 if name.endswith("training: True") else 1), name
        assert only_real == [], name
        # Models of transformers differ in the dtype of the router's output: both are collected.
        assert only_ahead == [] or name.startswith("transformers"), name


def test_output_is_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans in other cache folders are ignored, and the environment is restored afterwards."""
    for before in ({}, {"MOE_KERNELS_CACHE_DIR": "/mine", "MOE_KERNELS_CACHE_READONLY": "/yours"}):
        for name in ("MOE_KERNELS_CACHE_DIR", "MOE_KERNELS_CACHE_READONLY"):
            monkeypatch.delenv(name, raising=False)
        for name, value in before.items():
            monkeypatch.setenv(name, value)
        with ahead.output(None):
            assert {name: os.environ[name] for name in before} == before
        with pytest.raises(ZeroDivisionError), ahead.output(str(tmp_path)):
            assert store.folder() == tmp_path
            assert store.read_only_folders() == []
            raise ZeroDivisionError
        names = [name for name in os.environ if name.startswith("MOE_KERNELS_CACHE_") and "LIMIT" not in name]
        assert {name: os.environ[name] for name in names} == before


def parse(add: Callable[[argparse.ArgumentParser], None], *arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add(parser)
    return parser.parse_args(arguments)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1:8192", range(1, 8193)),
        ("7", range(7, 8)),
        ("5:5", range(5, 6)),
        ("3:4", range(3, 5)),
        ("1:1073741823", range(1, 2**30)),
    ],
)
def test_token_range(text: str, expected: range) -> None:
    assert commands.token_range(text) == expected


@pytest.mark.parametrize(
    "text", ["", "a", "0:4", "0", "-1:4", "-1", "1:", ":4", "5:4", "1:2:3", "1.5", "1:b", "1:1073741824"]
)
def test_no_token_range(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="expected"):
        commands.token_range(text)


def test_layer() -> None:
    assert commands.layer("64,32,4,2") == ahead.LayerShape(*SIZES)
    assert commands.layer("64,32,4,4") == ahead.LayerShape(64, 32, 4, 4)
    for text in ("", "64,32,4", "64,32,4,2,1", "64,32,4,x", "0,32,4,2", "64,32,4,5", "64,32,4,0", "64,-1,4,2"):
        with pytest.raises(argparse.ArgumentTypeError, match="expected"):
            commands.layer(text)


def compile_main(*arguments: str) -> int:
    return commands.compile_main(parse(commands.add_compile_arguments, *arguments))


def test_compile_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert compile_main("--list") == 0
    lines = capsys.readouterr().out.splitlines()
    assert "  qwen3-30b-a3b: 2048, 768, 128, 8" in lines
    sizes_only = [line.split()[0] for line in lines if line.endswith(commands._SIZES_ONLY)]
    assert sizes_only == ["gpt-oss-120b:", "gpt-oss-20b:"]
    assert "  h200: NVIDIA H200, sm90, 132 multiprocessors" in lines
    assert len(lines) == len(MODELS) + len(targets.KNOWN) + 2


REFUSED = [
    (["--gpu", "h200"], "give --model or --layer"),
    (["--model", "olmoe"], "there is no GPU here; name one with --gpu: a100"),
    (["--model", "olmoe", "--gpu", "h200", "--triton", "3.7"], "3.6.0 is installed here"),
    (["--model", "olmoe", "--gpu", "h200", "--triton", "3.6.1"], "binaries are for its version alone"),
    (["--model", "olmoe", "--gpu", "h200", "--triton", "3"], None),
    (["--model", "olmoe", "--gpu", "h200", "--triton", "3.6"], None),
    (["--model", "olmoe", "--gpu", "h200", "--triton", "3.6.0+cu130"], None),
    (["--model", "olmoe", "--gpu", "h200", "--torch", "2.10"], "--torch 2.10: expected 2.11 to 2.15"),
    (["--model", "olmoe", "--gpu", "h200", "--torch", "2"], "expected 2.11 to 2.15"),
    (["--model", "olmoe", "--gpu", "h200", "--torch", "2.16.0"], "expected 2.11 to 2.15"),
    (["--model", "olmoe", "--gpu", "h200", "--torch", "2.11"], None),
    (["--model", "olmoe", "--gpu", "h200", "--torch", "2.15.1+cu130"], None),
    (["--layer", "64,32,4,2", "--gpu", "h200", "--torch", "2.12", "--triton", "3.6.0"], None),
    (["--layer", "64,32,4,2", "--gpu", "h200", "--output", __file__], "expected a folder, this is a file"),
    (["--layer", "64,32,4,2", "--gpu", "h200", "--output", ""], "--output: expected a folder, got an empty name"),
]


@pytest.mark.parametrize(("arguments", "problem"), REFUSED)
def test_compile_refuses(
    arguments: list[str], problem: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The exit code is 2, and nothing is compiled."""
    asked: list[Any] = []

    def compile_ahead(what: Any, **options: Any) -> ahead.CompileCounts:
        asked.append((what, options))
        return ahead.CompileCounts(3, 2, 1)

    monkeypatch.setattr(commands, "compile_ahead", compile_ahead)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(store, "public_version", lambda name: "3.6.0")
    code = compile_main(*arguments)
    captured = capsys.readouterr()
    if problem is None:
        assert code == 0
        assert "3 plans, 2 binaries, 1 launcher libraries" in captured.out
        ((what, options),) = asked
        assert what in ([ahead.LayerShape(*MODELS["olmoe"])], [ahead.LayerShape(*SIZES)])
        expected = {"tokens": range(1, 8193), "training": False, "gpu": "h200", "jobs": 1}
        assert {name: options[name] for name in expected} == expected
    else:
        assert code == 2
        assert captured.err.startswith("compile: ")
        assert problem in captured.err
        assert asked == []


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RuntimeError("no C compiler"), 1),
        (subprocess.CalledProcessError(1, "gcc"), 1),
        (OSError("full"), 1),
        (ValueError("no"), 2),
    ],
    ids=str,
)
def test_a_failure_of_compile_is_one_line(
    error: Exception, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(commands, "compile_ahead", Mock(side_effect=error))
    assert compile_main("--model", "olmoe", "--gpu", "h200") == code
    assert capsys.readouterr().err.endswith(f"compile: {error}\n")


def test_no_progress_is_shown_where_stderr_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    commands._progress(1, 1)


@pytest.mark.parametrize("code", [0, 2])
def test_a_command_prints_nothing_of_its_own(code: int, capsys: pytest.CaptureFixture[str]) -> None:
    def main() -> int:
        print("done")
        return code

    with pytest.raises(SystemExit) as left:
        commands.run_and_exit(main)
    assert left.value.code == code
    assert capsys.readouterr() == ("done\n", "")


def test_ctrl_c_ends_a_command_without_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        commands.run_and_exit(Mock(side_effect=KeyboardInterrupt))
    assert exit.value.code == 130 and capsys.readouterr().err == "\nInterrupted.\n"


def test_ctrl_c_ends_compile_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: Any, **__: Any) -> ahead.CompileCounts:
        raise KeyboardInterrupt

    monkeypatch.setattr(commands, "compile_ahead", interrupted)
    assert compile_main("--model", "olmoe", "--gpu", "h200") == 130
    assert capsys.readouterr().err == "\nInterrupted. What is made is kept; the same command continues.\n"


def test_sigterm_ends_compile_as_ctrl_c_does(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`timeout` and `docker stop` send it. By default it would leave generated sources in /tmp."""
    before = signal.getsignal(signal.SIGTERM)

    def terminated(*_: Any, **__: Any) -> ahead.CompileCounts:
        os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError("the signal was ignored")

    monkeypatch.setattr(commands, "compile_ahead", terminated)
    assert compile_main("--model", "olmoe", "--gpu", "h200") == 130
    assert "the same command continues" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize(("name", "both"), [("folder", True), ("h200:v1", False), ("~/folder", True)])
def test_compile_names_the_variables_for_its_folder(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str, both: bool
) -> None:
    """MOE_KERNELS_CACHE_READONLY is a list of folders."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(commands, "compile_ahead", lambda *_, **__: ahead.CompileCounts(0, 0, 0))
    assert compile_main("--model", "olmoe", "--gpu", "h200", "--output", name) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.endswith(f" to {tmp_path / name.removeprefix('~/')}") and ("MOE_KERNELS_CACHE_READONLY" in last) == both
    assert "MOE_KERNELS_CACHE_DIR" in last


def test_other_processes_end_with_a_compile_that_is_killed(tmp_path: Path) -> None:
    pytest.importorskip("helion")
    command = [sys.executable, "-m", "moe_kernels", "compile", "--layer", "64,32,4,2", "--tokens", "1:2000"]
    command += ["--gpu", "h200", "--jobs", "2", "--output", str(tmp_path)]
    with subprocess.Popen(command, env=without_gpu(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
        assert run.stderr is not None
        while " plans\n" not in run.stderr.readline():
            assert run.poll() is None
        run.kill()
        run.communicate(timeout=60)  # raises TimeoutExpired if a process keeps stdout or stderr open


def note_interrupts(folder: Path, _: Any) -> None:
    Path(folder, str(os.getpid())).write_text(str(signal.getsignal(signal.SIGINT) == signal.SIG_IGN))


def test_only_the_parent_reacts_to_ctrl_c(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A terminal sends it to the other processes, too, also while they import Helion."""
    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(ahead, "_make", note_interrupts)
    monkeypatch.setattr(targets, "current", lambda: H200)  # so that the processes need not import Helion
    list(ahead._making([tmp_path], H200, 2))  # type: ignore[list-item]
    assert [file.read_text() for file in tmp_path.iterdir()] == ["True"]
    assert signal.getsignal(signal.SIGINT) == before


def test_plans_are_made_in_other_threads_than_the_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where Python cannot change how signals are handled."""
    monkeypatch.setattr(ahead, "_make", note_interrupts)
    monkeypatch.setattr(targets, "current", lambda: H200)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(lambda: list(ahead._making([tmp_path], H200, 2))).result()  # type: ignore[list-item]
    assert len(list(tmp_path.iterdir())) == 1


class Threads(ThreadPoolExecutor):
    """In place of a pool of processes."""

    def __init__(self, jobs: int, *_: Any):
        super().__init__(jobs)


def test_ctrl_c_says_what_it_waits_for(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(ahead, "_make", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    monkeypatch.setattr(ahead, "ProcessPoolExecutor", Threads)
    with pytest.raises(KeyboardInterrupt):
        list(ahead._making([1, 2], H200, 2))  # type: ignore[list-item]
    assert capsys.readouterr().err == "\nWaiting for the plans that are being made.\n"


def test_a_failure_ends_the_other_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is raised at once, and plans that no process has begun are not made."""
    made: list[int] = []

    def make(one: Any, _: Any) -> None:
        made.append(one)
        if one == 0:
            raise RuntimeError("first")
        time.sleep(0.2)

    monkeypatch.setattr(ahead, "_make", make)
    monkeypatch.setattr(ahead, "ProcessPoolExecutor", Threads)
    with pytest.raises(RuntimeError, match="first"):
        list(ahead._making([*range(30)], H200, 1))  # type: ignore[arg-type]
    assert 0 in made and len(made) < 5


def test_compile_compares_whole_numbers_of_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "public_version", lambda name: "3.10.0")
    line = ["--model", "olmoe", "--gpu", "h200", "--triton"]
    assert compile_main(*line, "3.1") == 2
    monkeypatch.setattr(commands, "compile_ahead", lambda *_, **options: ahead.CompileCounts(0, 0, 0))
    assert compile_main(*line, "3.10") == 0


def test_compile_passes_its_arguments_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[Any] = []

    def compile_ahead(what: Any, **options: Any) -> ahead.CompileCounts:
        asked.append((what, options, store.folder()))
        return ahead.CompileCounts(0, 0, 0)

    monkeypatch.setattr(commands, "compile_ahead", compile_ahead)
    line = "--model olmoe mixtral-8x7b --layer 64,32,4,2 --dtype float16 --tokens 3:9 --training --gpu b200 --jobs 5"
    assert compile_main(*line.split(), "--output", str(tmp_path)) == 0
    shapes = [ahead.LayerShape(*sizes, torch.float16) for sizes in (MODELS["olmoe"], MODELS["mixtral-8x7b"], SIZES)]
    ((what, options, into),) = asked
    assert what == shapes
    assert into == tmp_path
    expected = {"tokens": range(3, 10), "training": True, "gpu": "b200", "jobs": 5}
    assert {name: options[name] for name in expected} == expected


def test_compile_says_which_models_have_other_layers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(commands, "compile_ahead", lambda *_, **options: ahead.CompileCounts(0, 0, 0))
    assert compile_main("--model", "olmoe", "gpt-oss-20b", "--gpu", "h200") == 0
    (note,) = capsys.readouterr().err.splitlines()
    assert note.startswith(
        "gpt-oss-20b: plans of SwiGLU layers of these sizes, which the model's own layers, with biases"
    )
    assert note.endswith("for those pass the model's module to moe_kernels.compile_ahead")


@pytest.mark.parametrize(
    ("error", "code"),
    [(OSError("/nowhere: plans cannot be kept there"), 1), (ValueError("tokens: expected 0 to 3, got 4"), 2)],
    ids=str,
)
def test_compile_ends_with_what_is_wrong(
    error: Exception, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def compile_ahead(*_: Any, **options: Any) -> None:
        raise error

    monkeypatch.setattr(commands, "compile_ahead", compile_ahead)
    assert compile_main("--model", "olmoe", "--gpu", "h200") == code
    assert capsys.readouterr().err == f"compile: {error}\n"


def test_progress(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    for done in range(1, 5):
        commands._progress(done, 4)
    assert capsys.readouterr().err.split("\r")[1:] == [
        f"  [{'#' * (10 * done)}{' ' * (40 - 10 * done)}] {done} of 4 plans" + "\n" * (done == 4)
        for done in range(1, 5)
    ]


@pytest.mark.parametrize(
    ("total", "shown"), [(1, [1]), (4, [1, 2, 3, 4]), (99, [10, 20, 30, 40, 50, 60, 70, 80, 90, 99])]
)
def test_progress_without_a_terminal(total: int, shown: list[int], capsys: pytest.CaptureFixture[str]) -> None:
    for done in range(1, total + 1):
        commands._progress(done, total)
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition("] ")[2] for line in lines] == [f"{done} of {total} plans" for done in shown]


def test_cache_show_and_clear(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def cache_main(*arguments: str) -> list[str]:
        assert commands.cache_main(parse(commands.add_cache_arguments, *arguments)) == 0
        return capsys.readouterr().out.splitlines()

    mine, image = tmp_path / "mine", tmp_path / "image"
    monkeypatch.setenv("MOE_KERNELS_CACHE_DIR", str(mine))
    monkeypatch.setenv("MOE_KERNELS_CACHE_READONLY", os.pathsep.join([str(image), str(tmp_path / "nowhere")]))
    monkeypatch.setenv("MOE_KERNELS_CACHE_LIMIT_MB", "77")
    forget_store()
    limit = "limit: 77 MiB (MOE_KERNELS_CACHE_LIMIT_MB)"
    nowhere = f"{tmp_path / 'nowhere'}: not there yet"
    assert cache_main() == cache_main("show") == [f"{mine}: not there yet", f"{image}: not there yet", nowhere, limit]
    for i in range(3):
        store.write_binary(store.Binary(f"{i:064x}", ("i32",), (), "{}", "cubin", bytes([i]) * (1 << 20)))
    store.write_library("a" * 64, bytes(1 << 19))
    os.rename(mine, image)
    store.write_library("b" * 64, bytes(1 << 20))
    libraries = ["  libraries: 1, 1.0 MiB", "  libraries: 1, 0.5 MiB"]
    shown = [f"{mine}:", libraries[0], f"{image}, read only:", "  binaries: 3, 3.0 MiB", libraries[1], nowhere, limit]
    assert cache_main("show") == shown
    assert cache_main("clear") == [f"Files removed from {mine}: 1"]
    assert cache_main("show") == [f"{mine}:", *shown[2:]]
    assert cache_main("clear") == [f"Files removed from {mine}: 0"]
    with pytest.raises(SystemExit):
        cache_main("remove")
    store.write_library("c" * 64, bytes(1 << 20))
    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", Mock(side_effect=PermissionError))
        assert commands.cache_main(parse(commands.add_cache_arguments, "clear")) == 1
    captured = capsys.readouterr()
    assert captured.out == f"Files removed from {mine}: 0\n"
    assert captured.err.endswith("\ncache: the user may not remove the others\n")
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("MOE_KERNELS_CACHE_DIR", str(file))
    forget_store()
    monkeypatch.setenv("MOE_KERNELS_CACHE_READONLY", "")
    assert cache_main("show") == [f"{file}: is no folder", limit]
    assert commands.cache_main(parse(commands.add_cache_arguments, "clear")) == 1
    assert capsys.readouterr().err == f"cache: {file}: is no folder\n"


def test_cache_shows_that_a_folder_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MOE_KERNELS_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("MOE_KERNELS_CACHE_READONLY", "")
    store.write_library("a" * 64, bytes(1 << 20))
    for refused in (tmp_path / "libraries", tmp_path):
        refused.chmod(0o777)
        forget_store()
        assert commands.cache_main(parse(commands.add_cache_arguments)) == 0
        shown = capsys.readouterr().out.splitlines()[:2]
        trouble = f"{refused} can be written to by others (chmod go-w)"
        assert shown == [f"{tmp_path}, not used: {trouble}:", "  libraries: 1, 1.0 MiB"]


def test_files_from_the_future_are_the_oldest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock was set back. New files are not removed in their place."""
    monkeypatch.setenv("MOE_KERNELS_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("MOE_KERNELS_CACHE_LIMIT_MB", "1")
    for key in "ab":
        store.write_library(key * 64, key.encode() * 400_000)
    for file in (tmp_path / store._libraries()).iterdir():
        os.utime(file, (time.time() + 86400,) * 2)
    monkeypatch.setattr(store, "_written", 0)
    store.write_library("c" * 64, b"c" * 400_000)
    assert store.read_library("c" * 64) is not None
    assert len(list((tmp_path / store._libraries()).iterdir())) == 2


def test_folders_that_the_user_may_not_look_into(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They may be in the home folder of root, as in a container that another user runs with the same HOME."""
    hidden, real = str(tmp_path / "hidden"), os.stat

    def refuse(path: Any, *rest: Any, **options: Any) -> os.stat_result:
        if not isinstance(path, int) and str(path).startswith(hidden):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return real(path, *rest, **options)

    monkeypatch.setenv("MOE_KERNELS_CACHE_DIR", hidden)
    monkeypatch.setenv("MOE_KERNELS_CACHE_READONLY", "")
    monkeypatch.setattr(os, "stat", refuse)
    assert commands.cache_main(parse(commands.add_cache_arguments)) == 0
    assert capsys.readouterr().out.startswith(f"{hidden}: cannot be read (Permission denied)\n")
    assert commands.cache_main(parse(commands.add_cache_arguments, "clear")) == 0
    assert capsys.readouterr().out == f"Files removed from {hidden}: 0\n"
    with pytest.warns(RuntimeWarning, match="Permission denied"):
        assert compile_main("--layer", "64,32,4,2", "--gpu", "h200", "--output", hidden) == 1
    assert capsys.readouterr().err == f"compile: {hidden}: plans cannot be kept there\n"


@pytest.mark.parametrize("model", ["qwen3-30b-a3b", "gpt-oss-20b", "mixtral-8x7b"])
def test_info_lists_what_a_layer_launches(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    """All numbers of tokens are listed without compiling: there are far fewer kernels and configs than launches."""
    pytest.importorskip("helion")
    commands.print_layer(parse(commands.add_info_arguments, "--model", model, "--gpu", "h200"))
    out, err = capsys.readouterr()
    first, *lines = out.splitlines()
    assert err.startswith("gpt-oss-20b: plans of SwiGLU layers") if model == "gpt-oss-20b" else not err
    assert first == f"{model} {MODELS[model]} on NVIDIA H200: launches by token counts"
    at = next(i for i, line in enumerate(lines) if "distinct" in line)
    covered: list[int] = []
    launches: Counter[str] = Counter()
    for line in lines[:at]:
        numbers, _, names = line.strip().partition(": ")
        low, _, high = numbers.partition(" to ")
        covered += range(int(low), int(high or low) + 1)
        launches.update(name.split()[0] for name in names.split("], "))
    assert covered == [*range(1, 8193)]
    requests = ahead.requests(range(1, 8193), ahead.LayerShape(*MODELS[model]), H200)
    distinct = {(one.kernel.name, repr(one.config)) for steps in requests.values() for one in steps}
    # One binary each, except that mixtral's rows are listed in tiles of two heights.
    two_heights = model == "mixtral-8x7b"
    binaries = len(distinct) + two_heights
    assert lines[at] == f"{len(distinct)} distinct kernels with configs, {binaries} with their constants:"
    narrow = model == "gpt-oss-20b"  # with many rows, its last columns have tiles of their own
    assert len(lines[at + 1 :]) == len(distinct) <= 17 + narrow
    listed: Counter[str] = Counter()
    for line in lines[at + 1 :]:
        listed[line.strip().partition(":")[0]] += int(line.split()[-2])
    differing = [line for line in lines[at + 1 :] if line.count(";") > 1]
    assert [line.split(";")[1] for line in differing] == [" block_m 128, 64"] * two_heights
    assert listed == launches
    assert listed.total() == sum(map(len, requests.values())) > 3 * len(distinct)


def test_info_of_a_range_and_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("helion")
    commands.print_layer(parse(commands.add_info_arguments, "--model", "olmoe", "--tokens", "1:1", "--gpu", "a100"))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("on NVIDIA A100-SXM4-80GB: launches by token counts")
    assert lines[1].startswith("  1: first_half ")
    assert lines[2] == "2 distinct kernels with configs, 2 with their constants:"


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_a_layer_beside_an_equal_frozen_one(mode: Any) -> None:
    def layer(trains: bool) -> MoE:
        return MoE(64, 32, 4, 2, renormalize=True, dtype=torch.bfloat16).requires_grad_(trains)

    def plans(module: torch.nn.Module) -> set[str]:
        with mode():
            return {one.signature for one in ahead.collect(ahead._calls(module, [64], True))}

    both = plans(torch.nn.Sequential(layer(False), layer(True)))
    assert both == plans(layer(True)) | plans(layer(False)) and len(both) > len(plans(layer(False)))


def test_what_a_compiling_process_raises_can_be_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    class Unsendable(Exception):
        def __init__(self, *, reason: str):
            super().__init__(reason)

    monkeypatch.setattr(cache, "plan_of", Mock(side_effect=Unsendable(reason="too large")))
    with pytest.raises(RuntimeError, match=r"^route: Unsendable: too large$") as caught:
        ahead._make(ahead.PlanRequest("route", (), (4,), ""), H200)
    assert str(pickle.loads(pickle.dumps(caught.value))) == "route: Unsendable: too large"


@pytest.mark.parametrize("part", ["plans", "launchers"])
def test_a_process_forks_between_what_is_compiled(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the child would have no garbage collector, or Triton's settings for the building of launchers."""
    begun = threading.Event()

    @cache._collector_paused()
    def work(*_: Any, **__: Any) -> Any:
        begun.set()
        time.sleep(0.2)
        return 0

    monkeypatch.setattr(ahead, "_kept", lambda *_: None if part == "plans" and not begun.is_set() else {})
    monkeypatch.setattr(ahead, "_making", lambda wanted, gpu, jobs: (ahead._make(one, gpu) for one in wanted[:1]))
    monkeypatch.setattr(cache, "plan_of", work)
    monkeypatch.setattr(launch, "build_libraries", work if part == "launchers" else lambda _, renew: 0)
    thread = threading.Thread(target=partial(ahead.compile_ahead, SHAPE, tokens=[1], gpu="h200"))
    thread.start()
    assert begun.wait(60)
    child = os.fork()
    if child == 0:
        os._exit(not gc.isenabled())
    assert os.waitpid(child, 0)[1] == 0
    thread.join()
