"""The optimizers of shardwise by themselves: odd tensors, steps that change nothing, the iteration of Muon."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch

from shardwise.config.optimizers import OURS as CHECKED
from shardwise.errors import ConfigError
from shardwise.optim import Lamb, Lion, Muon, UncorrectedAdam, build_optimizer, supports_found_inf, uncorrected
from shardwise.optim.chunks import CPU_NUMEL, chunks
from shardwise.optim.optimizers import OURS
from shardwise.optim.orthogonal import orthogonalized
from tests.optim import textbook
from tests.optim.test_optimizers import Section
from tests.optim.textbook import Textbook

PAIRS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "Lamb": (Lamb, textbook.lamb, {"lr": 0.01, "weight_decay": 0.1}),
    "Lamb inside": (Lamb, textbook.lamb, {"lr": 0.01, "eps_inside_sqrt": True}),
    "Lion": (Lion, textbook.lion, {"lr": 0.01, "weight_decay": 0.1}),
    "Adam": (UncorrectedAdam, textbook.uncorrected_adamw, {"lr": 0.01, "weight_decay": 0.1}),
    "Muon": (Muon, textbook.muon, {"lr": 0.02, "weight_decay": 0.1}),
}


def shapes(name: str) -> list[tuple[int, ...]]:
    matrices = [(5, 9), (9, 5), (4, 4)]
    return matrices if name == "Muon" else [*matrices, (3,), (0,), (), (2, CPU_NUMEL + 3)]


def parameters(name: str) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    made = [torch.nn.Parameter(torch.randn(s, dtype=torch.float64, generator=generator)) for s in shapes(name)]
    if name != "Muon":
        made.append(torch.nn.Parameter(torch.randn(6, 4, dtype=torch.float64, generator=generator).t()))
    return made


def stepped(optimizer: torch.optim.Optimizer, steps: range = range(3)) -> list[torch.Tensor]:
    params = optimizer.param_groups[0]["params"]
    for step in steps:
        generator = torch.Generator().manual_seed(100 + step)
        for p in params:
            p.grad = torch.randn(p.shape, dtype=torch.float64, generator=generator).to(p.dtype)
        optimizer.step()
    return [p.detach().clone() for p in params]


@pytest.mark.parametrize("name", PAIRS)
def test_whole_parameters_of_any_shape(name):
    cls, update, settings = PAIRS[name]
    mine, theirs = stepped(cls(parameters(name), **settings)), stepped(Textbook(parameters(name), update, **settings))
    for found, expected in zip(mine, theirs, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("name", PAIRS)
def test_a_step_that_found_infinities_changes_nothing(name):
    cls, _, settings = PAIRS[name]
    # On shards all is contiguous; torch's Adam skips in its fused kernel only, which takes no mixed strides.
    made = [p for p in parameters(name) if p.is_contiguous() or name != "Adam"]
    optimizer = cls(made, **settings)
    assert supports_found_inf(optimizer)
    stepped(optimizer, range(2))
    before = copy.deepcopy((optimizer.param_groups[0]["params"], optimizer.state_dict()["state"]))
    optimizer.found_inf = torch.ones(1)
    for p in optimizer.param_groups[0]["params"]:
        p.grad = torch.full_like(p, torch.inf).masked_fill(p > 0, torch.nan)
    optimizer.step()
    after = (optimizer.param_groups[0]["params"], optimizer.state_dict()["state"])
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    optimizer.found_inf = torch.zeros(1)
    continued = stepped(optimizer, range(2, 3))
    again = [p for p in parameters(name) if p.is_contiguous() or name != "Adam"]
    for found, expected in zip(continued, stepped(cls(again, **settings)), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("name", ["Lamb", "Lion", "Adam", "Muon"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precision_follows_float64(name, dtype):
    cls, _, settings = PAIRS[name]
    low = [torch.nn.Parameter(p.detach().to(dtype)) for p in parameters(name)]
    wide = [torch.nn.Parameter(p.detach().double()) for p in low]
    # Lion's sign turns a rounding of a momentum near zero into a whole step; a few elements may differ by that.
    for found, expected in zip(stepped(cls(low, **settings)), stepped(cls(wide, **settings)), strict=True):
        error = (found.double() - expected).abs()
        assert error.numel() == 0 or error.mean() < 20 * torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1.0, 1e9, 1e14])
def test_lamb_does_not_feel_the_size_of_finite_gradients(dtype, size):
    made = [torch.nn.Parameter(torch.ones(40, dtype=d)) for d in (dtype, torch.float64)]
    for p in made:
        optimizer = Lamb([p], lr=0.1, weight_decay=0.1)
        for sign in (1.0, -1.0, 1.0):
            p.grad = torch.full_like(p, sign * size)
            optimizer.step()
    low, wide = (p.detach().double() for p in made)
    torch.testing.assert_close(low, wide, rtol=10 * torch.finfo(dtype).eps, atol=0)


def from_a_file(optimizer: torch.optim.Optimizer) -> Any:
    """Its state after a step on the CPU, as a file that is mapped there gives it."""
    for p in optimizer.param_groups[0]["params"]:
        p.grad = torch.ones_like(p)
    optimizer.step()
    return optimizer.state_dict()


def test_loaded_counts_go_where_they_are_read(monkeypatch):
    on_device, on_host = (torch.nn.Parameter(torch.ones(4, device=d)) for d in ("meta", "cpu"))
    lamb = Lamb([on_device])
    lamb.load_state_dict(from_a_file(Lamb([on_host])))
    lamb.found_inf = torch.zeros(1, device="meta")
    on_device.grad = torch.ones_like(on_device)
    lamb.advance()
    assert lamb.state[on_device]["step"].device.type == "meta"

    seen: list[torch.Tensor] = []
    muon = Muon([{"params": [on_device], "use_muon": False}])
    muon.load_state_dict(from_a_file(Muon([{"params": [on_host], "use_muon": False}])))
    monkeypatch.setattr(uncorrected, "fits_fused_kernel", lambda *lists: True)
    monkeypatch.setattr(uncorrected, "adam", lambda p, g, m, v, x, steps, **rest: seen.extend(steps))
    muon.step()
    assert [step.device.type for step in seen] == ["meta"] and muon.state[on_device]["step"] is seen[0]


def test_chunks_cover_everything_once():
    tensors = [torch.arange(n, dtype=torch.float64) for n in (3, CPU_NUMEL * 2 + 1, 0, 5)]
    seen = [torch.zeros_like(t) for t in tensors]
    for places, (part, marks) in chunks(tensors, seen):
        assert sum(t.numel() for t in part) <= 2 * CPU_NUMEL
        for place, t, mark in zip(places, part, marks, strict=True):
            assert t.untyped_storage().data_ptr() == tensors[place].untyped_storage().data_ptr()
            mark += 1
    assert all((mark == 1).all() for mark in seen)


@pytest.mark.parametrize("shape", [(6, 20), (20, 6), (7, 7), (1, 5), (5, 1)])
@pytest.mark.parametrize("method", ["gram", "standard"])
def test_newton_schulz_acts_on_the_singular_values(shape, method):
    matrix = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    left, sigma, right = torch.linalg.svd(matrix, full_matrices=False)
    sigma = sigma / (matrix.norm() + 1e-7)
    for _ in range(5):
        sigma = 3.4445 * sigma - 4.7750 * sigma**3 + 2.0315 * sigma**5
    torch.testing.assert_close(orthogonalized(matrix, method), (left * sigma) @ right, rtol=1e-9, atol=1e-10)


def test_muon_must_know_what_a_matrix_is():
    section = Section("Muon", {"lr": 0.1})
    with pytest.raises(ConfigError, match=r"optimizer\.type: Muon cannot tell whether a matrix of shape \(3, 2\)"):
        build_optimizer(section, [torch.nn.Parameter(torch.ones(3, 2))])
    named = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Embedding(4, 3)).named_parameters()
    optimizer = build_optimizer(section, named)
    assert [g["use_muon"] for g in optimizer.param_groups] == [True, False]
    with pytest.raises(ValueError, match="takes matrices, and parameter 0 of its group has the shape"):
        Muon([torch.nn.Parameter(torch.ones(3))])


def test_muons_groups_keep_their_settings_and_tied_heads_are_no_hidden_ones():
    model = torch.nn.ModuleDict({"tokens": torch.nn.Embedding(5, 4), "mid": torch.nn.Linear(4, 4)})
    model["out"] = torch.nn.Linear(4, 5, bias=False)
    model["out"].weight = model["tokens"].weight
    groups = [{"params": model.parameters(), "lr": 0.5, "momentum": 0.8, "betas": (0.1, 0.2)}]
    optimizer = build_optimizer(Section("Muon", {"weight_decay": 0.3}), groups, model)
    matrices, rest = optimizer.param_groups
    assert matrices["params"] == [model["mid"].weight] and matrices["momentum"] == 0.8 and "betas" not in matrices
    assert rest["betas"] == (0.1, 0.2) and rest["weight_decay"] == 0.3 and "momentum" not in rest
    assert matrices["lr"] == rest["lr"] == 0.5


@pytest.mark.parametrize("name", OURS)
def test_the_configuration_checks_the_arguments_that_there_are(name):
    taken = set(inspect.signature(OURS[name]).parameters) - {"params"}
    refused_or_said = {"amsgrad", "adam_w_mode", "per_head_muon", "fp32_optimizer_states"}
    assert taken <= CHECKED[name].keys() and CHECKED[name].keys() - taken <= refused_or_said


def test_adagrad_is_upstreams():
    """Its CPU version: lr 1e-2, eps 1e-10, L2 decay, ``p -= lr * g / (sqrt(sum of g^2) + eps)``."""
    p = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
    optimizer = build_optimizer(Section("Adagrad", {"weight_decay": 0.1}), [p])
    total, expected = 0.0, torch.ones(3, dtype=torch.float64)
    for step in range(3):
        g = torch.tensor([1.0, -2.0, 0.5 * step], dtype=torch.float64)
        p.grad = g.clone()
        optimizer.step()
        g = g + 0.1 * expected
        total = total + g * g
        expected = expected - 1e-2 * g / (total.sqrt() + 1e-10)
    torch.testing.assert_close(p.detach(), expected, rtol=1e-13, atol=0)


@pytest.mark.parametrize("method", ["gram", "standard"])
def test_muons_iteration_is_upstreams(upstream, method, monkeypatch):
    """On the CPU upstream computes in 16 bits where the processor can: it is made to stay in the matrix's dtype."""
    theirs = upstream("deepspeed.runtime.zero.muon.original_muon")
    monkeypatch.setattr(theirs, "ns_compute_dtype", lambda method="gram": torch.float64)
    name = "zeropower_via_gram_newtonschulz" if method == "gram" else "zeropower_via_newtonschulz5"
    function = inspect.unwrap(getattr(theirs, name))
    matrix = torch.randn(6, 20, dtype=torch.float64)
    torch.testing.assert_close(orthogonalized(matrix, method), function(matrix, 5), rtol=1e-9, atol=1e-10)
