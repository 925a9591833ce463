"""Training in bfloat16 and in fp8: the held-out losses of a small transformer with expert layers.

    python -m benchmarks.convergence [--steps N] [--only SEED:COMPUTE ...] [--tiny] [--json FILE]

A byte-level transformer with `moe_mlp` in each layer is trained on the source of the standard library of this Python.
Weights are float32 and are rounded to bfloat16 in each step. COMPUTE is "bfloat16", or an fp8 `compute` of `moe_mlp`;
"fp8_rowwise_fast" adds `fast_accumulation`. All runs of a seed start with the same weights and get the same batches.
The held-out batches are the same for all runs.

On a GPU this writes benchmarks/results/<gpu>/convergence.json after each run. Runs in the file are not repeated; a
file of other versions or steps is refused. Several processes that share a GPU may write to it at once:

    for run in {0,1,2}:{bfloat16,fp8_rowwise,fp8_rowwise_fast,fp8_block}; do
        python -m benchmarks.convergence --only $run &
    done; wait

--tiny checks on a CPU that the script works.
"""

from __future__ import annotations

import argparse
import fcntl
import math
import os
import platform
import sysconfig
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks import run, tables
from moe_kernels import moe_mlp, topk_softmax
from moe_kernels.commands import run_and_exit
from moe_kernels.models import positive

SEEDS = (0, 1, 2)
COMPUTES: dict[str, dict[str, Any]] = {  # options of moe_mlp
    "bfloat16": {},
    "fp8_rowwise": {"compute": "fp8_rowwise"},
    "fp8_rowwise_fast": {"compute": "fp8_rowwise", "fast_accumulation": True},
    "fp8_block": {"compute": "fp8_block"},
}
BALANCE = 0.01  # weight of the load-balancing loss
LEARNING_RATE = 1e-3
HELD_OUT_SEED = 1000
HELD_OUT_FILES = 20  # one file in this many is held out


@dataclass(frozen=True)
class Sizes:
    """Sizes of the model and of its training."""

    layers: int = 4
    width: int = 256
    heads: int = 8
    experts: int = 8
    top_k: int = 2
    inner: int = 512  # the experts' width
    batch: int = 32
    length: int = 256  # bytes of a sequence
    held_out: int = 8  # batches
    every: int = 50  # steps between evaluations


TINY = Sizes(1, 32, 2, 4, 2, 16, 2, 16, 2, 2)


class Block(nn.Module):
    """Causal attention, then a layer of experts."""

    def __init__(self, sizes: Sizes, compute: str):
        super().__init__()
        D, E, width = sizes.width, sizes.experts, sizes.inner
        self.heads, self.top_k = sizes.heads, sizes.top_k
        self.options = COMPUTES[compute]
        self.norm_1, self.norm_2 = nn.RMSNorm(D), nn.RMSNorm(D)
        self.qkv, self.out = nn.Linear(D, 3 * D, bias=False), nn.Linear(D, D, bias=False)
        self.router = nn.Linear(D, E, bias=False)
        self.w_gate_up = nn.Parameter(torch.randn(E, 2 * width, D) * D**-0.5)
        self.w_down = nn.Parameter(torch.randn(E, D, width) * width**-0.5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # [B, L, D] -> [B, L, D], load-balancing loss
        B, L, D = x.shape
        q, k, v = self.qkv(self.norm_1(x)).view(B, L, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(B, L, D))
        tokens = self.norm_2(x).view(B * L, D).bfloat16()
        logits = self.router(tokens).float()
        ids, weights = topk_softmax(logits, self.top_k, renormalize=True)
        experts = self.w_gate_up.bfloat16(), self.w_down.bfloat16()
        x = x + moe_mlp(tokens, ids, weights, *experts, **self.options).view(B, L, D)
        E = logits.shape[1]
        used = torch.zeros(E, device=x.device).index_add_(0, ids.flatten(), torch.ones(ids.numel(), device=x.device))
        return x, E * (used / ids.numel() * logits.softmax(-1).mean(0)).sum()


class Transformer(nn.Module):
    """Predicts the next byte."""

    def __init__(self, sizes: Sizes, compute: str):
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, sizes.width), nn.Embedding(sizes.length, sizes.width)
        self.blocks = nn.ModuleList(Block(sizes, compute) for _ in range(sizes.layers))
        self.norm, self.head = nn.RMSNorm(sizes.width), nn.Linear(sizes.width, 256, bias=False)

    def forward(self, text: Tensor) -> tuple[Tensor, Tensor]:  # [B, L + 1] -> cross entropy, load-balancing loss
        text = text.long()
        x = self.bytes(text[:, :-1]) + self.places.weight
        balance = x.new_zeros(())
        for block in self.blocks:
            x, one = block(x)
            balance = balance + one
        return F.cross_entropy(self.head(self.norm(x)).float().flatten(0, 1), text[:, 1:].flatten()), balance


def read(most: int | None = None) -> tuple[Tensor, Tensor]:
    """Return training and held-out text from the standard library's source, uint8; at most `most` files of each."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [file for file in sorted(root.rglob("*.py")) if not {"site-packages", "dist-packages"} & {*file.parts}]
    held_out = files[::HELD_OUT_FILES][:most]
    learned = [file for i, file in enumerate(files) if i % HELD_OUT_FILES][:most]
    texts = (b"\n".join(file.read_bytes() for file in part) for part in (learned, held_out))
    first, second = (torch.frombuffer(bytearray(text), dtype=torch.uint8) for text in texts)
    return first, second


def starts(text: Tensor, number: int, sizes: Sizes, seed: int) -> Tensor:  # [number, batch]
    """Return random start positions of the sequences in `number` batches."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(len(text) - sizes.length, (number, sizes.batch), generator=generator).to(text.device)


def learning_rate(steps: int, step: int) -> float:
    """Return the factor of `LEARNING_RATE`: linear warm-up over 1/20 of the steps, then cosine decay to 1/10."""
    warm = max(1, steps // 20)
    return min((step + 1) / warm, 0.55 + 0.45 * math.cos(math.pi * step / steps))


def train(
    seed: int, compute: str, steps: int, sizes: Sizes, text: Tensor, held_out: Tensor, device: torch.device
) -> run.Record:
    """Return the record of one run. The host waits for the device only at the end."""
    torch.manual_seed(seed)
    model = Transformer(sizes, compute).to(device)
    options: dict[str, Any] = {"lr": LEARNING_RATE, "betas": (0.9, 0.95), "weight_decay": 0.1}
    optimizer = torch.optim.AdamW(model.parameters(), **options, fused=device.type == "cuda")
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, partial(learning_rate, steps))
    learned, evaluated = starts(text, steps, sizes, seed), starts(held_out, sizes.held_out, sizes, HELD_OUT_SEED)
    places = torch.arange(sizes.length + 1, device=device)
    losses, found = torch.empty(steps, device=device), list[tuple[int, Tensor]]()
    autocast = partial(torch.autocast, device.type, torch.bfloat16)
    begun = time.monotonic()
    for step in range(1, steps + 1):
        with autocast():
            loss, balance = model(text[learned[step - 1, :, None] + places])
        (loss + BALANCE * balance).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses[step - 1] = loss.detach()
        if step % sizes.every == 0 or step == steps:
            with torch.no_grad(), autocast():
                each = [model(held_out[one[:, None] + places])[0] for one in evaluated]
            found.append((step, torch.stack(each).mean()))
    values = [round(loss, 4) for loss in losses.tolist()]
    last = values[-sizes.every :]
    return {
        "suite": "convergence",
        "case": f"{seed}:{compute}",
        "seed": seed,
        "compute": compute,
        "held_out": [(step, round(loss.item(), 4)) for step, loss in found],
        "final": round(found[-1][1].item(), 4),
        "final_training": round(sum(last) / len(last), 4),  # mean of the last `sizes.every` steps
        "seconds": round(time.monotonic() - begun, 1),
        "losses": values,
    }


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Hold an exclusive lock on this folder, against other processes."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def pair(text: str) -> tuple[int, str]:
    """Parse "SEED:COMPUTE", for argparse."""
    seed, _, compute = text.partition(":")
    if not seed.isdigit() or compute not in COMPUTES:
        raise argparse.ArgumentTypeError(f"expected SEED:COMPUTE with one of {', '.join(COMPUTES)}, got {text!r}")
    return int(seed), compute


def main(argv: Sequence[str] | None = None) -> int:
    parser = run.parser_of(
        "convergence", __doc__, tiny="a small model and little text", file="convergence.json", keeps="case"
    )
    parser.add_argument("--steps", type=positive, help="default: 2000, or 3 with --tiny")
    every = [(seed, compute) for seed in SEEDS for compute in COMPUTES]
    parser.add_argument("--only", type=pair, nargs="+", default=every, metavar="SEED:COMPUTE", help="default: all")
    options = parser.parse_args(argv)
    device = run.device_of(parser, options)
    sizes, steps = (TINY, options.steps or 3) if options.tiny else (Sizes(), options.steps or 2000)
    text, held_out = (part.to(device) for part in read(5 if options.tiny else None))
    meta = run.meta(device, f"python -m benchmarks.convergence --steps {steps}{' --tiny' * options.tiny}")
    del meta["ceilings"]  # not reliable while other processes share the GPU
    training = asdict(sizes) | {"steps": steps, "bytes": len(text), "held_out_bytes": len(held_out)}
    meta |= {"python": platform.python_version(), "training": training}
    file = run.file_of(options, meta, "convergence.json", adds=True)
    results = run.Results(meta)
    for seed, compute in options.only:
        if file is not None:
            results.keep(file, "case")
        if f"{seed}:{compute}" in {record["case"] for record in results.records}:
            print(f"seed {seed}, {compute}: in {file}", flush=True)
            continue
        record = train(seed, compute, steps, sizes, text, held_out, device)
        print(f"seed {seed}, {compute}: held-out loss {record['final']} ({record['seconds']} s)", flush=True)
        results.records.append(record)
        if file is not None:
            with alone(file.parent):
                results.keep(file, "case")
                results.write(file)
    print(f"\n{tables.markdown(results)}")
    return 0


if __name__ == "__main__":
    run_and_exit(main)
