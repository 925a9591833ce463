"""The choice of kernel and config, by the rule or a tuned entry; which files are read, and how they are written."""

from __future__ import annotations

import errno
import itertools
import json
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from processes import forget_store, stored_in

from moe_kernels import requirements, rules
from moe_kernels.ops.batched import varied_launch
from moe_kernels.rules import grouped, scaled, swiglu, uniform, varied, wgrad
from moe_kernels.runtime import attributes, cache, launch, store, targets
from moe_kernels.runtime.plan import Launch, Plan
from moe_kernels.runtime.signature import Counts, Operator
from moe_kernels.tuning import entries

GPU = targets.Gpu("NVIDIA Test 9000", "cuda", 90, 132, 232448)
SLOW = replace(GPU, slow_memory=True)
FAMILY = "NVIDIA sm90"
PROBLEM = grouped.Problem(
    rows=256,
    M=32768,
    N=1536,
    K=2048,
    G=128,
    dtype=torch.bfloat16,
    tf32=False,
    tma_A=True,
    tma_B=True,
    tma_out=True,
    has_bias=False,
    gpu=GPU,
)
DECODE = replace(PROBLEM, rows=4, M=512)
POINTERS = {"tma_A": False, "tma_B": False}


@pytest.fixture(autouse=True)
def folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Give each test folders of its own."""
    monkeypatch.setenv("MOE_KERNELS_CONFIG_DIR", str(tmp_path / "named"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setattr(entries, "BUNDLED", tmp_path / "bundled")
    rules.reload()
    yield
    rules.reload()


def entry(problem: grouped.Problem = PROBLEM, variant: str = "auto", **changed: Any) -> entries.Entry:
    """Return an entry for `problem` with a config unlike the rule's: 7 stages, and tiles of one height."""
    by_rule = grouped.rule(problem, variant, 128 if variant == "auto" and problem.rows >= 128 else None)
    made = entries.Entry(
        kernel=by_rule.variant,
        bucket=grouped.bucket_of(problem),
        block_m=by_rule.block_m,
        tma=by_rule.addressing.tma,
        config={**by_rule.config.config, "num_stages": 7},
        us=100.0,
        rule_us=110.0,
        M=problem.M,
        versions=entries.installed_versions(),
        date="2026-01-01",
        command="python -m moe_kernels tune",
    )
    return replace(made, **changed)


def with_config(**values: Any) -> entries.Entry:
    return entry(config={**entry().config, **values})


def named(tmp_path: Path, gpu: str = GPU.name) -> Path:
    return entries.file_in(tmp_path / "named", gpu)


def put(file: Path, *made: entries.Entry, gpu: str = GPU.name) -> Path:
    entries.write(file, gpu, made)
    return file


def choose_quietly(problem: grouped.Problem = PROBLEM, variant: str = "auto") -> rules.Choice:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return grouped.choose(problem, variant)


def uniform_problem(**changed: Any) -> uniform.Problem:
    flags = dict.fromkeys(("tf32", "a_columns", "b_columns"), False)
    flags |= dict.fromkeys(("bmm", "flat", "tma_A", "tma_B", "tma_out"), True)
    made = uniform.Problem(8, 512, 64, 512, torch.bfloat16, torch.bfloat16, **flags, gpu=GPU)
    return replace(made, **changed)


def varied_problem(*shapes: tuple[int, int, int], **changed: Any) -> varied.Problem:
    made = varied.Problem(shapes, torch.float16, True, False, 132, False, GPU)
    return replace(made, **changed)


def entry_of(kernel: str, bucket: entries.Bucket | None, tma: list[str], **config: Any) -> entries.Entry:
    assert bucket is not None
    return replace(entry(), kernel=kernel, bucket=bucket, tma=tma, config=config)


@pytest.mark.parametrize("gpu", targets.KNOWN.values(), ids=targets.KNOWN)
def test_buffers_of_varied_products_fit_into_shared_memory(gpu: targets.Gpu) -> None:
    """Triton has a buffer less than there are stages. Programs of one SM share its memory."""
    for n in (16, 100, 700, 2048):
        for P in (1, 8, 300):
            problem = varied_problem(*[(n, 1024, 4096)] * P, num_sms=gpu.multiprocessors, gpu=gpu)
            choice = varied.rule(problem)
            options = choice.config.config
            stage = 2 * (choice.block_m + choice.block_n) * options["block_sizes"][1]
            buffers = (options["num_stages"] - 1) * options["num_sm_multiplier"]
            assert options["num_stages"] >= 2 and buffers * stage <= gpu.shared_memory
            fastest = varied._fastest(problem.shapes, problem.num_sms)
            assert gpu.arch != 90 or options["num_stages"] == fastest[4]


def test_an_entry_with_names_of_arguments(tmp_path: Path) -> None:
    """It is used as a config, which then does not compile, and raises nothing before that."""
    made = entry_of("folded", uniform.bucket_of(uniform_problem()), ["A", "B", "out"])
    options = {"block_sizes": [128, 64, 64], "num_warps": 4, "kernel": "x", "problem": 1}
    put(named(tmp_path), replace(made, config=options))
    assert uniform.choose(uniform_problem()).config.config["problem"] == 1


def test_entries_of_uniform_products(tmp_path: Path) -> None:
    options = {"block_sizes": [128, 64, 64], "num_warps": 4, "num_stages": 6}
    file = put(named(tmp_path), entry_of("folded", uniform.bucket_of(uniform_problem()), ["A", "B", "out"], **options))
    choice = uniform.choose(uniform_problem())
    assert (choice.source, choice.variant) == (str(file), "folded")
    assert choice.config.config["num_stages"] == 6 and choice.config.config["host_tensor_descriptors"]
    assert uniform.choose(uniform_problem(M=768)).source == str(file)
    for other in (
        {"M": 520},  # not a multiple of 128
        {"flat": False},
        {"tma_out": False},
        {"N": 192},
        {"b_columns": True},
        {"a_columns": True},
        {"out_dtype": torch.float32},
        {"dtype": torch.float16, "out_dtype": torch.float16},
    ):
        assert uniform.choose(uniform_problem(**other)) == uniform.rule(uniform_problem(**other))
    with pytest.warns(RuntimeWarning, match="uniform, bfloat16, 512 rows"):
        assert rules.discard(choice, "does not fit")
    assert uniform.choose(uniform_problem()) == uniform.rule(uniform_problem())
    assert choose_quietly(DECODE).source == "rule"  # an entry serves one operator only


def test_an_entry_for_groups_that_are_not_folded(tmp_path: Path) -> None:
    """It keeps its kernel where groups could be folded, too."""
    bucket = uniform.bucket_of(uniform_problem())
    file = put(named(tmp_path), entry_of("batched", bucket, ["A", "B", "out"], block_sizes=[64, 64, 64]))
    for M in (512, 520):
        choice = uniform.choose(uniform_problem(M=M))
        assert (choice.source, choice.variant) == (str(file), "batched")


def test_an_entry_for_torch_bmm(tmp_path: Path) -> None:
    file = put(named(tmp_path), entry_of("bmm", uniform.bucket_of(uniform_problem()), []))
    choice = uniform.choose(uniform_problem())
    assert choice == uniform.BMM and choice.source == str(file)
    assert uniform.choose(uniform_problem(bmm=False)).source == "rule"


def test_entries_of_varied_products(tmp_path: Path) -> None:
    problem = varied_problem(*[(512, 512, 512)] * 4)
    tuned = varied.make(4, 128, 64, 64, 4, 5, 2)
    file = put(named(tmp_path), entry_of("varied", varied.bucket_of(problem), [], **varied.stored(tuned)))
    choice = varied.choose(problem)
    assert choice == tuned and choice.source == str(file)
    assert varied.choose(varied_problem(*[(512, 512, 512)] * 5)).config.config["block_sizes"] == [8, 64]
    for other in (
        varied_problem(*[(512, 512, 512)] * 3, (512, 512, 520)),
        varied_problem(*[(512, 512, 512)] * 9),
        replace(problem, aligned=False),
        replace(problem, b_columns=True),
        replace(problem, dtype=torch.float32),
    ):
        assert varied.choose(other) == varied.rule(other)


@pytest.mark.parametrize(
    ("kernel", "tma", "config"),
    [
        ("folded", ["A", "B", "out"], {"block_sizes": [96, 64, 64]}),
        ("folded", ["A", "B", "out"], {"block_sizes": [64, 64]}),
        ("folded", ["A", "B"], {"block_sizes": [64, 64, 64]}),
        ("basic", ["A", "B", "out"], {"block_sizes": [64, 64, 64]}),
        ("varied", [], {"block_sizes": [64, 64, 64], "num_warps": 4}),
        ("varied", [], {"block_sizes": [8, 64, 64], "num_warps": 4, "num_stages": 3, "num_sm_multiplier": 1}),
    ],
)
def test_illegal_entries_of_the_other_forms(
    tmp_path: Path, kernel: str, tma: list[str], config: dict[str, Any]
) -> None:
    varied_one = varied_problem((64, 64, 64))
    bucket = varied.bucket_of(varied_one) if kernel == "varied" else uniform.bucket_of(uniform_problem())
    put(named(tmp_path), entry_of(kernel, bucket, tma, **config))
    assert uniform.choose(uniform_problem()) == uniform.rule(uniform_problem())
    assert varied.choose(varied_one) == varied.rule(varied_one)


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"out_dtype": torch.float32}, ("folded", [64, 64, 128], 5)),
        ({"M": 2048, "K": 2048, "out_dtype": torch.float32}, ("folded", [64, 64, 128], 3)),
        ({"N": 8}, ("folded", [64, 16, 128], 5)),
        ({"M": 1000, "N": 48, "K": 1000}, ("batched", [64, 64, 128], 5)),
        ({"flat": False}, ("batched", [64, 64, 128], 5)),
        ({"G": 2**20, "M": 1984}, ("folded", [64, 64, 128], 3)),
        ({"G": 2**20, "M": 2048}, ("batched", [64, 64, 128], 3)),  # TMA counts rows in int32
        ({"N": 4096, "bmm": False}, ("folded", [128, 256, 64], 3)),
        ({"N": 4096, "bmm": False, "out_dtype": torch.float32}, ("folded", [128, 128, 64], 3)),
        ({"N": 65}, ("bmm", None, None)),
        ({"M": 2048, "K": 2048, "N": 8}, ("bmm", None, None)),
        ({"M": 2048, "K": 2048, "N": 16}, ("folded", [64, 16, 128], 5)),
        ({"tma_B": False}, ("bmm", None, None)),
        ({"dtype": torch.float32, "out_dtype": torch.float32}, ("bmm", None, None)),
        ({"tma_B": False, "bmm": False}, ("batched", [64, 64, 64], 3)),
        ({"tma_A": False}, ("bmm", None, None)),
        ({"tma_A": False, "bmm": False}, ("batched", [64, 64, 64], 3)),
        ({"K": 1000}, ("batched", [64, 64, 128], 5)),  # a folded tile would read the next group
        ({"M": 64, "N": 4096, "bmm": False}, ("folded", [64, 64, 128], 3)),
    ],
    ids=str,
)
def test_the_rule_for_uniform_products(changed: dict[str, Any], expected: tuple[Any, ...]) -> None:
    choice = uniform.rule(uniform_problem(**changed))
    values = choice.config.config
    assert (choice.variant, values.get("block_sizes"), values.get("num_stages")) == expected
    groups_first = choice.variant != "bmm" and changed.get("N", 64) <= 64
    assert values.get("loop_orders") == ([[2, 1, 0]] if groups_first else None)


@pytest.mark.parametrize(("N", "variant"), [(127 * 256, "tails"), (128 * 256, "persistent")])
def test_costs_of_tails_are_added_in_int32(N: int, variant: str) -> None:
    problem = replace(PROBLEM, rows=1, M=2**16, N=N, K=1024, G=2**16)
    assert grouped.rule(problem, "persistent").variant == variant


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32], ids=str)
def test_stages_and_result_of_uniform_products_fit_into_shared_memory(
    dtype: torch.dtype, out_dtype: torch.dtype
) -> None:
    for G, M, N, K, tma in itertools.product((2, 64), *[(1, 64, 65, 4096)] * 3, (False, True)):
        made = uniform_problem(G=G, M=M, N=N, K=K, dtype=dtype, out_dtype=out_dtype, tma_A=tma, tma_B=tma)
        values = uniform.by_kernel(made).config.config
        block_m, block_n, block_k = values["block_sizes"]
        stages = values["num_stages"] * (block_m + block_n) * block_k * dtype.itemsize
        assert stages + block_m * block_n * out_dtype.itemsize <= 227 << 10, made


@pytest.mark.parametrize(
    ("shapes", "expected"),
    [
        ([(128, 128, 128)] * 4, (32, 32, 128, 1)),
        ([(256, 256, 256)] * 4, (64, 32, 64, 1)),
        ([(512, 512, 512)] * 4, (64, 128, 64, 1)),
        ([(1024, 1024, 1024)] * 4, (128, 256, 32, 1)),
        ([(n, n, n) for n in (1024, 512, 256, 128)], (128, 128, 32, 1)),
        ([(256, 1536, 2048)] * 16, (128, 256, 32, 1)),
        ([(2048, 2048, 2048)] * 8, (128, 256, 64, 1)),
        ([(64, 64, 128)] * 160, (64, 64, 64, 2)),
    ],
    ids=str,
)
def test_the_rule_for_varied_products(shapes: list[tuple[int, int, int]], expected: tuple[int, int, int, int]) -> None:
    choice = varied.rule(varied_problem(*shapes))
    values = varied.stored(choice)
    assert (*values["block_sizes"], values["num_sm_multiplier"]) == expected


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"aligned": False}, (64, 64, 32, 1, 8, 3)),
        ({"dtype": torch.float32, "b_columns": True}, (128, 64, 32, 1, 4, 3)),
        ({"dtype": torch.float32}, (64, 64, 32, 1, 8, 3)),
        ({"dtype": torch.float32, "b_columns": True, "tf32": True}, (64, 64, 32, 1, 8, 3)),
    ],
    ids=str,
)
def test_the_rule_for_other_varied_products(changed: dict[str, Any], expected: tuple[int, ...]) -> None:
    values = varied.stored(varied.rule(varied_problem(*[(2048, 2048, 2048)] * 8, **changed)))
    names = ("num_sm_multiplier", "num_warps", "num_stages")
    assert (*values["block_sizes"], *(values[name] for name in names)) == expected


def test_the_steps_of_the_busiest_sm() -> None:
    """The result equals a count tile by tile."""
    shapes = ((100, 70, 64), (300, 200, 8), (0, 5, 7), (64, 64, 900), (33, 640, 128))
    for num_sms in (1, 3, 7, 132):
        loads, t = [0] * num_sms, 0
        for M, N, K in shapes:
            for _ in range(-(-M // 64) * -(-N // 32)):
                loads[t % num_sms] += K + varied._FIXED
                t += 1
        assert varied._most_steps(shapes, (64, 32), num_sms) == max(loads)


def test_file_names(tmp_path: Path) -> None:
    assert entries.file_in(tmp_path, "NVIDIA H200").name == "nvidia-h200.json"
    assert entries.file_in(tmp_path, entries.family(targets.KNOWN["h200"])).name == "nvidia-sm90.json"
    assert entries.file_in(tmp_path, "NVIDIA H100 80GB HBM3").name == "nvidia-h100-80gb-hbm3.json"


def test_an_entry_survives_the_file(tmp_path: Path) -> None:
    file = put(named(tmp_path), entry(), entry(DECODE))
    assert set(map(repr, entries.read(file, GPU.name))) == {repr(entry()), repr(entry(DECODE))}
    lines = file.read_text().splitlines()
    assert any('"block_sizes": [256, 64],' in line for line in lines)  # each list on one line, for readability
    assert list(json.loads(file.read_text())) == ["schema", "gpu", "entries"]


def test_lookup_order(tmp_path: Path) -> None:
    cache = tmp_path / "xdg" / "moe_kernels" / "configs"
    assert entries.folders()[-1] == cache
    folders = (tmp_path / "named", cache, tmp_path / "bundled")
    files = [(entries.file_in(folder, gpu), gpu) for folder in folders for gpu in (GPU.name, FAMILY)]
    for file, gpu in reversed(files):
        put(file, entry(), gpu=gpu)
        rules.reload()
        assert choose_quietly().source == str(file)
    for file, _ in files:
        assert choose_quietly().source == str(file)
        file.unlink()
        rules.reload()
    with pytest.warns(RuntimeWarning, match="python -m moe_kernels tune"):
        assert grouped.choose(PROBLEM).source == "rule"


def test_the_digest_is_that_of_the_entries_in_use(tmp_path: Path) -> None:
    """Another process may write a file between the two."""
    put(named(tmp_path), entry())
    digest = entries.digest(GPU)
    put(named(tmp_path), entry(DECODE))
    assert len(entries.load(GPU)) == 1 and entries.digest(GPU) == digest
    rules.reload()
    assert len(entries.load(GPU)) == 2 and entries.digest(GPU) != digest


def test_a_folder_that_is_named_twice_is_read_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("MOE_KERNELS_CONFIG_DIR", str(tmp_path / "moe_kernels" / "configs"))
    assert entries.folders() == [tmp_path / "moe_kernels" / "configs"]


def test_the_cache_folder_without_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert entries.folders()[-1] == tmp_path / ".cache" / "moe_kernels" / "configs"


def test_a_user_without_a_home_has_the_other_folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def nobody(uid: int) -> Any:
        raise KeyError(uid)

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", nobody)
    file = put(named(tmp_path), entry())
    assert choose_quietly().source == str(file)
    assert {path.parent for path, _ in entries.files_for(GPU)} == {file.parent, entries.BUNDLED}


def distance(choice: rules.Choice, problem: grouped.Problem) -> float:
    """Return the distance of the problem from the one that the tuned choice is for."""
    assert choice.entry is not None
    return grouped.bucket_of(problem).distance(choice.entry.bucket)


def test_the_nearest_bucket_wins_whatever_the_file(tmp_path: Path) -> None:
    put(named(tmp_path), entry(replace(PROBLEM, N=1024)))
    near = put(entries.file_in(tmp_path / "bundled", GPU.name), entry(replace(PROBLEM, K=1792)))
    choice = choose_quietly()
    assert choice.source == str(near) and distance(choice, PROBLEM) == pytest.approx(0.193, abs=1e-3)
    assert choice.config.config["num_stages"] == 7


@pytest.mark.parametrize(
    ("changed", "used"),
    [
        ({}, True),
        ({"rows": 512, "M": 65536}, True),
        ({"rows": 1024, "M": 65536}, False),
        ({"rows": 512, "M": 32768, "N": 1500}, False),
        ({"N": 768}, True),
        ({"N": 767}, False),
        ({"K": 4096}, True),
        ({"K": 4104}, False),
        ({"G": 64}, True),
        ({"G": 60}, False),
        ({"N": 1024, "K": 2560}, True),
        ({"N": 1024, "K": 3072}, False),
        ({"transposed": True}, False),
        ({"dtype": torch.float16}, False),
        ({"dtype": torch.float32, "tf32": True}, False),
        ({"out_dtype": torch.float32}, False),
    ],
    ids=str,
)
def test_the_limit_is_one_factor_of_two(tmp_path: Path, changed: dict[str, Any], used: bool) -> None:
    file = put(named(tmp_path), entry())
    choice = choose_quietly(replace(PROBLEM, **changed))
    assert choice.source == (str(file) if used else "rule")
    if used:
        assert distance(choice, replace(PROBLEM, **changed)) <= entries.LIMIT
    else:
        assert choice == grouped.rule(replace(PROBLEM, **changed))


def test_less_than_a_row_per_group_is_near_one(tmp_path: Path) -> None:
    put(named(tmp_path), entry(replace(DECODE, rows=1, M=128)))
    fewer = replace(DECODE, rows=0, M=64)
    assert distance(choose_quietly(fewer), fewer) == 1


@pytest.mark.parametrize("op", ["uniform", "varied"])
def test_entries_of_another_operator_are_not_near(op: str, tmp_path: Path) -> None:
    put(named(tmp_path), entry(bucket=replace(grouped.bucket_of(PROBLEM), op=op)))
    assert choose_quietly() == grouped.rule(PROBLEM)


def test_the_variant_that_is_asked_for(tmp_path: Path) -> None:
    put(named(tmp_path), entry())
    assert choose_quietly(PROBLEM, "persistent").entry is not None
    assert choose_quietly(PROBLEM, "basic") == grouped.rule(PROBLEM, "basic")


def broken(file: Path, kind: str) -> None:
    put(file, entry())
    text = file.read_text()
    content = json.loads(text)
    if kind == "corrupt":
        file.write_text(text[: len(text) // 2])
    elif kind == "binary":
        file.write_bytes(b"\xff\xfe\x00")
    elif kind == "unreadable":
        file.unlink()
        file.mkdir()
    elif kind == "a queue":
        file.unlink()
        os.mkfifo(file)
    elif kind == "foreign":
        file.write_text(text.replace(GPU.name, "NVIDIA Other"))
    elif kind == "schema":
        file.write_text(text.replace('"schema": 1', '"schema": 2'))
    elif kind == "a list":
        file.write_text("[]")
    elif kind == "a field is missing":
        del content["entries"][0]["block_m"]
        file.write_text(json.dumps(content))
    elif kind == "a field is of another type":
        content["entries"][0]["rows"] = "512"
        file.write_text(json.dumps(content))
    elif kind in ("l2_groupings", "num_warps"):
        content["entries"][0]["config"][kind] = [2**30] if kind == "l2_groupings" else 64
        file.write_text(json.dumps(content))
    elif kind == "helion":
        file.write_text(text.replace('"helion": "1.5', '"helion": "1.4'))
    elif kind == "triton":
        file.write_text(text.replace('"triton": "3.', '"triton": "2.'))
    assert file.is_dir() or file.is_fifo() or file.read_bytes() != text.encode()


KINDS = ["corrupt", "binary", "unreadable", "foreign", "schema", "a list", "a field is missing"]
KINDS += ["a field is of another type", "l2_groupings", "num_warps", "a queue", "helion", "triton"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("others", [False, True], ids=["alone", "beside a good file"])
def test_a_file_that_cannot_be_used_is_skipped_with_one_warning(tmp_path: Path, kind: str, others: bool) -> None:
    bad = named(tmp_path)
    broken(bad, kind)
    good = entries.file_in(tmp_path / "bundled", GPU.name)
    if others:
        put(good, entry())
    with pytest.warns(RuntimeWarning) as caught:
        for _ in range(3):
            choice = grouped.choose(PROBLEM)
            entries.load.cache_clear()  # as if another GPU of the same model read them
    assert choice.source == (str(good) if others else "rule")
    [warning] = caught
    assert str(bad) in str(warning.message) and "python -m moe_kernels tune" in str(warning.message)


@pytest.mark.parametrize(
    ("dtype", "tf32", "out_dtype", "label"),
    [
        (torch.bfloat16, False, None, "bfloat16"),
        (torch.bfloat16, False, torch.bfloat16, "bfloat16"),
        (torch.bfloat16, False, torch.float32, "bfloat16 to float32"),
        (torch.float32, False, None, "float32"),
        (torch.float32, True, None, "tf32"),
    ],
)
def test_dtypes_that_share_entries(dtype: torch.dtype, tf32: bool, out_dtype: torch.dtype | None, label: str) -> None:
    assert entries.dtype_label(dtype, tf32, out_dtype) == label


def test_entries_are_those_of_the_pinned_helion_if_none_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans that were compiled elsewhere run without it."""
    monkeypatch.setattr(requirements, "installed", {"torch": "2.11.0", "triton": "3.6.0"}.get)
    assert entries.installed_versions() == entries.Versions("2.11.0", "3.6.0", requirements.HELION)
    monkeypatch.setattr(requirements, "installed", {"helion": "1.5.1"}.get)
    assert entries.installed_versions() == entries.Versions("", "", "1.5.1")


def test_patch_versions_do_not_matter(tmp_path: Path) -> None:
    versions = entries.installed_versions()
    put(named(tmp_path), entry(versions=replace(versions, helion=f"{versions.helion.rsplit('.', 1)[0]}.99")))
    assert choose_quietly().entry is not None


def test_entries_of_other_versions_stay_and_are_not_warned_of_beside_new_ones(tmp_path: Path) -> None:
    old = entry(versions=replace(entries.installed_versions(), triton="2.1.0"))
    file = put(put(named(tmp_path), old), entry(us=50.0))
    assert len(entries.read(file, GPU.name)) == 2
    choice = choose_quietly()
    assert choice.entry is not None and choice.entry.us == 50.0


ILLEGAL = {
    "blocks of too few": with_config(block_sizes=[256]),
    "blocks of basic": with_config(block_sizes=[128, 256, 256, 64]),
    "no power of two": with_config(block_sizes=[192, 64]),
    "block_k above 256": with_config(block_sizes=[128, 512]),
    "block_n above N": with_config(block_sizes=[2048, 64]),
    "block of 8": with_config(block_sizes=[256, 8]),
    "less by TMA": entry(tma=["A", "B"]),
    "a flat grid": with_config(pid_type="flat"),
    "a block_m of 256": entry(block_m=256),
    "an unknown kernel": entry(kernel="swapped"),
    "two block_m": entry(PROBLEM, "basic", block_m=64),
}


@pytest.mark.parametrize("made", ILLEGAL.values(), ids=ILLEGAL)
def test_illegal_entries_are_not_chosen(tmp_path: Path, made: entries.Entry) -> None:
    put(named(tmp_path), made)
    assert choose_quietly() == grouped.rule(PROBLEM)


@pytest.mark.parametrize(
    "changed",
    [{"tma_A": False}, {"tma_B": False}, {"tma_out": False}, {"tma_B": False, "int64_B": True}, {"M": 64, "G": 128}],
    ids=str,
)
def test_entries_are_not_chosen_for_problems_where_they_are_illegal(tmp_path: Path, changed: dict[str, Any]) -> None:
    put(named(tmp_path), entry())
    assert choose_quietly(replace(PROBLEM, **changed)).source == "rule"


def test_a_problem_narrower_than_the_block(tmp_path: Path) -> None:
    """Kernels read blocks larger than an operand, except those of static shapes."""
    put(named(tmp_path), entry(replace(PROBLEM, N=300)))
    for N in (300, 250):
        choice = choose_quietly(replace(PROBLEM, N=N))
        assert choice.entry is not None and choice.config.config["block_sizes"][0] == 256
        assert grouped.why_illegal(choice, replace(PROBLEM, N=N)) is None
    tails = grouped.rule(replace(PROBLEM, rows=512, M=65536, K=64), "tails")
    assert tails.variant == "tails"
    larger = replace(tails, config=rules.Config(**(tails.config.config | {"block_sizes": [128]})))
    assert grouped.why_illegal(larger, replace(PROBLEM, rows=512, M=65536, K=64)) is not None


def test_an_entry_is_adapted_to_a_bias_and_to_the_number_of_groups(tmp_path: Path) -> None:
    tuned = entry(DECODE, "basic")
    tuned.config["load_eviction_policies"] = ["", "first", "last"]
    put(named(tmp_path), tuned)
    choice = choose_quietly(replace(DECODE, has_bias=True, G=250, M=1024))
    by_rule = grouped.rule(replace(DECODE, has_bias=True, G=250, M=1024), "basic")
    values = choice.config.config
    assert choice.entry is not None and values["num_stages"] == 7
    assert values["load_eviction_policies"] == ["", "first", "last", ""]
    for name in ("indexing", "block_sizes"):
        assert values[name] == by_rule.config.config[name]
    assert choice.addressing == (True, True, False, False)


def test_an_entry_of_tails(tmp_path: Path) -> None:
    many = replace(PROBLEM, rows=512, M=65536)
    put(named(tmp_path), entry(many, "tails"))
    for variant in ("auto", "persistent"):
        choice = choose_quietly(many, variant)
        assert (choice.variant, choice.config.config["num_stages"]) == ("tails", 7)
        assert choice.config.config["indexing"] == grouped.rule(many).config.config["indexing"]
    assert choose_quietly(many, "basic").entry is None
    assert choose_quietly(replace(many, rows=1024, M=131072)).entry is not None
    assert choose_quietly(replace(many, rows=256, M=32768)).entry is None
    assert choose_quietly(replace(many, has_bias=True)).config.config["indexing"].count("tensor_descriptor") == 8
    for changed in ({"N": 1500}, {"tma_B": False}, {"out_dtype": torch.float32}):
        assert choose_quietly(replace(many, **changed)).variant == "persistent"


@pytest.mark.parametrize(("rows", "N"), [(1024, 2880), (1024, 2816), (1024, 2944), (512, 2880)])
def test_an_entry_of_tails_with_another_narrow_column(tmp_path: Path, rows: int, N: int) -> None:
    """An entry tuned with these rows and N is used for 1024 rows and N = 2880, and the reverse with as many rows."""
    one, other = (replace(PROBLEM, rows=r, M=128 * r, N=n) for r, n in ((rows, N), (1024, 2880)))
    for at, problem in ((one, other), (other, one)):
        if at.rows <= problem.rows:
            check_loops_of_tails(named(tmp_path), entry(at, "tails"), problem)


def check_loops_of_tails(file: Path, tuned: entries.Entry, problem: grouped.Problem) -> None:
    tuned.config["block_sizes"] = [64]  # as before narrow columns had a block of their own
    put(file, tuned)
    rules.reload()
    choice = choose_quietly(problem)
    values, by_rule = choice.config.config, grouped.rule(problem, "tails").config.config
    assert choice.entry is not None and (choice.variant, values["num_stages"]) == ("tails", 7)
    for name in ("block_sizes", "range_flattens", "range_num_stages"):
        assert values.get(name) == by_rule.get(name)
    larger = replace(choice, config=rules.Config(**(by_rule | {"block_sizes": [128, 64]})), entry=None)
    assert grouped.why_illegal(larger, problem) is None
    assert grouped.why_illegal(larger, replace(problem, K=96)) is not None


@pytest.mark.parametrize(
    ("variant", "changed", "reason"),
    [
        ("basic", {"indexing": "pointer"}, "indexing is pointer"),
        ("tall", {"indexing": None}, "indexing is None"),
        ("tails", {"block_sizes": 64}, "block_sizes are 64"),
        ("tall", {"block_sizes": [64, 64]}, "block_sizes are [64, 64]"),
        ("basic", {"block_sizes": [128, 256, 64]}, "block_sizes are [128, 256, 64]"),
        ("basic", {"block_sizes": [128, 48, 256, 64]}, "a block is no power of two"),
        ("basic", {"block_sizes": [128, 0, 256, 64]}, "a block is no power of two"),
        ("tall", {"block_sizes": [64.0]}, "a block is no power of two"),
        ("tails", {"pid_type": "persistent_blocked"}, "pid_type is persistent_blocked"),
        ("tall", {"block_m": 64}, "its tiles are 128 x 256"),
        ("basic", {"block_m": 64}, "block_m is 64 and 128"),
        ("basic", {"block_m": 8, "block_sizes": [8, 256, 256, 64]}, "a block is too small or too large"),
        ("basic", {"block_m": 256, "block_sizes": [256, 256, 256, 64]}, "a block is too small or too large"),
        ("tails", {"block_sizes": [8, 64]}, "a block is too small or too large"),
        ("basic", {"block_sizes": [128, 512, 256, 64]}, "a block is larger than what TMA can read"),
        ("tall", {"block_sizes": [4096]}, "a block is larger than what TMA can read"),
    ],
    ids=str,
)
def test_illegal_choices(variant: Any, changed: dict[str, Any], reason: str) -> None:
    """As in damaged files of entries, or proposed by Helion's search."""
    problem = replace(PROBLEM, rows=512, M=65536)
    choice = grouped.rule(problem, variant)
    assert choice.variant == variant and grouped.why_illegal(choice, problem) is None
    values = dict(choice.config.config) | {name: value for name, value in changed.items() if name != "block_m"}
    block_m = changed.get("block_m", choice.block_m)
    assert grouped.why_illegal(replace(choice, block_m=block_m, config=rules.Config(**values)), problem) == reason


@pytest.mark.parametrize(
    ("variant", "N", "reason"),
    [
        ("tails", 192, "its tiles are 128 x 256"),
        ("tall", 192, "its tiles are 128 x 256"),
        ("tails", 256, None),
        ("tall", 256, None),
        ("tails", 264, "N is no multiple of 64"),
        ("tall", 264, None),
    ],
)
def test_columns_that_tiles_of_one_width_can_have(variant: Any, N: int, reason: str | None) -> None:
    problem = replace(PROBLEM, rows=512, M=65536, N=N)
    assert grouped.why_illegal(grouped.rule(problem, variant), problem) == reason


def test_a_persistent_entry_with_tiles_of_64_rows(tmp_path: Path) -> None:
    put(named(tmp_path), entry(block_m=64))
    choice = choose_quietly()
    assert (choice.variant, choice.block_m) == ("persistent", 64)


@pytest.mark.parametrize(
    "gpu", [None, targets.INTERPRETER, replace(GPU, backend="hip")], ids=["none", "the interpreter", "of another make"]
)
def test_nothing_is_read_or_warned_of_without_a_gpu(tmp_path: Path, gpu: targets.Gpu | None) -> None:
    broken(file := named(tmp_path), "corrupt")
    broken(entries.file_in(tmp_path / "named", targets.INTERPRETER.name), "corrupt")
    assert choose_quietly(replace(PROBLEM, gpu=gpu)).source == "rule"
    for choice in (uniform.choose(uniform_problem(gpu=gpu)), varied.choose(varied_problem((64, 64, 64), gpu=gpu))):
        assert choice.source == "rule"
    with pytest.warns(RuntimeWarning, match=file.name):
        assert grouped.choose(PROBLEM).source == "rule"


def test_without_entries_there_is_one_warning_per_process() -> None:
    with pytest.warns(RuntimeWarning, match=f"{GPU.name}.*python -m moe_kernels tune") as caught:
        for _ in range(3):
            assert grouped.choose(PROBLEM) == grouped.rule(PROBLEM)
    assert len(caught) == 1


def test_a_bundled_file_keeps_the_warning_away_for_every_problem(tmp_path: Path) -> None:
    put(entries.file_in(tmp_path / "bundled", GPU.name), entry())
    assert choose_quietly(replace(PROBLEM, rows=1, M=128)).source == "rule"


def test_discard_leads_to_the_next_entry_and_then_to_the_rule(tmp_path: Path) -> None:
    first = put(named(tmp_path), entry())
    second = put(entries.file_in(tmp_path / "bundled", GPU.name), entry())
    for file in (first, second):
        choice = choose_quietly()
        assert choice.source == str(file)
        with pytest.warns(RuntimeWarning, match="out of resources") as caught:
            assert rules.discard(choice, "out of resources")
        assert str(file) in str(caught[0].message)
    by_rule = choose_quietly()
    assert by_rule == grouped.rule(PROBLEM)
    assert not rules.discard(by_rule, "whatever")


@pytest.mark.parametrize("made", [entry(), with_config(self=1)], ids=["legal", "with a key self"])
def test_with_fallback_tries_again_without_what_failed(tmp_path: Path, made: entries.Entry) -> None:
    file = put(named(tmp_path), made, entry(DECODE))
    tried = []

    def attempt() -> str:
        choice = grouped.choose(PROBLEM)
        tried.append(choice.source)
        if choice.entry is not None:
            raise RuntimeError("out of resource: shared memory")
        return choice.source

    with pytest.warns(RuntimeWarning, match="shared memory") as caught:
        assert rules.with_fallback(attempt) == "rule"
    assert len(caught) == 1 and tried == [str(file), "rule"]
    assert choose_quietly(DECODE).entry is not None  # other entries stay


def test_with_fallback_raises_what_the_rule_cannot_help(tmp_path: Path) -> None:
    put(named(tmp_path), entry())

    def attempt(error: Exception) -> None:
        grouped.choose(PROBLEM)
        raise error

    with pytest.raises(torch.OutOfMemoryError):
        rules.with_fallback(lambda: attempt(torch.OutOfMemoryError("full")))
    with pytest.raises(OSError, match="No space left"):
        rules.with_fallback(lambda: attempt(OSError("No space left on device")))
    assert choose_quietly().entry is not None
    with pytest.warns(RuntimeWarning), pytest.raises(ValueError, match="broken"):
        rules.with_fallback(lambda: attempt(ValueError("broken")))


def test_a_forced_choice_is_every_problems(tmp_path: Path) -> None:
    """It applies to each operator that has choices, even if there is an entry, and `record` notes it."""
    product, other = uniform_problem(), varied_problem((64, 64, 64))
    put(named(tmp_path), entry(), entry_of("bmm", uniform.bucket_of(product), []))
    assert choose_quietly().entry is not None and uniform.choose(product).entry is not None
    forced: Any
    for choose, problem, forced in (
        (grouped.choose, PROBLEM, grouped.rule(DECODE)),
        (uniform.choose, product, uniform.by_kernel(product)),
        (varied.choose, other, varied.make(1, 256, 128, 64, 8, 3, 1)),
    ):
        assert choose(problem) != forced
        with rules.record() as made, rules.force(forced):
            assert rules.forced() is forced
            assert choose(problem) is forced
        assert made == [(problem, forced)] and made[0][1] is forced
        assert rules.forced() is None
        assert choose(problem) != forced


def test_a_forced_choice_has_no_fallback(tmp_path: Path) -> None:
    put(named(tmp_path), entry())
    tuned = choose_quietly()
    tried = []

    def attempt() -> None:
        tried.append(grouped.choose(PROBLEM))
        raise RuntimeError("out of resource: shared memory")

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with rules.force(tuned), pytest.raises(RuntimeError, match="shared memory"):
            rules.with_fallback(attempt)
    assert tried == [tuned]
    assert choose_quietly() == tuned  # the entry is not discarded


def write_many(file: Path, start: int, count: int) -> None:
    for i in range(start, start + count):
        entries.write(file, GPU.name, [entry(replace(PROBLEM, N=1000 + i))])


def test_two_writers_lose_nothing_and_readers_see_whole_files(tmp_path: Path) -> None:
    file, count = named(tmp_path), 25
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=write_many, args=(file, i * count, count)) for i in range(2)]
    for writer in writers:
        writer.start()
    seen = [0]
    while any(writer.is_alive() for writer in writers):
        found = len(entries.read(file, GPU.name))  # raises on a partial file
        assert found >= seen[-1]
        seen.append(found)
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    assert {made.bucket.N for made in entries.read(file, GPU.name)} == set(range(1000, 1000 + 2 * count))
    assert not list(file.parent.glob("*.tmp"))


def test_plans_can_be_stored_beside_entries_whatever_the_umask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The umask of many users is 002, and plans are not read where others may write to a folder above."""
    monkeypatch.delenv("MOE_KERNELS_CACHE_DIR", raising=False)
    forget_store()
    before = os.umask(0o002)
    try:
        put(entries.file_in(entries.folders()[-1], GPU.name), entry())
        assert store.folder().parent == entries.folders()[-1].parent
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert store.can_write()
    finally:
        os.umask(before)


def test_writing_replaces_the_entry_of_the_same_bucket(tmp_path: Path) -> None:
    file = put(put(named(tmp_path), entry(), entry(DECODE)), entry(us=90.0))
    assert sorted(made.us for made in entries.read(file, GPU.name)) == [90.0, 100.0]


def test_writing_puts_aside_what_cannot_be_read(tmp_path: Path) -> None:
    file = named(tmp_path)
    broken(file, "corrupt")
    with pytest.warns(RuntimeWarning, match="is now"):
        put(file, entry())
    assert len(entries.read(file, GPU.name)) == 1
    assert file.with_name(f"{file.name}.bad").exists()


def test_a_file_is_never_put_aside_in_place_of_another(tmp_path: Path) -> None:
    file, kept = named(tmp_path), []
    for kind in ("corrupt", "schema"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            broken(file, kind)
            kept.append(file.read_bytes())
            put(file, entry())
    assert [file.with_name(f"{file.name}.bad{i}").read_bytes() for i in ("", "1")] == kept


def test_a_file_that_cannot_be_read_now_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = put(named(tmp_path), entry())
    content = file.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", Mock(side_effect=OSError(errno.EIO, "Input/output error")))
        with pytest.raises(OSError, match="Input/output error"):
            put(file, entry(DECODE))
    assert file.read_bytes() == content
    assert {path.name for path in file.parent.iterdir()} == {file.name, f".{file.name}.lock"}


def test_a_full_disk_leaves_no_file_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = put(named(tmp_path), entry())
    content = file.read_bytes()

    def full(descriptor: int, rest: memoryview, write: Callable[..., int] = os.write) -> int:
        write(descriptor, rest[:4])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space left"):
        put(file, entry(DECODE))
    assert file.read_bytes() == content
    assert {path.name for path in file.parent.iterdir()} == {file.name, f".{file.name}.lock"}


def test_each_gpu_without_entries_has_a_warning(tmp_path: Path) -> None:
    """Also after that of another one, and of one whose entries, which come with the package, are for other versions."""
    bucket, old = grouped.bucket_of(PROBLEM), entry()
    name = targets.KNOWN["h200"].name
    put(entries.file_in(tmp_path / "bundled", name), replace(old, versions=entries.Versions("2", "2", "0")), gpu=name)
    gpus = [targets.KNOWN[name] for name in ("h200", "a100", "h100")]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for gpu in (*gpus, *gpus):
            entries.near(gpu, bucket)
    texts = [str(warning.message) for warning in caught]
    assert [text.split("no config has been tuned for ")[1].split(":")[0] for text in texts] == [
        targets.KNOWN[name].name for name in ("a100", "h100")
    ]


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, ("tails", 128, [64, 64], 8, 4)),
        ({"rows": 1024, "M": 131072, "K": 7168, "G": 1}, ("tails", 128, [64, 64], 8, 4)),
        ({"N": 2880}, ("tails", 128, [64, 64], 8, 4)),
        ({"rows": 1024, "M": 131072, "N": 2880}, ("tails", 128, [64, 128], 8, 4)),
        ({"N": 1400}, ("persistent", 128, [256, 64], 8, 4)),
        ({"N": 192}, ("persistent", 128, [256, 64], 8, 4)),
        ({"tma_out": False}, ("persistent", 128, [256, 64], 8, 4)),
        ({"rows": 32, "M": 4096, "gpu": GPU}, ("basic", 64, [64, 128, 256, 64], 4, 4)),
        ({"rows": 64, "M": 8192, "gpu": GPU}, ("tails", 128, [64, 64], 8, 4)),
        ({"rows": 64, "M": 512, "G": 8, "gpu": GPU}, ("basic", 64, [64, 128, 16, 64], 4, 4)),
        ({"rows": 16, "M": 128, "G": 8, "gpu": GPU}, ("basic", 64, [64, 128, 16, 64], 4, 4)),
        ({"rows": 8, "M": 64, "G": 8, "gpu": GPU}, ("basic", 16, [16, 128, 16, 128], 4, 4)),
        ({"rows": 16, "M": 32, "G": 2, "gpu": GPU}, ("basic", 32, [32, 128, 4, 128], 4, 3)),  # at most M rows high
        ({"rows": 128, "M": 1024, "N": 4096, "G": 8, "gpu": GPU}, ("tails", 128, [64, 64], 8, 4)),
        ({"rows": 64, "M": 512, "G": 8, "K": 7168, "gpu": GPU}, ("basic", 64, [64, 128, 16, 64], 4, 4)),
        ({"rows": 128, "M": 1024, "N": 4096, "G": 8, "K": 7168, "gpu": GPU}, ("persistent", 64, [256, 64], 4, 5)),
        ({"rows": 512, "M": 4096, "G": 8, "K": 7168, "gpu": GPU}, ("persistent", 64, [256, 64], 4, 5)),
        ({"rows": 512, "M": 4096, "G": 8, "K": 7168, "gpu": SLOW}, ("tails", 128, [64, 64], 8, 4)),
        # All tiles run at once.
        ({"rows": 64, "M": 512, "G": 8, "N": 512, "gpu": SLOW}, ("basic", 64, [64, 64, 16, 128], 4, 3)),
        ({"rows": 64, "M": 512, "G": 8, "N": 1024, "gpu": SLOW}, ("basic", 64, [64, 128, 16, 64], 4, 4)),
        ({"rows": 128, "M": 1024, "G": 8, "N": 1024, "gpu": GPU}, ("basic", 64, [64, 128, 16, 64], 4, 4)),
        ({"rows": 512, "M": 1024, "G": 2, "N": 1024, "gpu": SLOW}, ("basic", 64, [64, 128, 4, 64], 4, 4)),
        ({"rows": 128, "M": 1024, "G": 8, "N": 2048, "gpu": GPU}, ("basic", 128, [128, 256, 16, 64], 8, 4)),
        ({"rows": 256, "M": 2048, "G": 8, "N": 2048, "gpu": GPU}, ("tails", 128, [64, 64], 8, 4)),
        ({"rows": 128, "M": 1024, "G": 8, "N": 1024}, ("tails", 128, [64, 64], 8, 4)),
        ({"rows": 128, "M": 1024, "G": 8, "K": 7168, "gpu": GPU}, ("basic", 128, [128, 256, 16, 64], 8, 4)),
        ({"rows": 128, "M": 1024, "G": 8, "N": 1024, "tma_B": False, "gpu": GPU}, ("persistent", 128, [128, 32], 8, 3)),
        ({"rows": 64, "M": 8192, "N": 1400}, ("persistent", 128, [256, 64], 8, 4)),
        ({"rows": 1024, "M": 8192, "G": 8, "K": 7168, "gpu": GPU}, ("tails", 128, [64, 64], 8, 4)),
        # Weights of more than 2 GiB.
        ({"rows": 16, "M": 2048, "N": 5120, "K": 8192}, ("basic", 64, [64, 128, 256, 64], 4, 4)),
        ({"rows": 32, "M": 4096, "N": 5120, "K": 8192}, ("basic", 128, [128, 256, 256, 64], 8, 4)),
        ({"rows": 64, "M": 8192, "N": 5120, "K": 8192}, ("tall", 128, [64], 8, 4)),
        ({"rows": 128, "M": 16384, "N": 5120, "K": 8192}, ("tall", 128, [64], 8, 4)),
        ({"rows": 128, "M": 16384, "N": 5120, "K": 8192, "int64_out": True}, ("basic", 128, [128, 128, 256, 32], 8, 3)),
        ({"rows": 256, "M": 32768, "N": 5120, "K": 8192}, ("tails", 128, [64, 64], 8, 4)),
        ({"rows": 64, "M": 8192, "N": 7168, "K": 2048}, ("tall", 128, [64], 8, 4)),
        ({"rows": 64, "M": 8192, "N": 7168, "gpu": SLOW}, ("tall", 128, [64], 8, 4)),
        ({"rows": 64, "M": 8192, "N": 5120, "K": 8192, "gpu": SLOW}, ("basic", 128, [128, 256, 256, 64], 8, 4)),
        ({"rows": 128, "M": 16384, "N": 7168, "K": 2048}, ("tails", 128, [64, 64], 8, 4)),
        ({"rows": 1, "M": 128, "N": 7168}, ("basic", 32, [32, 128, 256, 128], 4, 3)),
        ({"rows": 0, "M": 64, "N": 7168}, ("basic", 64, [64, 128, 256, 64], 4, 4)),
        ({"rows": 0, "M": 32, "N": 7168}, ("basic", 32, [32, 128, 256, 128], 4, 3)),
        # A small K.
        ({"rows": 4, "M": 512, "K": 512}, ("persistent", 64, [256, 64], 4, 5)),
        ({"rows": 32, "M": 4096, "K": 512}, ("persistent", 64, [256, 64], 4, 5)),
        ({"rows": 64, "M": 8192, "K": 512}, ("persistent", 128, [256, 64], 8, 4)),
        ({"rows": 1, "M": 32, "G": 32, "N": 2048, "K": 512}, ("basic", 32, [32, 128, 64, 128], 4, 3)),
        ({"rows": 4, "M": 512, "N": 64, "K": 512}, ("basic", 32, [32, 64, 256, 128], 4, 3)),
        ({"rows": 0, "M": 64, "K": 512}, ("basic", 32, [32, 128, 256, 128], 4, 3)),
        ({"rows": 0, "M": 16}, ("basic", 16, [16, 128, 256, 128], 4, 4)),
        ({"rows": 128, "M": 16384, "K": 768}, ("persistent", 128, [256, 64], 8, 4)),
        ({"rows": 128, "M": 16384, "N": 4096, "K": 2048}, ("tails", 128, [64, 64], 8, 4)),
        ({"rows": 16, "M": 2048, "gpu": GPU}, ("basic", 64, [64, 128, 256, 64], 4, 4)),
        ({"rows": 32, "M": 4096, "gpu": SLOW}, ("basic", 64, [64, 128, 256, 64], 4, 4)),
        ({"rows": 64, "M": 8192, "gpu": SLOW}, ("basic", 128, [128, 256, 256, 64], 8, 4)),
        ({"rows": 128, "M": 16384, "gpu": SLOW}, ("tall", 128, [64], 8, 4)),
        ({"rows": 128, "M": 16384, "N": 192, "gpu": SLOW}, ("basic", 128, [128, 256, 256, 64], 8, 4)),
        ({"rows": 128, "M": 1024, "G": 8, "K": 7168, "gpu": SLOW}, ("basic", 128, [128, 256, 16, 64], 8, 4)),
        ({"rows": 128, "M": 16384, "K": 768, "gpu": SLOW}, ("persistent", 128, [256, 64], 8, 4)),
        ({"rows": 64, "M": 8192, "K": 1024, "gpu": SLOW}, ("basic", 128, [128, 256, 256, 64], 8, 4)),
        ({"rows": 128, "M": 16384, "K": 1024, "gpu": SLOW}, ("persistent", 128, [256, 64], 8, 4)),
        ({"rows": 128, "M": 16384, "int64_out": True, "gpu": SLOW}, ("persistent", 128, [256, 64], 8, 4)),
        ({"rows": 256, "M": 32768, "gpu": SLOW}, ("persistent", 128, [256, 64], 8, 4)),
        ({"rows": 512, "M": 65536, "gpu": SLOW}, ("tails", 128, [64, 64], 8, 4)),
        ({"rows": 1024, "M": 131072, "gpu": SLOW}, ("tails", 128, [64, 64], 8, 4)),
        ({"rows": 256, "M": 32768, "N": 3072, "gpu": SLOW}, ("persistent", 128, [256, 64], 8, 4)),
        ({"rows": 512, "M": 65536, "N": 3072, "gpu": SLOW}, ("tails", 128, [64, 64], 8, 4)),
        ({"rows": 512, "M": 65536, "N": 3072, "gpu": GPU}, ("tails", 128, [64, 64], 8, 4)),
        ({"rows": 64, "M": 8192, "dtype": torch.float32, "tf32": True}, ("basic", 64, [64, 64, 256, 32], 4, 3)),
        ({"rows": 16, "M": 2048, "tma_B": False}, ("basic", 32, [32, 64, 256, 64], 4, 3)),
        ({"rows": 512, "M": 4096, "N": 64, "G": 8, "gpu": GPU}, ("basic", 64, [64, 64, 16, 128], 4, 5)),
        ({"rows": 2048, "M": 16384, "N": 64, "G": 8, "gpu": GPU}, ("basic", 64, [64, 64, 16, 128], 4, 3)),
        ({"rows": 2048, "M": 16384, "N": 48, "K": 64, "G": 8, "gpu": GPU}, ("basic", 64, [64, 64, 16, 64], 4, 3)),
        ({"rows": 4, "M": 512}, ("basic", 32, [32, 128, 256, 128], 4, 3)),
        ({"rows": 0, "M": 8, "tma_A": False}, ("basic", 16, [16, 128, 256, 128], 4, 4)),
        ({"out_dtype": torch.float32}, ("persistent", 128, [128, 64], 8, 4)),
        ({"tma_B": False}, ("persistent", 128, [128, 32], 8, 3)),
        ({"dtype": torch.float32}, ("persistent", 128, [64, 16], 8, 3)),
        ({"N": 97, "K": 3, "tma_A": False, "tma_B": False}, ("persistent", 128, [128, 16], 8, 3)),
        # A K so small that most of the time goes into storing, as the rank of an adapter.
        ({"rows": 64, "M": 8192, "K": 64, "gpu": GPU}, ("persistent", 128, [128, 64], 4, 3)),
        ({"rows": 512, "M": 65536, "K": 256, "gpu": SLOW}, ("persistent", 128, [128, 64], 4, 3)),
        ({"rows": 512, "M": 65536, "K": 264, "gpu": GPU}, ("tails", 128, [64, 64], 8, 4)),
        ({"rows": 512, "M": 65536, "K": 32, "gpu": GPU}, ("persistent", 128, [256, 32], 8, 4)),
        ({"rows": 512, "M": 65536, "K": 256, "out_dtype": torch.float32}, ("persistent", 128, [128, 64], 8, 4)),
        ({"rows": 512, "M": 65536, "K": 8, **POINTERS, "gpu": GPU}, ("persistent", 64, [256, 16], 4, 3)),
        ({"rows": 16, "M": 2048, "K": 36, **POINTERS, "gpu": GPU}, ("persistent", 64, [256, 16], 4, 3)),
        ({"rows": 1, "M": 128, "N": 512, "K": 8, **POINTERS, "gpu": GPU}, ("basic", 16, [16, 64, 256, 16], 4, 3)),
        ({"rows": 512, "M": 65536, "K": 72, **POINTERS, "gpu": GPU}, ("persistent", 128, [128, 32], 8, 3)),
        # Few rows and columns.
        ({"rows": 8, "M": 64, "N": 512, "G": 8, "gpu": GPU}, ("basic", 16, [16, 128, 16, 128], 4, 4)),
        ({"rows": 32, "M": 32, "N": 64, "G": 1, "gpu": GPU}, ("basic", 64, [64, 64, 2, 128], 4, 5)),
        ({"rows": 32, "M": 32, "N": 8, "G": 1, "tma_B": False, "gpu": GPU}, ("basic", 64, [64, 16, 2, 32], 4, 3)),
        (
            {"rows": 128, "M": 1024, "G": 8, "N": 2048, "out_dtype": torch.float32, "gpu": GPU},
            ("basic", 128, [128, 256, 16, 64], 8, 4),
        ),
        # Few columns, with weights that TMA cannot read.
        ({"rows": 512, "M": 65536, "N": 8, "tma_B": False, "gpu": GPU}, ("basic", 64, [64, 16, 256, 128], 4, 3)),
        ({"rows": 8, "M": 1024, "N": 36, "tma_B": False, "gpu": GPU}, ("basic", 64, [64, 64, 256, 128], 4, 5)),
        ({"rows": 4, "M": 512, "N": 8, "tma_B": False, "gpu": GPU}, ("basic", 16, [16, 16, 256, 64], 4, 3)),
    ],
    ids=str,
)
def test_what_the_rule_gives(changed: dict[str, Any], expected: tuple[Any, ...]) -> None:
    problem = replace(PROBLEM, **{"gpu": None, **changed})
    choice = grouped.rule(problem)
    values = choice.config.config
    got = (choice.variant, choice.block_m, values["block_sizes"], values["num_warps"], values["num_stages"])
    assert got == expected
    two_per_sm = choice.variant == "persistent" and values["num_warps"] == 4 and values["num_stages"] == 3
    assert values.get("num_sm_multiplier") == (2 if two_per_sm else None)
    if choice.variant in ("basic", "persistent"):  # the others take the number as an argument
        assert values["l2_groupings"] == [4 if choice.variant == "basic" else grouped.row_group(problem)]
    few_tiles = problem.G == 8 and problem.gpu is GPU and problem.K == 7168 and problem.rows >= 128
    if few_tiles:
        row_group = 16
    elif problem.N * problem.K * problem.dtype.itemsize <= 2**23:  # bytes of a group's weight
        row_group = 4
    else:
        row_group = 16 if problem.rows >= 512 else 8 if problem.gpu is SLOW and problem.rows >= 256 else 4
    assert grouped.row_group(problem) == row_group
    assert grouped.why_illegal(choice, problem) is None


@pytest.mark.parametrize(
    ("dtype", "tf32", "gpu", "precision"),
    [
        (torch.float32, True, GPU, "tf32"),
        (torch.float32, False, GPU, "tf32x3"),
        (torch.float32, False, replace(GPU, arch=80), "tf32x3"),
        (torch.float32, False, replace(GPU, arch=75), "ieee"),
        (torch.float32, False, replace(GPU, backend="hip", arch="gfx942"), "ieee"),
        (torch.float32, False, None, "ieee"),
        (torch.bfloat16, False, GPU, "ieee"),
    ],
    ids=str,
)
def test_how_products_are_computed(dtype: torch.dtype, tf32: bool, gpu: targets.Gpu | None, precision: str) -> None:
    assert rules.precision_of(dtype, tf32, gpu) == precision
    assert replace(PROBLEM, dtype=dtype, tf32=tf32, gpu=gpu).precision == precision
    for b_columns in (False, True):
        expected = "ieee" if precision == "tf32x3" and not b_columns else precision
        assert varied.precision_of(dtype, tf32, b_columns, gpu) == expected


FP32 = replace(PROBLEM, dtype=torch.float32, transposed=True)


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"rows": 4, "M": 512}, ("basic", 16, [16, 64, 256, 64], 4, 3)),
        ({"rows": 16, "M": 2048}, ("basic", 32, [32, 64, 256, 32], 4, 3)),
        ({"rows": 64, "M": 8192}, ("basic", 64, [64, 64, 256, 32], 4, 3)),
        ({"rows": 64, "M": 8192, "transposed": False}, ("basic", 64, [64, 32, 256, 32], 4, 4)),
        ({}, ("basic", 128, [128, 64, 256, 32], 4, 3)),
        ({"transposed": False}, ("basic", 128, [128, 64, 256, 32], 4, 3)),
        ({"rows": 0, "M": 8}, ("basic", 16, [16, 64, 256, 64], 4, 3)),  # TMA could read a higher A
        ({"rows": 4, "M": 512, "tma_A": False}, ("basic", 16, [16, 64, 256, 32], 4, 3)),
        ({"tma_B": False}, ("basic", 128, [128, 64, 256, 32], 8, 3)),
        ({"int64_out": True}, ("basic", 128, [128, 64, 256, 32], 8, 3)),
        ({"gpu": replace(GPU, arch=75)}, ("persistent", 128, [64, 16], 8, 3)),
    ],
    ids=str,
)
def test_float32_in_three_products_is_computed_by_many_programs(
    changed: dict[str, Any], expected: tuple[Any, ...]
) -> None:
    choice = grouped.rule(replace(FP32, **changed))
    config = choice.config.config
    found = choice.variant, choice.block_m, config["block_sizes"], config["num_warps"], config["num_stages"]
    assert found == expected


FP8 = scaled.Problem(
    rows=128,
    M=1024,
    N=4096,
    K=2048,
    G=8,
    block_scaled=False,
    fast=False,
    out_dtype=torch.bfloat16,
    has_bias=False,
    tma_A=True,
    tma_B=True,
    multiprocessors=132,
)


@pytest.mark.parametrize(
    ("changed", "variant"),
    [
        ({}, "persistent"),
        ({"multiprocessors": 0, "N": 512}, "persistent"),
        ({"N": 1024}, "basic"),
        ({"N": 2048}, "basic"),
        ({"N": 2048, "G": 16}, "persistent"),
        ({"block_scaled": True, "N": 1024, "K": 1024}, "basic"),
        ({"block_scaled": True, "N": 1024}, "persistent"),
        ({"block_scaled": True, "N": 2048, "K": 1024}, "persistent"),
        ({"K": 0}, "basic"),
    ],
    ids=str,
)
def test_fp8_products_of_which_all_tiles_run_at_once(changed: dict[str, Any], variant: str) -> None:
    assert scaled.rule(replace(FP8, **changed)).variant == variant


@pytest.mark.parametrize(
    ("changed", "width", "num_stages"),
    [
        ({"M": 8, "rows": 0}, 64, 4),  # 8 groups at most have rows: 256 tiles of 128 columns, 2 per SM
        ({"M": 8, "rows": 0, "G": 256}, 64, 4),
        ({"M": 8, "rows": 0, "N": 8192}, 128, 3),
        ({"M": 16, "rows": 2}, 128, 3),
        ({"M": 16, "rows": 2, "N": 2048}, 64, 4),
        ({"M": 16, "rows": 16, "G": 1}, 64, 4),
        ({"M": 256, "rows": 256, "G": 1}, 64, 4),  # 160 tiles
        ({"M": 256, "rows": 64, "G": 4}, 128, 4),  # 256 tiles
        ({"M": 512, "rows": 128, "G": 4}, 128, 3),  # 384 tiles
        ({"M": 64, "rows": 64, "G": 1, "block_scaled": True, "K": 1024}, 128, 3),
        ({"M": 8, "rows": 0, "tma_B": False}, 64, 2),
        ({"M": 8, "rows": 0, "N": 8192, "tma_A": False}, 64, 2),
        ({"M": 8, "rows": 0, "multiprocessors": 0}, 128, 3),
    ],
    ids=str,
)
def test_tiles_of_fp8_products_with_few_rows(changed: dict[str, Any], width: int, num_stages: int) -> None:
    choice = scaled.rule(replace(FP8, **changed))
    assert choice.variant == "basic"
    # TMA does not read an A of fewer rows than a tile.
    fits = choice.block_m <= changed["M"]
    assert choice.addressing.tma_A == (changed.get("tma_A", True) and fits)
    assert choice.config.config["block_sizes"][:2] == [choice.block_m, width]
    assert choice.config.config["num_stages"] == num_stages


@pytest.mark.parametrize(
    ("changed", "expected", "tma"),
    [
        ({}, ([128], 4, 3), 2),
        ({"M": 64}, ([128], 4, 3), 2),  # it reads half a tile at once
        ({"M": 32}, ([32], 8, 2), 1),
        ({"tma_A": False}, ([32], 8, 2), 1),
        ({"K": 72}, ([128], 4, 3), 2),
        ({"K": 64}, ([32], 8, 2), 0),
        ({"fast": True}, ([256, 128], 8, 4), 3),
        ({"fast": True, "out_dtype": torch.float32}, ([128, 128], 8, 4), 3),
        ({"fast": True, "tma_out": False}, ([256, 128], 8, 4), 2),
        ({"fast": True, "M": 64}, ([32, 128], 8, 2), 1),
        ({"fast": True, "K": 16}, ([32, 32], 8, 2), 0),
    ],
    ids=str,
)
def test_how_persistent_fp8_products_are_read(changed: dict[str, Any], expected: tuple[Any, ...], tma: int) -> None:
    choice = scaled.rule(replace(FP8, **{"tma_out": True, **changed}), "persistent")
    values = choice.config.config
    assert (values["block_sizes"], values["num_warps"], values["num_stages"]) == expected
    assert choice.addressing.tma == ([], ["B"], ["A", "B"], ["A", "B", "out"])[tma]


@pytest.mark.parametrize(
    ("clock", "width", "shared_memory", "slow"),
    [
        (2_619_000, 5120, 232448, True),
        (3_201_000, 6144, 232448, False),
        (0, 6144, 232448, False),
        (14_001_000, 512, 101376, False),
    ],
)
def test_slow_memory(clock: int, width: int, shared_memory: int, slow: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of an H100, that of an H200, one with an unknown clock, and a GPU whose kernels do not use TMA."""
    properties = SimpleNamespace(
        name="NVIDIA Test 9000",
        major=9,
        minor=0,
        multi_processor_count=132,
        shared_memory_per_block_optin=shared_memory,
        memory_clock_rate=clock,
        memory_bus_width=width,
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.version, "hip", None)
    assert targets.of_device.__wrapped__("cuda", 0) == replace(GPU, shared_memory=shared_memory, slow_memory=slow)
    assert not targets.of_device("cpu", 0).slow_memory


@pytest.mark.parametrize(
    ("gpu", "capability", "tma", "tf32", "e4m3", "warp_size", "device_type"),
    [
        (targets.KNOWN["a100"], (8, 0), False, True, False, 32, "cuda"),
        (targets.KNOWN["l40s"], (8, 9), False, True, True, 32, "cuda"),
        (targets.KNOWN["h200"], (9, 0), True, True, True, 32, "cuda"),
        (targets.KNOWN["b200"], (10, 0), True, True, True, 32, "cuda"),
        (targets.KNOWN["rtx-pro-6000"], (12, 0), False, True, True, 32, "cuda"),
        (targets.Gpu("Tesla T4", "cuda", 75, 40, 65536), (7, 5), False, False, False, 32, "cuda"),
        (targets.Gpu("AMD Instinct MI300X", "hip", "gfx942", 304, 65536), (0, 0), False, False, True, 64, "cuda"),
        (targets.Gpu("Intel Arc B580", "xpu", "85899345920", 160, 1 << 17), (0, 0), False, False, True, 32, "xpu"),
        (targets.INTERPRETER, (0, 0), False, False, True, 32, "cpu"),
    ],
    ids=lambda value: value.name if isinstance(value, targets.Gpu) else None,
)
def test_properties_of_a_gpu_model(
    gpu: targets.Gpu,
    capability: tuple[int, int],
    tma: bool,
    tf32: bool,
    e4m3: bool,
    warp_size: int,
    device_type: str,
) -> None:
    assert (gpu.capability, gpu.has_tma, gpu.has_tf32, gpu.has_e4m3) == (capability, tma, tf32, e4m3)
    assert (gpu.warp_size, gpu.device_type) == (warp_size, device_type)


def test_models_of_other_makers(monkeypatch: pytest.MonkeyPatch) -> None:
    found, of_device = SimpleNamespace(name="AMD Instinct MI300X", multi_processor_count=304), targets.of_device
    found.gcnArchName = "gfx942:sramecc+:xnack-"
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: found)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert of_device.__wrapped__("cuda", 0) == targets.Gpu("AMD Instinct MI300X", "hip", "gfx942", 304, 65536)
    other = SimpleNamespace(name="Intel Arc B580", architecture=85899345920, gpu_subslice_count=20)
    monkeypatch.setattr(torch.xpu, "get_device_properties", lambda index: other)
    assert of_device.__wrapped__("xpu", 0) == targets.Gpu("Intel Arc B580", "xpu", "85899345920", 20, 1 << 17)
    assert of_device.__wrapped__("cpu", 0) is targets.INTERPRETER
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert of_device.__wrapped__("cuda", 0) is of_device.__wrapped__("xpu", 0) is targets.INTERPRETER


def test_the_model_of_the_current_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "of_device", lambda kind, index: (kind, index))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    for available, expected in ((True, ("cuda", 3)), (False, None)):
        monkeypatch.setattr(torch.cuda, "is_available", lambda available=available: available)
        assert targets.current() == expected
    assert targets.of_tensor(torch.empty(1)) == ("cpu", 0)
    assert targets.of_tensor(Mock(device=torch.device("cuda", 2))) == ("cuda", 2)


WGRAD = wgrad.Problem(
    M=65536,
    P=16,
    Q=2048,
    G=128,
    dtype=torch.bfloat16,
    tf32=False,
    tma=True,
    tma_out=True,
    int64_rows=False,
    int64_out=False,
)


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, (64, [64, 16], 4, 4, "flat")),
        ({"P": 2048, "Q": 48}, (64, [64, 64], 4, 4, "flat")),
        ({"M": 8192}, (32, [128, 16], 4, 5, "persistent_interleaved")),  # 64 rows per group
        ({"P": 8, "tma": False}, (128, [64, 16], 4, 3, "flat")),
        ({"P": 8, "tma": False, "M": 16384}, (32, [128, 16], 4, 3, "flat")),
        ({"P": 72}, (32, [128, 128], 4, 5, "persistent_interleaved")),
        ({"P": 72, "M": 1 << 18}, (32, [128, 128], 4, 5, "persistent_interleaved")),
        ({"P": 128}, (64, [64, 128], 4, 4, "flat")),
        ({"P": 2048, "Q": 100}, (64, [128, 64], 4, 4, "flat")),
        ({"P": 128, "M": 16384}, (32, [128, 128], 4, 5, "persistent_interleaved")),
        ({"P": 136, "M": 1 << 18}, (64, [256, 128], 8, 3, "persistent_interleaved")),
        ({"dtype": torch.float32}, (32, [64, 16], 4, 3, "flat")),
    ],
    ids=str,
)
def test_what_the_rule_gives_for_thin_weight_gradients(changed: dict[str, Any], expected: tuple[Any, ...]) -> None:
    choice = wgrad.rule(replace(WGRAD, **changed))
    values = choice.config.config
    got = (choice.block_m, values["block_sizes"], values["num_warps"], values["num_stages"])
    assert choice.variant == "basic"
    assert (*got, values.get("pid_type", "flat")) == expected


@pytest.mark.parametrize(
    ("changed", "expected", "tma"),
    [
        ({}, ("persistent", 64, [256], 8, 4), 3),
        ({"int64_rows": True}, ("persistent", 64, [256], 8, 4), 3),
        ({"M": 32768}, ("persistent", 64, [256], 8, 4), 3),
        ({"M": 16384}, ("basic", 32, [128, 128], 4, 5), 3),
        ({"Q": 1920}, ("basic", 32, [128, 128], 4, 5), 3),
        ({"M": 1 << 17, "Q": 1920}, ("basic", 64, [256, 128], 8, 3), 3),
        ({"M": 1 << 17, "Q": 192}, ("basic", 32, [128, 128], 4, 5), 3),
        ({"tma_out": False}, ("basic", 64, [256, 128], 8, 4), 2),
        ({"tma_out": False, "Q": 192}, ("basic", 64, [128, 256], 8, 4), 2),
        ({"tma_out": False, "P": 192, "Q": 192}, ("basic", 64, [256, 128], 8, 4), 2),
        ({"M": 64, "G": 1}, ("basic", 32, [128, 128], 4, 5), 3),
        ({"M": 32, "G": 1}, ("basic", 32, [128, 64], 4, 3), 0),  # a block of TMA has 32 or 64 rows
        ({"int64_out": True}, ("basic", 32, [128, 64], 4, 3), 0),
        ({"tma": False, "int64_rows": True}, ("basic", 32, [128, 64], 4, 3), 0),
        ({"dtype": torch.float32}, ("basic", 32, [64, 64], 4, 3), 0),
    ],
    ids=str,
)
def test_what_the_rule_gives_for_weight_gradients(changed: dict[str, Any], expected: tuple[Any, ...], tma: int) -> None:
    choice = wgrad.rule(replace(WGRAD, **{"P": 2048, **changed}))
    values = choice.config.config
    got = (choice.variant, choice.block_m, values["block_sizes"], values["num_warps"], values["num_stages"])
    assert got == expected
    assert choice.addressing.tma == ["A", "B", "out"][:tma]
    assert choice.addressing.int64_index == (tma == 0 and any(name.startswith("int64") for name in changed))
    assert values.get("num_sm_multiplier") == (2 if values["num_stages"] == 5 else None)


FIRST_HALF = swiglu.Problem(
    rows=128,
    M=16384,
    I=1536,
    H=4096,
    E=128,
    dtype=torch.bfloat16,
    precision="ieee",
    gathered=True,
    save_preact=False,
    biases=0,
    paired=True,
    tma_B=True,
    tma_out=True,
)


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, (True, 128, [64], 8)),
        ({"rows": 32, "M": 4096}, (False, 64, [64, 64, 256, 64], 4)),
        ({"slow_memory": True}, (False, 128, [128, 128, 256, 64], 8)),
        ({"slow_memory": True, "rows": 64, "M": 8192}, (False, 128, [128, 128, 256, 64], 8)),
        ({"slow_memory": True, "rows": 64, "M": 8192, "I": 64}, (True, 128, [64], 8)),  # small weights
        ({"slow_memory": True, "rows": 32, "M": 4096}, (False, 64, [64, 64, 256, 64], 4)),
        ({"slow_memory": True, "rows": 256, "M": 32768}, (True, 128, [64], 8)),
        ({"slow_memory": True, "M": 1024, "E": 8, "I": 14336}, (True, 128, [64], 8)),
        ({"slow_memory": True, "int64_out": True}, (True, 128, [64], 8)),
        ({"slow_memory": True, "int64_A": True}, (True, 128, [64], 8)),
        ({"slow_memory": True, "paired": False}, (False, 64, [64, 64, 256, 64], 4)),
        ({"paired": False, "tma_B": False}, (False, 64, [64, 32, 256, 32], 4)),
        ({"paired": False, "dtype": torch.float32}, (False, 64, [64, 32, 256, 16], 8)),
        ({"paired": False, "dtype": torch.float32, "precision": "tf32x3"}, (False, 64, [64, 64, 256, 32], 8)),
    ],
    ids=str,
)
def test_what_the_rule_gives_for_the_first_half(changed: dict[str, Any], expected: tuple[Any, ...]) -> None:
    choice = swiglu.rule(replace(FIRST_HALF, **changed))
    values = choice.config.config
    assert (choice.variant == "persistent", choice.block_m, values["block_sizes"], values["num_warps"]) == expected


@pytest.mark.parametrize(("rows", "height"), [(32, 64), (64, 128)])
def test_tma_reads_the_rows_of_a_first_half_if_they_fill_a_tile(rows: int, height: int) -> None:
    for M in (height // 2, height):
        for tma_A, tma_out in itertools.product((False, True), repeat=2):
            problem = replace(FIRST_HALF, rows=rows, M=M, E=M // rows, tma_A=tma_A, tma_out=tma_out)
            choice = swiglu.rule(problem)
            stores = tma_out and choice.variant == "persistent"
            assert choice.block_m == height
            assert choice.addressing == (tma_A and height == M, True, stores, False)


@pytest.mark.parametrize(("rows", "K", "cost"), [(512, 2048, 56), (1024, 2048, 48), (1024, 768, 50)])
def test_cost_of_a_tail_with_slow_memory(rows: int, K: int, cost: int) -> None:
    assert grouped.tail_cost(replace(PROBLEM, rows=rows, M=128 * rows, K=K, gpu=SLOW)) == cost


@pytest.mark.parametrize(
    ("rows", "N", "gpu", "narrow", "pieces"),
    [
        (1024, 2880, GPU, 64, 2),
        (1024, 1408, GPU, 128, 2),
        (1024, 2048, GPU, 0, 2),
        (1024, 960, GPU, 0, 4),
        (512, 2880, GPU, 64, 2),
        (512, 1408, GPU, 0, 2),
        (512, 2880, SLOW, 64, 2),
        (512, 1408, SLOW, 0, 2),
        (511, 2880, SLOW, 0, 4),
    ],
)
def test_a_narrow_column(rows: int, N: int, gpu: targets.Gpu, narrow: int, pieces: int) -> None:
    problem = replace(PROBLEM, rows=rows, M=128 * rows, N=N, gpu=gpu)
    assert grouped.narrow_column(problem) == narrow
    assert grouped.tail_pieces(N, narrow) == pieces
    assert grouped.narrow_cost(narrow) == {64: 30, 128: 36, 0: 0}[narrow]
    config = grouped.rule(problem, "tails").config.config
    assert config["block_sizes"] == ([64, 128] if narrow == 64 else [64, 64])
    assert config.get("range_num_stages") == ([0, 0, 0, 6, 0, 0] if narrow == 128 else None)
    assert config["indexing"].count("tensor_descriptor") == (3 * 2 if narrow else 2 * 2) + 2 * pieces + bool(narrow)


def test_bundled_files_are_read_and_legal() -> None:
    files = list(Path(entries.__file__).parent.glob("*.json"))
    assert files
    for file in files:
        gpu = json.loads(file.read_text())["gpu"]
        assert entries.file_in(file.parent, gpu) == file
        for made in entries.read(file, gpu):
            bucket = made.bucket
            if bucket.op != "grouped_gemm":
                continue  # compiled in tests/lowering/test_lowered_tune.py
            problem = replace(
                PROBLEM,
                **{name: getattr(bucket, name) for name in ("rows", "N", "K", "G", "transposed")},
                M=rules.floor_power_of_2(made.M),
                dtype=torch.float32 if bucket.dtype == "tf32" else getattr(torch, bucket.dtype),
                tf32=bucket.dtype == "tf32",
            )
            choice = grouped.adapted(made, problem)
            assert choice is not None and choice.addressing.tma == made.tma
            assert grouped.why_illegal(choice, problem) is None


def test_an_outer_record_hears_of_what_an_inner_one_did() -> None:
    def chosen(problem: Any, choice: Any) -> Any:
        return rules.chosen(problem, None, lambda entry, problem: None, lambda problem: choice)

    problem, choice = object(), object()
    with rules.record() as outer:
        with rules.record() as inner:
            chosen(problem, choice)
        rules.with_fallback(lambda: chosen(problem, None))
    chosen(problem, choice)
    assert inner == [(problem, choice)] and outer == [(problem, choice), (problem, None)]


def test_neither_rules_nor_entries_import_a_compiler() -> None:
    code = """
import sys
from moe_kernels import rules
from moe_kernels.rules import swiglu, uniform, varied
from moe_kernels.runtime import cache
from moe_kernels.tuning import search
rules.reload()
cache.reload()
sys.exit("helion" in sys.modules or "triton" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=120, check=False).returncode == 0


OPERATOR = Operator("drawn", "no planner", ("x",), (), lambda *_: Counts(0))


class Machine:
    """Stand-ins for a planner, the compiler and a GPU, on which the 7 stages of `entry` do not fit."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path):
        monkeypatch.setenv("MOE_KERNELS_CACHE_DIR", str(folder))
        monkeypatch.setenv("MOE_KERNELS_CACHE_READONLY", "")
        from moe_kernels.runtime import compile as compiler

        monkeypatch.setattr(targets, "of_device", lambda kind, index: GPU)
        monkeypatch.setattr(cache, "make_plan", self.draw)
        monkeypatch.setattr(compiler, "binary", self.binary)
        monkeypatch.setattr(launch, "compiled_kernel", lambda binary: binary.code.decode())
        monkeypatch.setattr(launch, "launcher", self.launcher)
        self.monkeypatch = monkeypatch
        self.error: Exception = RuntimeError("out of resource: shared memory")
        self.code: str | None = None  # of all binaries, instead of their keys
        self.drawn: list[str] = []
        self.ran: list[str] = []
        self.begin_a_process()

    def begin_a_process(self) -> None:
        """Clear the memory, as in a new process, which has only the store and the files of entries."""
        rules.reload()
        forget_store()
        self.monkeypatch.setattr(cache, "plans", cache.PlanCache())
        self.drawn.clear()

    def draw(self, operator: Operator, inputs: Any, options: Any, gpu: Any, begin: Any) -> tuple[Plan, dict[str, Any]]:
        key = f"stages{grouped.choose(replace(PROBLEM, gpu=gpu)).config.config['num_stages']}"
        self.drawn.append(key)
        source = SimpleNamespace(key=key)
        begin(source)
        return Plan(operator.inputs, (Launch(key, (1,), ()),), (0,)), {key: source}

    def binary(self, one: Any, gpu: Any, fewer_stages: bool = False, replace: bool = False) -> store.Binary:
        code = (self.code or one.key).encode()
        return store.write_binary(store.Binary(one.key, (), (), "{}", "cubin", code), replace)

    def launcher(self, key: str) -> Any:
        if key == "stages7":
            raise self.error
        return SimpleNamespace(
            before=lambda *_: [], statement=lambda _, body: f"{body.named('ran', self.ran)}.append({key!r})"
        )

    @property
    def kept(self) -> set[str]:
        """Return the kernels that the stored plans launch."""
        files = list(store.folder().glob("*/plans/*"))
        assert len(files) <= 1
        return {step["launch"] for file in files for step in stored_in(file)[0]["plan"]["steps"]}

    def run(self) -> str:
        """Return the kernel that a call runs."""
        self.ran.clear()
        x = torch.zeros(1)
        assert cache.call(OPERATOR, (x,), None) is x
        [ran] = self.ran
        return ran

    def run_quietly(self) -> str:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            return self.run()


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    return Machine(monkeypatch, tmp_path / "plans")


BY_RULE = f"stages{grouped.rule(PROBLEM).config.config['num_stages']}"


def test_an_entry_that_cannot_be_loaded_gives_way_to_the_rule(machine: Machine, tmp_path: Path) -> None:
    put(named(tmp_path), entry())
    with pytest.warns(RuntimeWarning, match="shared memory") as caught:
        assert machine.run() == BY_RULE
    assert len(caught) == 1 and machine.drawn == ["stages7", BY_RULE]
    assert machine.kept == {BY_RULE}  # a plan is kept after it has been loaded
    machine.begin_a_process()
    assert machine.run_quietly() == BY_RULE and not machine.drawn


def test_a_stored_binary_of_a_new_plan_counts_as_new(machine: Machine) -> None:
    """So it is not removed before the plan, if files have to make room."""
    assert machine.run() == BY_RULE
    [plan] = store.folder().glob("*/plans/*")
    [binary] = store.folder().glob("*/binaries/*")
    os.utime(binary, (1, 1))
    plan.unlink()
    machine.begin_a_process()
    assert machine.run() == BY_RULE and machine.drawn == [BY_RULE]
    assert binary.stat().st_mtime > 1


def test_only_a_choice_of_the_rule_is_compiled_with_fewer_stages(machine: Machine, tmp_path: Path) -> None:
    """An entry gives way to the rule, and a forced choice is an error."""
    import triton

    from moe_kernels.runtime import compile as compiler

    fewer: list[str] = []

    def binary(one: Any, gpu: Any, fewer_stages: bool = False, replace: bool = False) -> store.Binary:
        if not fewer_stages:
            raise triton.OutOfResources(2, 1, "shared memory")
        fewer.append(one.key)
        return machine.binary(one, gpu)

    machine.monkeypatch.setattr(compiler, "binary", binary)
    put(named(tmp_path), entry())
    with cache.isolated(), rules.force(grouped.rule(PROBLEM)), pytest.raises(triton.OutOfResources):
        machine.run()
    assert machine.drawn == [BY_RULE] and not fewer
    with pytest.warns(RuntimeWarning, match="out of resource: shared memory"):
        assert machine.run() == BY_RULE
    assert machine.drawn == [BY_RULE, "stages7", BY_RULE] and fewer == [BY_RULE]


def test_a_plan_of_the_store_that_cannot_be_loaded_is_drawn_again(machine: Machine, tmp_path: Path) -> None:
    """This happens to a plan compiled ahead on another machine."""
    put(named(tmp_path), entry())
    text = cache.portable(cache.signature(OPERATOR, (torch.zeros(1),), None))
    cache.plan_of(OPERATOR, (None,), None, text, GPU)
    assert machine.kept == {"stages7"}
    machine.begin_a_process()
    with pytest.warns(RuntimeWarning, match="shared memory") as caught:
        assert machine.run() == BY_RULE
    assert len(caught) == 1 and machine.drawn == ["stages7", BY_RULE]
    assert machine.kept == {BY_RULE}
    machine.begin_a_process()
    assert machine.run_quietly() == BY_RULE and not machine.drawn


@pytest.mark.filterwarnings("ignore:moe_kernels. no config has been tuned")
@pytest.mark.parametrize("plan", ["this", "another", "none"])
def test_a_stored_binary_that_cannot_be_loaded_is_compiled_again(plan: str, machine: Machine) -> None:
    """This happens to code by another assembler, which is too new for the driver; here or elsewhere, for any plan."""
    machine.code = "stages7"
    if plan == "none":
        with pytest.raises(RuntimeError, match="shared memory"):
            machine.run()
    else:
        x = torch.zeros(1, dtype=torch.float32 if plan == "this" else torch.float64)
        cache.plan_of(OPERATOR, (None,), None, cache.portable(cache.signature(OPERATOR, (x,), None)), GPU)
    machine.code = None
    machine.begin_a_process()
    assert machine.run() == BY_RULE and machine.drawn == [BY_RULE]
    machine.begin_a_process()
    assert machine.run_quietly() == BY_RULE and not machine.drawn


@pytest.mark.parametrize("error", [AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError])
@pytest.mark.filterwarnings("ignore:moe_kernels. no config has been tuned")
def test_without_tritons_class_of_compiled_kernels(machine: Machine, error: type[Exception]) -> None:
    """Triton then compiles each launched kernel, even in processes that find a plan."""
    from moe_kernels.runtime import compile as compiler

    def compiled_kernel(binary: Any) -> None:
        raise error("not as expected")

    machine.monkeypatch.setattr(launch, "compiled_kernel", compiled_kernel)
    compiled: list[str] = []
    by_triton = lambda source, gpu: compiled.append(source.key) or source.key  # noqa: E731
    machine.monkeypatch.setattr(compiler, "within_shared_memory", by_triton)
    for _ in range(2):
        assert machine.run() == BY_RULE and machine.drawn == compiled == [BY_RULE]
        machine.begin_a_process()
        compiled.clear()


def nothing() -> None:
    """The source of a kernel."""


def options_of_triton(monkeypatch: pytest.MonkeyPatch, **options: Any) -> dict[str, Any]:
    """Return the options with which Triton compiles a kernel that a plan wants with `options`."""
    pytest.importorskip("helion")
    import triton

    from moe_kernels.runtime import compile as compiler

    monkeypatch.setattr(triton, "compile", lambda *_, options, **__: options)
    return compiler.compiled_kernel(compiler.Specialization("key", triton.jit(nothing), (), {}, {}, options), GPU)


@pytest.mark.parametrize(("mode", "more"), [("", {}), ("consan", {"instrumentation_mode": "consan"})])
def test_instrumented_code_has_its_own_place_in_tritons_cache(
    mode: str, more: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    triton = pytest.importorskip("triton")
    monkeypatch.delenv("TRITON_DEFAULT_FP_FUSION", raising=False)
    monkeypatch.setattr(triton.knobs.compilation, "instrumentation_mode", mode)
    assert options_of_triton(monkeypatch, num_warps=4) == {"enable_fp_fusion": True, "num_warps": 4, **more}


@pytest.mark.parametrize("setting", ["0", "1"])
def test_a_setting_decides_on_fused_multiply_adds(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it, Triton 3.9 would warn; see the test above."""
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", setting)
    assert options_of_triton(monkeypatch) == {}


@pytest.mark.parametrize("elsewhere", [True, False])
@pytest.mark.filterwarnings("ignore:moe_kernels. no config has been tuned")
def test_a_full_disk_under_tritons_cache(machine: Machine, tmp_path: Path, elsewhere: bool) -> None:
    """Triton then gets a folder of the process, unless that has no place either."""
    from triton import knobs

    from moe_kernels.runtime import compile as compiler

    binary, full = compiler.binary, [str(tmp_path / "triton")]

    def by_triton(specialized: Any, gpu: Any, *options: Any) -> store.Binary:
        if not elsewhere or knobs.cache.dir in full:
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
        return binary(specialized, gpu, *options)

    machine.monkeypatch.setattr(compiler, "binary", by_triton)
    with knobs.cache.scope():
        [knobs.cache.dir] = full
        with nullcontext() if elsewhere else pytest.raises(OSError, match="quota"):
            assert machine.run() == BY_RULE
        assert machine.drawn == [BY_RULE, BY_RULE] and knobs.cache.dir not in full


PRIVATE: dict[str, Callable[[pytest.MonkeyPatch, Any, Any], Any]] = {  # removes it, returns what needs it
    "helion CompileEnvironment._to_fake_tensor": lambda patch, compiler, declare: (
        patch.delattr(compiler.helion_environment.CompileEnvironment, "_to_fake_tensor"),
        lambda: compiler._example_tensors(GPU).__enter__(),
    ),
    "helion CompileEnvironment._to_fake_tensor in any module": lambda patch, compiler, declare: (
        patch.setattr(compiler, "helion_environment", SimpleNamespace()),
        lambda: compiler._example_tensors(GPU).__enter__(),
    ),
    "helion inline_triton._get_masked_value": lambda patch, compiler, declare: (
        patch.setattr(compiler, "hl", SimpleNamespace(inline_triton=None)),
        lambda: compiler._generate(None, {}, (), GPU),
    ),
    "helion SubscriptIndexing.compute_per_dim_indexing": lambda patch, compiler, declare: (
        patch.setattr(declare, "helion_indexing", SimpleNamespace(SubscriptIndexing=None)),
        declare._leave_scalar_indices,
    ),
    "torch FakeTensor": lambda patch, compiler, declare: (
        patch.setitem(sys.modules, "torch._subclasses.fake_tensor", None),
        compiler.torch_internals.fake_tensors,
    ),
    "torch _disable_current_modes": lambda patch, compiler, declare: (
        patch.delattr("torch.utils._python_dispatch._disable_current_modes"),
        compiler.torch_internals.without_modes,
    ),
    "torch DeviceProperties": lambda patch, compiler, declare: (
        patch.setitem(sys.modules, "torch._inductor.runtime.hints", None),
        lambda: compiler.torch_internals.pretend(GPU),
    ),
}


@pytest.mark.parametrize("name", PRIVATE)
def test_where_nothing_can_be_compiled_without_a_private_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the version."""
    pytest.importorskip("helion")
    from moe_kernels.kernels import declare
    from moe_kernels.runtime import compile as compiler

    _, needs_it = PRIVATE[name](monkeypatch, compiler, declare)
    package, missing, *_ = name.split()
    expected = f"cannot work with {package} {requirements.installed(package)}, which has no {missing}: it was tested"
    with pytest.raises(RuntimeError, match=re.escape(expected)):
        needs_it()


def test_private_modules_that_are_not_there_are_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels' files can be imported without them; what needs one of their names says so."""
    for name in ("helion._compiler.compile_environment", "helion.none", "none"):
        monkeypatch.setitem(sys.modules, name, None)
        assert not vars(attributes.module_or_empty(name))


@pytest.mark.parametrize("types", [SimpleNamespace(), SimpleNamespace(TypePropagation=SimpleNamespace())])
def test_without_names_of_helion_nothing_is_replaced(types: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Generating code takes longer then; tests/lowering checks the code."""
    pytest.importorskip("helion")
    from moe_kernels.runtime import compile as compiler

    before = {name: vars(value).copy() for name, value in vars(types).items()}
    monkeypatch.setattr(compiler, "helion_types", types)
    monkeypatch.setattr(compiler, "helion_lowering", lowering := SimpleNamespace())
    with compiler._bodies_visited_once(), compiler._handlers_created_once():
        assert {name: vars(value) for name, value in vars(types).items()} == before
        assert not vars(lowering)
    assert not compiler._same_tensors(None, None)


def test_what_no_other_config_can_help_is_raised(machine: Machine, tmp_path: Path) -> None:
    put(named(tmp_path), entry())
    machine.error = torch.OutOfMemoryError("full")
    text = cache.portable(cache.signature(OPERATOR, (torch.zeros(1),), None))
    for drawn, kept in ((["stages7"], set()), ([], {"stages7"})):  # without a plan in the store, and with one
        with pytest.raises(torch.OutOfMemoryError):
            machine.run()
        assert machine.drawn == drawn and machine.kept == kept
        cache.plan_of(OPERATOR, (None,), None, text, GPU)
        machine.begin_a_process()
    assert choose_quietly().entry is not None  # no entry is discarded
    machine.begin_a_process()
    machine.monkeypatch.setattr(launch, "launcher", lambda key: 1 // 0)
    with pytest.warns(RuntimeWarning, match="ZeroDivisionError"), pytest.raises(ZeroDivisionError):
        machine.run()


def truncate(path: Path, patch: pytest.MonkeyPatch) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def corrupt(path: Path, patch: pytest.MonkeyPatch) -> None:
    content = bytearray(path.read_bytes())
    content[-6] ^= 1
    path.write_bytes(content)


def put_foreign(path: Path, patch: pytest.MonkeyPatch) -> None:
    """Let other users write to it."""
    path.chmod(0o666)


def make_unreadable(path: Path, patch: pytest.MonkeyPatch) -> None:
    def open_(name: Any, *rest: Any) -> int:
        if Path(name) == path:
            raise PermissionError(errno.EACCES, "Permission denied", str(name))
        return real(name, *rest)

    real = os.open
    patch.setattr(os, "open", open_)


@pytest.mark.parametrize("file", ["plans/*", "binaries/*"])
@pytest.mark.parametrize("spoil", [truncate, corrupt, put_foreign, make_unreadable])
@pytest.mark.filterwarnings("ignore:moe_kernels. no config has been tuned")
def test_a_call_goes_on_whatever_is_in_the_store(machine: Machine, spoil: Callable[..., None], file: str) -> None:
    """The right kernel runs, with one warning, and the next process finds what this one has stored."""
    assert machine.run() == BY_RULE
    (path,) = store.folder().glob(f"*/{file}")
    with machine.monkeypatch.context() as patch:
        spoil(path, patch)
        machine.begin_a_process()
        with pytest.warns(RuntimeWarning) as caught:
            assert machine.run() == BY_RULE
        assert machine.drawn == [BY_RULE]
        assert sum("stores compiled kernels on disk" in str(one.message) for one in caught) == 1
    machine.begin_a_process()
    assert machine.run_quietly() == BY_RULE and not machine.drawn


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS])
@pytest.mark.filterwarnings("ignore:moe_kernels. no config has been tuned")
def test_a_call_goes_on_where_nothing_can_be_stored(machine: Machine, number: int) -> None:
    def write(*_: Any) -> int:
        raise OSError(number, os.strerror(number))

    for _ in range(2):
        with machine.monkeypatch.context() as patch, pytest.warns(RuntimeWarning) as caught:
            patch.setattr(os, "write", write)
            assert machine.run() == BY_RULE
        assert machine.drawn == [BY_RULE] and not machine.kept
        assert sum("stores compiled kernels on disk" in str(one.message) for one in caught) == 1
        machine.begin_a_process()


@pytest.mark.filterwarnings("ignore:moe_kernels. no config has been tuned")
def test_isolated_calls_do_not_read_the_store(machine: Machine) -> None:
    for drawn in ([BY_RULE], []):
        assert machine.run() == BY_RULE and machine.drawn == drawn
        machine.begin_a_process()
    with cache.isolated():
        assert machine.run() == BY_RULE and machine.drawn == [BY_RULE]


def test_plans_under_a_forced_choice_are_not_of_the_store(machine: Machine) -> None:
    with pytest.warns(RuntimeWarning, match="no config has been tuned"):
        assert machine.run() == BY_RULE
    forced = grouped.rule(PROBLEM, "basic", 32)
    forced = replace(forced, config=rules.Config(**{**forced.config.config, "num_stages": 2}))
    with cache.isolated(), rules.force(forced):
        assert machine.run_quietly() == "stages2"
    assert machine.kept == {BY_RULE}
    assert machine.run_quietly() == BY_RULE and machine.drawn == [BY_RULE, "stages2"]
    machine.begin_a_process()
    with cache.isolated(), rules.force(forced):
        assert machine.run_quietly() == "stages2"  # not the plan of the store either
    assert machine.run_quietly() == BY_RULE and machine.drawn == ["stages2"]


def test_reload_makes_plans_by_what_the_files_say_now(machine: Machine, tmp_path: Path) -> None:
    with pytest.warns(RuntimeWarning, match="no config has been tuned"):
        assert machine.run() == BY_RULE
    put(named(tmp_path), with_config(num_stages=6))
    assert machine.run_quietly() == BY_RULE
    cache.reload()
    assert machine.run_quietly() == "stages6"


@pytest.mark.parametrize("name", ["tuning/entries.py", "rules/uniform.py", "rules/config.py"])
def test_plans_are_of_the_sources_by_which_configs_are_chosen(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    before = store._versions.__wrapped__()
    package = tmp_path / "package"
    shutil.copytree(store._PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__", "compiled"))
    monkeypatch.setattr(store, "_PACKAGE", package)
    assert store._versions.__wrapped__() == before
    with (package / name).open("a") as file:
        file.write("# another version\n")
    assert store._versions.__wrapped__() != before


def test_a_varied_entry_that_does_not_work_gives_way_to_the_rule(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The choice precedes the plan, because the table on the device depends on it."""
    tuned = varied.make(2, 32, 16, 64, 4, 5, 2)
    problem = varied_problem(*[(64, 64, 64)] * 2)
    put(named(tmp_path), entry_of("varied", varied.bucket_of(problem), [], **varied.stored(tuned)))
    tried: list[Any] = []

    def find(operator: Operator, tensors: Sequence[torch.Tensor], options: Any) -> Callable[..., None]:
        tried.append(options[3])
        if options[3] == tuned.config:
            raise RuntimeError("out of resource: shared memory")
        return lambda *_: None

    monkeypatch.setattr(cache, "find", find)
    monkeypatch.setattr(targets, "of_tensor", lambda tensor: GPU)
    operands = [torch.zeros(64, 64, dtype=torch.float16) for _ in range(2)]
    with pytest.warns(RuntimeWarning, match=r"varied, float16.*shared memory") as caught:
        varied_launch(operands, operands, [torch.empty_like(x) for x in operands])
    assert len(caught) == 1 and tried == [tuned.config, varied.rule(problem).config]


def test_gpus_with_little_shared_memory_do_without_tma() -> None:
    """The stages of operands read by TMA do not fit there."""
    assert [name for name, gpu in targets.KNOWN.items() if gpu.has_tma] == ["h100", "h200", "b200"]
