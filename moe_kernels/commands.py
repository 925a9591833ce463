"""`python -m moe_kernels compile`, `cache` and `info --model`: make plans, show the cache, show a layer's launches.

`run_and_exit` is for the other commands, too, also those of `benchmarks` and `tritonbench_ops`.
"""

from __future__ import annotations

import argparse
import io
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import torch

from moe_kernels import requirements
from moe_kernels.ahead import LayerShape, compile_ahead, output, requests
from moe_kernels.models import MODELS, NOT_SWIGLU, positive, shape
from moe_kernels.runtime import store, targets
from moe_kernels.runtime.plan import Request
from moe_kernels.runtime.signature import MAX_ROWS

COMPILE = """\
Makes the plans and binaries of layers of experts for a range of token counts, and stores them in a folder. A process
that finds them there compiles nothing, and imports neither Helion nor its compiler. With --gpu this machine needs no
GPU, so an image can be built with all binaries in it.

The folder is --output, or else MOE_KERNELS_CACHE_DIR, or else moe_kernels/compiled in the user's cache folder, which
is also the default at run time. For another folder, set MOE_KERNELS_CACHE_DIR to it at run time, or
MOE_KERNELS_CACHE_READONLY if it is not writable.

Plans are valid for the public versions of Triton and Helion that are installed here, and for any version of PyTorch.
Triton's launchers are built with a C compiler, for this version of Python; another version builds its own at the first
call.

Exits with 0 if all is made, 1 if something could not be compiled or stored, 2 for wrong arguments, 130 after Ctrl-C,
which keeps what is made: the same command continues."""
CACHE = """\
Shows the writable folder of plans and binaries, the folders that are only read, the number and size of the files in
each, and the size limit of the writable one (MOE_KERNELS_CACHE_LIMIT_MB, by default 2048 MiB; the oldest files go
first). "other versions" are files that cannot be used: they were made by another version of this package, Triton or
Helion, or with other compiler settings.

`cache clear` empties the writable folder, and exits with 1 if the user may not remove all files."""

_TOKENS = range(1, 8193)  # by default
_SIZES_ONLY = (
    ": plans of SwiGLU layers of these sizes, which the model's own layers, with biases and another activation, do not "
    "use; for those pass the model's module to moe_kernels.compile_ahead"
)


def run_and_exit(main: Callable[[], int]) -> NoReturn:
    """Exit with the code that `main` returns, 130 after Ctrl-C, or 1 if the reader has enough, as in `info | head`."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")  # the name of a folder may not fit into the locale's encoding
    try:
        code = main()
        print(end="", flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more at its exit
        code = 1
    except KeyboardInterrupt:
        print("\nInterrupted.", file=sys.stderr)
        code = 130
    sys.exit(code)


def add_compile_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `compile`."""
    parser.add_argument("--list", action="store_true", help="list the known models and GPUs, and exit")
    parser.add_argument("--model", nargs="+", default=[], choices=MODELS, metavar="NAME", help="layers of these models")
    parser.add_argument(
        "--layer", nargs="+", default=[], type=layer, metavar="H,I,E,TOP_K", help="layers of these sizes"
    )
    dtypes = ("bfloat16", "float16", "float32")
    parser.add_argument("--dtype", choices=dtypes, default="bfloat16", help="of the layers (default: bfloat16)")
    parser.add_argument(
        "--tokens",
        type=token_range,
        default=_TOKENS,
        metavar="A[:B]",
        help="numbers of tokens in a call; default: 1:8192",
    )
    parser.add_argument("--training", action="store_true", help="also the forward with gradients, and the backward")
    parser.add_argument("--gpu", choices=targets.KNOWN, help="default: the GPU of this machine")
    parser.add_argument(
        "--jobs", type=positive, default=1, metavar="N", help="processes that compile at the same time, by default 1"
    )
    parser.add_argument("--output", type=os.path.expanduser, metavar="DIR", help="the folder to write to")
    parser.add_argument(
        "--torch", metavar="VERSION", help="version on the target, 2.11 to 2.15; plans do not depend on it"
    )
    parser.add_argument("--triton", metavar="VERSION", help="version on the target; has to be the one installed here")


def layer(text: str) -> LayerShape:
    """Parse the sizes in "H,I,E,TOP_K", for argparse."""
    sizes = LayerShape(*shape(text, "H,I,E,TOP_K"))
    if sizes.top_k > sizes.num_experts:
        raise argparse.ArgumentTypeError(f"expected top_k of at most E, got {text!r}")
    return sizes


def token_range(text: str) -> range:
    """Parse "A:B", both included, or "A", for argparse."""
    first, colon, last = text.partition(":")
    try:
        low, high = int(first), int(last if colon else first)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected A:B or A, got {text!r}") from None
    if not 1 <= low <= high <= MAX_ROWS:
        raise argparse.ArgumentTypeError(f"expected 1 <= A <= B <= {MAX_ROWS}, got {text!r}")
    return range(low, high + 1)


def compile_main(options: argparse.Namespace) -> int:
    """Run `compile` and return the exit code."""
    if options.list:
        print("models (H, I, E, top_k):")
        for name, sizes in MODELS.items():
            print(f"  {name}: {', '.join(map(str, sizes))}{_SIZES_ONLY if name in NOT_SWIGLU else ''}")
        print("GPUs:")
        for name, gpu in targets.KNOWN.items():
            print(f"  {name}: {gpu.name}, sm{gpu.arch}, {gpu.multiprocessors} multiprocessors")
        return 0
    if problem := _refused(options):
        print(problem, file=sys.stderr)
        return 2
    dtype = getattr(torch, options.dtype)
    shapes = [LayerShape(*MODELS[name]) for name in options.model] + options.layer
    begun = time.monotonic()
    for name in options.model:
        if name in NOT_SWIGLU:
            print(f"{name}{_SIZES_ONLY}", file=sys.stderr)
    with output(options.output), _terminable():
        print(f"Into {store.folder()}, for {options.gpu or 'the GPU of this machine'}:", flush=True)
        try:
            made = compile_ahead(
                [shape._replace(dtype=dtype) for shape in shapes],
                tokens=options.tokens,
                training=options.training,
                gpu=options.gpu,
                jobs=options.jobs,
                progress=_progress,
            )
        except (OSError, RuntimeError, ValueError, subprocess.CalledProcessError) as error:
            print(f"compile: {error}", file=sys.stderr)
            return 2 if isinstance(error, ValueError) else 1
        except KeyboardInterrupt:
            print("\nInterrupted. What is made is kept; the same command continues.", file=sys.stderr)
            return 130
    libraries = f"{made.libraries} launcher libraries in {time.monotonic() - begun:.0f} s."
    print(f"{made.plans} plans, {made.binaries} binaries, {libraries}")
    if options.output is not None:
        path = os.path.abspath(options.output)
        names = "MOE_KERNELS_CACHE_DIR" + ("" if os.pathsep in path else " or MOE_KERNELS_CACHE_READONLY")
        print(f"At run time set {names} to {path}")
    return 0


@contextmanager
def _terminable() -> Iterator[None]:
    """End on SIGTERM, as of `timeout` or `docker stop`, as on Ctrl-C, which removes temporary folders."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _refused(options: argparse.Namespace) -> str | None:
    """Return the error message for options that `compile` cannot serve, or None."""
    if not options.model and not options.layer:
        return "compile: give --model or --layer (--list names the models)"
    if options.gpu is None and not torch.cuda.is_available():
        return f"compile: there is no GPU here; name one with --gpu: {', '.join(targets.KNOWN)}"
    here = store.public_version("triton") or "none"
    if options.triton is not None and not f"{here}.".startswith(f"{options.triton.partition('+')[0]}."):
        return f"compile: --triton {options.triton}: {here} is installed here, and binaries are for its version alone"
    if options.torch is not None and not requirements.is_tested(options.torch, *requirements.TESTED["torch"]):
        return f"compile: --torch {options.torch}: expected {' to '.join(requirements.TESTED['torch'])}"
    if options.output == "":
        return "compile: --output: expected a folder, got an empty name"
    if options.output is not None and _is_no_folder(options.output):
        return f"compile: --output {options.output}: expected a folder, this is a file"
    return None


def _is_no_folder(path: str | Path) -> bool:
    """Whether a path exists and is something else; False if the user may not look at it."""
    return os.path.exists(path) and not os.path.isdir(path)


def _progress(done: int, total: int) -> None:
    """Show a bar that grows in place on a terminal; elsewhere, as in a log, a line for each tenth of the plans."""
    if sys.stderr is None:  # closed
        return
    width = 40 * done // total
    bar = f"  [{'#' * width}{' ' * (40 - width)}] {done} of {total} plans"
    if sys.stderr.isatty():
        print(f"\r{bar}", end="\n" if done == total else "", file=sys.stderr, flush=True)
    elif 10 * done // total > 10 * (done - 1) // total:
        print(bar, file=sys.stderr, flush=True)


def add_cache_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `cache`."""
    parser.add_argument("action", nargs="?", choices=("show", "clear"), default="show", help="default: show")


def cache_main(options: argparse.Namespace) -> int:
    """Run `cache` and return the exit code."""
    if options.action == "clear":
        if _is_no_folder(store.folder()):
            print(f"cache: {store.folder()}: is no folder", file=sys.stderr)
            return 1
        print(f"Files removed from {store.folder()}: {store.clear()}")
        if store.contents(store.folder()):
            print("cache: the user may not remove the others", file=sys.stderr)
            return 1
        return 0
    _show(store.folder(), "")
    for root in store.read_only_folders():
        _show(root, ", read only")
    print(f"limit: {store.limit_mb()} MiB (MOE_KERNELS_CACHE_LIMIT_MB)")
    return 0


def _show(root: Path, note: str) -> None:
    try:
        absent = "" if stat.S_ISDIR(os.stat(root).st_mode) else "is no folder"
    except FileNotFoundError:
        absent = "not there yet"
    except OSError as error:  # as in another user's home folder
        absent = f"cannot be read ({error.strerror})"
    if not absent and (refused := store.refusal(root)) is not None:
        note += f", not used: {refused}"
    print(f"{root}: {absent}" if absent else f"{root}{note}:")
    for kind, (count, size) in sorted(store.contents(root).items()):
        print(f"  {kind}: {count}, {size / 2**20:.1f} MiB")


def add_info_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `info`."""
    parser.add_argument(
        "--model", choices=MODELS, metavar="NAME", help="a model that `compile --list` names: show its layer's launches"
    )
    parser.add_argument(
        "--tokens", type=token_range, metavar="A[:B]", help="numbers of tokens in a call, with --model; default: 1:8192"
    )
    parser.add_argument(
        "--gpu", choices=targets.KNOWN, help="with --model; default: the GPU of this machine, or else h200"
    )


def print_layer(options: argparse.Namespace) -> int:
    """Print the launches of a model's layer for each class of token counts, and the distinct kernels and configs.

    Returns the exit code.
    """
    gpu = targets.KNOWN[options.gpu] if options.gpu else targets.current() or targets.KNOWN["h200"]
    shape = LayerShape(*MODELS[options.model])
    try:
        by_tokens = requests(options.tokens or _TOKENS, shape, gpu)
    except ValueError as error:
        print(f"info: {error}", file=sys.stderr)
        return 2
    if options.model in NOT_SWIGLU:
        print(f"{options.model}{_SIZES_ONLY}", file=sys.stderr)
    print(f"{options.model} {tuple(MODELS[options.model])} on {gpu.name}: launches by token counts")
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}  # constants of each launch, by kernel and config
    for (low, high), launches in by_tokens.items():
        names = []
        for launch in launches:
            found.setdefault((launch.kernel.name, repr(launch.config)), []).append(_constants(launch))
            names.append(f"{launch.kernel.name} {launch.config.config.get('block_sizes')}")
        print(f"  {low if low == high else f'{low} to {high}'}: {', '.join(names)}")
    distinct = sum(len({repr(constants) for constants in each}) for each in found.values())
    print(f"{len(found)} distinct kernels with configs, {distinct} with their constants:")
    for (name, config), each in sorted(found.items()):
        values = {key: sorted({constants[key] for constants in each}, key=repr) for key in each[0]}
        differing = [f"{key} {', '.join(map(str, value))}" for key, value in values.items() if len(value) > 1]
        print("; ".join([f"  {name}: {config.removeprefix('Config')}", *differing]) + f"; in {len(each)} launches")
    return 0


def _constants(launch: Request) -> dict[str, Any]:
    """Return, by name, the arguments that are compiled into a kernel."""
    parameters = launch.kernel.signature.parameters.values()
    pairs = zip(parameters, launch.arguments, strict=True)
    return {parameter.name: value for parameter, value in pairs if "constexpr" in str(parameter.annotation)}
