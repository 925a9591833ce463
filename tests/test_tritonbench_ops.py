"""`tritonbench_ops` without TritonBench: problems, providers on small operators of both kinds, and messages."""

from __future__ import annotations

import inspect
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tritonbench_ops
from moe_kernels.testing import assert_grouped_gemm_close, group_sizes_for
from tritonbench_ops import cases, providers
from tritonbench_ops.__main__ import run

ROWS = (5, 0, 3, 17)
K, N = 24, 40
DTYPES = (torch.float32, torch.bfloat16)


class ListOperator:
    """Stand-in for an operator of 2025: a weight for each group as input, a list as output."""

    def inputs(self, dtype: torch.dtype) -> tuple[Any, ...]:
        generator = torch.Generator().manual_seed(0)
        group_A = [torch.randn(M, K, generator=generator).to(dtype) for M in ROWS]
        return group_A, [torch.randn(K, N, generator=generator).to(dtype) for _ in ROWS]

    def parts(self, out: list[Tensor]) -> list[Tensor]:
        assert isinstance(out, list)
        return out


class PackedOperator(ListOperator):
    """Stand-in for an operator of 2026: the same weight for each group, two more arguments, one matrix as output."""

    def list_input_to_jagged(self) -> None: ...

    def inputs(self, dtype: torch.dtype) -> tuple[Any, ...]:
        group_A, group_B = super().inputs(dtype)
        return group_A, [group_B[0]] * len(ROWS), None, None

    def parts(self, out: Tensor) -> list[Tensor]:
        assert out.shape == (sum(ROWS), N) and out.is_contiguous()
        return list(torch.split(out, ROWS))


def assert_right(parts: list[Tensor], group_A: list[Tensor], group_B: list[Tensor]) -> None:
    assert [part.shape for part in parts] == [(M, N) for M in ROWS]
    for part, A, B in zip(parts, group_A, group_B, strict=True):
        assert_grouped_gemm_close(part, A, B, torch.tensor([0, len(A)]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("operator", (ListOperator, PackedOperator))
@pytest.mark.parametrize("provider", providers.PROVIDERS, ids=lambda provider: provider.__name__)
def test_providers_are_right_on_both_kinds_of_operator(
    provider: Callable[..., Callable[[], Any]], operator: type[ListOperator], dtype: torch.dtype
) -> None:
    tb_op = operator()
    inputs = tb_op.inputs(dtype)
    call = provider(tb_op, *inputs)
    call._name = "TritonBench writes this"  # type: ignore[attr-defined]
    first = call()
    assert_right(tb_op.parts(first), inputs[0], inputs[1])
    for part in tb_op.parts(first):
        part.fill_(torch.nan)
    assert_right(tb_op.parts(call()), inputs[0], inputs[1])


@pytest.mark.parametrize("provider", providers.PROVIDERS, ids=lambda provider: provider.__name__)
def test_weights_may_differ_where_a_packed_result_is_wanted(provider: Callable[..., Callable[[], Any]]) -> None:
    tb_op = PackedOperator()
    group_A, group_B = ListOperator().inputs(torch.float32)
    assert_right(tb_op.parts(provider(tb_op, group_A, group_B, None, None)()), group_A, group_B)


def test_packing_is_timed_in_the_plain_forms_only(monkeypatch: pytest.MonkeyPatch) -> None:
    packed: list[int] = []
    pack = providers.pack_groups
    monkeypatch.setattr(providers, "pack_groups", lambda groups: packed.append(1) or pack(groups))
    tb_op = PackedOperator()
    for provider, label in providers.PROVIDERS.items():
        call = provider(tb_op, *tb_op.inputs(torch.float32))
        packed.clear()
        call()
        beforehand = provider.__name__.startswith("preprocessed_")
        assert len(packed) == (0 if beforehand else 1)
        assert ("packed beforehand" in label, "packing timed" in label) == (beforehand, not beforehand)


def test_one_weight_for_all_groups_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Tensor] = []

    def gemm(A: Tensor, B: Tensor, group_offsets: Tensor) -> Tensor:
        seen.append(B)
        return A @ B

    monkeypatch.setattr(providers, "grouped_gemm", gemm)
    tb_op = PackedOperator()
    inputs = tb_op.inputs(torch.float32)
    providers.grouped_gemm_tritonbench(tb_op, *inputs)()
    assert seen[0] is inputs[1][0]


def test_labels_and_names_suit_tritonbench() -> None:
    labels = list(providers.PROVIDERS.values())
    assert len(set(labels)) == len(labels)
    assert not [label for label in labels if "-" in label or ";" in label]
    for provider in providers.PROVIDERS:
        assert inspect.isfunction(provider) and provider.__name__.endswith("_tritonbench")
        assert getattr(tritonbench_ops, provider.__name__) is provider
    assert callable(tritonbench_ops.register)  # looked up by --plugin


@pytest.mark.parametrize("device", ("cpu", "cuda"))
def test_every_moe_case_can_be_made_and_told_apart(device: str) -> None:
    found = cases.moe_cases(device)
    assert len(set(found)) == len(found)
    for case in found:
        assert sum(group_sizes_for(case.sizes, case.G, case.M)) == case.M
    assert {case.sizes for case in found} == {"uniform", "softmax", "zipf", "empty"}


def test_moe_cases_hold_the_models_from_decode_to_training() -> None:
    found = cases.moe_cases("cuda")
    assert len(found) < 50  # a case takes 9 s with --cudagraph
    layers = Counter(case.layer for case in found)
    for model in (
        "mixtral-8x7b",
        "qwen3-30b",
        "qwen3-235b",
        "deepseek-v3",
        "deepseek-v3, 1 of 8 ranks",
        "gpt-oss-20b",
        "gpt-oss-120b",
        "llama-4-scout",
        "olmoe",
        "glm-4.5",
        "kimi-k2",
    ):
        assert layers[f"{model} up"] >= 3
    by_name = {(case.layer, case.M, case.sizes): case for case in found}
    assert by_name["qwen3-30b up", 65536, "zipf"][:4] == (128, 65536, 1536, 2048)
    assert by_name["mixtral-8x7b down", 16384, "softmax"][:4] == (8, 16384, 4096, 14336)
    assert by_name["deepseek-v3 up", 128, "softmax"][:4] == (256, 128, 4096, 7168)
    assert by_name["deepseek-v3, 1 of 8 ranks up", 65536, "empty"][:4] == (32, 65536, 4096, 7168)


@pytest.mark.parametrize("device", ("cpu", "cuda"))
def test_uniform_and_varied_cases_are_told_apart(device: str) -> None:
    uniform, varied = cases.uniform_cases(device), cases.varied_cases(device)
    assert len(set(uniform)) == len(uniform) and all(min(case) > 0 for case in uniform)
    assert len({case.name for case in varied}) == len(varied)
    assert all(min(problem) > 0 for case in varied for problem in case.problems)
    if device == "cuda":
        assert uniform[:2] == [(8, 512, 64, 512), (8, 2048, 64, 2048)]
        assert [case.problems for case in varied[:4]] == [((n, n, n),) * 4 for n in (128, 256, 512, 1024)]


@pytest.mark.parametrize("device", ("cpu", "cuda"))
def test_layers_can_be_routed_and_told_apart(device: str) -> None:
    found = cases.ffn_cases(device)
    assert len(set(found)) == len(found)
    assert all(1 <= case.top_k <= case.E and min(case[:5]) > 0 for case in found)
    if device == "cuda":
        assert {case.T for case in found} == {16, 512, 8192}
        assert (8192, 2048, 768, 128, 8, "qwen3-30b") in found
        assert (16, 7168, 2048, 32, 8, "deepseek-v3, 1 of 8 ranks") in found


def test_extent() -> None:
    assert cases.extent([7, 7]) == 7
    assert cases.extent([8, 2, 4]) == "2..8"


@pytest.fixture
def bare_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty folder, on a machine without a GPU and without TritonBench."""
    monkeypatch.setitem(sys.modules, "tritonbench", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("bare_machine")
def test_the_command_says_how_to_install_tritonbench(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--op", "grouped_gemm", "--device", "cpu"]) == 2
    how = "git clone https://github.com/meta-pytorch/tritonbench && pip install --no-deps -e tritonbench"
    assert how in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "text"),
    (
        ([], "--op: expected names"),
        (["--op", "moe_ffn,", "--device", "cpu"], "--op: expected names"),
        (["--op", "grouped_gemm"], "add --device cpu"),
        (["--op", "grouped_gemm", "--device", "cpu", "--cudagraph"], "no CUDA graphs with --device cpu"),
        (["--op", "a,b", "--device", "cpu", "--output-json", "x"], "--output-dir takes a file of each"),
        (["--op", "a", "--device", "cpu", "--output-dir", __file__], "--output-dir: expected a folder, got the file"),
        (["--op", "a", "--device", "cpu", "--output", "no/x.csv"], "--output: expected a file in a folder that exists"),
        (
            ["--op", "a", "--device", "cpu", "--output-json", "/"],
            "--output-json: expected a file in a folder that exis",
        ),
    ),
)
def test_the_command_refuses(
    arguments: list[str], text: str, bare_machine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == 2
    assert text in capsys.readouterr().err
    assert not list(bare_machine.iterdir())


def test_register_says_how_to_install_tritonbench(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tritonbench", None)
    with pytest.raises(ImportError, match="git clone"):
        tritonbench_ops.register()
