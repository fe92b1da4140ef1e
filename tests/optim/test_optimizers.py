"""Optimizers by name, and what each class of torch can do on a slice of a parameter or inside its kernel."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from shardwise.errors import ConfigError
from shardwise.optim import ELEMENTWISE, build_optimizer, supports_found_inf, supports_grad_scale


@dataclass
class Section:
    type: str
    params: dict[str, Any] = field(default_factory=dict)


def parameter(n: int = 37, dtype: torch.dtype = torch.float64, seed: int = 0) -> torch.nn.Parameter:
    generator = torch.Generator().manual_seed(seed)
    return torch.nn.Parameter(torch.randn(n, dtype=torch.float64, generator=generator).to(dtype))


def gradients(steps: int, n: int = 37, dtype: torch.dtype = torch.float64) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    for _ in range(steps):
        yield torch.randn(n, dtype=torch.float64, generator=generator).to(dtype)


def trained(optimizer: torch.optim.Optimizer, steps: int = 5) -> torch.Tensor:
    (param,) = optimizer.param_groups[0]["params"]
    for gradient in gradients(steps, param.numel(), param.dtype):
        param.grad = gradient
        optimizer.step()
    return param.detach()


# -- by name --


@pytest.mark.parametrize(
    ("section", "plain"),
    [
        (
            Section("Adam", {"lr": 0.1, "weight_decay": 0.3}),
            lambda p: torch.optim.AdamW(p, 0.1, weight_decay=0.3),
        ),
        (
            Section("adam", {"adam_w_mode": False, "weight_decay": 0.3}),
            lambda p: torch.optim.Adam(p, 1e-3, weight_decay=0.3),
        ),
        (Section("AdamW"), lambda p: torch.optim.AdamW(p, 1e-3, weight_decay=0.0)),
        (
            Section("ADAMW", {"betas": [0.8, 0.95], "eps": 1e-6, "amsgrad": True, "torch_adam": True}),
            lambda p: torch.optim.AdamW(p, betas=(0.8, 0.95), eps=1e-6, amsgrad=True, weight_decay=0.0),
        ),
        (
            Section("Adam", {"betas": [0, 0.99], "bias_correction": True, "fp32_optimizer_states": True}),
            lambda p: torch.optim.AdamW(p, betas=(0.0, 0.99), weight_decay=0.0),
        ),
        (Section("sgd", {"lr": 0.1, "momentum": 0.9}), lambda p: torch.optim.SGD(p, 0.1, 0.9)),
        (Section("SGD", {"lr": 0.1}), lambda p: torch.optim.SGD(p, 0.1)),
        (Section("adagrad"), lambda p: torch.optim.Adagrad(p)),
        (Section("RMSprop", {"lr": 1, "alpha": 0.5}), lambda p: torch.optim.RMSprop(p, 1, 0.5)),
        (Section("Rprop", {"etas": [0.6, 1.1]}), lambda p: torch.optim.Rprop(p, etas=(0.6, 1.1))),
    ],
    ids=lambda value: value.type if isinstance(value, Section) else "",
)
def test_steps_as_torchs_class_with_upstreams_defaults(section, plain):
    mine = build_optimizer(section, iter([parameter()]))
    theirs = plain([parameter()])
    assert type(mine) is type(theirs)
    # float64: the fused and the plain kernel differ by rounding only.
    torch.testing.assert_close(trained(mine), trained(theirs), rtol=1e-13, atol=1e-13)


def test_groups_keep_their_own_settings():
    first, second, third = parameter(), parameter(seed=1), parameter(seed=2)
    groups = [
        {"params": iter([first, second]), "weight_decay": 0.1, "name": "decayed"},
        {"params": third, "lr": 0.5},
    ]
    optimizer = build_optimizer(Section("AdamW", {"lr": 0.25}), (group for group in groups))
    decayed, plain = optimizer.param_groups
    assert decayed["params"][0] is first and decayed["params"][1] is second and plain["params"][0] is third
    assert (decayed["lr"], decayed["weight_decay"], decayed["name"]) == (0.25, 0.1, "decayed")
    assert (plain["lr"], plain["weight_decay"]) == (0.5, 0.0)
    assert all(group["fused"] for group in optimizer.param_groups)


def test_named_parameters_are_taken():
    optimizer = build_optimizer(Section("AdamW"), torch.nn.Linear(2, 3).named_parameters())
    assert optimizer.param_groups[0]["param_names"] == ["weight", "bias"]
    assert optimizer.param_groups[0]["fused"]


def test_the_users_section_is_left_as_it_was():
    section = Section("Adam", {"adam_w_mode": True, "torch_adam": False, "lr": 0.1})
    before = copy.deepcopy(section)
    build_optimizer(section, [parameter()])
    assert section == before


@pytest.mark.parametrize(
    ("section", "error", "message"),
    [
        (Section("Adma"), ConfigError, r"optimizer\.type: no optimizer is called 'Adma'; did you mean 'Adam"),
        (Section("Optimizer"), ConfigError, r"optimizer\.type: no optimizer is called 'Optimizer'"),
        (Section("lr_scheduler"), ConfigError, r"optimizer\.type: no optimizer"),
        (Section("rmsprop"), ConfigError, r"did you mean 'RMSprop'\?"),
        (Section("OneBitAdam"), ConfigError, r"optimizer\.type: OneBitAdam is refused: .*error feedback.*write Adam"),
        (Section("onebitlamb"), ConfigError, r"optimizer\.type: onebitlamb is refused: .*write Lamb"),
        (Section("ZeroOneAdam"), ConfigError, r"optimizer\.type: ZeroOneAdam is refused"),
        (Section("MuAdamW"), ConfigError, r"optimizer\.type: MuAdamW is refused: .*mup.*write AdamW"),
        (Section("Lion", {"eps": 1e-8}), ConfigError, r"optimizer\.params\.eps: Lion has no parameter 'eps'"),
        (Section("Lamb", {"max_coef": 1}), ConfigError, r"did you mean 'max_coeff'\?"),
        (Section("Lamb", {"max_coeff": 0.1, "min_coeff": 1}), ConfigError, r"max_coeff 0.1 is below min_coeff 1"),
        (Section("Muon", {"ns_method": "qr"}), ConfigError, r"ns_method must be one of gram, standard, got 'qr'"),
        (Section("Lion", {"betas": [0.9, 1.0]}), ConfigError, r"betas must be two numbers from 0 up to but not 1"),
        (Section("Lamb", {"eps": -1}), ConfigError, r"eps must not be negative, got -1"),
        (
            Section("AdamW", {"weigth_decay": 0.1, "beta": 3}),
            ConfigError,
            r"optimizer\.params\.weigth_decay: AdamW has no parameter .*did you mean 'weight_decay'\?"
            r".*\noptimizer\.params\.beta: .*did you mean 'betas'\?",
        ),
        (Section("SGD", {"zzz": 1}), ConfigError, r"SGD has no parameter 'zzz'\. It takes: dampening, "),
        (Section("Adam", {"adamw_mode": True}), ConfigError, r"did you mean 'adam_w_mode'\?"),
        (Section("Adam", {"decoupled_weight_decay": True}), ConfigError, r"decoupled_weight_decay: Adam"),
        (
            Section("SGD", {"adam_w_mode": True}),
            ConfigError,
            r"optimizer\.params\.adam_w_mode: SGD has no parameter",
        ),
        (
            Section("AdamW", {"bias_correction": False, "amsgrad": True}),
            ConfigError,
            r"optimizer\.params\.amsgrad: UncorrectedAdam has no parameter",
        ),
        (
            Section("Adam", {"adam_w_mode": "no"}),
            ConfigError,
            r"adam_w_mode: expected true or false, got 'no'",
        ),
        (
            Section("AdamW", {"lr": "auto"}),
            ConfigError,
            r"optimizer\.params\.lr: expected a number, got 'auto'",
        ),
        (Section("AdamW", {"lr": True}), ConfigError, r"optimizer\.params\.lr: expected a number, got True"),
        (
            Section("AdamW", {"lr": math.nan}),
            ConfigError,
            r"optimizer\.params\.lr: expected a finite number, got nan",
        ),
        (Section("AdamW", {"lr": None}), ConfigError, r"optimizer\.params\.lr: expected a value, not null"),
        (Section("AdamW", {"lr": {"x": 1}}), ConfigError, r"optimizer\.params\.lr: expected a number"),
        (
            Section("AdamW", {"lr": -1}),
            ConfigError,
            r"optimizer\.params: AdamW refused .*Invalid learning rate: -1",
        ),
        (
            Section("AdamW", {"betas": [0.9]}),
            ConfigError,
            r"optimizer\.params\.betas: expected a list of 2 numbers",
        ),
        (
            Section("AdamW", {"betas": 0.9}),
            ConfigError,
            r"optimizer\.params\.betas: expected a list of numbers",
        ),
        (
            Section("AdamW", {"betas": [0.9, "x"]}),
            ConfigError,
            r"optimizer\.params\.betas: expected a list of finite",
        ),
        (
            Section("AdamW", {"amsgrad": 1}),
            ConfigError,
            r"optimizer\.params\.amsgrad: expected true or false, got 1",
        ),
        (
            Section("LBFGS", {"max_iter": 2.5}),
            ConfigError,
            r"optimizer\.params\.max_iter: expected a whole number",
        ),
    ],
    ids=lambda value: f"{value.type}-{'-'.join(value.params)}" if isinstance(value, Section) else "",
)
def test_a_bad_section_is_refused_with_its_path(section, error, message):
    with pytest.raises(error, match=f"(?s){message}"):
        build_optimizer(section, [parameter()])


def test_adamw_says_that_adam_w_mode_false_has_no_effect():
    with pytest.warns(UserWarning, match=r"optimizer\.params\.adam_w_mode: false has no effect with type AdamW"):
        optimizer = build_optimizer(Section("AdamW", {"adam_w_mode": False}), [parameter()])
    assert type(optimizer) is torch.optim.AdamW


@pytest.mark.parametrize("name", ["AdamW", "Lion", "Adagrad"])
def test_the_dtype_of_states_is_said_to_be_that_of_the_weights(name):
    with pytest.warns(UserWarning, match=r"optimizer\.params\.fp32_optimizer_states: false has no effect"):
        build_optimizer(Section(name, {"fp32_optimizer_states": False}), [parameter()])


def test_the_clipping_norm_is_left_to_the_engine():
    assert type(build_optimizer(Section("Lamb", {"max_grad_norm": 1.0}), [parameter()])).__name__ == "Lamb"


# -- fused or not --

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", ["Adam", "AdamW", "Adagrad", "SGD"])
def test_fused_is_taken_where_it_is_right(name, dtype):
    optimizer = build_optimizer(Section(name), [parameter(dtype=dtype)])
    right = name != "SGD" or dtype in (torch.float32, torch.float64)
    assert bool(optimizer.param_groups[0]["fused"]) == right
    if not right:
        return
    # Against float64 an update may be off by the dtype's rounding of a number near 3 in each of 5 steps.
    wide = torch.nn.Parameter(parameter(dtype=dtype).detach().double())
    exact = build_optimizer(Section(name, {"fused": False}), [wide])
    for gradient in gradients(5, dtype=dtype):
        wide.grad = gradient.double()
        exact.step()
    torch.testing.assert_close(trained(optimizer).double(), wide.detach(), rtol=0, atol=5 * 3 * torch.finfo(dtype).eps)


@pytest.mark.parametrize(
    ("section", "params"),
    [
        (Section("AdamW", {"fused": False}), [parameter()]),
        (Section("AdamW", {"foreach": True}), [parameter()]),
        (Section("AdamW", {"foreach": False}), [parameter()]),
        (Section("AdamW", {"differentiable": False}), [parameter()]),
        (Section("AdamW"), [{"params": [parameter()], "foreach": True}]),
        (Section("AdamW"), [parameter(), torch.nn.Parameter(torch.zeros(2, dtype=torch.complex64))]),
        (Section("AdamW"), [torch.nn.Parameter(torch.zeros(2, device="meta"))]),
        (Section("SGD", {"momentum": 0.9}), [parameter()]),
        (Section("SGD"), [{"params": [parameter()]}, {"params": [parameter()], "momentum": 0.9}]),
    ],
)
def test_fused_is_left_alone(section, params):
    optimizer = build_optimizer(section, params)
    assert not any(group["fused"] for group in optimizer.param_groups)


def test_fused_may_be_asked_for():
    assert build_optimizer(Section("SGD", {"momentum": 0.9, "fused": True}), [parameter()]).defaults["fused"]


def test_fused_steps_on_fake_tensors():
    with FakeTensorMode():
        for name in ("AdamW", "SGD", "Adagrad"):
            param = torch.nn.Parameter(torch.empty(10))
            optimizer = build_optimizer(Section(name), [param])
            assert optimizer.defaults["fused"]
            param.grad = torch.empty(10)
            optimizer.step()


def test_why_sgd_with_momentum_is_not_fused():
    """torch: a parameter whose first gradient comes after another one has momentum."""
    early, late = parameter(), parameter()
    fused = torch.optim.SGD([early, late], lr=0.1, momentum=0.9, fused=True)
    early.grad = torch.ones_like(early)
    fused.step()
    late.grad = torch.ones_like(late)
    with pytest.raises(TypeError, match="got NoneType"):
        fused.step()


def test_why_sgd_in_half_precision_is_not_fused_on_the_cpu():
    """torch 2.13: wrong from 16 elements on. When this fails, torch is repaired and the exception can go."""
    param = parameter(64, torch.bfloat16)
    expected = param.detach().double() - 0.5
    param.grad = torch.ones_like(param)
    torch.optim.SGD([param], lr=0.5, fused=True).step()
    assert (param.detach().double() - expected).abs().max() > 0.1


# -- elementwise --

SETTINGS: dict[str, list[dict[str, Any]]] = {
    "Adam": [{}, {"amsgrad": True, "weight_decay": 0.1}, {"fused": True}],
    "AdamW": [{}, {"amsgrad": True, "maximize": True}, {"fused": True}],
    "SGD": [
        {},
        {"momentum": 0.9, "dampening": 0.1, "weight_decay": 0.1},
        {"momentum": 0.9, "nesterov": True},
    ],
    "RMSprop": [{}, {"momentum": 0.9, "centered": True}],
    "ASGD": [{}, {"t0": 1.0, "lambd": 0.1}],
    "Adagrad": [{}, {"lr_decay": 0.1}, {"fused": True}],
}


def every_class() -> dict[str, type[torch.optim.Optimizer]]:
    classes = vars(torch.optim).values()
    found = [cls for cls in classes if inspect.isclass(cls) and issubclass(cls, torch.optim.Optimizer)]
    return {cls.__name__: cls for cls in found if cls is not torch.optim.Optimizer}


def whole_and_halves(
    cls: type[torch.optim.Optimizer], settings: dict[str, Any], shape: tuple[int, ...], scale: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """A parameter stepped whole, and the same parameter stepped as two halves of its first dimension."""
    torch.manual_seed(0)
    start = torch.randn(shape, dtype=torch.float64)
    whole = torch.nn.Parameter(start.clone())
    halves = [torch.nn.Parameter(part.clone()) for part in start.chunk(2)]
    optimizers = [cls([param], **settings) for param in (whole, *halves)]
    for _ in range(6):
        # The halves differ in size, so that a norm over one of them cannot pass for one over the whole.
        gradient = torch.randn(shape, dtype=torch.float64)
        gradient[: len(halves[0])] *= scale
        whole.grad = gradient.clone()
        for half, part in zip(halves, gradient.chunk(2), strict=True):
            half.grad = part.clone()
        for optimizer in optimizers:
            optimizer.step(closure) if cls is torch.optim.LBFGS else optimizer.step()
    return whole.detach(), torch.cat([half.detach() for half in halves])


def closure() -> float:
    return 0.0


@pytest.mark.parametrize(
    ("cls", "settings"),
    [(cls, settings) for cls in sorted(ELEMENTWISE, key=str) for settings in SETTINGS.get(cls.__name__, [{}])],
    ids=lambda value: value.__name__ if inspect.isclass(value) else "-".join(value),
)
def test_stepping_halves_is_stepping_the_whole(cls, settings):
    whole, halves = whole_and_halves(cls, {"lr": 0.05, **settings}, (101,), scale=50.0)
    # The vector and the tail loop of a kernel may round differently.
    torch.testing.assert_close(halves, whole, rtol=1e-13, atol=1e-14)


def test_every_other_class_of_torch_is_not_elementwise():
    others = set(every_class().values()) - ELEMENTWISE
    assert {cls.__name__ for cls in others} == {"LBFGS", "Adafactor", "Muon", "SparseAdam"}

    for cls, shape in (
        (torch.optim.Adafactor, (101,)),
        (torch.optim.LBFGS, (101,)),
        (torch.optim.Muon, (8, 6)),
    ):
        whole, halves = whole_and_halves(cls, {"lr": 0.05}, shape, scale=50.0)
        assert (whole - halves).abs().max() > 1e-3, cls
    with pytest.raises(ValueError, match="2D"):
        torch.optim.Muon([parameter()])
    with pytest.raises(RuntimeError, match="dense gradients"):
        trained(torch.optim.SparseAdam([parameter()]))


# -- the scale inside the kernel --

SCALABLE = [
    (torch.optim.Adam, {"amsgrad": True}),
    (torch.optim.AdamW, {}),
    (torch.optim.SGD, {}),
    (torch.optim.SGD, {"momentum": 0.9}),
    (torch.optim.Adagrad, {}),
]


@pytest.mark.parametrize(("cls", "settings"), SCALABLE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_grad_scale_divides_the_gradient_in_place(cls, settings, dtype):
    scale = 3.0 * 2**10
    scaled, plain = parameter(dtype=dtype), parameter(dtype=dtype)
    one = cls([scaled], lr=0.05, fused=True, **settings)
    two = cls([plain], lr=0.05, fused=True, **settings)
    assert supports_grad_scale(one)
    one.grad_scale = torch.tensor(scale)
    for gradient in gradients(4, dtype=dtype):
        scaled.grad, plain.grad = gradient * scale, gradient * scale / scale
        one.step()
        two.step()
        assert torch.equal(scaled.grad, plain.grad)
    assert torch.equal(scaled, plain)


@pytest.mark.parametrize(("cls", "settings"), SCALABLE)
def test_found_inf_skips_the_step_and_leaves_state_and_gradient(cls, settings):
    param = parameter(dtype=torch.float32)
    optimizer = cls([param], lr=0.05, fused=True, **settings)
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(2.0), torch.tensor(0.0)
    trained(optimizer, 2)
    assert supports_found_inf(optimizer)
    before = copy.deepcopy((param, optimizer.state[param]))
    param.grad = torch.full_like(param, 7.0)
    param.grad[3] = math.inf
    gradient = param.grad.clone()
    optimizer.found_inf = torch.tensor(1.0)
    optimizer.step()
    after = (param, optimizer.state[param])
    assert torch.equal(before[0], after[0]) and torch.equal(param.grad, gradient)
    assert before[1].keys() == after[1].keys()
    assert all(torch.equal(before[1][key], after[1][key]) for key in before[1])
    optimizer.found_inf = torch.tensor(0.0)
    param.grad = torch.ones_like(param)
    optimizer.step()
    assert not torch.equal(before[0], param)


def test_found_inf_on_the_first_step_of_sgd_with_momentum_would_poison_it():
    param = parameter()
    optimizer = torch.optim.SGD([param], lr=0.1, momentum=0.9, fused=True)
    assert supports_grad_scale(optimizer) and not supports_found_inf(optimizer)
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(1.0), torch.tensor(1.0)
    torch.use_deterministic_algorithms(True)  # Fills new memory with NaN.
    try:
        param.grad = torch.ones_like(param)
        optimizer.step()
    finally:
        torch.use_deterministic_algorithms(False)
    assert optimizer.state[param]["momentum_buffer"].isnan().all()


def test_grad_scale_is_not_supported_without_fused():
    assert not supports_grad_scale(torch.optim.AdamW([parameter()]))
    assert not supports_found_inf(torch.optim.AdamW([parameter()], fused=False))
    assert not supports_grad_scale(torch.optim.RMSprop([parameter()]))


def test_loaded_state_that_switches_fused_off_is_seen():
    plain = torch.optim.AdamW([parameter()], fused=False)
    trained(plain, 1)
    optimizer = torch.optim.AdamW([parameter()], fused=True)
    assert supports_grad_scale(optimizer)
    optimizer.load_state_dict(plain.state_dict())
    assert not supports_grad_scale(optimizer)
