"""`MoE.from_experts`: results against a loop over the original modules in float64, and refused modules."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.nn.utils import prune

from moe_kernels import MoE

E, H, I, T, TOP_K = 4, 6, 5, 9, 2  # noqa: E741


class FFN(nn.Module):
    """Expert `down(f(gate(x)) * up(x))`, or without a gate `down(f(up(x)))`, with the given names of its layers."""

    def __init__(self, names: str, f: Callable[[Tensor], Tensor], *, hidden: int = H, bias: bool = False, **kind: Any):
        super().__init__()
        *self.into, self.back = names.split()
        self.f = f
        wide = 2 * I if self.into == ["gate_up_proj"] else I
        for name in self.into:
            setattr(self, name, nn.Linear(hidden, wide, bias=bias, **kind))
        setattr(self, self.back, nn.Linear(I, hidden, bias=bias, **kind))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.cat([getattr(self, name)(x) for name in self.into], -1)
        if len(self.into) == 2 or self.into == ["gate_up_proj"]:
            gate, up = h.chunk(2, -1)
            return getattr(self, self.back)(self.f(gate) * up)
        return getattr(self, self.back)(self.f(h))


def tanh_gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


class Returning(FFN):
    """Returns something else than the result."""

    def __init__(self, returned: Callable[[Tensor], Any], hidden: int = H):
        super().__init__("w1 w3 w2", F.silu, hidden=hidden)
        self.returned = returned

    def forward(self, x: Tensor) -> Any:
        return self.returned(super().forward(x))


def ffn(names: str = "w1 w3 w2", f: Callable[[Tensor], Tensor] = F.silu, **kind: Any) -> nn.Module:
    return FFN(names, f, **kind).double()


LAYOUTS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "Mixtral": (ffn, "silu"),
    "Llama": (lambda: ffn("gate_proj up_proj down_proj", F.gelu), "gelu"),
    "gate and up in one": (lambda: ffn("gate_up_proj down_proj", tanh_gelu), "gelu_tanh"),
    "no gate": (lambda: ffn("up_proj down_proj", lambda x: F.relu(x) ** 2), "relu_squared"),
    "fc1, fc2": (lambda: ffn("fc1 fc2", F.relu), "relu"),
    "Sequential": (
        lambda: nn.Sequential(nn.Linear(H, I, bias=False), nn.GELU(), nn.Linear(I, H, bias=False)).double(),
        "gelu",
    ),
}


def loop(experts: list[nn.Module], router: Tensor, hidden: Tensor) -> Tensor:
    """Compute the layer one expert at a time."""
    topk_weights, ids = (hidden @ router.T).softmax(-1).topk(TOP_K)
    topk_weights = topk_weights / topk_weights.sum(-1, keepdim=True)
    out = torch.zeros_like(hidden)
    for e, expert in enumerate(experts):
        token, k = torch.where(ids == e)
        out = out.index_add(0, token, topk_weights[token, k, None] * expert(hidden[token]))
    return out


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_same_as_a_loop(name: str) -> None:
    make, activation = LAYOUTS[name]
    experts = [make() for _ in range(E)]
    router = nn.Linear(H, E, bias=False).double()
    layer = MoE.from_experts(experts, router, top_k=TOP_K, renormalize=True)
    assert layer.activation == activation
    hidden = torch.randn(T, H, dtype=torch.float64, requires_grad=True)
    upstream = torch.randn(T, H, dtype=torch.float64)
    expected = loop(experts, router.weight, hidden)
    weights = [list(expert.parameters()) for expert in experts]
    d_hidden, d_router, *d_weights = torch.autograd.grad(
        expected, [hidden, router.weight, *(w for expert in weights for w in expert)], upstream
    )
    d_experts = [d_weights[e * len(weights[0]) : (e + 1) * len(weights[0])] for e in range(E)]
    wanted = [
        expected,
        d_hidden,
        d_router,
        torch.stack([torch.cat(d[:-1]) for d in d_experts]),
        torch.stack([d[-1] for d in d_experts]),
    ]
    out = layer(hidden)
    parameters = [layer.router, layer.w_gate_up, layer.w_down]
    for got, want in zip((out, *torch.autograd.grad(out, [hidden, *parameters], upstream)), wanted, strict=True):
        assert want.any()
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize(
    "frozen", ["all experts", "some experts", "gate and up", "down", "router", "a router that is a tensor"]
)
def test_what_is_frozen_stays_frozen(frozen: str) -> None:
    experts, router = nn.ModuleList([ffn() for _ in range(E)]), nn.Linear(H, E, bias=False, dtype=torch.float64)
    if frozen == "router":
        router.requires_grad_(False)
    elif frozen.endswith("experts"):
        (experts if frozen == "all experts" else experts[1:]).requires_grad_(False)
    for expert in experts:
        *into, back = (module for module in expert.modules() if isinstance(module, nn.Linear))
        for linear in {"gate and up": into, "down": [back]}.get(frozen, []):
            linear.requires_grad_(False)
    given = router.weight.data if frozen == "a router that is a tensor" else router
    layer = MoE.from_experts(experts, given, top_k=1, renormalize=False)
    trains = frozen != "all experts"
    assert layer.w_gate_up.requires_grad == (trains and frozen != "gate and up")
    assert layer.w_down.requires_grad == (trains and frozen != "down")
    assert layer.router.requires_grad == (frozen != "router")
    assert {"all experts": "router", "down": "w_gate_up"}.get(frozen, "w_down") in [
        n for n, w in layer.named_parameters() if w.requires_grad
    ]


def test_weights_are_copies() -> None:
    experts, router = [ffn() for _ in range(E)], torch.randn(E, H, dtype=torch.float64)
    layer = MoE.from_experts(iter(experts), router, top_k=1, renormalize=False)
    before = [w.clone() for w in layer.parameters()]
    with torch.no_grad():
        for weight in (router, *nn.ModuleList(experts).parameters()):
            weight.zero_()
    assert all(
        torch.equal(w, b) and w.any() and w.requires_grad for w, b in zip(layer.parameters(), before, strict=True)
    )
    assert (layer.top_k, layer.renormalize) == (1, False)


def test_a_transposed_router_is_copied_contiguously() -> None:
    """FSDP2 and safetensors refuse other parameters."""
    router = torch.randn(H, E, dtype=torch.float64).T
    layer = MoE.from_experts([ffn() for _ in range(E)], router, top_k=1, renormalize=False)
    assert layer.router.is_contiguous() and torch.equal(layer.router, router)


@pytest.mark.parametrize(
    "changed", [lambda router: prune.l1_unstructured(router, "weight", amount=0.5), nn.utils.weight_norm]
)
def test_a_router_whose_weight_a_hook_computes(changed: Callable[[nn.Module], nn.Module]) -> None:
    experts, router = [ffn() for _ in range(E)], nn.Linear(H, E, bias=False, dtype=torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of weight_norm
        router = changed(router)  # type: ignore[assignment]
    with pytest.raises(
        ValueError, match=r"^router: expected a parameter as its weight, .*prune\.remove .* pass router\.weight"
    ):
        MoE.from_experts(experts, router, top_k=1, renormalize=False)
    layer = MoE.from_experts(experts, router.weight, top_k=1, renormalize=False)
    assert torch.equal(layer.router, router.weight)


def test_experts_that_are_not_initialised() -> None:
    class Lazy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc1, self.fc2 = nn.LazyLinear(I, bias=False), nn.LazyLinear(H, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc2(F.relu(self.fc1(x)))  # type: ignore[no-any-return]

    experts = [Lazy() for _ in range(E)]
    with pytest.raises(ValueError, match=r"^experts: fc\d\.weight of one is not initialised: call the experts"):
        MoE.from_experts(experts, top_k=1, renormalize=False)
    for expert in experts:
        expert(torch.randn(1, H))
    assert MoE.from_experts(experts, top_k=1, renormalize=False).w_down.shape == (E, H, I)


def test_a_router_of_its_own() -> None:
    layer = MoE.from_experts(nn.ModuleList(ffn() for _ in range(E)), top_k=TOP_K, renormalize=True)
    assert layer.router.shape == (E, H) and layer.router.dtype == torch.float64
    assert layer.router.any() and bool((layer.router.abs() <= H**-0.5).all())


def test_an_activation_that_is_named_is_not_looked_for() -> None:
    """Naming the activation permits weights without values, and modules that are called differently."""
    experts = [FFN("w1 w3 w2", torch.tanh, device="meta") for _ in range(E)]
    layer = MoE.from_experts(experts, top_k=TOP_K, renormalize=True, activation="gelu")
    assert layer.activation == "gelu" and layer.w_gate_up.is_meta
    clamped = MoE.from_experts(experts, top_k=1, renormalize=True, activation="clamped_silu", alpha=1.0, limit=10.0)
    assert (clamped.activation, clamped.alpha, clamped.limit) == ("clamped_silu", 1.0, 10.0)
    with pytest.raises(ValueError, match=r"^experts\[0\]: calling this FFN does not show .* pass activation="):
        MoE.from_experts(experts, top_k=TOP_K, renormalize=True)
    for kind in (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout):
        with pytest.raises(ValueError, match=rf"^experts\[0\]\.drop: MoE has no dropout, got {kind.__name__}\("):
            MoE.from_experts([with_module(kind(0.1))], top_k=1, renormalize=True, activation="silu")


class Dropping(FFN):
    """Expert with functional dropout between its products."""

    def __init__(self, p: float):
        super().__init__("w1 w3 w2", lambda x: F.dropout(F.silu(x), p, self.training))


def with_module(module: nn.Module) -> nn.Module:
    expert = FFN("w1 w3 w2", lambda x: module(F.silu(x))).double()
    expert.drop = module
    return expert


class Scaled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / 2


@pytest.mark.parametrize("value", [0.0, torch.nan, torch.inf, None])
def test_the_activation_is_found_whatever_the_weights(value: float | None) -> None:
    experts = [FFN("w1 w3 w2", F.gelu, device="meta" if value is None else None) for _ in range(E)]
    for weight in nn.ModuleList(experts).parameters():
        nn.init.constant_(weight, value or 0.0)
    layer = MoE.from_experts(experts, top_k=TOP_K, renormalize=True)
    assert layer.activation == "gelu" and layer.w_gate_up.is_meta == (value is None)


@pytest.mark.parametrize(("f", "activation"), [(F.gelu, "gelu"), (tanh_gelu, "gelu_tanh")])
def test_activations_of_wide_experts_are_told_apart(f: Callable[[Tensor], Tensor], activation: str) -> None:
    layer = MoE.from_experts([FFN("fc1 fc2", f, hidden=2**14)], top_k=1, renormalize=True)
    assert layer.activation == activation


def test_square_weights_are_not_taken_for_swapped_ones() -> None:
    layer = MoE.from_experts([FFN("w1 w3 w2", F.silu, hidden=I)], top_k=1, renormalize=True)
    assert (layer.w_gate_up.shape, layer.activation) == ((1, 2 * I, I), "silu")


def test_the_activation_is_found_by_experts_with_buffers() -> None:
    f = nn.Sequential(nn.ReLU(), nn.BatchNorm1d(I, eps=1e-300, affine=False))  # whose running mean is 0, and variance 1
    expert = nn.Sequential(nn.Linear(H, I, bias=False), f, nn.Linear(I, H, bias=False)).eval()
    assert MoE.from_experts([expert], top_k=1, renormalize=True).activation == "relu"


@pytest.mark.parametrize("inside", [True, False])
def test_the_activation_of_fake_experts_is_found(inside: bool) -> None:
    mode = FakeTensorMode()
    with mode:
        experts = [FFN("w1 w3 w2", F.gelu) for _ in range(E)]
    with mode if inside else nullcontext():
        layer = MoE.from_experts(experts, nn.Parameter(experts[0].w1.weight.new_ones(E, H)), top_k=1, renormalize=True)
    assert layer.activation == "gelu" and isinstance(layer.w_gate_up, FakeTensor)


def test_a_router_without_values() -> None:
    experts = [FFN("w1 w3 w2", F.silu, device="meta") for _ in range(E)]
    router = nn.Linear(H, E, bias=False, device="meta")
    assert MoE.from_experts(experts, router, top_k=TOP_K, renormalize=True).router.is_meta


def test_experts_in_a_dict() -> None:
    experts = nn.ModuleDict({f"expert{e}": ffn() for e in range(E)})
    layer = MoE.from_experts(experts, None, top_k=1, renormalize=False)
    assert layer.w_down.shape == (E, H, I)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Dropping(0.3).eval(),
        lambda: Dropping(0.0),
        lambda: with_module(nn.Dropout(0.1)).eval(),
        lambda: with_module(nn.Dropout(0.0)),
    ],
)
def test_dropout_that_does_nothing_is_taken(make: Callable[[], nn.Module]) -> None:
    assert MoE.from_experts([make().double() for _ in range(E)], top_k=TOP_K, renormalize=True).activation == "silu"


def test_finding_the_activation_leaves_the_experts_and_the_random_numbers_alone() -> None:
    experts = [ffn() for _ in range(E)]
    weights = [(w, w.clone()) for expert in experts for w in expert.parameters()]
    router = nn.Linear(H, E, bias=False, dtype=torch.float64)
    before = torch.get_rng_state()
    for given in (router, torch.zeros(E, H, dtype=torch.float64)):
        MoE.from_experts(experts, given, top_k=TOP_K, renormalize=True)
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(w, kept) and w.requires_grad for w, kept in weights)
    assert all(expert.training for expert in experts)


def refusals() -> dict[str, tuple[Any, type[Exception], str]]:
    biased = nn.Linear(H, E).double()
    other = ffn("w1 w3 w2", torch.tanh)
    norm = ffn()
    norm.norm = nn.LayerNorm(I)
    square = FFN("w1 w3 w2", F.silu)
    square.w2 = nn.Linear(I + 1, H, bias=False)
    int8 = ffn()
    int8.w1.weight = nn.Parameter(torch.ones(I, H, dtype=torch.int8), requires_grad=False)
    conv = ffn()
    conv.w1 = nn.Conv1d(H, I, 1, bias=False).double()
    empty = ffn()
    for parameter in empty.parameters():
        parameter.data = parameter.new_empty(0)
    swapped = ffn()
    swapped.forward = lambda x: swapped.w2(F.silu(swapped.w3(x)) * swapped.w1(x))  # type: ignore[method-assign]
    return {
        "empty": ([], ValueError, "^experts: expected at least one module, got none"),
        "one module": (ffn(), TypeError, "^experts: expected a module for each expert, got FFN; .*set_experts_implem"),
        "tensors": ([torch.ones(2)], TypeError, r"^experts\[0\]: expected an nn.Module, got Tensor"),
        "other names": (
            [FFN("wi wg wo", F.silu)],
            ValueError,
            r"^experts\[0\]: unknown layout of FFN: expected .* w1, w3, w2; or gate_proj, up_proj, down_proj; .*"
            r"got wi \(Linear\), wg \(Linear\), wo \(Linear\) with the parameters wg.weight, wi.weight, wo.weight",
        ),
        "another parameter": ([norm], ValueError, r"unknown layout of FFN.* norm \(LayerNorm\)"),
        "no Linear": ([conv], ValueError, r"unknown layout of FFN.* w1 \(Conv1d\)"),
        "nothing": ([nn.Identity()], ValueError, r"got no modules with the parameters \(none\)"),
        "biases": (
            [ffn(bias=True)],
            ValueError,
            r"^experts\[0\]: MoE has no biases, got w1.bias, w2.bias, w3.bias; moe_kernels.moe_mlp takes them",
        ),
        "two layouts": (
            [ffn(), ffn("fc1 fc2")],
            ValueError,
            r"^experts\[1\]: expected w1, w3, w2 as in experts\[0\], got fc1 \(Linear\), fc2 \(Linear\)",
        ),
        "shapes": (
            [ffn(), ffn(hidden=H + 1)],
            ValueError,
            rf"^experts\[1\]\.w1\.weight: expected shape \[{I}, {H}\], got \[{I}, {H + 1}\]",
        ),
        "up and down swapped": (
            [FFN("w1 w2 w3", F.silu)],
            ValueError,
            rf"^experts\[0\]: expected w1, w3, w2 to be gate, up, down, .*\[{H}, {I}\].*; w3 and w2 seem swapped",
        ),
        "halves that do not fit": ([square], ValueError, rf"w1\.weight: expected shape \[{I + 1}, {H}\], got \[{I}, "),
        "dtypes": (
            [ffn(), ffn().float()],
            TypeError,
            r"^experts\[1\]\.w1\.weight: expected torch.float64 as experts\[0\], got torch.float32; convert it with",
        ),
        "devices": (
            [ffn(), ffn().to("meta")],
            ValueError,
            r"^experts\[1\]\.w1\.weight: expected on cpu with experts\[0\], got on meta; move it with \.to\(\)",
        ),
        "weights without elements, as sharded by ZeRO-3": (
            [empty],
            ValueError,
            r"^experts\[0\]\.w2\.weight: expected shape \[H, I\], got \[0\]",
        ),
        "quantized": ([int8], TypeError, "expected bfloat16, .* got torch.int8; dequantize"),
        "an activation with a limit": (
            [FFN("w1 w3 w2", lambda x: F.silu(x.clamp(max=10))).double()],
            ValueError,
            "does not show that it is .*silu, gelu, .* pass activation=",
        ),
        "an activation with a high limit": (
            [FFN("w1 w3 w2", lambda x: F.silu(x.clamp(max=1000))).double()],
            ValueError,
            "does not show that it is .*silu, gelu, .* pass activation=",
        ),
        "unknown activation": ([other], ValueError, "does not show that it is .*silu, gelu, .* pass activation="),
        "two activations": (
            [ffn(), ffn(), ffn(f=F.gelu)],
            ValueError,
            r"^experts\[2\]: expected the activation silu as in experts\[0\], got gelu$",
        ),
        "one unknown activation": ([ffn(), other], ValueError, r"^experts\[1\]: calling this FFN does not show"),
        "dropout": (
            [ffn(), with_module(nn.Dropout(0.1))],
            ValueError,
            r"^experts\[1\]\.drop: MoE has no dropout, got Dropout\(p=0\.1.* in training mode; .* call \.eval\(\)",
        ),
        "dropout by a function": (
            [ffn(), Dropping(1e-9).double()],
            ValueError,
            r"^experts\[1\]: this Dropping draws random numbers when it is called, such as for dropout, .*\.eval\(\)",
        ),
        "a tuple": ([Returning(lambda y: (y, None)).double()], ValueError, "does not show that it is"),
        "a part of the result": ([Returning(lambda y: y[:, :1]).double()], ValueError, "does not show that it is"),
        # With as many columns as rows, whose maxima broadcast.
        "a further dimension": ([Returning(lambda y: y[None], 16).double()], ValueError, "does not show that it is"),
        "gate and up swapped": ([swapped], ValueError, "does not show that it is"),
        "router with a bias": (([ffn()] * E, biased), ValueError, "^router: MoE's has no bias"),
        "router's shape": (([ffn()] * E, torch.ones(E, H + 1)), ValueError, rf"^router: expected shape \[{E}, {H}\]"),
        "router's dtype": (([ffn()] * E, torch.ones(E, H)), TypeError, "^router: expected torch.float64 as the exp"),
        "router's device": (
            ([ffn()] * E, torch.ones(E, H, dtype=torch.float64, device="meta")),
            ValueError,
            "^router: expected on cpu with the experts, got on meta; move it with",
        ),
        "router that is no Linear": (
            ([ffn()] * E, Scaled(H, E, bias=False).double()),
            TypeError,
            "^router: .*got Scaled, w",
        ),
        "router's type": (([ffn()] * E, "softmax"), TypeError, r"^router: expected a tensor \[E, H\] or an nn.Linear"),
        "top_k": ([ffn()], ValueError, "^top_k: expected 1 to 1, got 2"),
    }


@pytest.mark.parametrize("case", refusals())
def test_refusals_say_what_to_do(case: str) -> None:
    given, error, text = refusals()[case]
    arguments = given if isinstance(given, tuple) else (given,)
    with pytest.raises(error, match=text):
        MoE.from_experts(*arguments, top_k=TOP_K, renormalize=True)


def router_with(hook: str) -> nn.Linear:
    router = nn.Linear(H, E, bias=False).double()
    if hook == "on the weight":
        return nn.utils.spectral_norm(router)
    if hook == "on hidden states":
        router.register_forward_pre_hook(lambda module, args: (2 * args[0],))
    else:
        result = {
            "on logits": lambda y: 2 * y,
            "on the result's type": lambda y: (y, None),
            "on the result's shape": lambda y: y[None],
            "without effect": lambda y: None,
        }
        router.register_forward_hook(lambda module, args, logits: result[hook](logits))
    return router


@pytest.mark.parametrize(
    "hook", ["on the weight", "on hidden states", "on logits", "on the result's type", "on the result's shape"]
)
def test_a_hook_that_changes_the_router_is_not_dropped(hook: str) -> None:
    with pytest.raises(ValueError, match=r"^router: .* as with a hook: pass router.weight if MoE .* to moe_mlp$"):
        MoE.from_experts([ffn() for _ in range(E)], router_with(hook), top_k=TOP_K, renormalize=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_router_with_a_hook_that_changes_nothing(dtype: torch.dtype) -> None:
    router = router_with("without effect").to(dtype)
    with torch.no_grad():
        router.weight[0, 0], router.weight[1] = float("nan"), torch.finfo(dtype).max
    experts = [ffn().to(dtype) for _ in range(E)]
    layer = MoE.from_experts(experts, router, top_k=TOP_K, renormalize=True)
    torch.testing.assert_close(layer.router, router.weight, rtol=0, atol=0, equal_nan=True)


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this PyTorch has no torch.distributed")
@pytest.mark.parametrize("wrapper", ["checkpoint_wrapper", "offload_wrapper"])
def test_wrappers_that_hide_themselves_in_parameters_names(wrapper: str) -> None:
    from torch.distributed.algorithms._checkpoint import checkpoint_wrapper

    wrapped = getattr(checkpoint_wrapper, wrapper)(ffn())
    assert "w1.weight" in dict(wrapped.named_parameters())
    with pytest.raises(ValueError, match=r"^experts\[0\]: unknown layout of .*, got _checkpoint_wrapped_module \(FFN"):
        MoE.from_experts([wrapped], top_k=1, renormalize=True)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_scripted_modules_are_refused() -> None:
    scripted = torch.jit.script(LAYOUTS["Sequential"][0]())
    with pytest.raises(ValueError, match=r"^experts\[0\]: unknown layout of RecursiveScriptModule: .*got 0 \(Recurs"):
        MoE.from_experts([scripted], top_k=1, renormalize=True)


def test_another_default_device() -> None:
    experts = [ffn() for _ in range(E)]
    with torch.device("meta"):
        layer = MoE.from_experts(experts, None, top_k=1, renormalize=False)
    assert layer.w_down.device.type == "cpu" and layer.activation == "silu"


def test_compute_depends_on_the_dtype_of_the_experts() -> None:
    options: dict[str, Any] = {"top_k": 1, "renormalize": False, "activation": "silu", "compute": "fp8_block"}
    experts = [ffn() for _ in range(E)]
    with pytest.raises(TypeError, match=r"^dtype: expected bfloat16, .*, got torch.float64$"):
        MoE.from_experts(experts, **options)
    default = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        assert MoE.from_experts([expert.float() for expert in experts], **options).w_down.dtype == torch.float32
        assert MoE(8, 4, E, 1, renormalize=True).w_down.dtype == torch.float64
        with pytest.raises(TypeError, match=r"^dtype: expected bfloat16, .*, got torch.float64$"):
            MoE(8, 4, E, 1, renormalize=True, compute="fp8_block")
    finally:
        torch.set_default_dtype(default)
