"""Launch a compiled Triton kernel: the only file that knows Triton's launcher.

Triton's public launch, `kernel[grid](*arguments)`, takes the host 20 to 40 us to wrap arguments that a plan already
has. A direct launch passes them to the launcher's C function. It relies on the launchers of Triton 3.6 to 3.9. If they
look different, the public launch is used.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import inspect
import os
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

import torch

from moe_kernels import requirements
from moe_kernels.runtime import store
from moe_kernels.runtime.attributes import replaced
from moe_kernels.runtime.plan import Constant, Descriptor, Launch, Pointer

_MOST_ENCODED = 1024  # cached TMA descriptors, of 128 bytes each, per descriptor of a launch
_DIRECT = ((3, 6), (3, 7), (3, 8), (3, 9))  # the versions of Triton whose launchers are supported
UNEXPECTED = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)


class Body(Protocol):
    """The names and values that a launcher needs in the generated function."""

    def named(self, kind: str, value: Any) -> str: ...

    def number(self, n: Any) -> str: ...

    def address(self, variable: int, offset: int = 0) -> str: ...


class Launcher(Protocol):
    """Turns a launch into statements of the generated function."""

    def before(self, device: torch.device, named: Callable[[str, Any], str]) -> list[str]: ...

    def statement(self, launch: Launch, body: Any) -> str: ...


class TritonLauncher:
    """Launches by `kernel[grid](*arguments)`, the public interface of a compiled kernel."""

    def __init__(self, kernel: Any):
        self.kernel = kernel

    def before(self, device: torch.device, named: Callable[[str, Any], str]) -> list[str]:
        return []

    def statement(self, launch: Launch, body: Body) -> str:
        arguments = ", ".join(self._argument(x, body) for x in launch.arguments)
        return f"{body.named('kernel', self.kernel)}[{_grid(launch, body)}]({arguments})"

    def _argument(self, x: Any, body: Body) -> str:
        if isinstance(x, Descriptor):
            dtype, make = body.named("dtype", x.dtype), body.named("descriptor", _host_descriptor)
            shape = ", ".join(map(body.number, x.shape))
            return f"{make}({body.address(x.variable, x.offset)}, {dtype}, [{shape}], {x.strides}, {x.block_shape})"
        return _plain_argument(x, body)


class DirectLauncher:
    """Launches by the C function of Triton's launcher.

    Raises:
        UNEXPECTED: Triton's launcher is not as expected.
    """

    def __init__(self, kernel: Any):
        from triton import __version__, knobs
        from triton.runtime import driver

        if requirements.minor(__version__) not in _DIRECT:
            raise RuntimeError(f"the launcher of Triton {__version__} is not known")
        if kernel.metadata.target.backend != "cuda":
            raise RuntimeError(f"the launcher for {kernel.metadata.target.backend} is not known")
        self.kernel, self.hooks, self.driver = kernel, knobs.runtime, driver.active
        self.launcher = kernel.run
        if self.launcher.global_scratch_size or self.launcher.profile_scratch_size:
            raise RuntimeError("scratch memory")
        if getattr(self.launcher, "gsan_enabled", False):
            raise RuntimeError("instrumented code takes more arguments")
        self.hooks.launch_enter_hook.calls  # noqa: B018
        self.descriptions = list(getattr(kernel.metadata, "tensordesc_meta", None) or ())
        self.raw = self.launcher.launch
        if self.descriptions:  # inside Triton's wrapper for arguments that are descriptors
            self.raw = inspect.getclosurevars(self.raw).nonlocals["launcher"]
        self.function, self.packed = kernel.function, kernel.packed_metadata
        self.generic = hasattr(self.launcher, "arg_annotations")  # from 3.7 on, one launcher for all kernels
        self.attributes = repr(bool(self.launcher.launch_cooperative_grid)), repr(bool(self.launcher.launch_pdl))
        if self.generic:
            self.generic_arguments = self.launcher.arg_annotations, self.launcher.kernel_signature

    def before(self, device: torch.device, named: Callable[[str, Any], str]) -> list[str]:
        hooks, stream = named("hooks", self.hooks), named("stream", self.driver.get_current_stream)
        return [
            f"stream = {stream}({device.index or 0})",
            f"enter, leave = {hooks}.launch_enter_hook, {hooks}.launch_exit_hook",
            "enter, leave = (enter, leave) if enter.calls else (None, None)",
        ]

    def statement(self, launch: Launch, body: Body) -> str:
        arguments: list[str] = []
        descriptions = iter(self.descriptions)
        for x in launch.arguments:
            arguments += self._argument(x, body, descriptions)
        grid = _grid(launch, body)
        raw, packed = body.named("raw", self.raw), body.named("packed", self.packed)
        metadata = f"enter and {body.named('kernel', self.kernel)}.launch_metadata(({grid}), stream)"
        to = f"{grid}, stream, {body.named('function', self.function)}, {', '.join(self.attributes)}"
        if self.generic:
            kinds, kernel_signature = (body.named("generic", x) for x in self.generic_arguments)
            scratch = f"None, None, {kinds}, {kernel_signature}"
            return f"{raw}({to}, {packed}, {metadata}, enter, leave, {scratch}, ({', '.join(arguments)},))"
        return f"{raw}({to}, None, None, {packed}, {metadata}, enter, leave, {', '.join(arguments)})"

    def _argument(self, x: Any, body: Body, descriptions: Iterator[Any]) -> list[str]:
        if isinstance(x, Descriptor):
            encode = body.named("encode", _encoder(next(descriptions), x))
            shape = [body.number(n) for n in x.shape]
            changing = "".join(f", {s}" for n, s in zip(x.shape, shape, strict=True) if type(n) is not int)
            address = body.address(x.variable, x.offset)
            return [f"{encode}({address}{changing})", *shape, *map(str, x.strides)]
        return [_plain_argument(x, body)]


def _plain_argument(x: Any, body: Body) -> str:
    """Return the expression of an argument other than a descriptor, the same for both launchers."""
    if isinstance(x, Pointer):
        return body.address(x.variable, x.offset)
    return body.named("constant", x.value) if isinstance(x, Constant) else body.number(x)


def _grid(launch: Launch, body: Body) -> str:
    grid = [body.number(n) for n in launch.grid]
    return ", ".join(grid + ["1"] * (3 - len(grid)))


def _encoder(meta: dict[str, Any], like: Descriptor) -> Callable[..., Any]:
    """Return a function from the address and the changing extents to the encoded descriptor, with an LRU cache."""
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST  # not in every build of Triton
    from triton.runtime import driver

    if meta["fp4_padded"] or meta.get("is_im2col"):
        raise RuntimeError("an unusual descriptor")
    utils = driver.active.utils
    fill = getattr(utils, "fill_tma_descriptor_tiled", None) or utils.fill_tma_descriptor
    encoding = (meta["swizzle"], meta["elem_size"], TMA_DTYPE_DEVICE_TO_HOST[meta["elem_type"]], meta["block_size"])
    places = [i for i, n in enumerate(like.shape) if type(n) is not int]
    template, strides = [n if type(n) is int else 0 for n in like.shape], list(like.strides)

    @functools.lru_cache(_MOST_ENCODED)
    def encode(address: int, *extents: int) -> Any:
        shape = list(template)
        for place, n in zip(places, extents, strict=True):
            shape[place] = n
        return fill(address, *encoding, shape, strides, 0)

    return encode


def _host_descriptor(
    address: int, dtype: torch.dtype, shape: list[int], strides: tuple[int, ...], block_shape: tuple[int, ...]
) -> Any:
    from triton.tools.tensor_descriptor import TensorDescriptor

    base = SimpleNamespace(data_ptr=lambda: address, dtype=dtype)  # what Triton needs of a tensor
    return TensorDescriptor(base, shape, list(strides), list(block_shape))


def launcher(kernel: Any) -> Launcher:
    """Load a `triton.compiler.CompiledKernel` onto the current GPU; return its direct launcher, or else the public one.

    Raises:
        triton.OutOfResources: the kernel needs more than this GPU has.
        RuntimeError: there is no C compiler, and no library that was built before.
    """
    kernel.run  # noqa: B018  (loads the kernel, and its launcher)
    # From Triton 3.9 on, a kernel unloads itself when it is freed. At the end of a process it cannot, since Triton's
    # modules are gone, and prints an error. With a reference that is never dropped, it is never freed.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(kernel))
    try:
        return DirectLauncher(kernel)
    except UNEXPECTED:
        return TritonLauncher(kernel)


def compiled_kernel(record: store.Binary) -> Any:
    """Return the `triton.compiler.CompiledKernel` of a binary, compiled by this process or another.

    Raises:
        UNEXPECTED: Triton's class is not as expected.
    """
    from triton.compiler import CompiledKernel

    names = [f"a{i}" for i in range(len(record.signature))]
    source = SimpleNamespace(
        signature=dict(zip(names, record.signature, strict=True)),
        constants={(i,): None for i in record.constants},
        fn=SimpleNamespace(arg_names=names),
    )
    with tempfile.TemporaryDirectory() as folder:
        # Triton reads these copies at once. Files in the store might change after they were checked.
        files = {"kernel.json": record.metadata.encode(), f"kernel.{record.extension}": record.code}
        paths = {}
        for name, content in files.items():
            paths[name] = os.path.join(folder, name)
            Path(paths[name]).write_bytes(content)
        return CompiledKernel(source, paths, record.key)


@contextmanager
def libraries(records: Collection[store.Binary] = ()) -> Iterator[None]:
    """Within the block, Triton's C libraries, a launcher for each signature, come from the store if it has them.

    Triton requests only those that are not in its own cache. It loads that cache's files unchecked, so a new folder
    replaces a cache that others may write to, or the user may not. Libraries that are built are added to the store.
    With the first, the missing launchers of `records` are built, all at the same time.
    """
    try:
        from triton import knobs
        from triton.runtime.build import _build  # noqa: F401

        _, scope = knobs.build.impl, knobs.cache.scope()
    except (ImportError, AttributeError):
        yield
        return
    with scope:
        if not store.is_private(knobs.cache.dir):
            knobs.cache.dir = _own_folder()
        with replaced(knobs.build, impl=functools.partial(_library, records, {})):
            yield


def ensure_cache() -> None:
    """Give Triton a cache folder for this process if the user cannot write to its own, as without a home folder."""
    with suppress(ImportError, AttributeError):
        from triton import knobs

        if not store.is_writable(knobs.cache.dir):
            leave_cache()


def leave_cache() -> bool:
    """Give Triton a cache folder for this process, as where its own is on a full disk. False if it has that already."""
    from triton import knobs

    before, knobs.cache.dir = knobs.cache.dir, _own_folder()
    return bool(knobs.cache.dir != before)


@functools.cache
def _own_folder() -> str:
    """Cache folder for Triton in this process. It is kept, since other threads may use it in the meantime."""
    return store.temporary_folder()


def _library(
    records: Collection[store.Binary], built: dict[str, bytes], name: str, src: str, srcdir: str, *options: Any
) -> str:
    """Triton's build hook: return the path of the library of the C file `src`. `built` is what earlier calls built."""
    source = Path(src).read_text()
    path = os.path.join(srcdir, f"{name}{sysconfig.get_config_var('EXT_SUFFIX')}")
    if _key(source) not in built:
        stored = store.read_library(_key(source))
        if stored is not None and _can_be_loaded(stored):
            Path(path).write_bytes(stored)
            return path
        try:
            others = set() if built else _sources(records)
        except UNEXPECTED:
            others = set()
        built |= _build({source} | _missing(others), *options, [])
    Path(path).write_bytes(built[_key(source)])
    return path


def _can_be_loaded(library: bytes) -> bool:
    """Whether a library can be loaded here. One that was built elsewhere may need a newer C library.

    It is loaded from Triton's cache, as Triton will do: nothing can be loaded from a /tmp mounted with `noexec`.
    """
    from triton import knobs

    try:
        os.makedirs(knobs.cache.dir, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=knobs.cache.dir) as folder:
            path = os.path.join(folder, "library.so")
            Path(path).write_bytes(library)
            ctypes.CDLL(path)
    except OSError:
        return False
    return True


def _key(source: str) -> str:
    return hashlib.sha256(source.encode()).hexdigest()


def _sources(records: Collection[store.Binary]) -> set[str]:
    """Return the C files of the launchers of `records`. From Triton 3.7 on, one launcher serves all kernels."""
    from triton.backends.nvidia import driver as nvidia

    if not hasattr(nvidia, "make_launcher"):
        return set()
    sources = set()
    for record in records:
        if record.extension == "cubin":
            signature = {f"a{i}": kind for i, kind in enumerate(record.signature)}
            sources.add(nvidia.make_launcher({(i,): None for i in record.constants}, signature, record.descriptors))
    return sources


def _missing(sources: set[str]) -> set[str]:
    return {source for source in sources if store.read_library(_key(source)) is None}


_ELSEWHERE = "or make launchers elsewhere: python -m moe_kernels compile --help"


def _c_compiler() -> str:
    """Return the C compiler that Triton would use. Raise RuntimeError if there is none."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise RuntimeError(
            "moe_kernels: Triton needs a C compiler to build a launcher, and found none. Install one (apt install gcc) "
            + _ELSEWHERE
        )
    return compiler


def _not_built(error: Exception) -> RuntimeError:
    named = f" that CC names, {os.environ['CC']!r}," if "CC" in os.environ else ""
    return RuntimeError(
        f"moe_kernels: the C compiler{named} could not build a launcher of Triton's ({error}). If it did not find "
        f"Python.h, install Python's headers (apt install python3-dev) {_ELSEWHERE}"
    )


def _build(sources: Collection[str], *options: Any) -> dict[str, bytes]:
    """Build C files with options of Triton's build, all at the same time; store the libraries, and return them by key.

    The options are folders of libraries, folders of headers, names of libraries, and flags of the compiler.
    """
    from triton import knobs
    from triton.runtime import build

    if sources:
        _c_compiler()  # raises if there is none

    def library(source: str) -> bytes:
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "library.c")
            Path(path).write_text(source)
            try:
                return Path(build._build("library", path, folder, *options)).read_bytes()
            except (OSError, subprocess.CalledProcessError) as error:
                raise _not_built(error) from error

    with replaced(knobs.build, impl=None), ThreadPoolExecutor() as pool:
        built = dict(zip(map(_key, sources), pool.map(library, sources), strict=True))
    for key, content in built.items():
        store.write_library(key, content)
    return built


def build_libraries(records: Collection[store.Binary], renew: bool = False) -> int:
    """Build the launchers of `records` and Triton's driver library into the store, without a GPU. Return their number.

    With `renew`, those that are there already count as new. They are linked against a stub of libcuda, so no driver is
    needed: names are bound when a library is loaded.

    Raises:
        RuntimeError: there is no C compiler, or it fails; or this Triton builds its libraries in another way.
        OSError: they cannot be stored.
    """
    try:
        return _build_libraries(records, renew)
    except (AttributeError, ImportError, TypeError) as error:
        raise requirements.lacks("triton", f"launcher that can be built ahead ({error})") from error


def _build_libraries(records: Collection[store.Binary], renew: bool) -> int:
    from triton import knobs
    from triton.backends.nvidia import driver as nvidia

    with tempfile.TemporaryDirectory() as folder, knobs.nvidia.scope():
        source, stub = os.path.join(folder, "stub.c"), os.path.join(folder, "libcuda.so.1")
        Path(source).write_text("")
        try:
            subprocess.run([_c_compiler(), "-shared", "-Wl,-soname,libcuda.so.1", source, "-o", stub], check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise _not_built(error) from error
        knobs.nvidia.libcuda_path = folder
        nvidia.libcuda_dirs.cache_clear()
        nvidia.library_dirs.cache_clear()
        try:
            sources = {Path(nvidia.dirname, "driver.c").read_text()} | _sources(records)
            # The stub has no symbols. Some compilers, such as Ubuntu's, link only libraries that have one that is used.
            flags = ["-Wl,--no-as-needed", "-l:libcuda.so.1"]
            if renew:
                store.renew(libraries=map(_key, sources))
            _build(_missing(sources), nvidia.library_dirs(), nvidia.include_dirs, nvidia.libraries, flags)
            if _missing(sources):
                raise OSError(f"{store.folder()}: launchers cannot be kept there")
            return len(sources)
        finally:
            nvidia.libcuda_dirs.cache_clear()
            nvidia.library_dirs.cache_clear()
