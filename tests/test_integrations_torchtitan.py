"""torchtitan's own experts and ours with the same weights, against the formula in float64."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
import torch.nn.functional as F
from processes import python_path
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from moe_kernels import requirements
from moe_kernels.integrations import torchtitan as integration

NAME = "moe_kernels.integrations.torchtitan.grouped_experts"
SIZES = [5, 0, 16, 3]
E, D, H, R = len(SIZES), 32, 48, sum(SIZES) + 6  # the last six rows belong to no expert
installed = importlib.util.find_spec("torchtitan") is not None
needs_torchtitan = pytest.mark.skipif(not installed, reason="needs torchtitan: pip install 'torchtitan>=0.3'")


@pytest.mark.skipif(installed, reason="torchtitan is installed")
def test_says_what_is_missing() -> None:
    with pytest.raises(ImportError, match="pip install 'torchtitan"):
        integration.grouped_experts(None)


# Stand-ins for the modules of torchtitan that the override uses.
STANDINS = {
    "config": """
def derive(config, made):
    return made()

def override(**options):
    return lambda function: function
""",
    "distributed/spmd_types": "def spmd_mesh_size(axis): ...",
    "distributed/utils": "def get_spmd_backend(): ...",
    "models/common/moe": """
import dataclasses
from torch import nn

class GroupedExperts(nn.Module):
    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config:
        pass
""",
}


def with_standins(folder: Path, modules: dict[str, str], program: str) -> subprocess.CompletedProcess[str]:
    """Run a program in a process whose torchtitan has these modules, and which is not installed, as a checkout."""
    for name, source in {"__init__": "", **modules}.items():
        path = folder / "torchtitan" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    (folder / "spmd_types.py").touch()
    env = os.environ | {"PYTHONPATH": python_path(folder)}
    return subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("lacking", STANDINS)
def test_a_version_without_these_names_is_refused(lacking: str, tmp_path: Path) -> None:
    modules = {name: "" if name == lacking else source for name, source in STANDINS.items()}
    done = with_standins(tmp_path, modules, "import moe_kernels.integrations.torchtitan")
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ImportError: moe_kernels.integrations.torchtitan needs torchtitan 0.3, and ")
    assert "is installed: pip install 'torchtitan>=0.3,<0.4' (cannot import name " in last


@pytest.mark.skipif(installed, reason="torchtitan is installed")
def test_a_checkout_that_is_not_installed_warns_and_goes_on(tmp_path: Path) -> None:
    program = """
import warnings
from moe_kernels.integrations import torchtitan

with warnings.catch_warnings(record=True) as found:
    warnings.simplefilter("always")
    assert isinstance(torchtitan.grouped_experts(None), torchtitan.MoEKernelsExperts.Config)
print(*(one.message for one in found))
"""
    done = with_standins(tmp_path, STANDINS, program)
    assert done.returncode == 0, done.stderr
    assert "moe_kernels was tested with torchtitan 0.3, this is an unknown version" in done.stdout


def step(experts: torch.nn.Module, x: Tensor, upstream: Tensor, device: str) -> list[Tensor]:
    """Return the output and all gradients, those of tokens only for rows that belong to experts."""
    experts.zero_grad()
    x = x.clone().requires_grad_()
    out = experts(x, torch.tensor(SIZES, device=device))
    owned = sum(SIZES)
    if type(experts) is integration.MoEKernelsExperts:
        assert not out[owned:].any()
    out[:owned].backward(upstream[:owned])
    assert x.grad is not None
    if type(experts) is integration.MoEKernelsExperts:
        assert not x.grad[owned:].any()
    weights = (experts.w1_EFD, experts.w2_EDF, experts.w3_EFD)
    return [y.detach().double() for y in (out[:owned], x.grad[:owned], *(w.grad for w in weights))]


def exact(weights: list[Tensor], x: Tensor, upstream: Tensor) -> list[Tensor]:
    inputs = [t.detach().double().requires_grad_() for t in (x[: sum(SIZES)], *weights)]
    groups = [
        (F.silu(rows @ w1.T) * (rows @ w3.T)) @ w2.T
        for rows, w1, w2, w3 in zip(inputs[0].split(SIZES), *inputs[1:], strict=True)
    ]
    out = torch.cat(groups)
    return [out.detach(), *torch.autograd.grad(out, inputs, upstream[: sum(SIZES)].double())]


def check(device: str) -> None:
    from torchtitan.config.override import OverrideConfig, apply_overrides
    from torchtitan.models.common.moe import GroupedExperts, RoutedExperts
    from torchtitan.models.common.token_dispatcher import LocalTokenDispatcher

    torch.manual_seed(0)
    config = GroupedExperts.Config(dim=D, hidden_dim=H, num_experts=E)
    dispatcher = LocalTokenDispatcher.Config(num_experts=E, top_k=2)
    whole = RoutedExperts.Config(inner_experts=config, token_dispatcher=dispatcher)
    assert len(apply_overrides(OverrideConfig(imports=[NAME]), whole)) == 1
    plain, ours = (c.build().to(device, torch.bfloat16) for c in (config, whole.inner_experts))
    assert type(ours) is integration.MoEKernelsExperts
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.normal_(std=0.2)
    ours.load_state_dict(plain.state_dict())
    x, upstream = (torch.randn(R, D).to(device, torch.bfloat16) for _ in range(2))
    x[sum(SIZES) :] = float("nan")
    weights = [plain.w1_EFD, plain.w2_EDF, plain.w3_EFD]
    results = step(ours, x, upstream, device), step(plain, x, upstream, device), exact(weights, x, upstream)
    for got, theirs, want in zip(*results, strict=True):
        budget = 2 * float((theirs - want).abs().max()) + 1e-6
        assert budget < float(want.abs().max()) / 10
        assert float((got - want).abs().max()) <= budget
    # Also of weights, tokens and counts in float32, the experts are computed in bfloat16.
    out = ours.float()(x.float(), torch.tensor(SIZES, dtype=torch.float32, device=device))
    assert out.dtype == torch.float32 and torch.equal(out[: sum(SIZES)].double(), results[0][0])


@needs_torchtitan
def test_the_same_as_its_own_experts() -> None:
    check("cpu")


@needs_torchtitan
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_the_same_as_its_own_experts_on_the_gpu() -> None:
    check("cuda")


class Float8TrainingWeightWrapperTensor(Tensor):
    """Stand-in for torchao's class: the weight itself, whose products PyTorch runs in fp8. A cast of it is one, too."""

    __module__ = "torchao.prototype.moe_training.tensor"

    @staticmethod
    def __new__(cls, weight: Tensor) -> Float8TrainingWeightWrapperTensor:
        return Tensor._make_wrapper_subclass(cls, weight.shape, dtype=weight.dtype)  # type: ignore[no-any-return,attr-defined]

    def __init__(self, weight: Tensor):
        self._data = weight

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["_data"], None

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return tree_map_only(Tensor, cls, function(*tree_map_only(cls, lambda x: x._data, args), **(kwargs or {})))


@needs_torchtitan
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_weights_that_torchao_has_wrapped_are_refused(dtype: torch.dtype) -> None:
    from torchtitan.models.common.moe import GroupedExperts

    config = integration.grouped_experts(GroupedExperts.Config(dim=D, hidden_dim=H, num_experts=E))
    experts = config.build().to(dtype)
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.normal_(std=0.2)
    x, sizes = torch.randn(R, D, dtype=torch.bfloat16), torch.tensor(SIZES)
    assert experts(x, sizes).any()
    for name, weight in list(experts.named_parameters()):
        setattr(experts, name, nn.Parameter(Float8TrainingWeightWrapperTensor(weight.detach())))
        with pytest.raises(TypeError, match=r"Float8TrainingWeightWrapper.*leave .*Float8GroupedExpertsConverter"):
            experts(x, sizes)
        setattr(experts, name, weight)


@needs_torchtitan
def test_experts_that_a_converter_has_made_keep_their_forward() -> None:
    """A converter, for example to fp8, derives a class and runs before overrides."""
    from torchtitan.config.override import OverrideConfig, apply_overrides
    from torchtitan.models.common.moe import GroupedExperts, RoutedExperts
    from torchtitan.models.common.token_dispatcher import LocalTokenDispatcher

    class Float8GroupedExperts(GroupedExperts):
        @dataclass(kw_only=True, slots=True)
        class Config(GroupedExperts.Config):
            pass

    config = Float8GroupedExperts.Config(dim=D, hidden_dim=H, num_experts=E)
    whole = RoutedExperts.Config(
        inner_experts=config, token_dispatcher=LocalTokenDispatcher.Config(num_experts=E, top_k=2)
    )
    assert apply_overrides(OverrideConfig(imports=[NAME]), whole) == []
    assert type(whole.inner_experts.build()) is Float8GroupedExperts


def experts_with_types(rank: int, folder: str) -> None:
    """Compute with types of spmd_types on tokens that differ between ranks, by torchtitan's experts and ours, and then
    with weights that are sharded by expert.
    """
    import spmd_types
    import torch.distributed as dist
    from spmd_types._checker import typecheck
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor
    from torchtitan.distributed import utils
    from torchtitan.distributed.spmd_types import set_current_spmd_mesh
    from torchtitan.models.common.moe import GroupedExperts

    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    utils.set_spmd_backend("spmd_types")
    torch.manual_seed(0)
    config = GroupedExperts.Config(dim=D, hidden_dim=H, num_experts=E)
    plain, ours = config.build(), integration.grouped_experts(config).build()
    for parameter in plain.parameters():
        nn.init.normal_(parameter, std=0.2)
    ours.load_state_dict(plain.state_dict())
    x, sizes = torch.randn(R, D), torch.tensor(SIZES)
    for axis, shape in (("dp", (2, 1, 1)), ("cp", (1, 2, 1))):
        mesh, results = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "cp", "tp")), []
        for experts in (plain, ours):
            tokens, counts = x.clone(), sizes.clone()
            with typecheck(strict_mode="strict", local=True), set_current_spmd_mesh(mesh):
                spmd_types.assert_type(tokens, {axis: spmd_types.V})
                spmd_types.assert_type(counts, {axis: spmd_types.P})
                for parameter in experts.parameters():
                    spmd_types.assert_type(parameter, {axis: spmd_types.R})
                results.append(experts(tokens, counts))
        plain_rows, our_rows = (rows.detach()[: sum(SIZES)] for rows in results)
        assert bool(plain_rows.any())
        torch.testing.assert_close(our_rows, plain_rows, rtol=0.02, atol=0.02)
    for name, weight in list(ours.named_parameters()):
        setattr(ours, name, nn.Parameter(distribute_tensor(weight.detach(), mesh["cp"], [Shard(0)])))
    first, last = ((0, 5), (5, 24))[rank]  # rows of this rank's two experts
    assert torch.equal(ours(x[first:last], sizes.chunk(2)[rank]), our_rows[first:last])
    dist.barrier()
    os._exit(0)


@needs_torchtitan
def test_types_of_data_parallel_tokens(tmp_path: Path) -> None:
    mp.spawn(experts_with_types, (str(tmp_path),), nprocs=2)


@needs_torchtitan
def test_the_documented_command_is_accepted() -> None:
    for name in ("datasets", "tokenizers", "torchdata"):
        pytest.importorskip(name, reason="torchtitan's models need all of its dependencies")
    from torchtitan.config import ConfigManager

    page = (Path(__file__).parents[1] / "docs" / "torchtitan.md").read_text()
    command = re.search(r"^torchrun .* -m (torchtitan\.train) ((?:.*\\\n)*.*)\n```", page, re.MULTILINE)
    assert command is not None and importlib.util.find_spec(command[1]) is not None
    config: Any = ConfigManager().parse_args(shlex.split(command[2].replace("\\\n", "")))
    assert config.override.imports == [NAME]


@needs_torchtitan
def test_untested_versions_warn_once_and_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    from torchtitan.models.common.moe import GroupedExperts

    config = GroupedExperts.Config(dim=D, hidden_dim=H, num_experts=E)
    requirements.warn_if_untested.cache_clear()
    monkeypatch.setattr(integration, "_VERSION", "0.2.1")  # which is read at import
    with pytest.warns(UserWarning, match="tested with torchtitan 0.3, this is 0.2.1"):
        integration.grouped_experts(config)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert isinstance(integration.grouped_experts(config), integration.MoEKernelsExperts.Config)
