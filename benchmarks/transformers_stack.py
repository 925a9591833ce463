"""Four layers of Qwen3-30B-A3B in transformers, with each of its experts implementations and with ours.

    python -m benchmarks.transformers_stack [--parts PART ...] [--tiny] [--json FILE]

Measures tokens per second of prefill (a forward pass to the last logits), of a training step (forward, backward, AdamW
in bfloat16) and of `generate` from a short prompt, with random bfloat16 weights. "compiled" is `generate` with a static
cache, whose decoding steps transformers compiles with mode="reduce-overhead", into CUDA graphs. The vocabulary is
reduced in proportion to the layers, from 151936 to 12672, so that embedding and head take the same share of the time as
in the full model. The implementations take turns on one model; first calls, which compile, are timed separately. In
each part grouped_mm is first, so that its first call alone includes what all of them need: PyTorch's imports for
compilation, and cuDNN's plans of attention, one for each length. On a GPU, `generate` of transformers decodes with
batched_mm instead of grouped_mm.

On a GPU this writes benchmarks/results/<gpu>/transformers.json. --tiny checks on a CPU that the script works.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import transformers

from benchmarks import run, tables
from moe_kernels.commands import run_and_exit
from moe_kernels.integrations import transformers as integration
from moe_kernels.models import positive
from moe_kernels.testing import assert_within_budget
from moe_kernels.timing import interleaved

IMPLEMENTATIONS = ("moe_kernels", "grouped_mm", "batched_mm", "eager")
PARTS = ("prefill", "training", "decode", "compiled")
PROMPT = 8
SHAPES = {  # (sequences, tokens of each); the smaller ones are for batched_mm, which copies weights for every token
    "prefill": ((4, 2048), (1, 128)),
    "training": ((4, 2048), (1, 128)),
    "decode": ((1, 64), (16, 64)),
    "compiled": ((1, 64), (16, 64)),
}
TINY = {"prefill": ((2, 8),), "training": ((2, 8),), "decode": ((2, 3),), "compiled": ((2, 3),)}


def make_model(tiny: bool, device: torch.device) -> Any:
    """Return the four layers with random weights, in the dimensions of Qwen3-30B-A3B, or one small layer if `tiny`."""
    sizes = {"hidden_size": 2048, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8}
    sizes |= {"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128}
    sizes |= {"num_hidden_layers": 4, "vocab_size": 12672}
    if tiny:
        sizes |= {"hidden_size": 32, "moe_intermediate_size": 16, "num_experts": 8, "num_experts_per_tok": 2}
        sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
        sizes |= {"num_hidden_layers": 1, "vocab_size": 64}
    config = transformers.Qwen3MoeConfig(**sizes, eos_token_id=None, pad_token_id=0, norm_topk_prob=True)
    torch.manual_seed(0)
    with torch.device(device):
        return transformers.Qwen3MoeForCausalLM(config).bfloat16()


@torch.no_grad()
def check(model: Any) -> None:
    """Check one layer's experts by each implementation: at most twice the error of "eager" against float64."""
    experts = model.model.layers[0].mlp.experts
    config, device = model.config, model.device
    hidden = torch.randn(64, config.hidden_size, device=device).bfloat16()
    logits = torch.randn(64, config.num_experts, device=device)
    topk_weights, ids = logits.softmax(-1).topk(config.num_experts_per_tok)
    topk_weights = topk_weights.bfloat16()
    model.set_experts_implementation("eager")
    exact = copy.deepcopy(experts).double()(hidden.double(), ids, topk_weights.double())
    plain = experts(hidden, ids, topk_weights)
    for name in IMPLEMENTATIONS:
        model.set_experts_implementation(name)
        assert_within_budget(experts(hidden, ids, topk_weights), plain, exact, name=name)


def make_call(model: Any, part: str, batch: int, length: int, optimizer: torch.optim.Optimizer) -> Callable[[], Any]:
    """Return the call to time, without the choice of an implementation."""
    count = length if part in ("prefill", "training") else PROMPT
    tokens = torch.randint(1, model.config.vocab_size, (batch, count), device=model.device)
    if part == "prefill":
        return torch.no_grad()(lambda: model(tokens, logits_to_keep=1))
    if part == "training":

        def step() -> None:
            model(tokens, labels=tokens, use_cache=False).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        return step
    cache = {"cache_implementation": "static"} if part == "compiled" else {}
    mask = torch.ones_like(tokens)
    return lambda: model.generate(tokens, attention_mask=mask, max_new_tokens=length, do_sample=False, **cache)


def measure(model: Any, part: str, batch: int, length: int, rounds: int) -> list[run.Record]:
    """Return a record for each implementation; one that fails or runs out of memory has an error instead of times."""
    device, on_gpu = model.device, model.device.type != "cpu"
    model.train(part == "training")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=on_gpu)
    call = make_call(model, part, batch, length, optimizer)
    torch.compiler.reset()
    names = [name for name in IMPLEMENTATIONS if part != "compiled" or name != "eager"]  # "eager" is a loop
    timed: dict[str, Callable[[], None]] = {}
    repeats = 3 if on_gpu and part in ("prefill", "training") else 1

    def repeated(name: str) -> None:
        model.set_experts_implementation(name)
        for _ in range(repeats):
            call()

    records = {}
    for name in names:
        record = {"suite": "transformers", "part": part, "batch": batch, "length": length, "implementation": name}
        records[name] = record | dict.fromkeys(("first_s", "ms", "tokens_per_s", "peak_gb", "error"))
    for name in sorted(names, key=lambda name: name != "grouped_mm"):
        one = {name: partial(repeated, name)}
        try:
            records[name]["first_s"] = round(interleaved(one, 1, device, cold=False)[name] / 1e6, 2)
            if on_gpu:
                torch.cuda.reset_peak_memory_stats(device)
            interleaved(one, 1, device, cold=False)
            if on_gpu:
                records[name]["peak_gb"] = round(torch.cuda.max_memory_allocated(device) / 1e9, 1)
            timed |= one
        except Exception as error:
            records[name]["error"] = run.error_text(error)
            optimizer.zero_grad()
        if on_gpu:
            torch.cuda.empty_cache()
    for name, us in interleaved(timed, rounds, device, cold=False).items():
        records[name]["ms"] = round(us / 1e3 / repeats, 3)
        records[name]["tokens_per_s"] = round(batch * length * repeats / us * 1e6, 1)
    return list(records.values())


def main(argv: Sequence[str] | None = None) -> int:
    parser = run.parser_of(
        "transformers_stack", __doc__, tiny="a few small tokens", file="transformers.json", keeps="part"
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--rounds", type=positive, default=21)
    options = parser.parse_args(argv)
    device = run.device_of(parser, options)
    begun = time.monotonic()
    qwen3 = "4 layers of Qwen3-30B-A3B with a vocabulary of 12672, random weights in bfloat16"
    size = "tiny layers" if options.tiny else qwen3
    meta = run.meta(device, run.command_line("transformers_stack", argv))
    meta |= {"transformers": transformers.__version__, "model": size}
    file = run.file_of(options, meta, "transformers.json", adds=set(options.parts) < set(PARTS))
    results = run.Results(meta)
    integration.register()
    model = make_model(options.tiny, device)
    check(model)
    for part in dict.fromkeys(options.parts):
        for batch, length in (TINY if options.tiny else SHAPES)[part]:
            records = measure(model, part, batch, length, options.rounds)
            results.records += records
            for r in records:
                said = r["error"] or f"{r['tokens_per_s']:.0f} tokens/s, first call {r['first_s']} s"
                print(f"[{run.elapsed(begun)}] {part} {batch} x {length}, {r['implementation']}: {said}", flush=True)
    if file is not None:
        results.keep(file, "part")
        results.write(file)
    print(f"\n{tables.markdown(results)}")
    return int(any(r["error"] is not None and r["implementation"] == "moe_kernels" for r in results.records))


if __name__ == "__main__":
    run_and_exit(main)
