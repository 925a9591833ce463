"""What `tune` takes from the launcher, and on a GPU a whole search."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moe_kernels import configs, reference, tune, tune_forms
from moe_kernels.configs import store, uniform, varied

TASK = tune.Task(3, 160, 32, 48, "float32", False)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("variant", ["basic", "persistent"])
def test_kernel_calls(device: str, variant: str, transposed: bool) -> None:
    inputs = tune.Inputs(replace(TASK, transposed=transposed), torch.device(device))
    with configs.noted() as made:
        tune._plan(None, inputs)
    [(problem, _)] = made
    choice = configs.rule(problem, variant)
    kernel, arg_sets = tune.kernel_calls(choice, inputs)
    assert kernel.name == {"basic": "jagged", "persistent": "jagged_persistent"}[variant]
    assert len(arg_sets) == len(tune.ROUTINGS)
    stored = inputs.B.transpose(1, 2) if transposed else inputs.B
    for args, out in zip(arg_sets, inputs.outs, strict=True):
        assert args[0] is inputs.A and args[1].data_ptr() == inputs.B.data_ptr()
        assert args[1].shape == stored.shape and args[1].is_contiguous()
        assert sum(arg is out for arg in args) == 1 and not out.any()
        assert len(args) == len(kernel.signature.parameters)


def test_pinned_plans_are_right(device: str) -> None:
    """Also with a height that the rule does not give, which changes the table of tiles."""
    inputs = tune.Inputs(TASK, torch.device(device))
    with configs.noted() as made:
        tune._plan(None, inputs)
    [(problem, _)] = made
    choices = tune.alternatives(problem)
    assert len({(choice.variant, choice.block_m) for choice in choices}) >= 3
    for choice in choices:
        plan = tune._plan(choice, inputs)
        for A, B, offsets, bias, out in inputs.tensors():
            plan(A, B, offsets, bias, out)
            tune.check_close(out, reference.grouped_gemm(A, B, offsets))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("op", ["uniform", "varied"])
def test_an_entry_for_the_other_forms(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, device: str, op: str, transposed: bool
) -> None:
    """Without time the rule's config and two more take turns, here by a clock for which the third is the fastest."""
    task = tune.Task(3, 32, 32, 48, "float32", transposed, op)
    where = torch.device(device)
    clock = {0: 3.0, 1: 2.0, 2: 1.0}
    monkeypatch.setattr(tune_forms, "interleaved", lambda calls, *_: {i: clock.get(i, 9.0) for i in calls})
    file = store.file_in(tmp_path, "NVIDIA Test 9000")
    assert tune.tune([task], file, "NVIDIA Test 9000", where, 0.5) == 0
    [made] = store.read(file, "NVIDIA Test 9000")
    assert (made.us, made.rule_us, made.bucket) == (1.0, 3.0, tune_forms.bucket(task))
    assert f"tune --op {op} --shapes 3,32,32,48 --dtype float32" in made.command
    problem, make = (tune_forms._uniform if op == "uniform" else tune_forms._varied)(task, where)
    rules = uniform if op == "uniform" else varied
    assert rules.bucket_of(problem) == made.bucket
    choice = rules.adapted(made, problem, "file")
    assert choice.source == "file" and replace(choice, source="rule") != rules.rule(problem)
    expected = make(rules.rule(problem))()
    tune.check_close(make(choice)(), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("op", ["uniform", "varied"])
def test_a_grid(tmp_path: Path, op: str) -> None:
    gpu = torch.device("cuda", torch.cuda.current_device())
    file = store.file_in(tmp_path, store.gpu_of(gpu).name)
    assert tune.tune([tune.Task(4, 256, 64, 256, "bfloat16", False, op)], file, store.gpu_of(gpu).name, gpu, 15.0) == 0
    [made] = store.read(file, store.gpu_of(gpu).name)
    assert 0 < made.us <= made.rule_us


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [2, 256])
def test_a_search(tmp_path: Path, rows: int) -> None:
    gpu = torch.device("cuda", torch.cuda.current_device())
    file = store.file_in(tmp_path, store.gpu_of(gpu).name)
    task = tune.Task(16, 16 * rows, 512, 1024, "bfloat16", True)
    assert tune.tune([task], file, store.gpu_of(gpu).name, gpu, 60.0) == 0
    [made] = store.read(file, store.gpu_of(gpu).name)
    assert 0 < made.us <= made.rule_us
