"""Register our operators in TritonBench, and our providers in its `grouped_gemm`."""

from __future__ import annotations

import functools
import importlib
import logging
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import torch

from tritonbench_ops.providers import PROVIDERS

_CPU_SIZES = (32, 64)  # N of the N x N inputs of `grouped_gemm` on a CPU; its own have up to 8,192
OPERATORS = Path(__file__).parent / "operators"
INSTALL = (
    "git clone https://github.com/meta-pytorch/tritonbench && pip install --no-deps -e tritonbench "
    "&& pip install psutil tabulate pyyaml matplotlib nvidia-ml-py"
)
_log = logging.getLogger(__name__)


class Refused(ValueError):
    """An argument that an operator does not take."""


def register() -> None:
    """Add our operators to TritonBench, and our providers to its `grouped_gemm`. Further calls change nothing.

    With `--device cpu`, `grouped_gemm` gets small inputs, as our operators do. Without a CUDA GPU, its kernels in
    TritonBench cannot be imported, and functions that report this replace them. TritonBench loads a `--plugin` only
    after that import, so `--plugin` needs a GPU; `run.py --launch tritonbench_ops.__main__` does not.

    Raises:
        ImportError: TritonBench, or a package that it needs, is not installed; the message has the command to install
            it.
    """
    import_tritonbench()
    helion = logging.getLogger("helion")
    if helion.level == logging.NOTSET:
        helion.setLevel(logging.WARNING)  # TritonBench shows INFO messages, which Helion logs for each kernel
    _add_operators()
    _add_providers()


def import_tritonbench() -> None:
    """Import the base of TritonBench."""
    try:
        found = importlib.import_module("tritonbench")
        clone = next(iter(found.__path__))
        if found.__file__ is None and Path(clone, "tritonbench", "__init__.py").is_file():
            # The working directory has a clone, which Python imported as a namespace package instead of its content.
            del sys.modules["tritonbench"]
            sys.path.insert(0, clone)
        importlib.import_module("tritonbench.utils.triton_op")
    except ModuleNotFoundError as error:
        raise ImportError(f"TritonBench cannot be imported ({error}). To install it: {INSTALL}") from error


def skip(reason: str) -> NoReturn:
    """Leave a provider out: later versions of TritonBench show the reason in its table, earlier "not supported"."""
    warn_once(reason)
    raise NotImplementedError(reason)


def _add_operators() -> None:
    package = importlib.import_module("tritonbench.operators")
    loader = importlib.import_module("tritonbench.operators.op")
    if str(OPERATORS) in package.__path__:
        return
    package.__path__.append(str(OPERATORS))
    list_theirs = loader._list_opbench_paths

    @functools.wraps(list_theirs)
    def list_all() -> list[str]:
        return [*list_theirs(), *(str(file.parent) for file in sorted(OPERATORS.glob("*/__init__.py")))]

    loader._list_opbench_paths = list_all  # type: ignore[attr-defined]


def _add_providers() -> None:
    _stand_in_for_kernels()
    triton_op = importlib.import_module("tritonbench.utils.triton_op")
    try:
        operator = importlib.import_module("tritonbench.operators.grouped_gemm").Operator
    except Exception as error:  # from one of the many packages that it imports and our operators do not need
        warn_once(f"our providers on grouped_gemm, which cannot be imported: {type(error).__name__}: {error}")
        return
    if not hasattr(operator.get_input_iter, "__wrapped__"):
        operator.get_input_iter = _small_on_a_cpu(operator.get_input_iter)
    for function, label in PROVIDERS.items():
        name = function.__name__
        if name not in triton_op.REGISTERED_BENCHMARKS["grouped_gemm"]:
            declare = triton_op.register_benchmark(
                operator_name="grouped_gemm", func_name=name, label=label, fwd_only=True
            )
            setattr(operator, name, declare(function))


def _small_on_a_cpu(theirs: Callable[[Any], Iterator[Any]]) -> Callable[[Any], Iterator[Any]]:
    """Replace the inputs of `grouped_gemm` on a CPU by small ones of the same kind, unless shapes are given."""

    @functools.wraps(theirs)
    def get_input_iter(self: Any) -> Iterator[Any]:
        if self.device != "cpu" or getattr(self, "external_shapes", None):
            yield from theirs(self)
            return
        for n in _CPU_SIZES:
            group_A, group_B = ([torch.rand(n, n, dtype=self.dtype) for _ in range(4)] for _ in "AB")
            shared = hasattr(self, "list_input_to_jagged")
            yield (group_A, group_B[:1] * 4, None, None) if shared else (group_A, group_B)

    return get_input_iter


def _stand_in_for_kernels() -> None:
    name = "tritonbench.operators.grouped_gemm.kernels"
    if not torch.cuda.is_available():
        sys.modules.setdefault(name, _CudaOnly(name))


class _CudaOnly(types.ModuleType):
    """Placeholder for a module of kernels that cannot be imported without a GPU."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: skip(f"{name} needs a CUDA GPU")


@functools.cache
def warn_once(reason: str) -> None:
    """Log once that something is left out."""
    _log.warning("skipped: %s", reason)
