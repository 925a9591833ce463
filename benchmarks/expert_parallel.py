"""A layer of DeepSeek-V3's size with its experts spread over ranks: time of a step, and the exchange's share of it.

    NCCL_NVLS_ENABLE=0 torchrun --nproc-per-node N -m benchmarks.expert_parallel [--tiny] [--json FILE]

A step is forward and backward of dispatch, experts and combine, with the gradients of all inputs and weights;
H = 7168, I = 2048, 256 experts of which each rank holds 256 / N, top_k = 8, bfloat16. Weak scaling: each rank has 4096
tokens for any N. Strong scaling: 8192 tokens in total, 8192 / N on each rank. The time is that of the slowest rank.
The exchange is the device time from the start to the end of each all-to-all, including the wait for slower ranks.
First, at a smaller size, outputs and all gradients are compared with those of a single process.

NCCL_NVLS_ENABLE=0 turns off NVLink multicast, which all-to-alls do not use. On GPUs rank 0 adds the records of N ranks
to benchmarks/results/<gpu>/expert_parallel.json. --tiny also runs on a CPU, with gloo.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import run, tables
from moe_kernels import grouped_gemm, reference, swiglu_ffn, topk_softmax
from moe_kernels.expert_parallel import combine, dispatch
from moe_kernels.models import positive
from moe_kernels.runtime.attributes import replaced
from moe_kernels.testing import assert_within_budget

TOP_K = 8
SIZES = {False: (7168, 2048, 256, 4096), True: (64, 32, 16, 32)}  # by options.tiny: H, I, E, tokens per rank
NAMES = ("hidden", "topk_weights", "w_gate_up", "w_down")


def make(T: int, H: int, I: int, E: int, seed: int, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:  # noqa: E741
    """Return random hidden states and upstream gradient of T tokens, and weights of E experts."""
    generator = torch.Generator(device).manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=dtype, generator=generator)

    return {
        "hidden": randn(T, H),
        "upstream": randn(T, H),
        "w_gate_up": randn(E, 2 * I, H).mul_(H**-0.5),
        "w_down": randn(E, H, I).mul_(I**-0.5),
    }


def route_randomly(T: int, E: int, seed: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return topk_ids and topk_weights of T tokens among E experts, from random logits."""
    generator = torch.Generator(device).manual_seed(seed)
    return topk_softmax(torch.randn(T, E, device=device, generator=generator), TOP_K, renormalize=True)


def step(x: dict[str, Tensor], E: int) -> list[Tensor]:
    """Return the output, and the gradients in the order of `NAMES`; `x` has the weights of this rank's experts."""
    inputs = [x[name].detach().requires_grad_() for name in NAMES]
    hidden, topk_weights, w_gate_up, w_down = inputs
    rows, exchange = dispatch(hidden, x["topk_ids"], topk_weights, E)
    act = swiglu_ffn(rows, w_gate_up, exchange.group_offsets)
    out = combine(grouped_gemm(act, w_down.mT, exchange.group_offsets), exchange)
    return [out.detach(), *torch.autograd.grad(out, inputs, x["upstream"])]


def single(x: dict[str, Tensor]) -> list[Tensor]:
    """Return the results of `step` in one process, in plain PyTorch, from the weights of all experts."""
    inputs = [x[name].detach().requires_grad_() for name in NAMES]
    out = reference.moe_mlp(inputs[0], x["topk_ids"], *inputs[1:])
    return [out.detach(), *torch.autograd.grad(out, inputs, x["upstream"])]


def check(device: torch.device, dtype: torch.dtype) -> float:
    """Compare with a single process, computed on each rank; return the largest share of the budget on this rank."""
    P, rank = dist.get_world_size(), dist.get_rank()
    H, I, E, T = 256, 128, 16 * P, 64  # noqa: E741
    whole = make(P * T, H, I, E, 0, device, dtype)
    whole["topk_ids"], whole["topk_weights"] = route_randomly(P * T, E, 1, device)
    exact = single({name: x.cpu().double() if x.is_floating_point() else x.cpu() for name, x in whole.items()})
    ours = step({name: x.chunk(P)[rank] for name, x in whole.items()}, E)
    shares = []
    for name, got, *others in zip(("out", *NAMES), ours, single(whole), exact, strict=True):
        plain, wanted = (x.chunk(P)[rank].to(device) for x in others)
        # The sums of absolute values, which bound rounding in float32, are some ten times as large as the result.
        scale = 16 * wanted.abs().max().item()
        shares.append(assert_within_budget(got, plain, wanted, scale=scale, name=name))
    return max(shares)


class Clock:
    """A clock on the device, or on the host for a CPU."""

    def __init__(self, device: torch.device):
        self.device = device

    def now(self) -> Any:
        if self.device.type == "cpu":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def milliseconds(self, start: Any, end: Any) -> float:
        """Return the time between two results of `now`; the device must have completed both."""
        passed: float = 1e3 * (end - start) if self.device.type == "cpu" else start.elapsed_time(end)
        return passed


def measure(x: dict[str, Tensor], E: int, rounds: int, device: torch.device) -> dict[str, float]:
    """Return seconds of the first step and median milliseconds, of the slowest rank, and the exchange's mean share."""
    clock = Clock(device)
    begun = time.perf_counter()
    step(x, E)[0].sum().item()
    first = time.perf_counter() - begun
    step(x, E)
    exchanges: list[tuple[Any, Any]] = []
    all_to_all = dist.all_to_all_single

    def timed(*args: Any, **kwargs: Any) -> None:
        start = clock.now()
        all_to_all(*args, **kwargs)
        exchanges.append((start, clock.now()))

    steps, shares = [], []
    for _ in range(rounds):
        exchanges.clear()
        dist.barrier()
        with replaced(dist, all_to_all_single=timed):
            start = clock.now()
            step(x, E)
            end = clock.now()
        if device.type != "cpu":
            torch.cuda.synchronize(device)
        steps.append(clock.milliseconds(start, end))
        shares.append(sum(clock.milliseconds(*pair) for pair in exchanges) / steps[-1])
    found = torch.tensor([first, statistics.median(steps), statistics.median(shares)], device=device)
    slowest = found.clone()
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    dist.all_reduce(found)
    return {"first_s": slowest[0].item(), "ms": slowest[1].item(), "comm": found[2].item() / dist.get_world_size()}


def main(argv: Sequence[str] | None = None) -> None:
    parser = run.parser_of("expert_parallel", __doc__, tiny="a small layer", file="expert_parallel.json", keeps="ranks")
    parser.add_argument("--rounds", type=positive, default=21)
    options = parser.parse_args(argv)
    if "RANK" not in os.environ:
        parser.error("start this with: torchrun --nproc-per-node N -m benchmarks.expert_parallel")
    local = int(os.environ["LOCAL_RANK"])
    on_gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    if not (options.tiny or on_gpu):
        parser.error("needs a CUDA GPU for each rank; --tiny runs without")
    device = torch.device("cuda", local) if on_gpu else torch.device("cpu")
    dtype = torch.bfloat16 if on_gpu else torch.float32
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    P, rank = dist.get_world_size(), dist.get_rank()
    H, I, E, T = SIZES[options.tiny]  # noqa: E741
    if E % P:
        parser.error(f"needs a number of ranks by which its {E} experts can be divided, got {P}")
    if rank == 0:
        words = f" --rounds {options.rounds}{' --tiny' * options.tiny}"
        command = f"NCCL_NVLS_ENABLE=0 torchrun --nproc-per-node N -m benchmarks.expert_parallel{words}"
        meta = run.meta(device, command)
        file = run.file_of(options, meta, "expert_parallel.json", adds=True)
    worst = torch.tensor(check(device, dtype), device=device)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    x = make(2 * T, H, I, E // P, rank, device, dtype)
    records = []
    for scaling, tokens in (("weak", T), ("strong", 2 * T // P)):
        part = x | {name: x[name][:tokens] for name in ("hidden", "upstream")}
        part["topk_ids"], part["topk_weights"] = route_randomly(tokens, E, rank, device)
        found = measure(part, E, options.rounds, device)
        records.append(
            {"suite": "expert_parallel", "scaling": scaling, "ranks": P, "H": H, "I": I, "E": E, "top_k": TOP_K}
            | {"tokens_per_rank": tokens, "dtype": str(dtype).removeprefix("torch.")}
            | {"first_s": round(found["first_s"], 2), "ms": round(found["ms"], 3)}
            | {"tokens_per_s": round(1e3 * tokens * P / found["ms"], 1), "comm": round(found["comm"], 4)}
            | {"error_share": round(worst.item(), 3)}
        )
    if rank == 0:
        results = run.Results(meta, records)
        if file is not None:
            results.keep(file, "ranks")
            results.write(file)
        print(tables.markdown(results), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
