"""A layer of experts with SwiGLU, top_k experts per token: from hidden states and router choice to output, and back.

    hidden        [T, H]
    topk_ids      [T, top_k] int64, no expert twice
    topk_weights  [T, top_k]
    w_gate_up     [E, 2I, H], gate first
    w_down        [E, H, I]

Sorting the ids by expert is timed, except in `torch_loop`. With --bwd and --fwd-bwd all gradients are computed: of
hidden states and all weights. A forward alone, --mode fwd or fwd_no_grad, saves nothing for a backward. `best_config`
is that of the last product in a call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from tritonbench.utils.triton_op import Mode, register_benchmark, register_metric, register_x_val

from moe_kernels.testing import make_experts, make_tokens
from tritonbench_ops import base, ffn
from tritonbench_ops.cases import FfnCase, ffn_cases
from tritonbench_ops.registration import skip, warn_once

_TRANSFORMERS = find_spec("transformers") is not None
if not _TRANSFORMERS:
    warn_once("transformers: the package transformers is not installed")


@contextmanager
def _stream_of_captures() -> Iterator[None]:
    """Enter the stream in which a forward must run if its backward is captured: autograd runs a backward on the stream
    of its forward, and a capture accepts only its own stream.
    """
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.graph(torch.cuda.CUDAGraph()).capture_stream):
        yield
    torch.cuda.synchronize()


class Operator(base.Operator):
    FWD_ONLY = False
    not_ours = frozenset({"torch_loop", "transformers", "transformers_compiled"})

    @register_benchmark(baseline=True, label="torch_loop (tokens of each expert known beforehand)")
    @base.checked
    def torch_loop(
        self, hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor, w_gate_up: Tensor, w_down: Tensor
    ) -> Callable[[], Tensor]:
        slots = [(topk_ids == e).nonzero(as_tuple=True) for e in range(len(w_down))]

        def call() -> Tensor:
            out = torch.zeros_like(hidden)
            for (t, k), w_in, w_out in zip(slots, w_gate_up.unbind(), w_down.unbind(), strict=True):
                if len(t):
                    out.index_add_(0, t, ffn.expert(hidden[t], topk_weights[t, k], w_in, w_out))
            return out

        return call

    @register_benchmark(enabled=_TRANSFORMERS)
    @base.checked
    def transformers(self, *inputs: Tensor) -> Callable[[], Tensor]:
        return ffn.transformers(self.layer)

    @register_benchmark(enabled=_TRANSFORMERS)
    @base.checked
    def transformers_compiled(self, *inputs: Tensor) -> Callable[[], Tensor]:
        if self.device != "cuda":
            skip("transformers_compiled needs a CUDA GPU")
        torch.compiler.reset()  # otherwise other inputs' shapes count towards the limit of recompilations
        if self.backward:
            torch._functorch.config.donated_buffer = False  # the backward runs several times on tensors of one forward
        return ffn.compiled(self.layer)

    @register_benchmark()
    @base.checked
    def moe_mlp(self, *inputs: Tensor) -> Callable[[], Tensor]:
        return ffn.ours(self.layer)

    @property
    def cases(self) -> Sequence[FfnCase]:
        return ffn_cases(self.device)

    @property
    def backward(self) -> bool:
        return self.mode in (Mode.BWD, Mode.FWD_BWD)

    def make(self, case: FfnCase) -> tuple[Tensor, ...]:
        options = {"dtype": self.dtype, "device": self.device}
        tokens = make_tokens(case.T, case.H, case.E, case.top_k, **options, seed=1)
        experts = make_experts(case.E, case.H, case.width, **options)
        self.layer = ffn.make_layer(*tokens, *experts, trains=self.backward)
        return self.layer.hidden, self.layer.topk_ids, self.layer.topk_weights, self.layer.w_gate_up, self.layer.w_down

    def get_bwd_fn(self, fwd_fn: Callable[[], Tensor]) -> Callable[[], dict[str, Tensor]]:
        with _stream_of_captures() if self.use_cuda_graphs else nullcontext():
            layer, out = self.layer, fwd_fn()

        def call() -> dict[str, Tensor]:
            return ffn.gradients(layer, out, retain_graph=True)

        self.check(call(), *self.example_inputs)
        return call

    def result(self, name: str, made: Any) -> Any:
        if self.mode != Mode.FWD_BWD:
            return made
        out, grads = made
        return {"out": out, **grads}

    def check(self, out: Tensor | dict[str, Tensor], *inputs: Tensor) -> None:
        ffn.check({"out": out} if isinstance(out, Tensor) else out, self.layer)

    @register_x_val("(T, H, I, E, top_k, model)")
    def get_x_val(self, example_inputs: Any) -> Any:
        return example_inputs and tuple(self.case)

    @register_metric()
    def flops(self, fn_name: str, example_inputs: Any, metrics: Any) -> float:
        return self._work[0]

    @register_metric()
    def gbps(self, fn: Any, example_inputs: Any, metrics: Any) -> float | None:
        return base.gigabytes_per_second(self._work[1], metrics)

    @property
    def _work(self) -> tuple[int, int]:
        return ffn.work(self.layer, forward=self.mode != Mode.BWD, backward=self.backward)
